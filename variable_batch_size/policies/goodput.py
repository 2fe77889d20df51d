"""Goodput: progress per second of steps that are made of fixed minibatches.

With minibatches of m samples on R cores, a step in which the busiest core runs d of them takes (d − 1)·a + u seconds: a
of a minibatch that is only accumulated, u of the one with the all-reduce and the update. It is worth

    gain(B) = (φ/B0 + 1) / (φ/B + 1)        φ = V/G², the noise scale in samples

steps at the reference batch size B0, so that goodput = gain(B) / ((d − 1)·a + u). All n of the same depth take equally
long, and gain grows with n: only the largest n of a depth, R·d, comes into question. Over d goodput has one maximum, at

    d* = √(φ·(u − a) / (a·R·m)),  that is B* = √(φ·W),  W = R·m·(u − a)/a

where W is how many samples the cores could compute during the overhead u − a.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def gain(batch_size: float, *, ref_batchsize: float, noise_scale: float) -> float:
    """How many steps at the reference batch size one step is worth.

    >>> gain(400, ref_batchsize=100, noise_scale=100.0), gain(400, ref_batchsize=100, noise_scale=math.inf)
    (1.6, 4.0)
    """
    if math.isinf(noise_scale):
        return batch_size / ref_batchsize
    return (noise_scale / ref_batchsize + 1) / (noise_scale / batch_size + 1)


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """What progress per second depends on, beside the batch size.

    Args:
        cores: how many share the work.
        minibatch_size: samples that one core runs at once.
        ref_batchsize: of the steps that progress is counted in.
        noise_scale: V/G², in samples; may be 0 or infinite.
        accumulating: seconds of a minibatch that is only accumulated.
        updating: seconds of the minibatch that completes a step, above 0.

    >>> shape = dict(cores=4, minibatch_size=32, ref_batchsize=128)
    >>> goodput = Goodput(noise_scale=10_000.0, accumulating=1.0, updating=4.0, **shape)
    >>> [round(goodput(n), 3) for n in (4, 8, 16, 60)]
    [0.25, 0.395, 0.551, 0.708]
    >>> goodput.best(range(1, 1000))
    60
    """

    cores: int
    minibatch_size: int
    ref_batchsize: int
    noise_scale: float
    accumulating: float
    updating: float

    def __call__(self, num_minibatches: int) -> float:
        """Steps at the reference batch size that steps of `num_minibatches` are worth per second."""
        size = num_minibatches * self.minibatch_size
        worth = gain(size, ref_batchsize=self.ref_batchsize, noise_scale=self.noise_scale)
        return worth / self.seconds(num_minibatches)

    def seconds(self, num_minibatches: int) -> float:
        """How long a step takes."""
        return (-(-num_minibatches // self.cores) - 1) * self.accumulating + self.updating

    def best(self, allowed: range) -> int:
        """The number of minibatches with the largest goodput, of successive ones that are allowed."""
        first, last = (-(-n // self.cores) for n in (allowed[0], allowed[-1]))
        middle = self._best_depth()
        below = first if middle <= first else last if middle >= last else math.floor(middle)
        # the last depth may be cut short by a bound, and then its neighbour may be better
        depths = sorted({min(max(depth, first), last) for depth in (below, below + 1, last - 1, last)})
        return max((min(depth * self.cores, allowed[-1]) for depth in depths), key=self)

    def _best_depth(self) -> float:
        overhead = max(self.updating - self.accumulating, 0.0)
        if self.accumulating <= 0 or math.isinf(self.noise_scale):
            return math.inf
        return math.sqrt(self.noise_scale / self.accumulating * overhead / (self.cores * self.minibatch_size))
