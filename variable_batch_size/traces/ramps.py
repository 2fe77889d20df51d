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
