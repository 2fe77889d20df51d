"""StepTimes: the seconds of accumulating and of updating minibatches, from the seconds of whole steps."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

_FEWEST, _MOST = 5, 40


class StepTimes:
    """Medians of the seconds of steps of each depth, and the line through them.

    A step of depth d takes (d − 1)·a + u seconds; the line through two depths or more gives a and u. Only whole steps
    are timed, for a device that runs behind the host shows the time of single minibatches to nobody.

    >>> times = StepTimes()
    >>> for _ in range(5):
    ...     times.add(1, 4.0)
    ...     times.add(2, 5.0)
    >>> times.seconds
    (1.0, 4.0)
    """

    def __init__(self) -> None:
        self._of_depth: dict[int, deque[float]] = {}

    def add(self, depth: int, seconds: float) -> None:
        """Take in the seconds of a step in which the busiest core ran `depth` minibatches."""
        self._of_depth.setdefault(depth, deque(maxlen=_MOST)).append(seconds)

    @property
    def seconds(self) -> tuple[float, float] | None:
        """a and u: of an accumulating and of an updating minibatch; None before two depths are known."""
        points = [(d, statistics.median(found)) for d, found in self._of_depth.items() if len(found) >= _FEWEST]
        if len(points) < 2:
            return None
        line = statistics.linear_regression(*zip(*points, strict=True))
        accumulating = max(line.slope, 0.0)
        mean_depth, mean_seconds = (statistics.fmean(column) for column in zip(*points, strict=True))
        return accumulating, max(mean_seconds - (mean_depth - 1) * accumulating, accumulating)

    def num_of(self, depth: int) -> int:
        """How many steps of a depth are known."""
        return len(self._of_depth.get(depth, ()))

    @property
    def is_empty(self) -> bool:
        """Whether no step is known."""
        return not self._of_depth

    def clear(self) -> None:
        self._of_depth = {}

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": {depth: list(found) for depth, found in self._of_depth.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._of_depth = {int(depth): deque(found, maxlen=_MOST) for depth, found in state["seconds"].items()}
