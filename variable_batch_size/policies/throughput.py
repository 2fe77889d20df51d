"""Throughput: a model of step times, and the best split of a batch into minibatches and accumulation steps.

The model of Pollux (Qiao et al. 2021), for minibatches of b samples on R cores of N machines:

    T_accumulate(b)    = αc + βc·b
    T_network(N, R)    = αn + βn·(R − 2)   if N > 1,   αr + βr·(R − 2)   if R > 1,   0 alone
    T_update(N, R, b)  = (T_accumulate^γ + T_network^γ)^(1/γ)

γ ranges from 1, without overlap of computation and communication, to 10, with nearly full overlap.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from variable_batch_size.checks import check_positive
from variable_batch_size.policies.autoscale import gain

_MOST_CHOICES = 64


class Throughput(NamedTuple):
    """The seven parameters, in seconds and seconds per sample or core.

    >>> model = Throughput(0.01, 0.001, 0.2, 0.01, 0.05, 0.005, 1.0)
    >>> round(model.accumulating(32), 3), round(model.updating(1, 4, 32), 3), round(model.updating(2, 4, 32), 3)
    (0.042, 0.102, 0.262)
    """

    alpha_c: float
    beta_c: float
    alpha_n: float
    beta_n: float
    alpha_r: float
    beta_r: float
    gamma: float

    def accumulating(self, minibatch_size: float) -> float:
        """Seconds of an accumulating minibatch."""
        return self.alpha_c + self.beta_c * minibatch_size

    def network(self, machines: int, cores: int) -> float:
        """Seconds of an all-reduce."""
        if cores == 1:
            return 0.0
        alpha, beta = (self.alpha_n, self.beta_n) if machines > 1 else (self.alpha_r, self.beta_r)
        return alpha + beta * max(cores - 2, 0)

    def updating(self, machines: int, cores: int, minibatch_size: float) -> float:
        """Seconds of the minibatch that completes a step."""
        computing, communicating = self.accumulating(minibatch_size), self.network(machines, cores)
        longer = max(computing, communicating)
        # divided by the longer one, as a high power of a short time would round to 0
        powers = (computing / longer) ** self.gamma + (communicating / longer) ** self.gamma
        return float(longer * powers ** (1 / self.gamma))

    def step(self, machines: int, cores: int, minibatch_size: float, depth: int) -> float:
        """Seconds of a step in which every core runs `depth` minibatches."""
        return (depth - 1) * self.accumulating(minibatch_size) + self.updating(machines, cores, minibatch_size)


class Split(NamedTuple):
    """A batch split into minibatches."""

    minibatch_size: int  # samples per minibatch
    num_minibatches: int  # per step, summed over cores
    shares: tuple[int, ...]  # number of minibatches of each core


def split(batch_size: int, *, max_minibatch: int, cores: int) -> Split:
    """Split a batch into equal minibatches of at most `max_minibatch` samples that need the fewest rounds.

    The minibatch size divides the batch size, so every step has exactly `batch_size` samples on any number of cores. Of
    the sizes with the fewest rounds it is the smallest, which leaves the fewest cores idle.

    >>> split(256, max_minibatch=64, cores=3)
    Split(minibatch_size=64, num_minibatches=4, shares=(2, 1, 1))
    >>> split(256, max_minibatch=64, cores=8).minibatch_size
    32
    """
    check_positive(batch_size=batch_size, max_minibatch=max_minibatch, cores=cores)
    divisors = [size for size in range(1, min(batch_size, max_minibatch) + 1) if batch_size % size == 0]
    size = min(divisors, key=lambda size: (-(-batch_size // size // cores), size))
    num = batch_size // size
    return Split(size, num, tuple(len(range(rank, num, cores)) for rank in range(cores)))


class BestSplit(NamedTuple):
    """A choice of minibatch size and accumulation depth."""

    goodput: float  # progress per second, in samples at the reference batch size
    minibatch_size: int  # samples per minibatch
    depth: int  # minibatches per core and step


def best_split(
    throughput: Throughput,
    *,
    noise_scale: float,
    ref_batchsize: int,
    cores: int,
    max_batch_size: int,
    machines: int = 1,
    min_minibatch: int = 1,
    max_minibatch: int | None = None,
    may_accumulate: bool = True,
) -> BestSplit:
    """Choose the minibatch size before a run, and the number of minibatches per step.

    Goodput has one maximum over the minibatch size at each depth. A geometric grid of 64 sizes and 64 depths is as
    precise as measured times. All cores run equally many samples. Above the reference batch size a step has at least
    two minibatches, because one gives no estimate of the noise.

    Args:
        throughput: the model of step times.
        noise_scale: V/G², in samples.
        ref_batchsize: the smallest batch size, for which the inner optimizer's settings were chosen.
        cores: number of cores.
        max_batch_size: the largest batch size.
        machines: number of machines.
        min_minibatch: the fewest samples in a minibatch.
        max_minibatch: the most; None for no bound.
        may_accumulate: whether cores may run several minibatches in a step.

    >>> model = Throughput(0.01, 0.001, 0.2, 0.01, 0.05, 0.005, 1.0)
    >>> best_split(model, noise_scale=1000.0, ref_batchsize=128, cores=4, max_batch_size=4096, max_minibatch=64)[1:]
    (64, 2)
    """
    check_positive(ref_batchsize=ref_batchsize, cores=cores, max_batch_size=max_batch_size, machines=machines)
    largest = max_batch_size if max_minibatch is None else max_minibatch
    check_positive(min_minibatch=min_minibatch, max_minibatch=largest)
    if not noise_scale >= 0:
        raise ValueError(f"`noise_scale` must be a non-negative number, got {noise_scale!r}")

    def goodput(size: int, depth: int) -> float:
        worth = gain(cores * size * depth, ref_batchsize=ref_batchsize, noise_scale=noise_scale)
        return ref_batchsize * worth / throughput.step(machines, cores, size, depth)

    splits = [
        BestSplit(goodput(size, depth), size, depth)
        for depth in _spread(1, max_batch_size // (min_minibatch * cores) if may_accumulate else 1)
        for num in [cores * depth]
        for size in _spread(max(min_minibatch, -(-ref_batchsize // num)), min(largest, max_batch_size // num))
        if num > 1 or size <= ref_batchsize
    ]
    if not splits:
        total = f"{ref_batchsize} to {max_batch_size} samples in total, {min_minibatch} to {largest} in a minibatch"
        raise ValueError(f"no split satisfies all bounds on {cores} cores: {total}, equally many on every core")
    return max(splits)


def _spread(first: int, last: int) -> Iterator[int]:
    """Integers from first to last, thinned out to a geometric grid."""
    if first <= last:
        yield from np.unique(np.geomspace(first, last, _MOST_CHOICES).round().astype(int)).tolist()
