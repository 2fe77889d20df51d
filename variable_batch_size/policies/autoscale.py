"""Autoscale: chooses the batch size with the largest goodput, which is progress per second.

A step in which the busiest of R cores runs d minibatches of m samples takes (d − 1)·a + u seconds and is worth gain(B)
steps at the reference batch size. Of all numbers n of minibatches with the same d only the largest, n = R·d, matters.
Goodput has one maximum over d, d* = √(φ·(u − a) / (a·R·m)), φ = V/G² (docs/policies.md).
"""

import math
from dataclasses import dataclass
from typing import TypeVar, final

import numpy as np
import numpy.typing as npt

from variable_batch_size.policies.policy import BoundsOptions, Policy, Situation

Sizes = TypeVar("Sizes", float, npt.NDArray[np.float64])


def gain(batch_size: Sizes, *, ref_batchsize: float, noise_scale: float) -> Sizes:
    """The progress of a step, or of each in an array, in steps at the reference batch size: (φ/B0 + 1) / (φ/B + 1)."""
    if math.isinf(noise_scale):
        return batch_size / ref_batchsize
    return (noise_scale / ref_batchsize + 1) / (noise_scale / batch_size + 1)


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Progress per second as a function of the number of minibatches per step.

    >>> shape = dict(cores=4, minibatch_size=32, ref_batchsize=128)
    >>> goodput = Goodput(noise_scale=10_000.0, accumulating=1.0, updating=4.0, **shape)
    >>> [round(goodput(n), 3) for n in (4, 8, 16, 60)]
    [0.25, 0.395, 0.551, 0.708]
    >>> goodput.best(range(1, 1000))
    60
    """

    cores: int  # number of cores
    minibatch_size: int  # samples per forward and backward pass of one core
    ref_batchsize: int  # the batch size of the steps in which progress is counted
    noise_scale: float  # V/G², in samples; may be 0 or infinite
    accumulating: float  # a, seconds of an accumulating minibatch
    updating: float  # u > 0, seconds of the minibatch that completes a step

    def __call__(self, num_minibatches: int) -> float:
        """Progress per second, in steps at the reference batch size."""
        size = num_minibatches * self.minibatch_size
        worth = gain(size, ref_batchsize=self.ref_batchsize, noise_scale=self.noise_scale)
        return worth / ((-(-num_minibatches // self.cores) - 1) * self.accumulating + self.updating)

    def best(self, allowed: range) -> int:
        """The number of minibatches in a contiguous range that has the largest goodput."""
        first, last = (-(-n // self.cores) for n in (allowed[0], allowed[-1]))
        middle, overhead = math.inf, max(self.updating - self.accumulating, 0.0)
        if self.accumulating > 0 and not math.isinf(self.noise_scale):
            middle = math.sqrt(self.noise_scale / self.accumulating * overhead / (self.cores * self.minibatch_size))
        below = first if middle <= first else last if middle >= last else math.floor(middle)
        # a bound may truncate the last depth, and the one before may then be better
        depths = sorted({min(max(depth, first), last) for depth in (below, below + 1, last - 1, last)})
        return max((min(depth * self.cores, allowed[-1]) for depth in depths), key=self)


@final
class Autoscale(Policy):
    """Maximizes goodput, gain / time, computed from measured step times and gradient noise (Qiao et al. 2021).

    Until both are known it tries two depths of accumulation: the noise needs at least two minibatches, and the
    difference between two depths is the time of an accumulating minibatch. One core without an accelerator times its
    updates instead. On a new number of cores it decides by the times on all numbers so far. See :class:`Bounds` and
    :class:`Policy` for other arguments.

    Args:
        max_batch_size: the largest batch size; beyond it, no measurement shows whether training still converges well.
        min_batch_size: the smallest; None for the reference batch size.

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
        bounds: BoundsOptions = {"min_batch_size": min_batch_size, "max_batch_size": max_batch_size}
        bounds |= {"min_per_core": min_per_core, "max_per_core": max_per_core}
        bounds |= {"max_growth": max_growth, "threshold": threshold}
        super().__init__(every=every, lead=lead, **bounds)

    def decide(self, situation: Situation) -> float:
        allowed = self._from_reference(self.bounds.reachable(situation), situation)
        if situation.batch_size is None:
            self.why = "first decision"
            return _size(situation, -(-allowed[0] // situation.cores), allowed)
        goodput = _goodput(situation)
        if goodput is None:
            return self._probe(situation, situation.batch_size, allowed)
        best = even(goodput.best(allowed), situation, allowed) * situation.minibatch_size
        now = self.worth(situation, situation.batch_size)
        self.why = f"goodput {100 * (self.worth(situation, best) / now - 1):+.0f} %" if now > 0 else ""
        return best

    def expected(self, situation: Situation) -> float:
        goodput, allowed = _goodput(situation), self._from_reference(self.bounds.minibatches(situation), situation)
        if goodput is None:
            return super().expected(situation)
        return even(goodput.best(allowed), situation, allowed) * situation.minibatch_size

    def _from_reference(self, allowed: range, situation: Situation) -> range:
        """The allowed numbers of minibatches from the reference batch size on, unless there is another minimum."""
        if self.bounds.min_batch_size is not None:
            return allowed
        reference = -(-situation.ref_batchsize // situation.minibatch_size)
        return range(min(max(allowed.start, reference), allowed.stop - 1), allowed.stop)

    def worth(self, situation: Situation, batch_size: int) -> float:
        goodput = _goodput(situation)
        return float(batch_size) if goodput is None else goodput(-(-batch_size // situation.minibatch_size))

    def _probe(self, situation: Situation, size: int, allowed: range) -> float:
        """Keep the share of each core, or try once what is not known yet: a second depth, or two minibatches."""
        m, cores = situation.minibatch_size, situation.cores
        if situation.seconds_updating is None and len(situation.timed_depths) == 1:
            (depth,) = situation.timed_depths
            for other in (depth + -(-depth // 2), depth // 2):
                number = even(min(max(other * cores, allowed[0]), allowed[-1]), situation, allowed)
                if -(-number // cores) != depth:
                    self.why = f"times unknown, trying {-(-number // cores)} minibatches per core after {depth}"
                    return number * m
        if not situation.knows_noise and size < 2 * m and cores == 1:  # several cores have one each
            self.why = "noise unknown, trying two minibatches"
            return 2 * m
        self.why = f"{'times' if situation.knows_noise else 'noise'} unknown"
        return _size(situation, max(1, round(size / (m * cores))), allowed)


def _size(situation: Situation, depth: int, allowed: range) -> int:
    """The batch size with this depth on all cores, limited to the allowed range."""
    whole = min(depth, max(1, allowed[-1] // situation.cores)) * situation.cores
    return even(min(max(whole, allowed[0]), allowed[-1]), situation, allowed) * situation.minibatch_size


def even(number: int, situation: Situation, allowed: range) -> int:
    """The nearest allowed number of minibatches that larger minibatches, if allowed, divide evenly among cores.

    Larger minibatches are 2, 4, … times as large, so a core's share must be such a number or a multiple of the largest.

    >>> situation = Situation(cores=2, minibatch_size=32, ref_batchsize=64, max_minibatch_size=150)
    >>> [even(number, situation, range(1, 16)) for number in (1, 2, 6, 9, 10, 13, 14)]
    [1, 2, 8, 8, 8, 8, 8]
    """
    largest, cores = (situation.max_minibatch_size or 0) // situation.minibatch_size, situation.cores
    share = number // cores
    if largest < 2 or not share:
        return number
    largest = _power_of_two(largest)
    lower = share // largest * largest if share >= largest else _power_of_two(share)
    upper = 2 * lower if lower < largest else lower + largest
    nearest = sorted((lower, upper), key=lambda other: max(other * cores / number, number / (other * cores)))
    return next((other * cores for other in nearest if other * cores in allowed), number)


def _power_of_two(number: int) -> int:
    """The largest power of two that is not above a number."""
    return 1 << (number.bit_length() - 1)


def _goodput(situation: Situation) -> Goodput | None:
    """The goodput of a situation; None while noise or times are unknown."""
    noise_scale, a, u = situation.noise_scale, situation.seconds_accumulating, situation.seconds_updating
    if noise_scale is None or a is None or not u or not situation.knows_noise:
        return None
    sizes = {name: getattr(situation, name) for name in ("cores", "minibatch_size", "ref_batchsize")}
    return Goodput(noise_scale=noise_scale, accumulating=a, updating=u, **sizes)
