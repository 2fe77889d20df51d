"""PerCore: a batch size that is proportional to the cores that are there."""

from __future__ import annotations

from typing import final

from typing_extensions import Unpack

from variable_batch_size.checks import check_positive
from variable_batch_size.policies.bounds import BoundsOptions
from variable_batch_size.policies.policy import Policy
from variable_batch_size.policies.situation import Situation


@final
class PerCore(Policy):
    """As many samples for every core, however many there are.

    Args:
        samples: of each core in a step; None for one minibatch.
        every: steps from one decision to the next.
        lead: how many steps ahead batch sizes are decided.
        bounds: as of :class:`Bounds`.

    >>> PerCore(64).answer(Situation(cores=3, minibatch_size=32, ref_batchsize=128)).batch_size
    192
    """

    def __init__(
        self, samples: int | None = None, *, every: int = 20, lead: int = 16, **bounds: Unpack[BoundsOptions]
    ) -> None:
        super().__init__(every=every, lead=lead, **bounds)
        if samples is not None:
            check_positive(samples=samples)
        self.samples = samples

    def decide(self, situation: Situation) -> float:
        self.why = f"{situation.cores} cores"
        return (self.samples or situation.minibatch_size) * situation.cores
