"""split: a fixed global batch size, dealt to any number of cores without losing a sample."""

from __future__ import annotations

from typing import NamedTuple

from variable_batch_size.checks import check_positive


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
