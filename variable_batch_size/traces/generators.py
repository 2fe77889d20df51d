"""Generated traces: constant sizes, ramps, growth in place of learning-rate decay, and a spot market."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from variable_batch_size.checks import check_not_negative, check_one_of, check_positive, check_within
from variable_batch_size.traces.trace import MOST_STEPS, Stages, Trace

RampUnit = Literal["samples", "tokens"]
RAMP_UNITS: tuple[RampUnit, ...] = get_args(RampUnit)

_LEAST_FACTOR = 1.001
_QUARTER = 2 / math.pi  # radians to quarters of a turn


def _check_sizes(minibatch_size: int, **sizes: int) -> None:
    """Reject batch sizes that are not positive multiples of the minibatch size."""
    check_positive(minibatch_size=minibatch_size, **sizes)
    for name, size in sizes.items():
        if size % minibatch_size:
            raise ValueError(f"`{name}` must be a multiple of {minibatch_size} (the minibatch size), got {size}")


def _check_num_steps(num_steps: int) -> None:
    if num_steps > MOST_STEPS:
        raise ValueError(f"a trace may have at most {MOST_STEPS} steps, got {num_steps}")


def _whole_minibatches(sizes: npt.NDArray[Any], minibatch_size: int) -> npt.NDArray[np.int64]:
    """Round to the nearest multiple of the minibatch size, halves up, at least one."""
    return np.maximum(np.floor(sizes / minibatch_size + 0.5).astype(np.int64), 1) * minibatch_size


def constant_trace(batch_size: int, *, num_steps: int) -> Trace:
    """The same batch size for `num_steps` steps.

    >>> list(constant_trace(128, num_steps=3))
    [128, 128, 128]
    """
    check_positive(batch_size=batch_size)
    return linear_ramp(batch_size, batch_size, num_steps=num_steps, minibatch_size=1)


def linear_ramp(start: int, end: int, *, num_steps: int, minibatch_size: int) -> Trace:
    """A linear ramp from `start` to `end`, up or down, rounded to multiples of the minibatch size.

    >>> list(linear_ramp(32, 256, num_steps=6, minibatch_size=32))
    [32, 64, 128, 160, 224, 256]
    """
    check_positive(num_steps=num_steps)
    _check_sizes(minibatch_size, start=start, end=end)
    _check_num_steps(num_steps)
    along = np.arange(num_steps) / max(1, num_steps - 1)
    return Trace.from_sequence(_whole_minibatches(start + along * (end - start), minibatch_size))


def doubling_ramp(start: int, end: int, *, every: int, minibatch_size: int, num_steps: int | None = None) -> Trace:
    """A batch size that doubles or halves every N steps until it reaches `end`.

    Args:
        start: the first batch size.
        end: the last batch size.
        every: N, the number of steps between changes.
        minibatch_size: sizes are rounded to its nearest multiple.
        num_steps: the length of the trace; by default the last size also holds for `every` steps.

    >>> list(doubling_ramp(32, 200, every=2, minibatch_size=8))
    [32, 32, 64, 64, 128, 128, 200, 200]
    >>> list(doubling_ramp(256, 32, every=1, minibatch_size=32, num_steps=6))
    [256, 128, 64, 32, 32, 32]
    """
    check_positive(every=every)
    _check_sizes(minibatch_size, start=start, end=end)
    num_changes = math.ceil(abs(math.log2(end / start)) - 1e-12)
    num_steps = (num_changes + 1) * every if num_steps is None else num_steps
    check_positive(num_steps=num_steps)
    _check_num_steps(num_steps)
    sizes = start * 2.0 ** (np.arange(num_changes) * (1 if end > start else -1))
    changes = np.minimum(np.arange(num_steps) // every, num_changes)
    return Trace.from_sequence(np.append(_whole_minibatches(sizes, minibatch_size), end)[changes])


def rampup(
    start: int,
    increment: int,
    length: int,
    *,
    final: int,
    until: int | None = None,
    unit: RampUnit = "samples",
    tokens_per_sample: int | None = None,
) -> Trace:
    """Megatron-LM's ``--rampup-batch-size START INCREMENT SAMPLES``: equal increments over a number of samples.

    With N = (final − start) / increment, a step after s samples has the batch size

        B(s) = start + increment · ⌊s / (length / N)⌋   up to s = length,   `final` from then on.

    Batch sizes are in samples, also with tokens as the unit of lengths.

    Args:
        start: the first batch size.
        increment: the size of one increment.
        length: of the ramp, in `unit`.
        final: the last batch size, `start` plus a multiple of `increment`.
        until: the length of the trace, in `unit`, rounded down to full steps; by default the trace ends with the first
            step of the final size, for use with ``on_end="hold"``.
        unit: ``"samples"``, or ``"tokens"``, which are rounded down to samples.
        tokens_per_sample: the sequence length, if `unit` is ``"tokens"``.

    >>> list(rampup(16, 16, 120, final=48))
    [16, 16, 16, 16, 32, 32, 48]
    >>> len(rampup(16, 16, 120, final=48, until=1000))
    24
    >>> len(rampup(16, 16, 120_000, final=48, until=1_000_000, unit="tokens", tokens_per_sample=1000))
    24
    """
    check_one_of(RAMP_UNITS, unit=unit)
    check_positive(start=start, increment=increment, length=length, final=final)
    if unit == "tokens":
        check_positive(tokens_per_sample=tokens_per_sample)
    elif tokens_per_sample is not None:
        raise ValueError(f"`tokens_per_sample` must be None unless `unit` is 'tokens', got {tokens_per_sample!r}")
    ramp_samples, num_samples = (None if one is None else one // (tokens_per_sample or 1) for one in (length, until))
    if not ramp_samples:
        raise ValueError(f"`length` must be at least one sample of {tokens_per_sample} tokens, got {length}")
    if final <= start or (final - start) % increment:
        raise ValueError(f"`final` must be {start} plus one or more increments of {increment}, got {final}")
    if num_samples is not None:
        _check_at_least_one_step(start, until=num_samples)
    _check_num_steps(ramp_samples // final)
    # a float, as in Megatron-LM: its rounding decides the size of a step that begins exactly at a change
    samples_per_size = ramp_samples / ((final - start) // increment)
    sizes: list[int] = []
    done = 0
    while done <= ramp_samples and (size := start + increment * int(done / samples_per_size)) < final:
        sizes.append(size)
        done += size
        _check_num_steps(len(sizes))
    if num_samples is None:
        return Trace.from_sequence(np.array([*sizes, final]))
    num_final = max(0, num_samples - done) // final
    _check_num_steps(len(sizes) + num_final)
    fitting = np.array(sizes)[np.cumsum(sizes) <= num_samples]
    return Trace.from_sequence(np.append(fitting, np.full(num_final, final)))


def _check_at_least_one_step(start: int, **num_samples: int) -> None:
    for name, number in num_samples.items():
        check_not_negative(**{name: number})
        if number < start:
            raise ValueError(f"`{name}` must be at least one step of {start} samples, got {number}")


def growth_for_decay(
    start: int,
    *,
    factor: float,
    at_epochs: Sequence[int],
    num_epochs: int,
    dataset_size: int,
    minibatch_size: int,
    cap: int | None = None,
) -> Trace:
    """Multiply the batch size when a schedule would divide the learning rate (Smith et al. 2018).

    After each epoch of `at_epochs`, B → min(factor · B, cap) instead of lr → lr / factor. Train with
    :class:`LinearRuleOptimizer` at ``ref_batchsize=start`` *and* the decay that is replaced. The rule cancels the decay
    until the batch size reaches the cap. An epoch is `dataset_size` samples.

    Args:
        start: the batch size of the first epochs.
        factor: by which the learning rate would be divided.
        at_epochs: the epochs after which it would be divided.
        num_epochs: the length of the trace in epochs.
        dataset_size: samples in the data set.
        minibatch_size: sizes are rounded to its nearest multiple.
        cap: the largest batch size; None for no bound.

    >>> trace = growth_for_decay(
    ...     128, factor=5, at_epochs=[60, 120, 160], num_epochs=200, dataset_size=50_000, minibatch_size=32)
    >>> len(trace), str(Stages.of(trace, unit="steps"))
    (28875, '0:128 23438:640 28125:3200 28750:16K')
    """
    check_positive(num_epochs=num_epochs, dataset_size=dataset_size)
    _check_growth(start, cap, minibatch_size, factor)
    for before, after in itertools.pairwise((0, *at_epochs, num_epochs)):
        if not before < after:
            raise ValueError(f"`at_epochs` must be ascending between 0 and {num_epochs}, got {after} after {before}")
    starts = tuple(epoch * dataset_size for epoch in (0, *at_epochs))
    largest = num_epochs * dataset_size if cap is None else cap
    sizes = start * np.minimum(float(factor) ** np.arange(len(starts)), largest / start)
    rounded = tuple(_whole_minibatches(sizes, minibatch_size).tolist())
    return Stages(starts, rounded, num_epochs * dataset_size, "samples").trace()


def seesaw(
    start: int, *, num_samples: int, minibatch_size: int, factor: float | None = None, cap: int | None = None
) -> Trace:
    """Seesaw's batch sizes for a cosine schedule of the learning rate (Meterez et al. 2025).

    Each time lr0 · cos(π/2 · s/S) has fallen by `factor`, the batch size is multiplied by it; in the limit of small
    factors B(s) = start / cos(π/2 · s/S), which takes 2/π · S / start updates. Train with :class:`RootRuleOptimizer` at
    ``ref_batchsize=start`` *and* the unchanged cosine schedule over samples to get Seesaw's learning rate.

    Args:
        start: the first batch size.
        num_samples: S, the length of the trace in samples.
        minibatch_size: sizes are rounded to its multiples. In the limit of small factors the cumulative sum is rounded,
            so that errors don't accumulate: sizes may alternate between two neighbouring multiples.
        factor: of each change, at least 1.001; None for the limit of small factors.
        cap: the largest batch size; None for no bound.

    >>> len(seesaw(256, num_samples=10_000_000, minibatch_size=32)), round(2 / math.pi * 10_000_000 / 256)
    (24868, 24868)
    >>> str(Stages.of(seesaw(256, num_samples=10_000_000, minibatch_size=32, factor=2, cap=2048), unit="steps"))
    '0:256 26042:512 29410:1024 30202:2048'
    """
    _check_growth(start, cap, minibatch_size, factor)
    _check_at_least_one_step(start, num_samples=num_samples)
    whole = num_samples // minibatch_size * minibatch_size
    largest = whole if cap is None else min(cap, whole)
    if factor is None:
        return _seesaw_limit(start, whole, minibatch_size, largest)
    if factor < _LEAST_FACTOR:
        raise ValueError(f"`factor` must be at least {_LEAST_FACTOR} (None: the limit of small factors), got {factor}")
    starts, sizes = [0], [start]
    for change in range(1, 1 + math.ceil(math.log(largest / start, factor))):
        begin = max(starts[-1] + 1, round(_QUARTER * math.acos(factor**-change) * whole))
        size = int(_whole_minibatches(np.array(min(start * factor**change, largest)), minibatch_size))
        if whole - begin < size:  # no step of this size fits
            break
        starts.append(begin)
        sizes.append(size)
    return Stages(tuple(starts), tuple(sizes), whole, "samples").trace()


def _seesaw_limit(start: int, num_samples: int, minibatch_size: int, cap: int) -> Trace:
    """Steps of the size B(s), up to the cap, below which 2/π · S · arcsin(π/2 · k · start/S) samples precede step k."""
    scale = _QUARTER * num_samples
    capped_from = scale / start * math.sqrt(1 - (start / cap) ** 2)
    samples_before_cap = scale * math.acos(start / cap)
    num_steps = math.floor(capped_from + (num_samples - samples_before_cap) / cap + 0.5)
    _check_num_steps(num_steps)
    steps = np.arange(num_steps)
    growing = scale * np.arcsin(np.minimum(steps * start / scale, 1))
    samples = np.where(steps < capped_from, growing, samples_before_cap + (steps - capped_from) * cap)
    edges = np.floor(samples / minibatch_size + 0.5).astype(np.int64) * minibatch_size
    return Trace.from_sequence(np.diff(edges, append=min(num_samples, int(edges[-1]) + cap)))


def _check_growth(start: int, cap: int | None, minibatch_size: int, factor: float | None) -> None:
    _check_sizes(minibatch_size, start=start, **({} if cap is None else {"cap": cap}))
    if factor is not None and not 1 < factor < math.inf:
        raise ValueError(f"`factor` must be greater than 1, got {factor!r}")
    if cap is not None and cap < start:
        raise ValueError(f"`cap` must be at least the first batch size of {start}, got {cap}")


def spot_market(
    *, num_devices: int, at_least: int, arrive: float, leave: float, samples_per_device: int, num_steps: int, seed: int
) -> Trace:
    """Simulates a spot market in which devices arrive and leave independently.

    All devices are present at first. In each step a present device leaves with probability `leave`, and an absent one
    arrives with probability `arrive`. In the long run each is present in arrive / (arrive + leave) of the steps.

    Args:
        num_devices: the largest number of devices.
        at_least: number of devices that never leave.
        arrive: the probability per step that an absent device arrives.
        leave: the probability per step that a present device leaves.
        samples_per_device: samples per present device in the batch size.
        num_steps: the length of the trace.
        seed: of the random numbers, which are the same with every version of numpy.

    >>> list(spot_market(num_devices=4, at_least=1, arrive=.3, leave=.2, samples_per_device=32, num_steps=8, seed=0))
    [128, 128, 128, 128, 128, 96, 32, 32]
    """
    check_positive(num_devices=num_devices, at_least=at_least)
    check_positive(samples_per_device=samples_per_device, num_steps=num_steps)
    _check_num_steps(num_steps)
    if at_least > num_devices:
        raise ValueError(f"`at_least` must be at most the {num_devices} devices, got {at_least}")
    for name, value in (("arrive", arrive), ("leave", leave)):
        if not 0 <= value <= 1:
            raise ValueError(f"`{name}` must be a probability from 0 to 1, got {value!r}")
    check_within(2**32 - 1, seed=seed)
    draws = np.random.RandomState(seed)  # unlike newer generators, its stream is frozen
    is_present = np.ones(num_devices - at_least, dtype=bool)
    counts = np.empty(num_steps, dtype=np.int64)
    for step in range(num_steps):
        counts[step] = at_least + np.count_nonzero(is_present)
        is_present ^= draws.random_sample(len(is_present)) < np.where(is_present, leave, arrive)
    return Trace.from_sequence(counts * samples_per_device)
