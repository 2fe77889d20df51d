"""Reads recordings that are tables: CSV files of times and counts, or of the events that changed a count."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Literal

from variable_batch_size.checks import refuse
from variable_batch_size.traces.recording_rows import Rows

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
