"""What several seeds say about a number: its spread, and by how much two of them differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from variable_batch_size.checks import install


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of what several seeds gave; the deviation, of a sample, is None for a single one."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Of those that are numbers; None if none is.

        >>> Spread.of([97.0, None, 99.0])
        Spread(mean=98.0, deviation=1.4142135623730951)
        """
        numbers = [value for value in values if value is not None]
        if not numbers:
            return None
        return cls(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None)


@dataclass(frozen=True)
class Difference:
    """By how much one number is above another, from the differences of runs of the same seed.

    Of n differences with mean d and standard deviation s the 95 % interval is d ± t · s / √n, with t of Student's
    distribution for n − 1 degrees of freedom; a single seed has none.
    """

    mean: float
    half_width: float | None

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0: else chance may have made the difference."""
        return self.half_width is not None and abs(self.mean) > self.half_width

    @classmethod
    def of(cls, values: Sequence[float]) -> Difference | None:
        """From the differences of all seeds; None if there are none.

        >>> gap = Difference.of([0.68, 0.74, 0.73])
        >>> print(f"{gap.mean:.4f} ± {gap.half_width:.4f}")
        0.7167 ± 0.0799
        """
        spread = Spread.of(values)
        if spread is None or spread.deviation is None:
            return None if spread is None else cls(spread.mean, None)
        half_width = _student(len(values) - 1) * spread.deviation / math.sqrt(len(values))
        return cls(spread.mean, half_width)


def _student(degrees: int) -> float:
    """The quantile of Student's distribution that leaves 2.5 % above it."""
    try:
        from scipy.special import stdtrit  # what scipy.stats.t.ppf calls; scipy.stats takes a second to load
    except ImportError:
        raise ImportError(f"an interval needs scipy: {install('compare')}") from None
    return float(stdtrit(degrees, 0.975))
