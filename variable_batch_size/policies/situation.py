"""Situation: what a policy knows of a run when it decides."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The numbers from which a policy decides; None where they are not known.

    Args:
        cores: how many share the work.
        minibatch_size: samples that one core runs at once.
        ref_batchsize: the batch size at which the settings of the inner optimizer are right.
        batch_size: of the step decided last; None before the first decision.
        noise_scale: V/G² of the gradient, in samples; infinite where the signal drowns in the noise.
        seconds_accumulating: of a minibatch that is only accumulated.
        seconds_updating: of the minibatch that completes a step, all-reduce and update included.
        is_fresh: whether no step was timed yet on these cores.
        steps_done: steps so far.
        samples_done: samples in these.
        progress: how many steps at `ref_batchsize` these are worth.
        loss: the latest that a log has recorded.
        capacity: the most samples that a step may have, those of an epoch.

    >>> situation = Situation(cores=4, minibatch_size=32, ref_batchsize=128, batch_size=320)
    >>> situation.depth, situation.knows_noise
    (3, False)
    """

    cores: int
    minibatch_size: int
    ref_batchsize: int
    batch_size: int | None = None
    noise_scale: float | None = None
    seconds_accumulating: float | None = None
    seconds_updating: float | None = None
    is_fresh: bool = False
    steps_done: int = 0
    samples_done: int = 0
    progress: float = 0.0
    loss: float | None = None
    capacity: int | None = None

    @property
    def depth(self) -> int | None:
        """How many minibatches the busiest core runs in a step of the present batch size."""
        return None if self.batch_size is None else -(-self.batch_size // (self.minibatch_size * self.cores))

    @property
    def knows_noise(self) -> bool:
        """Whether there is a noise scale to decide by; it may be infinite."""
        return self.noise_scale is not None and not math.isnan(self.noise_scale) and self.noise_scale >= 0

    @property
    def knows_times(self) -> bool:
        """Whether both times are known; a clock that has not moved tells nothing."""
        return self.seconds_accumulating is not None and bool(self.seconds_updating)
