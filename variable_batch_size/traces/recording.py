"""Recording: how many devices were available at which time, read from CSV tables, event lists and JSON."""

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


TimeUnit = Literal["ms", "s", "min", "h"]
TIME_UNITS: Mapping[TimeUnit, float] = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_WHOLE = re.compile(r"[+-]?[0-9]+(?:\.0*)?")
_QUOTED_OR_COMMENT = re.compile(r"""(?:^|(?<=[,\n]))[ \t]*("[^"]*(?:""[^"]*)*")[ \t]*|\#[^\n]*""")
_EVENTS = ("add", "remove")


def table_of(source: str, text: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV text, without comments and blank lines: the line in which each begins, and its cells.

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
    """The text, line by line, without comments and blanks beside quotes, which to the csv module are content."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _QUOTED_OR_COMMENT.sub(lambda found: found[1] or "", text)


def are_events(source: str, text: str) -> bool:
    """Whether the rows of a text are events, not counts; a header may come first."""
    first_rows = itertools.islice(table_of(source, text), 2)
    return any(len(cells) > 1 and cells[1].lower() in _EVENTS for _, cells in first_rows)


def read_counts(
    source: str, text: str, *, time_column: str | None, count_column: str | None, seconds_per_unit: float
) -> Rows:
    """The times and counts of a table that has a header."""
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
    """Which columns hold the times and the counts."""
    if not header:
        refuse(place, "the file must have a header that names the columns", "an empty file")
    if all(_NUMBER.fullmatch(name) for name in header if name):
        refuse(place, "the first row must name the columns", repr(",".join(header))[:80])
    named = [name for name in header if name]
    if time_column is None and count_column is None:
        if len(named) != 2:
            refuse(place, "two columns must have names, or else say which are the times and counts", repr(named)[:80])
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
            refuse(place, "a time must not be before the last one", f"{time:.15g} s after {before:.15g} s")
        if time > before > -math.inf:
            rows.append(place_before, before, len(nodes))
        if (node in nodes) == (event == "add"):
            rule = "a node that is added must be away" if event == "add" else "a node that is removed must be there"
            refuse(place, rule, repr(node)[:80])
        nodes ^= {node}
    if time == -math.inf:
        refuse(place, "the file must have rows milliseconds,add|remove,node", "none")
    rows.append(place, time, len(nodes))
    return rows


def _event(place: str, cells: list[str]) -> tuple[float, str, str]:
    """The time in seconds, what happened, and to which node."""
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
    """Seconds since 1970; a date without a time zone is taken as UTC."""
    try:
        # before Python 3.11, fromisoformat does not understand Z for UTC
        date = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
        return (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()
    except (ValueError, OverflowError):
        refuse(place, "a time must be a number, or in all rows a date like 2026-03-01T12:00:00Z", repr(text)[:80])


def _count(place: str, text: str) -> int:
    if not _WHOLE.fullmatch(text) or len(text) > 40:
        refuse(place, "a number of devices must be a whole number", repr(text)[:80])
    return int(text.split(".")[0])


_SHAPE = '{"metadata": {"gap_seconds": g}, "data": [counts]}'
_BLANK = re.compile(r"[ \t\r\n]*")
_LINE_END = re.compile(r"\r\n|\r|\n")

# int refuses integers of thousands of digits without naming a line
_DECODER = json.JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) < 20 else math.inf)


def is_json(text: str) -> bool:
    """Whether a text is meant to be JSON."""
    return text.lstrip()[:1] in ("{", "[")


def read_json(source: str, text: str) -> Rows:
    """The counts in a text, each of which holds for the seconds of its gap."""
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
            refuse(place, "a number of devices must be a whole number", repr(count)[:80])
        rows.append(place, int(index) * gap, int(count))
    rows.append(place, len(counts) * gap, 0)
    return rows


def _gap_and_counts(source: str, text: str) -> tuple[Any, list[Any]]:
    """The two values in a text of the right shape, not checked yet."""
    content = _decoded(source, text)
    metadata = content.get("metadata") if isinstance(content, dict) else None
    gap = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    counts = content.get("data") if isinstance(content, dict) else None
    if gap is None or not isinstance(counts, list) or not counts:
        refuse(f"{source}:1", f"the file must be {_SHAPE}", repr(text.strip()[:60]))
    return gap, counts


def _decoded(source: str, text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        refuse(f"{source}:{error.lineno}", f"the file must be JSON ({error.msg})", repr(text[error.pos :][:20]))
    except RecursionError:
        refuse(f"{source}:1", "the file must be JSON", "one that is nested too deep")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _children(text: str, start: int) -> Iterator[tuple[str | int, int]]:
    """The key and the position of each value of the object or array that begins at `start`, in a text that is JSON."""
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
    """The position after any blanks."""
    blanks = _BLANK.match(text, position)
    assert blanks is not None
    return blanks.end()
