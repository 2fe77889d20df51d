"""Numbers as people read them, with the digits that mean something."""

from __future__ import annotations

import math

from variable_batch_size.comparison.report.estimates import Difference, Spread


def number(value: float, *, like: float | None = None) -> str:
    """With two decimals, and more if it is, or is to be compared with what is, below 1; huge ones in short.

    >>> number(97.8125), number(0.97812), number(0.3, like=97.8), number(-3.2e20)
    ('97.81', '0.9781', '0.30', '-3.2e+20')
    """
    size = abs(value if like is None else like)
    if abs(value) >= 1e6:
        return f"{value:.3g}"
    decimals = 2 if size >= 1 or size == 0 or not math.isfinite(size) else 3 - math.floor(math.log10(size))
    return f"{value:.{decimals}f}"


def with_deviation(spread: Spread, *, unit: str) -> str:
    """A mean and its deviation.

    >>> with_deviation(Spread(97.8125, 0.318), unit=" %")
    '97.81 ± 0.32 %'
    """
    deviation = "" if spread.deviation is None else f" ± {number(spread.deviation, like=spread.mean)}"
    return f"{number(spread.mean)}{deviation}{unit}"


def with_interval(gap: Difference, *, unit: str, like: float) -> str:
    """A difference and its interval, with the digits of what differs.

    >>> with_interval(Difference(-2.1, 0.3), unit=" %", like=97.8)
    '2.10 ± 0.30 points lower'
    """
    width = "" if gap.half_width is None else f" ± {number(gap.half_width, like=like)}"
    unit = " points" if unit.strip() == "%" else unit
    return f"{number(abs(gap.mean), like=like)}{width}{unit} {'lower' if gap.mean < 0 else 'higher'}"
