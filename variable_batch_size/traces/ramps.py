"""Ramps: batch sizes that stay the same, or go from one size to another."""

from __future__ import annotations

import math

import numpy as np

from variable_batch_size.checks import check_positive
from variable_batch_size.traces.limits import check_multiples, check_num_steps, whole_minibatches
from variable_batch_size.traces.trace import Trace


def constant_trace(batch_size: int, *, num_steps: int) -> Trace:
    """The same batch size for a number of steps.

    >>> list(constant_trace(128, num_steps=3))
    [128, 128, 128]
    """
    check_positive(batch_size=batch_size)
    return linear_ramp(batch_size, batch_size, num_steps=num_steps, minibatch_size=1)


def linear_ramp(start: int, end: int, *, num_steps: int, minibatch_size: int) -> Trace:
    """Batch sizes on a straight line from `start` to `end`, up or down, to the nearest whole minibatch.

    >>> list(linear_ramp(32, 256, num_steps=6, minibatch_size=32))
    [32, 64, 128, 160, 224, 256]
    """
    check_positive(start=start, end=end, num_steps=num_steps, minibatch_size=minibatch_size)
    check_multiples(minibatch_size, start=start, end=end)
    check_num_steps(num_steps)
    along = np.arange(num_steps) / max(1, num_steps - 1)
    return Trace.from_sequence(whole_minibatches(start + along * (end - start), minibatch_size))


def doubling_ramp(start: int, end: int, *, every: int, minibatch_size: int, num_steps: int | None = None) -> Trace:
    """A batch size that doubles, or halves, every N steps until it reaches `end`.

    Args:
        start: the first batch size.
        end: the last one, where the ramp stops.
        every: N, the steps between two changes.
        minibatch_size: sizes are rounded to its nearest multiple.
        num_steps: the length of the trace; by default the last size, too, holds for `every` steps.

    >>> list(doubling_ramp(32, 200, every=2, minibatch_size=8))
    [32, 32, 64, 64, 128, 128, 200, 200]
    >>> list(doubling_ramp(256, 32, every=1, minibatch_size=32, num_steps=6))
    [256, 128, 64, 32, 32, 32]
    """
    check_positive(start=start, end=end, every=every, minibatch_size=minibatch_size)
    check_multiples(minibatch_size, start=start, end=end)
    num_changes = math.ceil(abs(math.log2(end / start)) - 1e-12)
    num_steps = (num_changes + 1) * every if num_steps is None else num_steps
    check_positive(num_steps=num_steps)
    check_num_steps(num_steps)
    sizes = start * 2.0 ** (np.arange(num_changes) * (1 if end > start else -1))
    changes = np.minimum(np.arange(num_steps) // every, num_changes)
    return Trace.from_sequence(np.append(whole_minibatches(sizes, minibatch_size), end)[changes])


def rampup(start: int, increment: int, ramp_samples: int, *, final: int, num_samples: int | None = None) -> Trace:
    """From one batch size to another by equal increments over a number of samples, as Megatron-LM does it.

    Its option ``--rampup-batch-size START INCREMENT SAMPLES``: with N = (final − start) / increment, a step before
    which s samples were used has the batch size

        B(s) = start + increment · ⌊s / (ramp_samples / N)⌋   up to s = ramp_samples,   `final` from then on.

    Args:
        start: the first batch size.
        increment: by how much it grows at once.
        ramp_samples: the samples over which it grows.
        final: the last batch size, a whole number of increments above the first.
        num_samples: of the whole training, whose last step is the last one that still fits; by default the trace ends
            with the first step of the final size, which ``on_end="hold"`` then goes on with.

    >>> list(rampup(16, 16, 120, final=48))
    [16, 16, 16, 16, 32, 32, 48]
    >>> len(rampup(16, 16, 120, final=48, num_samples=1000))
    24
    """
    check_positive(start=start, increment=increment, ramp_samples=ramp_samples, final=final)
    if final <= start or (final - start) % increment:
        raise ValueError(f"`final` must be {start} and one or more increments of {increment}, got {final}")
    if num_samples is not None:
        check_positive(num_samples=num_samples)
        if num_samples < start:
            raise ValueError(f"`num_samples` must be at least one step of {start}, got {num_samples}")
    check_num_steps(ramp_samples // final)
    sizes = np.array(_rampup_sizes(start, increment, ramp_samples, final))
    if num_samples is None:
        return Trace.from_sequence(np.append(sizes, final))
    num_final = max(0, num_samples - int(sizes.sum())) // final
    check_num_steps(len(sizes) + num_final)
    fitting = sizes[np.cumsum(sizes) <= num_samples]
    return Trace.from_sequence(np.append(fitting, np.full(num_final, final)))


def _rampup_sizes(start: int, increment: int, ramp_samples: int, final: int) -> list[int]:
    """The batch sizes of the steps before the final size."""
    # a float, as there: its rounding decides which size a step has that begins right at a change
    samples_per_size = ramp_samples / ((final - start) // increment)
    sizes: list[int] = []
    done = 0
    while done <= ramp_samples:
        size = start + increment * int(done / samples_per_size)
        if size >= final:
            break
        sizes.append(size)
        done += size
        check_num_steps(len(sizes))
    return sizes
