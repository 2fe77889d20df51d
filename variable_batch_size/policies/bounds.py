"""Bounds: which batch sizes a policy may choose, in one place for all policies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypedDict

from variable_batch_size.checks import check_positive, is_integer
from variable_batch_size.policies.situation import Situation


class BoundsOptions(TypedDict, total=False):
    """The bounds that every policy takes; :class:`Bounds` says what each is."""

    min_batch_size: int | None
    max_batch_size: int | None
    min_per_core: int | None
    max_per_core: int | None
    max_growth: float
    threshold: float


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The batch sizes that are allowed: whole minibatches within limits.

    With n minibatches of m samples on R cores, one core runs ⌊n/R⌋ to ⌈n/R⌉ of them, so that

        max(⌈min_batch_size/m⌉, R·⌈min_per_core/m⌉) ≤ n ≤ min(⌊max_batch_size/m⌋, R·⌊max_per_core/m⌋)

    Args:
        min_batch_size: the smallest batch size; None for one minibatch.
        max_batch_size: the largest; None for what an epoch holds.
        min_per_core: the fewest samples that any core has in a step; None for none, so that cores may be idle.
        max_per_core: the most samples that any core has in a step; None for no bound.
        max_growth: by what one decision may multiply the batch size at most, unless the other bounds ask for more.
        threshold: a change is made only if it changes what the policy goes by by this factor or more.

    >>> bounds = Bounds(max_batch_size=1000, max_growth=2.0)
    >>> situation = Situation(cores=4, minibatch_size=32, ref_batchsize=128, batch_size=320)
    >>> [bounds.nearest(size, situation) for size in (1, 100, 640, 100_000)]
    [32, 96, 640, 640]
    """

    min_batch_size: int | None = None
    max_batch_size: int | None = None
    min_per_core: int | None = None
    max_per_core: int | None = None
    max_growth: float = math.inf
    threshold: float = 1.0

    def __post_init__(self) -> None:
        for name in ("min_batch_size", "max_batch_size", "min_per_core", "max_per_core"):
            if getattr(self, name) is not None:
                check_positive(**{name: getattr(self, name)})
        for low, high in (("min_batch_size", "max_batch_size"), ("min_per_core", "max_per_core")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least > most:
                raise ValueError(f"`{low}` must be at most `{high}`, which is {most}, got {least}")
        if not self.max_growth > 1:
            raise ValueError(f"`max_growth` must be above 1, got {self.max_growth!r}")
        if not 1 <= self.threshold < math.inf:
            raise ValueError(f"`threshold` must be a number from 1 on, got {self.threshold!r}")

    def minibatches(self, situation: Situation) -> range:
        """How many minibatches a step may have, whatever it has now.

        Raises:
            ValueError: if there is no such number, with all bounds.
        """
        m, cores = situation.minibatch_size, situation.cores
        least = [1, -(-(self.min_batch_size or 1) // m), cores * -(-(self.min_per_core or 0) // m)]
        most = [
            limit
            for limit in (
                None if self.max_batch_size is None else self.max_batch_size // m,
                None if self.max_per_core is None else cores * (self.max_per_core // m),
                None if situation.capacity is None else situation.capacity // m,
            )
            if limit is not None
        ]
        if most and max(least) > min(most):
            raise ValueError(self._contradiction(situation))
        return range(max(least), (min(most) if most else 2**62 // m) + 1)

    def reachable(self, situation: Situation) -> range:
        """How many minibatches the next step may have, given the present batch size."""
        allowed = self.minibatches(situation)
        if situation.batch_size is None or math.isinf(self.max_growth):
            return allowed
        # a product such as 1.1 · 320 may fall short of a whole number by a rounding error
        largest = math.floor(self.max_growth * situation.batch_size / situation.minibatch_size + 1e-9)
        return range(allowed.start, max(allowed.start, min(largest, allowed.stop - 1)) + 1)

    def nearest(self, size: float, situation: Situation) -> int:
        """The batch size nearest to a wish that is allowed now."""
        if not (is_integer(size) or isinstance(size, float)) or math.isnan(size) or size <= 0:
            raise ValueError(f"a policy must answer with a batch size, a positive integer, got {size!r}")
        reachable, m = self.reachable(situation), situation.minibatch_size
        wish = reachable.stop if math.isinf(size) else math.floor(size / m + 0.5)
        return min(max(wish, reachable.start), reachable.stop - 1) * m

    def is_worth_it(self, worth: float, worth_now: float) -> bool:
        """Whether a change is large enough, by what the policy goes by."""
        return not worth_now / self.threshold < worth < worth_now * self.threshold

    def _contradiction(self, situation: Situation) -> str:
        cores, m = situation.cores, situation.minibatch_size
        parts = [
            f"at least {self.min_batch_size} in all" if self.min_batch_size is not None else "",
            f"at least {self.min_per_core} a core" if self.min_per_core is not None else "",
            f"at most {self.max_batch_size} in all" if self.max_batch_size is not None else "",
            f"at most {self.max_per_core} a core" if self.max_per_core is not None else "",
            f"at most {situation.capacity} in an epoch" if situation.capacity is not None else "",
        ]
        named = ", ".join(part for part in parts if part)
        return f"no batch size keeps all bounds on {cores} cores with minibatches of {m}: {named}"
