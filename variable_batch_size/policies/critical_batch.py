"""CriticalBatch: doubles as long as that costs next to no samples."""

from __future__ import annotations

from typing import final

from typing_extensions import Unpack

from variable_batch_size.policies.bounds import BoundsOptions
from variable_batch_size.policies.policy import Policy
from variable_batch_size.policies.situation import Situation


@final
class CriticalBatch(Policy):
    """Doubles when a step of twice the batch size makes nearly twice the progress (McCandlish et al. 2018).

    Steps of 2B make as much progress with (φ + 2B)/(φ + B) times the samples, where φ = V/G² is the noise scale. It
    doubles while this is at most 1 + `cost`.

    Args:
        cost: how many more samples, as a share, doubling may take.
        every: steps from one decision to the next.
        lead: how many steps ahead batch sizes are decided.
        bounds: as of :class:`Bounds`.

    >>> policy = CriticalBatch(cost=0.25)
    >>> policy.answer(Situation(cores=2, minibatch_size=32, ref_batchsize=64, batch_size=64, noise_scale=200.0))
    Decision(batch_size=128, reason='doubling takes 24 % more samples')
    """

    needs_noise = True

    def __init__(self, *, cost: float = 0.2, every: int = 20, lead: int = 16, **bounds: Unpack[BoundsOptions]) -> None:
        super().__init__(every=every, lead=lead, **bounds)
        if not 0 < cost < 1:
            raise ValueError(f"`cost` must be between 0 and 1, got {cost!r}")
        self.cost = cost

    def decide(self, situation: Situation) -> float:
        now = situation.batch_size or situation.ref_batchsize
        if situation.noise_scale is None or not situation.knows_noise:
            self.why = "noise unknown"
            return max(now, 2 * situation.minibatch_size)
        cost = now / (situation.noise_scale + now)  # (φ + 2B)/(φ + B) − 1
        self.why = f"doubling takes {100 * cost:.0f} % more samples"
        return 2 * now if cost <= self.cost else now
