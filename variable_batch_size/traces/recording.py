"""Recording: the number of available devices over time, read from CSV tables, event logs and JSON."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from variable_batch_size.checks import check_one_of, refuse

LATEST = 1e15  # seconds
_MOST_DEVICES = 10**9

Columns = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], list[str]]
"""Times, counts and the source of each count."""


class Rows:
    """Collects rows of a time and the number of devices from then on."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self.times: list[float] = []
        self.counts: list[int] = []

    def append(self, place: str, time: float, count: int) -> None:
        """Add a row: `count` devices from `time` on, in seconds."""
        if not abs(time) <= LATEST:
            refuse(place, f"a time must be a number within {LATEST:g} seconds", time)
        if self.times and time - self.times[0] <= self.times[-1] - self.times[0]:
            refuse(place, "a time must be later than the previous one", f"{time:.15g} s after {self.times[-1]:.15g} s")
        if not 0 <= count <= _MOST_DEVICES:
            refuse(place, f"the number of devices must be from 0 to {_MOST_DEVICES}", count)
        self.places.append(place)
        self.times.append(time)
        self.counts.append(count)

    def columns(self) -> Columns:
        """All rows, in seconds since the first one; the last row only gives the end of the recording."""
        if len(self.times) < 2:
            refuse(self.places[0], "a recording needs two different times", "one")
        times = np.array(self.times, dtype=np.float64)
        return times - times[0], np.array(self.counts[:-1], dtype=np.int64), self.places[:-1]


Format = Literal["csv", "events", "json"]
FORMATS: tuple[Format, ...] = get_args(Format)


