"""Recording: how many devices there were, and when, read from the files that spot-market studies leave behind."""

from __future__ import annotations

import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

FORMATS = ("csv", "events", "json")
TIME_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_WHOLE = re.compile(r"[+-]?[0-9]+(?:\.0*)?")
_LINE_END = re.compile(r"\r\n|\r|\n")
_BLANK = re.compile(r"[ \t\r\n]*")
_EVENTS = ("add", "remove")
_LATEST = 1e15  # seconds
_MOST_DEVICES = 10**9


@dataclass(frozen=True)
class Recording:
    """A number of devices that stays the same from one time to the next.

    Args:
        times: seconds since the start, ascending, one more than counts: `counts[i]` devices from ``times[i]`` on, and
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
        """A recording of numbers: `counts[i]` devices from ``times[i]`` to ``times[i + 1]``, in seconds."""
        if len(times) != len(counts) + 1 or not len(counts):
            raise ValueError(f"`times` must be one more than the counts, got {len(times)} and {len(counts)}")
        rows = _Rows()
        for index, (time, count) in enumerate(zip(times, (*counts, 0), strict=True)):
            rows.append(f"recording[{index}]", float(time), count)
        return rows.recording()

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,
        time_column: str | None = None,
        count_column: str | None = None,
        time_unit: str = "s",
    ) -> Recording:
        """Read a file in one of three formats.

        - ``"csv"``: a header, then a time and a number of devices in each row, which holds until the time of the next
          row; the last row only ends the recording. Times are numbers or dates such as ``2026-03-01T12:00:00Z``.
        - ``"events"``: rows ``milliseconds,add|remove,node``; the last event only ends the recording.
        - ``"json"``: ``{"metadata": {"gap_seconds": g}, "data": [counts]}``, each count for g seconds.

        Args:
            path: the file.
            format: one of these; told from the file's content if None.
            time_column: the name of a CSV file's time column; by default the first that has a name.
            count_column: that of its count column; by default the second and last that has a name.
            time_unit: of a CSV file's times where they are numbers: ``"ms"``, ``"s"``, ``"min"`` or ``"h"``.

        Raises:
            ValueError: with file, line and value of the first row that breaks a rule.
        """
        if format is not None and format not in FORMATS:
            raise ValueError(f"`format` must be one of {', '.join(map(repr, FORMATS))}, got {format!r}")
        if time_unit not in TIME_UNITS:
            raise ValueError(f"`time_unit` must be one of {', '.join(map(repr, TIME_UNITS))}, got {time_unit!r}")
        source = os.fspath(path)
        text = Path(source).read_bytes().decode("utf-8-sig", errors="replace")
        format = format or _format(text)
        if format == "json":
            return _read_json(source, text)
        if format == "events":
            return _read_events(source, text)
        return _read_csv(source, text, time_column, count_column, TIME_UNITS[time_unit])

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


class _Rows:
    """Times and counts as they are read, each checked against the one before."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self.times: list[float] = []
        self.counts: list[int] = []

    def append(self, place: str, time: float, count: int) -> None:
        if not abs(time) <= _LATEST:
            _refuse(place, f"a time must be a number within {_LATEST:g} seconds", time)
        if self.times and time - self.times[0] <= self.times[-1] - self.times[0]:
            _refuse(place, "a time must be later than the one before", f"{time:.15g} s after {self.times[-1]:.15g} s")
        if not 0 <= count <= _MOST_DEVICES:
            _refuse(place, f"a number of devices must be from 0 to {_MOST_DEVICES}", count)
        self.places.append(place)
        self.times.append(time)
        self.counts.append(count)

    def recording(self) -> Recording:
        if len(self.times) < 2:
            _refuse(self.places[0], "a recording needs two different times", "one")
        times = np.array(self.times, dtype=np.float64)
        return Recording(times - times[0], np.array(self.counts[:-1], dtype=np.int64), self.places[:-1])


def _format(text: str) -> str:
    if text.lstrip()[:1] in ("{", "["):
        return "json"
    first_rows = [fields for _, (_, fields) in zip(range(2), _rows(text), strict=False)]
    return "events" if any(len(row) > 1 and row[1].lower() in _EVENTS for row in first_rows) else "csv"


# --------------------------------------------------------------------------------------------------------- text tables


def _rows(text: str) -> Iterator[tuple[int, list[str]]]:
    """The number and the fields of each line that is not blank and no comment."""
    for number, line in enumerate(_LINE_END.split(text), start=1):
        content = line.split("#")[0].strip()
        if content:
            yield number, [field.strip().strip('"').strip() for field in content.split(",")]


def _read_csv(source: str, text: str, time_column: str | None, count_column: str | None, unit: float) -> Recording:
    table = _rows(text)
    line, header = next(table, (1, []))
    columns = _columns(f"{source}:{line}", header, time_column, count_column)
    rows = _Rows()
    has_dates = False
    for line, fields in table:
        place = f"{source}:{line}"
        if len(fields) != len(header):
            _refuse(place, f"a row must have {len(header)} values", len(fields))
        time, count = (fields[column] for column in columns)
        has_dates = has_dates or (not rows.times and not _NUMBER.fullmatch(time))
        seconds = _date(place, time) if has_dates else _number(place, time) * unit
        rows.append(place, seconds, _count(place, count))
    if not rows.times:
        _refuse(f"{source}:{line + 1}", "expected a row below the header", "nothing")
    return rows.recording()


