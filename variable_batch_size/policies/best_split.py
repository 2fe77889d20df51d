"""best_split: the minibatch size and depth of the largest goodput, where the minibatch may still be chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from variable_batch_size.checks import check_positive
from variable_batch_size.policies.goodput import gain
from variable_batch_size.policies.throughput import Throughput

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
