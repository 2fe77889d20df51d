"""The CSV file of a trace: a header ``step,batchsize``, then one row per step.

pandas reads millions of rows in a fraction of a second. Only if the result is unusual is the file read row by row, to
name the first invalid row.
"""

from __future__ import annotations

import io
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from variable_batch_size.checks import is_integer, refuse
from variable_batch_size.files import write

LARGEST = 2**63 - 1
"""The largest 64-bit integer."""

MOST_STEPS = 20_000_000
"""Limit for generated traces: more is probably a typo. A file may have more."""


def checked_size(size: Any, place: str) -> int:
    """Return a valid batch size as int, or raise ValueError with its place.

    >>> checked_size(0, "spot.csv:17")
    Traceback (most recent call last):
    ValueError: spot.csv:17: batchsize must be a positive integer, got 0
    """
    if not is_integer(size) or not 0 < size <= LARGEST:
        refuse(place, "batchsize must be a positive integer", size)
    return int(size)


def check_multiples(minibatch_size: int, **sizes: int) -> None:
    """Reject batch sizes that are not multiples of the minibatch size.

    >>> check_multiples(32, start=64, end=100)
    Traceback (most recent call last):
    ValueError: `end` must be a multiple of 32 (the minibatch size), got 100
    """
    for name, size in sizes.items():
        if size % minibatch_size:
            raise ValueError(f"`{name}` must be a multiple of {minibatch_size} (the minibatch size), got {size}")


def whole_minibatches(sizes: npt.NDArray[Any], minibatch_size: int) -> npt.NDArray[np.int64]:
    """Round to the nearest multiple of the minibatch size, halves up, at least one.

    >>> whole_minibatches(np.array([3.0, 47.9, 48.0]), 32).tolist()
    [32, 32, 64]
    """
    minibatches = np.floor(sizes / minibatch_size + 0.5).astype(np.int64)
    return np.maximum(minibatches, 1) * minibatch_size


def check_num_steps(num_steps: int) -> None:
    """Reject generated traces with too many steps."""
    if num_steps > MOST_STEPS:
        raise ValueError(f"a trace may have at most {MOST_STEPS} steps, got {num_steps}")


COLUMNS = ("step", "batchsize")

_INTEGER = re.compile(r"[+-]?[0-9]{1,99}")
_LINE = re.compile(rb"[^\n]*\n?")
_COMMENT = re.compile(rb"#[^\n]*")


def read_sizes(source: str, content: bytes) -> npt.NDArray[np.int64]:
    """The batch sizes in a file; ValueError with line and value of the first invalid row."""
    text = _plain(content)
    names, header_line = _header(source, text)
    columns = [names.index(column) for column in COLUMNS]
    # pandas reads files nearly twice as fast as bytes, but a pipe can be read only once
    is_plain_file = text == content and os.path.isfile(source)
    file = os.path.abspath(source) if is_plain_file else io.BytesIO(text)
    sizes = _sizes_at_once(file, header_line, len(names), columns)
    return _sizes_by_row(source, text, len(names), columns) if sizes is None else sizes


def write_sizes(path: str | os.PathLike[str], sizes: npt.NDArray[np.int64], *, comment: str) -> None:
    """Write a file for :func:`read_sizes`, atomically: a truncated trace would be a valid trace."""
    target = Path(path)
    if target.is_symlink() or (target.exists() and not target.is_file()):  # don't replace it by a file
        _fill(target, sizes, comment)
    else:
        write(target, lambda temporary: _fill(temporary, sizes, comment))


def _fill(path: Path, sizes: npt.NDArray[np.int64], comment: str) -> None:
    import pandas as pd

    # the comment may be a command line, which need not be Unicode
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        for line in comment.splitlines():
            file.write(f"# {line}\n")
        frame = pd.DataFrame({"step": np.arange(len(sizes)), "batchsize": sizes})
        frame.to_csv(file, index=False, lineterminator="\n")


