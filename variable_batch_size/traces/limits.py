"""What a trace may hold: which batch sizes, and how many steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from variable_batch_size.checks import is_integer, refuse

LARGEST = 2**63 - 1
"""The largest of the 64-bit integers that hold a trace."""

MOST_STEPS = 20_000_000
"""As many as can be made in the memory of a small machine; more is probably a typo. A file may hold more."""


def checked_size(size: Any, place: str) -> int:
    """The batch size given at a place, or a refusal that names the place.

    >>> checked_size(0, "spot.csv:17")
    Traceback (most recent call last):
    ValueError: spot.csv:17: batchsize must be a positive integer, got 0
    """
    if not is_integer(size) or not 0 < size <= LARGEST:
        refuse(place, "batchsize must be a positive integer", size)
    return int(size)


def check_multiples(minibatch_size: int, **sizes: int) -> None:
    """Refuse a batch size that is not made of whole minibatches.

    >>> check_multiples(32, start=64, end=100)
    Traceback (most recent call last):
    ValueError: `end` must be a multiple of 32 (the minibatch size), got 100
    """
    for name, size in sizes.items():
        if size % minibatch_size:
            raise ValueError(f"`{name}` must be a multiple of {minibatch_size} (the minibatch size), got {size}")


def whole_minibatches(sizes: npt.NDArray[Any], minibatch_size: int) -> npt.NDArray[np.int64]:
    """Round to the nearest multiple of the minibatch size, halves up, but at least one minibatch.

    >>> whole_minibatches(np.array([3.0, 47.9, 48.0]), 32).tolist()
    [32, 32, 64]
    """
    minibatches = np.floor(sizes / minibatch_size + 0.5).astype(np.int64)
    return np.maximum(minibatches, 1) * minibatch_size


def check_num_steps(num_steps: int) -> None:
    """Refuse to make a trace of too many steps."""
    if num_steps > MOST_STEPS:
        raise ValueError(f"a trace may have {MOST_STEPS} steps at most, got {num_steps}")