def _columns(place: str, header: list[str], time_column: str | None, count_column: str | None) -> tuple[int, int]:
    """Which columns hold the times and the counts."""
    if not header:
        _refuse(place, "the file must have a header that names the columns", "an empty file")
    if all(_NUMBER.fullmatch(name) for name in header if name):
        _refuse(place, "the first row must name the columns", repr(",".join(header))[:80])
    named = [name for name in header if name]
    if time_column is None and count_column is None:
        if len(named) != 2:
            _refuse(place, "two columns must have names, or else say which are the times and counts", repr(named)[:80])
        time_column, count_column = named
    elif time_column is None or count_column is None:
        raise ValueError("pass both `time_column` and `count_column` or neither")
    for name in (time_column, count_column):
        if header.count(name) != 1:
            _refuse(place, f"the header must name the column {name!r} once", repr(header)[:80])
    return header.index(time_column), header.index(count_column)


def _read_events(source: str, text: str) -> Recording:
    rows = _Rows()
    nodes: set[str] = set()
    time, place = -math.inf, f"{source}:1"
    for number, (line, fields) in enumerate(_rows(text)):
        if number == 0 and not any(_NUMBER.fullmatch(field) or field.lower() in _EVENTS for field in fields):
            continue  # a header
        if len(fields) != 3:
            _refuse(f"{source}:{line}", "a row must be milliseconds,add|remove,node", repr(",".join(fields))[:80])
        event, node = fields[1].lower(), fields[2]
        now = _number(f"{source}:{line}", fields[0]) * TIME_UNITS["ms"]
        if event not in _EVENTS:
            _refuse(f"{source}:{line}", "an event must be add or remove", repr(fields[1])[:80])
        if now < time:
            _refuse(f"{source}:{line}", "a time must not be before the last one", f"{now:.15g} s after {time:.15g} s")
        if now > time and time != -math.inf:
            rows.append(place, time, len(nodes))
        if (node in nodes) == (event == "add"):
            rule = "a node that is added must be away" if event == "add" else "a node that is removed must be there"
            _refuse(f"{source}:{line}", rule, repr(node)[:80])
        nodes ^= {node}
        time, place = now, f"{source}:{line}"
    if time == -math.inf:
        _refuse(place, "the file must have rows milliseconds,add|remove,node", "none")
    rows.append(place, time, len(nodes))
    return rows.recording()


def _number(place: str, text: str) -> float:
    if not _NUMBER.fullmatch(text):
        _refuse(place, "a time must be a number", repr(text)[:80])
    return float(text)


def _date(place: str, text: str) -> float:
    """Seconds since 1970; a date without a time zone is taken as UTC."""
    try:
        # before Python 3.11, Z for UTC is not understood
        date = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
        return (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()
    except (ValueError, OverflowError):
        _refuse(place, "a time must be a number, or in all rows a date like 2026-03-01T12:00:00Z", repr(text)[:80])


def _count(place: str, text: str) -> int:
    if not _WHOLE.fullmatch(text) or len(text) > 40:
        _refuse(place, "a number of devices must be a whole number", repr(text)[:80])
    return int(text.split(".")[0])


# --------------------------------------------------------------------------------------------------------------- JSON


def _read_json(source: str, text: str) -> Recording:
    # integers of thousands of digits are refused by int, without a line
    decoder = json.JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) < 20 else math.inf)
    try:
        content = decoder.decode(text)
    except json.JSONDecodeError as error:
        _refuse(f"{source}:{error.lineno}", f"the file must be JSON ({error.msg})", repr(text[error.pos :][:20]))
    except RecursionError:
        _refuse(f"{source}:1", "the file must be JSON", "one that is nested too deep")
    gap = content.get("metadata", {}) if isinstance(content, dict) else None
    gap = gap.get("gap_seconds") if isinstance(gap, dict) else None
    data = content.get("data") if isinstance(content, dict) else None
    if gap is None or not isinstance(data, list) or not data:
        shape = '{"metadata": {"gap_seconds": g}, "data": [counts]}'
        _refuse(f"{source}:1", f"the file must be {shape}", repr(text.strip()[:60]))
    positions = dict(_children(text, _skip(text, 0), decoder))
    line_ends = [line_end.end() for line_end in _LINE_END.finditer(text)]
    if not _is_number(gap) or not 0 < gap <= _LATEST:
        position = dict(_children(text, positions["metadata"], decoder))["gap_seconds"]
        place = f"{source}:{bisect_right(line_ends, position) + 1}"
        _refuse(place, "gap_seconds must be a positive number", repr(gap)[:80])
    rows = _Rows()
    for count, (index, position) in zip(data, _children(text, positions["data"], decoder), strict=True):
        place = f"{source}:{bisect_right(line_ends, position) + 1}: data[{index}]"
        if not _is_number(count) or count % 1:
            _refuse(place, "a number of devices must be a whole number", repr(count)[:80])
        rows.append(place, int(index) * gap, int(count))
    rows.append(place, len(data) * gap, 0)
    return rows.recording()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _children(text: str, start: int, decoder: json.JSONDecoder) -> Iterator[tuple[str | int, int]]:
    """The key and the position of each value of the object or array that begins at `start`, in a text that is JSON."""
    name: str | int = -1
    position = _skip(text, start + 1)
    while text[position] not in "]}":
        if text[start] == "{":
            name, position = decoder.raw_decode(text, position)
            position = _skip(text, _skip(text, position) + 1)  # the colon
        else:
            name = int(name) + 1
        yield name, position
        _, position = decoder.raw_decode(text, position)
        position = _skip(text, position)
        if text[position] == ",":
            position = _skip(text, position + 1)


def _skip(text: str, position: int) -> int:
    blanks = _BLANK.match(text, position)
    assert blanks is not None
    return blanks.end()


def _refuse(place: str, rule: str, value: Any) -> NoReturn:
    raise ValueError(f"{place}: {rule}, got {value}")
