"""What a trace may hold: batch sizes that are positive integers of 64 bits."""

from __future__ import annotations

from typing import Any

from variable_batch_size.checks import is_integer, refuse

LARGEST = 2**63 - 1
"""What fits into the integers of 64 bits that hold a trace."""


def checked_size(size: Any, place: str) -> int:
    """A batch size that was given at a place, if it is one.

    >>> checked_size(0, "spot.csv:17")
    Traceback (most recent call last):
    ValueError: spot.csv:17: batchsize must be a positive integer, got 0
    """
    if not is_integer(size) or not 0 < size <= LARGEST:
        refuse(place, "batchsize must be a positive integer", size)
    return int(size)
