"""Draws numbers as one line of text, for terminals without a display."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-=+*%#"


def sparkline(
    values: npt.NDArray[Any], *, width: int, weights: npt.NDArray[Any] | None = None, is_ascii: bool = False
) -> str:
    """Positive numbers as a line of blocks, whose heights go from 0 to the largest number.

    Args:
        values: the numbers, in order.
        width: characters in the line, or fewer where there are fewer numbers.
        weights: how wide each number is; all the same if None. A character shows the mean over its share of the width.
        is_ascii: whether to use ASCII instead of Unicode's block characters.

    >>> sparkline(np.array([1, 2, 3, 4, 5, 6, 7, 8]), width=8)
    '▁▂▃▄▅▆▇█'
    >>> sparkline(np.array([2, 8, 8, 8, 8]), width=5, weights=np.array([4, 1, 1, 1, 1]))
    '▂▂▅██'
    """
    widths = np.ones(len(values)) if weights is None else weights.astype(np.float64)
    ends = np.concatenate(([0.0], np.cumsum(widths)))
    areas = np.concatenate(([0.0], np.cumsum(values * widths)))
    edges = np.linspace(0, ends[-1], min(width, len(values)) + 1)
    means = np.diff(np.interp(edges, ends, areas)) / np.diff(edges)
    blocks = _ASCII if is_ascii else _BLOCKS
    # a floating-point error may put a mean of whole numbers just above its level
    levels = np.ceil(means / values.max() * len(blocks) - 1e-6).astype(np.int64)
    return "".join(blocks[level - 1] for level in np.clip(levels, 1, len(blocks)))
