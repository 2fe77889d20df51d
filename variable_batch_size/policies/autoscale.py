"""Autoscale: the batch size that makes most progress per second."""

from __future__ import annotations

from typing import final

from variable_batch_size.policies.goodput import Goodput
from variable_batch_size.policies.policy import Policy
from variable_batch_size.policies.situation import Situation


@final
class Autoscale(Policy):
    """The batch size of the largest goodput, gain / time, from measured seconds and gradient noise (Qiao et al. 2021).

    Until both are known it tries two depths of accumulation: a single minibatch tells no noise, and the difference
    between two depths is the time of an accumulating minibatch. The noise grows as training goes on, so it decides
    again and again; it moves by at most `max_growth` at once, and only for `threshold` times the goodput.

    Args:
        max_batch_size: the largest batch size: no measurement tells where a larger one stops training well.
        min_batch_size: the smallest; None for the reference batch size.
        max_growth: by what one decision may multiply the batch size at most.
        threshold: by what factor the goodput must grow for a change.
        every: steps from one decision to the next.
        lead: how many steps ahead batch sizes are decided.
        min_per_core: the fewest samples that any core has in a step; None for none.
        max_per_core: the most; None for no bound.

    >>> policy = Autoscale(max_batch_size=4096)
    >>> known = dict(cores=4, minibatch_size=32, ref_batchsize=128, noise_scale=10_000.0)
    >>> policy.answer(Situation(batch_size=1024, seconds_accumulating=1.0, seconds_updating=4.0, **known))
    Decision(batch_size=1920, reason='goodput +6 %')
    """

    needs_noise = True

    def __init__(
        self,
        *,
        max_batch_size: int,
        min_batch_size: int | None = None,
        max_growth: float = 2.0,
        threshold: float = 1.05,
        every: int = 20,
        lead: int = 16,
        min_per_core: int | None = None,
        max_per_core: int | None = None,
    ) -> None:
        super().__init__(
            every=every,
            lead=lead,
            min_batch_size=min_batch_size,
            max_batch_size=max_batch_size,
            max_growth=max_growth,
            threshold=threshold,
            min_per_core=min_per_core,
            max_per_core=max_per_core,
        )

    def decide(self, situation: Situation) -> float:
        allowed = self._allowed(situation)
        if situation.batch_size is None:
            self.why = "the start"
            return _size(situation, -(-allowed[0] // situation.cores), allowed)
        goodput = _goodput(situation)
        if goodput is None:
            return self._probe(situation, situation.batch_size, allowed)
        best = goodput.best(allowed) * situation.minibatch_size
        now = self.worth(situation, situation.batch_size)
        self.why = f"goodput {100 * (self.worth(situation, best) / now - 1):+.0f} %" if now > 0 else ""
        return best

    def worth(self, situation: Situation, batch_size: int) -> float:
        goodput = _goodput(situation)
        return float(batch_size) if goodput is None else goodput(-(-batch_size // situation.minibatch_size))

    def _allowed(self, situation: Situation) -> range:
        """Within reach, and not below the reference batch size unless `min_batch_size` says so."""
        reachable = self.bounds.reachable(situation)
        if self.bounds.min_batch_size is not None:
            return reachable
        reference = -(-situation.ref_batchsize // situation.minibatch_size)
        return range(min(max(reachable.start, reference), reachable.stop - 1), reachable.stop)

    def _probe(self, situation: Situation, size: int, allowed: range) -> float:
        """Once and twice as deep, in turns."""
        assert situation.depth is not None
        if situation.is_fresh:
            self.why = "begins anew on these cores"
            return _size(situation, situation.depth, allowed)
        unknown = "times" if situation.knows_noise else "noise"
        deeper = _size(situation, 2 * situation.depth, allowed)
        if deeper > size:
            self.why = f"{unknown} unknown, tries twice as deep"
            return deeper
        self.why = f"{unknown} unknown, tries half as deep"
        return _size(situation, max(1, situation.depth // 2), allowed)


def _size(situation: Situation, depth: int, allowed: range) -> int:
    """The batch size of steps in which all cores are equally deep, as far as that is allowed."""
    whole = min(depth, max(1, allowed[-1] // situation.cores)) * situation.cores
    return min(max(whole, allowed[0]), allowed[-1]) * situation.minibatch_size


def _goodput(situation: Situation) -> Goodput | None:
    """None while noise or times are not known."""
    noise_scale, a, u = situation.noise_scale, situation.seconds_accumulating, situation.seconds_updating
    if noise_scale is None or a is None or u is None or not situation.knows_noise or not situation.knows_times:
        return None
    return Goodput(
        cores=situation.cores,
        minibatch_size=situation.minibatch_size,
        ref_batchsize=situation.ref_batchsize,
        noise_scale=noise_scale,
        accumulating=a,
        updating=u,
    )
