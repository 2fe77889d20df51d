"""Throughput: a model of step times, and the best split of a batch into minibatches and accumulation steps.

The model of Pollux (Qiao et al. 2021), for minibatches of b samples on R cores of N machines:

    T_accumulate(b)    = αc + βc·b
    T_network(N, R)    = αn + βn·(R − 2)   if N > 1,   αr + βr·(R − 2)   if R > 1,   0 alone
    T_update(N, R, b)  = (T_accumulate^γ + T_network^γ)^(1/γ)

γ from 1, where computing and communicating follow each other, to 10, where the longer one hides the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from variable_batch_size.checks import check_positive
from variable_batch_size.policies.autoscale import gain


class Throughput(NamedTuple):
    """The seven parameters, seconds and seconds per sample or core.

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
        """Seconds of a minibatch that is only accumulated."""
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
        # divided by the longer one, for a high power of a short time is 0
        powers = (computing / longer) ** self.gamma + (communicating / longer) ** self.gamma
        return float(longer * powers ** (1 / self.gamma))

    def step(self, machines: int, cores: int, minibatch_size: float, depth: int) -> float:
        """Seconds of a step in which every core runs `depth` minibatches."""
        return (depth - 1) * self.accumulating(minibatch_size) + self.updating(machines, cores, minibatch_size)


class Split(NamedTuple):
    """How a batch is split.

    Attributes:
        minibatch_size: samples that one core runs at once.
        num_minibatches: of a step, over all cores.
        shares: how many of them each core runs.
    """

    minibatch_size: int
    num_minibatches: int
    shares: tuple[int, ...]


def split(batch_size: int, *, max_minibatch: int, cores: int) -> Split:
    """Split a batch into equal minibatches for some cores, so that they need as few rounds as possible.

    The minibatch divides the batch, so every step has exactly `batch_size` samples on any number of cores; of those
    that need equally few rounds it is the smallest, which leaves the fewest cores idle.

    Args:
        batch_size: samples of a step, over all cores.
        max_minibatch: the most samples that one core can run at once.
        cores: how many share the work.

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


_MOST_CHOICES = 64


class BestSplit(NamedTuple):
    """A choice of both.

    Attributes:
        goodput: samples at the reference batch size that a second is worth.
        minibatch_size: samples that one core runs at once.
        depth: how many of them every core runs in a step.
    """

    goodput: float
    minibatch_size: int
    depth: int


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
    """Choose the minibatch size, before a start, and how many of them a step should have.

    Goodput has one maximum over the minibatch size at each depth, so that 64 sizes and 64 depths, evenly spread by
    their ratios, come as close as measured times deserve. Every core has equally much, and no bound is broken. A single
    minibatch tells no noise: above the reference batch size there are at least two.

    Args:
        throughput: how long steps take.
        noise_scale: V/G², in samples.
        ref_batchsize: the smallest batch size, at which the settings of the inner optimizer are right.
        cores: how many share the work.
        max_batch_size: the largest batch size.
        machines: that the cores are on.
        min_minibatch: the fewest samples that one core runs at once.
        max_minibatch: the most; None for no bound.
        may_accumulate: whether cores may run several in a step.

    Raises:
        ValueError: if no split keeps all bounds, or a number is none that these can have.

    >>> model = Throughput(0.01, 0.001, 0.2, 0.01, 0.05, 0.005, 1.0)
    >>> best_split(model, noise_scale=1000.0, ref_batchsize=128, cores=4, max_batch_size=4096, max_minibatch=64)[1:]
    (64, 2)
    """
    check_positive(ref_batchsize=ref_batchsize, cores=cores, max_batch_size=max_batch_size, machines=machines)
    check_positive(
        min_minibatch=min_minibatch, max_minibatch=max_batch_size if max_minibatch is None else max_minibatch
    )
    if not noise_scale >= 0:
        raise ValueError(f"`noise_scale` must be 0 or a positive number, got {noise_scale!r}")
    splits = [
        BestSplit(_goodput(throughput, machines, cores, size, depth, ref_batchsize, noise_scale), size, depth)
        for depth in _spread(1, max_batch_size // (min_minibatch * cores) if may_accumulate else 1)
        for size in _spread(
            max(min_minibatch, -(-ref_batchsize // (cores * depth))),
            min(max_minibatch or max_batch_size, max_batch_size // (cores * depth)),
        )
        if cores * depth > 1 or size <= ref_batchsize
    ]
    if not splits:
        raise ValueError(
            f"no split keeps all bounds on {cores} cores: {ref_batchsize} to {max_batch_size} samples in all, "
            f"{min_minibatch} to {max_minibatch or max_batch_size} in a minibatch, equally many on every core"
        )
    return max(splits)


def _goodput(
    throughput: Throughput, machines: int, cores: int, size: int, depth: int, ref_batchsize: int, noise_scale: float
) -> float:
    worth = gain(cores * size * depth, ref_batchsize=ref_batchsize, noise_scale=noise_scale)
    return ref_batchsize * worth / throughput.step(machines, cores, size, depth)


def _spread(first: int, last: int) -> Iterator[int]:
    """Integers from first to last, all of them or as many as are needed to be close to any."""
    if first <= last:
        yield from np.unique(np.geomspace(first, last, _MOST_CHOICES).round().astype(int)).tolist()
