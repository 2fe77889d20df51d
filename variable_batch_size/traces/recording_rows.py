"""The rows of a recording as they are read, each checked against the one before."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from variable_batch_size.checks import refuse

LATEST = 1e15  # seconds
_MOST_DEVICES = 10**9

Columns = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], list[str]]
"""Times, counts and where each count was given."""


class Rows:
    """How many devices there are from a time on, row after row."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self.times: list[float] = []
        self.counts: list[int] = []

    def append(self, place: str, time: float, count: int) -> None:
        """Add a row: from `time` on, in seconds, there are `count` devices."""
        if not abs(time) <= LATEST:
            refuse(place, f"a time must be a number within {LATEST:g} seconds", time)
        if self.times and time - self.times[0] <= self.times[-1] - self.times[0]:
            refuse(place, "a time must be later than the one before", f"{time:.15g} s after {self.times[-1]:.15g} s")
        if not 0 <= count <= _MOST_DEVICES:
            refuse(place, f"a number of devices must be from 0 to {_MOST_DEVICES}", count)
        self.places.append(place)
        self.times.append(time)
        self.counts.append(count)

    def columns(self) -> Columns:
        """All rows, in seconds since the first one; the last row has a time only, as it only ends the recording."""
        if len(self.times) < 2:
            refuse(self.places[0], "a recording needs two different times", "one")
        times = np.array(self.times, dtype=np.float64)
        return times - times[0], np.array(self.counts[:-1], dtype=np.int64), self.places[:-1]
