"""Recording: how many devices there were, and when, read from the files that spot-market studies leave behind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from variable_batch_size.checks import check_one_of
from variable_batch_size.traces.recording_json import is_json, read_json
from variable_batch_size.traces.recording_rows import Rows
from variable_batch_size.traces.recording_tables import TIME_UNITS, TimeUnit, are_events, read_counts, read_events

Format = Literal["csv", "events", "json"]
FORMATS: tuple[Format, ...] = get_args(Format)


@dataclass(frozen=True)
class Recording:
    """Numbers of devices, each of which holds from one time to the next.

    Args:
        times: seconds since the start, ascending, one more than counts: there are `counts[i]` devices from ``times[i]``
            until ``times[i + 1]``.
        counts: numbers of devices.
        places: where each of the counts was given, such as ``spot.csv:17``.

    >>> recording = Recording.from_counts([0, 30, 90], [2, 4])
    >>> recording.seconds, recording.mean_devices
    (90.0, 3.3333333333333335)
    """

    times: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    places: Sequence[str]

    @classmethod
    def from_counts(cls, times: Sequence[float], counts: Sequence[int]) -> Recording:
        """A recording made from numbers: `counts[i]` devices from ``times[i]`` to ``times[i + 1]``, in seconds."""
        if len(times) != len(counts) + 1 or not len(counts):
            raise ValueError(f"`times` must be one more than the counts, got {len(times)} and {len(counts)}")
        rows = Rows()
        for index, (time, count) in enumerate(zip(times, (*counts, 0), strict=True)):
            rows.append(f"recording[{index}]", float(time), count)
        return cls(*rows.columns())

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        *,
        format: Format | None = None,
        time_column: str | None = None,
        count_column: str | None = None,
        time_unit: TimeUnit | None = None,
    ) -> Recording:
        """Read a file in one of three formats.

        - ``"csv"``: a header, then a time and a number of devices in each row, which holds until the time of the next
          row; the last row only ends the recording. Times are numbers or dates such as ``2026-03-01T12:00:00Z``.
        - ``"events"``: rows ``milliseconds,add|remove,node``; the last event only ends the recording.
        - ``"json"``: ``{"metadata": {"gap_seconds": g}, "data": [counts]}``, each count for g seconds.

        In the first two, cells may be quoted, and blank lines and ``#`` comments are fine.

        Args:
            path: the file.
            format: one of these; detected from the file's content if None.
            time_column: the name of a CSV file's time column; by default the first that has a name.
            count_column: the name of its count column; by default the second, and last, that has a name.
            time_unit: the unit of a CSV file's times where they are numbers: ``"ms"``, ``"s"``, ``"min"`` or ``"h"``;
                seconds if None. Events and JSON have their own units, and no columns to name.

        Raises:
            ValueError: with file, line and value of the first row that breaks a rule.
        """
        if format is not None:
            check_one_of(FORMATS, format=format)
        if time_unit is not None:
            check_one_of(TIME_UNITS, time_unit=time_unit)
        source = os.fspath(path)
        text = Path(source).read_bytes().decode("utf-8-sig", errors="replace")
        format = format or _detected_format(source, text)
        if format != "csv":
            _refuse_given(source, format, time_column=time_column, count_column=count_column, time_unit=time_unit)
        if format == "json":
            rows = read_json(source, text)
        elif format == "events":
            rows = read_events(source, text)
        else:
            rows = read_counts(
                source,
                text,
                time_column=time_column,
                count_column=count_column,
                seconds_per_unit=TIME_UNITS[time_unit or "s"],
            )
        return cls(*rows.columns())

    @property
    def durations(self) -> npt.NDArray[np.float64]:
        """For how many seconds each count holds."""
        return np.diff(self.times)

    @property
    def seconds(self) -> float:
        """How long the recording is."""
        return float(self.times[-1])

    @property
    def seconds_empty(self) -> float:
        """For how long there was no device."""
        return float(self.durations[self.counts == 0].sum())

    @property
    def mean_devices(self) -> float:
        """The mean number of devices over time."""
        return float(self.counts @ self.durations) / self.seconds


def _detected_format(source: str, text: str) -> Format:
    if is_json(text):
        return "json"
    return "events" if are_events(source, text) else "csv"


def _refuse_given(source: str, format: Format, **options: str | None) -> None:
    """Refuse options that a format has no use for."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{source}: `{name}` is for CSV files of times and counts, got {value!r} with {format}")
