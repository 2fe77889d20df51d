"""Growth: larger batches in place of a decaying learning rate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from variable_batch_size.checks import check_positive
from variable_batch_size.traces.limits import check_multiples, check_num_steps, whole_minibatches
from variable_batch_size.traces.stages import Stages
from variable_batch_size.traces.trace import Trace

_LEAST_FACTOR = 1.001
_QUARTER = 2 / math.pi  # radians to quarters of a turn


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
    """Multiply the batch size where a schedule would divide the learning rate (Smith et al. 2018).

    From "Don't decay the learning rate, increase the batch size": after each epoch e of `at_epochs`

        B → min(factor · B, cap)   instead of   lr → lr / factor.

    Training with :class:`LinearRuleOptimizer` at ``ref_batchsize=start`` *and* the decay that it replaces gives
    the paper's learning rate: the rule multiplies by what the decay divides by, and what a cap cuts off is left to the
    decay. An epoch is `dataset_size` samples.

    Args:
        start: the batch size of the first epochs.
        factor: what the learning rate would be divided by.
        at_epochs: after how many epochs each change comes.
        num_epochs: epochs of the whole training.
        dataset_size: samples in the data set.
        minibatch_size: sizes are rounded to its nearest multiple.
        cap: the largest batch size; None for no bound.

    >>> trace = growth_for_decay(
    ...     128, factor=5, at_epochs=[60, 120, 160], num_epochs=200, dataset_size=50_000, minibatch_size=32)
    >>> len(trace), str(Stages.of(trace, unit="steps"))
    (28875, '0:128 23438:640 28125:3200 28750:16K')
    """
    check_positive(start=start, num_epochs=num_epochs, dataset_size=dataset_size, minibatch_size=minibatch_size)
    _check_growth(start, cap, minibatch_size, factor)
    for before, after in itertools.pairwise((0, *at_epochs, num_epochs)):
        if not before < after:
            raise ValueError(f"`at_epochs` must grow from above 0 to below {num_epochs}, got {after} after {before}")
    starts = tuple(epoch * dataset_size for epoch in (0, *at_epochs))
    largest = num_epochs * dataset_size if cap is None else cap
    sizes = start * np.minimum(float(factor) ** np.arange(len(starts)), largest / start)
    rounded = whole_minibatches(sizes, minibatch_size)
    return Stages(starts, tuple(rounded.tolist()), num_epochs * dataset_size, "samples").trace()


def seesaw(
    start: int, *, num_samples: int, minibatch_size: int, factor: float | None = None, cap: int | None = None
) -> Trace:
    """Seesaw's batch sizes for a cosine schedule of the learning rate (Meterez et al. 2025).

    Over S samples the schedule lr(s) = lr0 · cos(π/2 · s/S) falls; whenever it has fallen by `factor`, Seesaw
    multiplies the batch size by `factor` and divides the learning rate by only √factor. In the limit of small factors

        B(s) = start / cos(π/2 · s/S),   which takes ∫ ds / B(s) = 2/π · S / start updates:

    63.7 % of those at the constant batch size `start`. Training with :class:`RootRuleOptimizer` at
    ``ref_batchsize=start`` *and* the unchanged cosine schedule, over samples, gives Seesaw's learning rate.

    Args:
        start: the first batch size.
        num_samples: S, the samples of the whole training.
        minibatch_size: sizes are whole minibatches. In the limit the *sum* of sizes is rounded, so that neither
            updates nor samples drift: sizes may alternate between two neighbouring multiples.
        factor: what each change multiplies by, at least 1.001; None for the limit.
        cap: the largest batch size; None for no bound.

    >>> len(seesaw(256, num_samples=10_000_000, minibatch_size=32)), round(2 / math.pi * 10_000_000 / 256)
    (24868, 24868)
    >>> str(Stages.of(seesaw(256, num_samples=10_000_000, minibatch_size=32, factor=2, cap=2048), unit="steps"))
    '0:256 26042:512 29410:1024 30202:2048'
    """
    check_positive(start=start, num_samples=num_samples, minibatch_size=minibatch_size)
    _check_growth(start, cap, minibatch_size, factor)
    if factor is not None and factor < _LEAST_FACTOR:
        raise ValueError(
            f"`factor` must be at least {_LEAST_FACTOR}, or None for the limit of small ones, got {factor}"
        )
    if num_samples < start:
        raise ValueError(f"`num_samples` must be at least one step of {start}, got {num_samples}")
    whole = num_samples // minibatch_size * minibatch_size
    largest = whole if cap is None else min(cap, whole)
    if factor is None:
        return _seesaw_limit(start, whole, minibatch_size, largest)
    return _seesaw_stages(start, whole, minibatch_size, largest, factor)


def _seesaw_stages(start: int, num_samples: int, minibatch_size: int, cap: int, factor: float) -> Trace:
    """A stage for each change, as long as a step of its size still fits."""
    starts, sizes = [0], [start]
    for change in range(1, 1 + math.ceil(math.log(cap / start, factor))):
        begin = max(starts[-1] + 1, round(_QUARTER * math.acos(factor**-change) * num_samples))
        size = int(whole_minibatches(np.array(min(start * factor**change, cap)), minibatch_size))
        if num_samples - begin < size:
            break
        starts.append(begin)
        sizes.append(size)
    return Stages(tuple(starts), tuple(sizes), num_samples, "samples").trace()


def _seesaw_limit(start: int, num_samples: int, minibatch_size: int, cap: int) -> Trace:
    """Steps of the size B(s) = start / cos(π/2 · s/S), until that reaches the cap.

    Until then, s(k) = 2/π · S · arcsin(π/2 · k · start/S) samples come before step k.
    """
    scale = _QUARTER * num_samples
    capped_from = scale / start * math.sqrt(1 - (start / cap) ** 2)
    samples_before_cap = scale * math.acos(start / cap)
    num_steps = math.floor(capped_from + (num_samples - samples_before_cap) / cap + 0.5)
    check_num_steps(num_steps)
    steps = np.arange(num_steps)
    samples = np.where(
        steps < capped_from,
        scale * np.arcsin(np.minimum(steps * start / scale, 1)),
        samples_before_cap + (steps - capped_from) * cap,
    )
    edges = np.floor(samples / minibatch_size + 0.5).astype(np.int64) * minibatch_size
    return Trace.from_sequence(np.diff(edges, append=min(num_samples, int(edges[-1]) + cap)))


def _check_growth(start: int, cap: int | None, minibatch_size: int, factor: float | None) -> None:
    check_multiples(minibatch_size, start=start)
    if factor is not None and not 1 < factor < math.inf:
        raise ValueError(f"`factor` must be greater than 1, got {factor!r}")
    if cap is not None:
        check_positive(cap=cap)
        check_multiples(minibatch_size, cap=cap)
        if cap < start:
            raise ValueError(f"`cap` must be at least the first batch size of {start}, got {cap}")