@dataclass(frozen=True)
class Recording:
    """The number of available devices over time.

    Args:
        times: seconds since the start, ascending, one more than counts.
        counts: ``counts[i]`` is the number of devices from ``times[i]`` to ``times[i + 1]``.
        places: the source of each count, such as ``spot.csv:17``.

    >>> recording = Recording.from_counts([0, 30, 90], [2, 4])
    >>> recording.seconds, recording.mean_devices
    (90.0, 3.3333333333333335)
    """

    times: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    places: Sequence[str]

    @classmethod
    def from_counts(cls, times: Sequence[float], counts: Sequence[int]) -> Recording:
        """A recording with ``counts[i]`` devices from ``times[i]`` to ``times[i + 1]``, in seconds."""
        if len(times) != len(counts) + 1 or not len(counts):
            raise ValueError(f"`times` must have one more element than `counts`, got {len(times)} and {len(counts)}")
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

        - ``"csv"``: a header, then rows of a time and the number of devices until the next row's time. The last row
          only gives the end of the recording. Times are numbers or dates such as ``2026-03-01T12:00:00Z``.
        - ``"events"``: rows ``milliseconds,add|remove,node``; the last event only gives the end of the recording.
        - ``"json"``: ``{"metadata": {"gap_seconds": g}, "data": [counts]}``, each count for g seconds.

        In the first two, quoted cells, blank lines and ``#`` comments are allowed.

        Args:
            path: the file.
            format: one of these; detected from the content if None.
            time_column: the name of the time column in a CSV file; by default the first of two named columns.
            count_column: the name of the count column; by default the second of two named columns.
            time_unit: of numeric times in a CSV file: ``"ms"``, ``"s"``, ``"min"`` or ``"h"``; seconds if None.

        Raises:
            ValueError: with file, line and value of the first invalid row.
        """
        if format is not None:
            check_one_of(FORMATS, format=format)
        if time_unit is not None:
            check_one_of(TIME_UNITS, time_unit=time_unit)
        source = os.fspath(path)
        text = Path(source).read_bytes().decode("utf-8-sig", errors="replace")
        if format is None:
            is_json = text.lstrip()[:1] in ("{", "[")
            format = "json" if is_json else "events" if are_events(source, text) else "csv"
        if format == "csv":
            unit = TIME_UNITS[time_unit or "s"]
            rows = read_counts(source, text, time_column=time_column, count_column=count_column, seconds_per_unit=unit)
            return cls(*rows.columns())
        options = {"time_column": time_column, "count_column": count_column, "time_unit": time_unit}
        for name, value in options.items():
            if value is not None:
                raise ValueError(f"{source}: `{name}` is for format 'csv' only, got {value!r} with {format!r}")
        rows = read_json(source, text) if format == "json" else read_events(source, text)
        return cls(*rows.columns())

    @property
    def durations(self) -> npt.NDArray[np.float64]:
        """The duration of each count, in seconds."""
        return np.diff(self.times)

    @property
    def seconds(self) -> float:
        """The length of the recording."""
        return float(self.times[-1])

    @property
    def seconds_empty(self) -> float:
        """The time without any device."""
        return float(self.durations[self.counts == 0].sum())

    @property
    def mean_devices(self) -> float:
        """The mean number of devices over time."""
        return float(self.counts @ self.durations) / self.seconds


TimeUnit = Literal["ms", "s", "min", "h"]
TIME_UNITS: Mapping[TimeUnit, float] = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_WHOLE = re.compile(r"[+-]?[0-9]+(?:\.0*)?")
_QUOTED_OR_COMMENT = re.compile(r"""(?:^|(?<=[,\n]))[ \t]*("[^"]*(?:""[^"]*)*")[ \t]*|\#[^\n]*""")
_EVENTS = ("add", "remove")


def table_of(source: str, text: str) -> Iterator[tuple[int, list[str]]]:
    """First line and cells of each row of a CSV text, without comments and blank lines.

    >>> list(table_of("spot.csv", 'time, nodes  # of zone a\\n\\n0, "3"\\n'))
    [(1, ['time', 'nodes']), (3, ['0', '3'])]
    """
    lines = io.StringIO(_plain(text)).readlines()
    reader = csv.reader(lines, strict=True)
    while reader.line_num < len(lines):
        line = reader.line_num + 1
        try:
            cells = [cell.strip() for cell in next(reader)]
        except csv.Error as error:
            refuse(f"{source}:{line}", f"a row must be CSV ({error})", repr(lines[line - 1].strip())[:80])
        if any(cells) or len(cells) > 1:
            yield line, cells


def _plain(text: str) -> str:
    """The text without comments and without spaces next to quotes, which the csv module would treat as content."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _QUOTED_OR_COMMENT.sub(lambda found: found[1] or "", text)


def are_events(source: str, text: str) -> bool:
    """Whether the rows of a text, after an optional header, are events and not counts."""
    first_rows = itertools.islice(table_of(source, text), 2)
    return any(len(cells) > 1 and cells[1].lower() in _EVENTS for _, cells in first_rows)


def read_counts(
    source: str, text: str, *, time_column: str | None, count_column: str | None, seconds_per_unit: float
) -> Rows:
    """The times and counts of a table with a header."""
    table = table_of(source, text)
    line, header = next(table, (1, []))
    columns = _columns(f"{source}:{line}", header, time_column, count_column)
    rows = Rows()
    has_dates = False
    for line, cells in table:
        place = f"{source}:{line}"
        if len(cells) != len(header):
            refuse(place, f"a row must have {len(header)} values", len(cells))
        time, count = (cells[column] for column in columns)
        has_dates = has_dates or (not rows.times and not _NUMBER.fullmatch(time))
        seconds = _date(place, time) if has_dates else _number(place, time) * seconds_per_unit
        rows.append(place, seconds, _count(place, count))
    if not rows.times:
        refuse(f"{source}:{line + 1}", "expected a row below the header", "nothing")
    return rows


def _columns(place: str, header: list[str], time_column: str | None, count_column: str | None) -> tuple[int, int]:
    """The indices of the time and count columns."""
    if not header:
        refuse(place, "the file must have a header with column names", "an empty file")
    if all(_NUMBER.fullmatch(name) for name in header if name):
        refuse(place, "the first row must be a header with column names", repr(",".join(header))[:80])
    named = [name for name in header if name]
    if time_column is None and count_column is None:
        if len(named) != 2:
            refuse(
                place, "pass `time_column` and `count_column` unless exactly two columns are named", repr(named)[:80]
            )
        time_column, count_column = named
    elif time_column is None or count_column is None:
        raise ValueError("pass both `time_column` and `count_column` or neither")
    for name in (time_column, count_column):
        if header.count(name) != 1:
            refuse(place, f"the header must name the column {name!r} once", repr(header)[:80])
    return header.index(time_column), header.index(count_column)


def read_events(source: str, text: str) -> Rows:
    """The times and counts of a table whose rows are ``milliseconds,add|remove,node``, with or without a header."""
    rows = Rows()
    nodes: set[str] = set()
    time, place = -math.inf, f"{source}:1"
    for number, (line, cells) in enumerate(table_of(source, text)):
        if number == 0 and not any(_NUMBER.fullmatch(cell) or cell.lower() in _EVENTS for cell in cells):
            continue  # a header
        before, place_before = time, place
        place = f"{source}:{line}"
        time, event, node = _event(place, cells)
        if time < before:
            refuse(place, "a time must not be earlier than the previous one", f"{time:.15g} s after {before:.15g} s")
        if time > before > -math.inf:
            rows.append(place_before, before, len(nodes))
        if (node in nodes) == (event == "add"):
            rule = "an added node must be absent" if event == "add" else "a removed node must be present"
            refuse(place, rule, repr(node)[:80])
        nodes ^= {node}
    if time == -math.inf:
        refuse(place, "the file must have rows milliseconds,add|remove,node", "none")
    rows.append(place, time, len(nodes))
    return rows


def _event(place: str, cells: list[str]) -> tuple[float, str, str]:
    """The time in seconds, the event and the node."""
    if len(cells) != 3:
        refuse(place, "a row must be milliseconds,add|remove,node", repr(",".join(cells))[:80])
    seconds = _number(place, cells[0]) * TIME_UNITS["ms"]
    event = cells[1].lower()
    if event not in _EVENTS:
        refuse(place, "an event must be add or remove", repr(cells[1])[:80])
    return seconds, event, cells[2]


def _number(place: str, text: str) -> float:
    if not _NUMBER.fullmatch(text):
        refuse(place, "a time must be a number", repr(text)[:80])
    return float(text)


def _date(place: str, text: str) -> float:
    """Seconds since 1970; UTC without a time zone."""
    try:
        # fromisoformat accepts Z from Python 3.11 on
        date = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
        return (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()
    except (ValueError, OverflowError):
        refuse(place, "times must be all numbers, or all dates like 2026-03-01T12:00:00Z", repr(text)[:80])


def _count(place: str, text: str) -> int:
    if not _WHOLE.fullmatch(text) or len(text) > 40:
        refuse(place, "the number of devices must be an integer", repr(text)[:80])
    return int(text.split(".")[0])


_SHAPE = '{"metadata": {"gap_seconds": g}, "data": [counts]}'
_BLANK = re.compile(r"[ \t\r\n]*")
_LINE_END = re.compile(r"\r\n|\r|\n")

# int() rejects thousands of digits, without naming a line
_DECODER = json.JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) < 20 else math.inf)


def read_json(source: str, text: str) -> Rows:
    """The times and counts of a JSON text."""
    gap, counts = _gap_and_counts(source, text)
    positions = dict(_children(text, _skip(text, 0)))
    line_ends = [line_end.end() for line_end in _LINE_END.finditer(text)]

    def place_of(position: int) -> str:
        return f"{source}:{bisect_right(line_ends, position) + 1}"

    if not _is_number(gap) or not 0 < gap <= LATEST:
        position = dict(_children(text, positions["metadata"]))["gap_seconds"]
        refuse(place_of(position), "gap_seconds must be a positive number", repr(gap)[:80])
    rows = Rows()
    for count, (index, position) in zip(counts, _children(text, positions["data"]), strict=True):
        place = f"{place_of(position)}: data[{index}]"
        if not _is_number(count) or count % 1:
            refuse(place, "the number of devices must be an integer", repr(count)[:80])
        rows.append(place, int(index) * gap, int(count))
    rows.append(place, len(counts) * gap, 0)
    return rows


def _gap_and_counts(source: str, text: str) -> tuple[Any, list[Any]]:
    """The two values, unchecked, in a text of the correct structure."""
    try:
        content = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        refuse(f"{source}:{error.lineno}", f"the file must be JSON ({error.msg})", repr(text[error.pos :][:20]))
    except RecursionError:
        refuse(f"{source}:1", "the file must be JSON", "JSON that is nested too deeply")
    metadata = content.get("metadata") if isinstance(content, dict) else None
    gap = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    counts = content.get("data") if isinstance(content, dict) else None
    if gap is None or not isinstance(counts, list) or not counts:
        refuse(f"{source}:1", f"the file must be {_SHAPE}", repr(text.strip()[:60]))
    return gap, counts


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _children(text: str, start: int) -> Iterator[tuple[str | int, int]]:
    """Key and position of each value of the object or array that begins at `start` of a valid JSON text."""
    name: str | int = -1
    position = _skip(text, start + 1)
    while text[position] not in "]}":
        if text[start] == "{":
            name, position = _DECODER.raw_decode(text, position)
            position = _skip(text, _skip(text, position) + 1)  # the colon
        else:
            name = int(name) + 1
        yield name, position
        _, position = _DECODER.raw_decode(text, position)
        position = _skip(text, position)
        if text[position] == ",":
            position = _skip(text, position + 1)


def _skip(text: str, position: int) -> int:
    """The position after any whitespace."""
    blanks = _BLANK.match(text, position)
    assert blanks is not None
    return blanks.end()
