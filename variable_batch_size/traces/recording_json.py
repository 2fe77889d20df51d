"""Reads recordings that are JSON: ``{"metadata": {"gap_seconds": g}, "data": [counts]}``."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

from variable_batch_size.checks import refuse
from variable_batch_size.traces.recording_rows import LATEST, Rows

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