def read_comment(content: bytes) -> str:
    """The comment at the top of a file."""
    with io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig", errors="replace") as file:
        lines = itertools.takewhile(lambda line: line.startswith("#"), file)
        return "\n".join(line[1:].strip() for line in lines)


def find_line(content: bytes, row: int) -> int:
    """The line number of a row, counting rows from 0 after the header."""
    lines = [line for line, _ in _rows(_plain(content))]
    return lines[row + 1]


def _plain(text: bytes) -> bytes:
    """The text without byte order mark and comments, with line feeds and unchanged line numbers."""
    text = text.removeprefix(b"\xef\xbb\xbf")
    if b"\r" in text:
        text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return _COMMENT.sub(b"", text) if b"#" in text else text


def _rows(text: bytes) -> Iterator[tuple[int, str]]:
    """Number and content of every non-blank line, the header first; lazy, because often only the header is needed."""
    for line, found in enumerate(_LINE.finditer(text), start=1):
        content = found[0].strip(b" \t\n")
        if content:
            yield line, content.decode(errors="replace")


def _header(source: str, text: bytes) -> tuple[list[str], int]:
    """The column names and the number of their line."""
    for line, content in _rows(text):
        names = [name.strip().strip('"') for name in content.split(",")]
        for column in COLUMNS:
            if names.count(column) != 1:
                refuse(f"{source}:{line}", f"the header must name the column {column!r} once", repr(names)[:80])
        return names, line
    raise ValueError(f"{source}:1: the file is empty, expected the columns {','.join(COLUMNS)}")


def _sizes_at_once(
    file: str | io.BytesIO, header_line: int, num_columns: int, columns: list[int]
) -> npt.NDArray[np.int64] | None:
    """The batch sizes after the header if all rows are valid, else None."""
    import csv
    import warnings

    import pandas as pd

    try:
        with warnings.catch_warnings():
            # pandas only warns if the first row is too long; mixed types are detected below
            warnings.simplefilter("error", pd.errors.ParserWarning)
            warnings.simplefilter("ignore", pd.errors.DtypeWarning)
            frame = pd.read_csv(
                file,
                compression=None,
                header=None,
                names=range(num_columns),
                index_col=False,
                skiprows=header_line,
                quoting=csv.QUOTE_NONE,
                na_filter=False,
                encoding_errors="replace",
            )
    except (pd.errors.EmptyDataError, pd.errors.ParserError, pd.errors.ParserWarning):
        return None
    steps, sizes = (np.asarray(frame[column]) for column in columns)
    if not len(frame) or steps.dtype != np.int64 or sizes.dtype != np.int64:
        return None
    follows = (steps[1:] == 0) | (steps[1:] == steps[:-1] + 1)
    # copy: a column may be a view of the whole table
    return np.array(sizes) if steps[0] == 0 and follows.all() and sizes.min() > 0 else None


def _sizes_by_row(source: str, text: bytes, num_columns: int, columns: list[int]) -> npt.NDArray[np.int64]:
    """The batch sizes after the header, row by row; raises at the first invalid row."""
    (header_line, _), *rows = _rows(text)
    if not rows:
        refuse(f"{source}:{header_line + 1}", "expected a row below the header", "nothing")
    sizes: list[int] = []
    expected = 0
    for line, content in rows:
        place = f"{source}:{line}"
        values = content.rstrip(", \t").split(",")
        if len(values) > num_columns:
            refuse(place, f"a row must have {num_columns} values", len(values))
        step, size = (
            _integer(place, name, values[column].strip() if column < len(values) else "")
            for name, column in zip(COLUMNS, columns, strict=True)
        )
        if step not in (0, expected):
            refuse(place, f"step must be {expected}" + (" (or 0, to start again)" if expected else ""), step)
        sizes.append(checked_size(size, place))
        expected = step + 1
    return np.array(sizes, dtype=np.int64)


def _integer(place: str, name: str, text: str) -> int:
    if not _INTEGER.fullmatch(text):
        refuse(place, f"{name} must be an integer", text or "nothing")
    if int(text) > LARGEST:
        refuse(place, f"{name} must be below 2**63", text)
    return int(text)
