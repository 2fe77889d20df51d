"""NormTest: a batch size that keeps the noise of a step below a share of its gradient."""

from __future__ import annotations

import math
from typing import final

from typing_extensions import Unpack

from variable_batch_size.policies.bounds import BoundsOptions
from variable_batch_size.policies.policy import Policy
from variable_batch_size.policies.situation import Situation


@final
class NormTest(Policy):
    """Grows when V/B > η²·‖ḡ‖², the variance of a step's mean gradient against its square (Byrd et al. 2012).

    On average ‖ḡ‖² is G² + V/B, so the smallest batch size that passes is B = φ·(1 − η²)/η², with φ = V/G². It
    never shrinks.

    Args:
        eta: η, between 0 and 1; the smaller, the larger the batch size.
        every: steps from one decision to the next.
        lead: how many steps ahead batch sizes are decided.
        bounds: as of :class:`Bounds`.

    >>> policy = NormTest(eta=0.5)
    >>> policy.answer(Situation(cores=2, minibatch_size=32, ref_batchsize=64, batch_size=64, noise_scale=100.0))
    Decision(batch_size=320, reason='the noise is above 0.5 of the gradient')
    """

    needs_noise = True

    def __init__(self, *, eta: float, every: int = 20, lead: int = 16, **bounds: Unpack[BoundsOptions]) -> None:
        super().__init__(every=every, lead=lead, **bounds)
        if not 0 < eta < 1:
            raise ValueError(f"`eta` must be between 0 and 1, got {eta!r}")
        self.eta = eta

    def decide(self, situation: Situation) -> float:
        now = situation.batch_size or situation.ref_batchsize
        if situation.noise_scale is None or not situation.knows_noise:
            return self._until_known(situation, now)
        m = situation.minibatch_size
        passing = situation.noise_scale * (1 - self.eta**2) / self.eta**2
        if passing <= now:
            return now
        self.why = f"the noise is above {self.eta:g} of the gradient"
        return passing if math.isinf(passing) else math.ceil(passing / m) * m

    def _until_known(self, situation: Situation, now: int) -> float:
        """At least two minibatches, for one tells no noise."""
        if now < 2 * situation.minibatch_size:
            self.why = "one minibatch tells no noise"
        return max(now, 2 * situation.minibatch_size)
