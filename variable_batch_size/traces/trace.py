"""Trace: the batch size of every step, read from a file or made from numbers."""

from __future__ import annotations

import io
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, overload

import numpy as np
import numpy.typing as npt

COLUMNS = ("step", "batchsize")

_INTEGER = re.compile(r"[+-]?[0-9]{1,99}")
_LINE = re.compile(rb"[^\n]*\n?")
_COMMENT = re.compile(rb"#[^\n]*")
_LARGEST = int(np.iinfo(np.int64).max)


class Trace:
    """The global batch size of every optimizer step, in order.

    A trace is finite, or it is constant and endless. It is immutable, 8 bytes a step, and remembers where each number
    came from, so that whoever finds it wrong can name the file and the line.

    >>> trace = Trace.from_sequence([64, 96, 32])
    >>> len(trace), trace[1], list(trace)
    (3, 96, [64, 96, 32])
    >>> Trace.constant(128)[10**12]
    128
    """

    def __init__(self, sizes: npt.NDArray[np.int64], *, is_endless: bool = False, source: str | None = None) -> None:
        self.sizes = sizes
        self.sizes.flags.writeable = False
        self.is_endless = is_endless
        self._source = source

    @classmethod
    def of(cls, source: Any) -> Trace:
        """Make a trace of whatever a user may pass as one: path, sequence, array, column, int or trace."""
        if isinstance(source, Trace):
            return source
        if isinstance(source, (str, os.PathLike)):
            return cls.read(source)
        if isinstance(source, (int, np.integer)) and not isinstance(source, bool):
            return cls.constant(int(source))
        if hasattr(source, "__len__") and not isinstance(source, (bytes, dict, set)):
            return cls.from_sequence(source)
        raise ValueError(f"`trace` must be a path, a sequence of batch sizes or an integer, got {source!r}")

    @classmethod
    def constant(cls, size: int) -> Trace:
        """The same batch size for ever."""
        return cls(np.array([_checked(size, "trace")], dtype=np.int64), is_endless=True)

    @classmethod
    def from_sequence(cls, sizes: Sequence[int] | npt.NDArray[Any]) -> Trace:
        """A trace of the given batch sizes: a list, a tuple, an array or a pandas column."""
        # numpy would make 1 of a True among integers, so what has no type yet is looked at value by value
        array = np.asarray(sizes, dtype=None if hasattr(sizes, "dtype") else object)
        if array.ndim != 1:
            raise ValueError(f"`trace` must be one-dimensional, got the shape {array.shape}")
        if not len(array):
            raise ValueError("`trace` must hold at least one batch size, got an empty sequence")
        if array.dtype.kind not in "iu" or array.min() <= 0 or array.max() > _LARGEST:
            values = list(sizes)
            array = np.array([_checked(value, f"trace[{row}]") for row, value in enumerate(values)], dtype=np.int64)
        return cls(np.array(array, dtype=np.int64))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a CSV file with the columns ``step`` and ``batchsize``.

        Rows in file order are the steps; ``step`` counts 0, 1, 2 … and may start again at 0 (several recordings after
        one another). Blanks around numbers, commas behind them, any line ends, blank lines, ``#`` comments and further
        columns are fine.

        Raises:
            ValueError: with file, line and value of the first row that breaks a rule.
        """
        source = os.fspath(path)
        content = Path(source).read_bytes()
        text = _plain(content)
        names, header_line = _header(source, text)
        columns = [names.index(column) for column in COLUMNS]
        # pandas takes nearly twice as long for bytes as for a file; but what is a pipe cannot be read again
        is_plain_file = text == content and os.path.isfile(source)
        file = os.path.abspath(source) if is_plain_file else io.BytesIO(text)
        sizes = _sizes_at_once(file, header_line, len(names), columns)
        if sizes is None:
            sizes = _sizes_by_row(source, text, len(names), columns)
        return cls(sizes, source=source)

    def write(self, path: str | os.PathLike[str], *, comment: str | None = None) -> None:
        """Write the trace as a CSV file that :meth:`read` reads back, the lines of `comment` on top behind ``#``."""
        if self.is_endless:
            raise ValueError("a constant trace is endless and cannot be written to a file")
        import pandas as pd

        with open(path, "w", encoding="utf-8", newline="") as file:
            for line in (comment or "").splitlines():
                file.write(f"# {line}\n")
            frame = pd.DataFrame({"step": np.arange(len(self.sizes)), "batchsize": self.sizes})
            frame.to_csv(file, index=False, lineterminator="\n")

    def place(self, row: int) -> str:
        """Where the batch size of a row was given: ``spot.csv:17`` or ``trace[3]``."""
        if self._source is None:
            return "trace" if self.is_endless else f"trace[{row}]"
        lines = [line for line, _ in _rows(_plain(Path(self._source).read_bytes()))]
        return f"{self._source}:{lines[row + 1]}"

    @property
    def name(self) -> str:
        """The file the trace was read from, or ``trace``."""
        return self._source or "trace"

    @property
    def comment(self) -> str:
        """The comment on top of the file the trace was read from, as :meth:`write` takes it: where it comes from."""
        if self._source is None:
            return ""
        with open(self._source, encoding="utf-8-sig", errors="replace") as file:
            lines = itertools.takewhile(lambda line: line.startswith("#"), file)
            return "\n".join(line[1:].strip() for line in lines)

    def __len__(self) -> int:
        if self.is_endless:
            raise TypeError("a constant trace is endless and has no length")
        return len(self.sizes)

    @overload
    def __getitem__(self, row: int) -> int: ...
    @overload
    def __getitem__(self, row: slice) -> Trace: ...
    def __getitem__(self, row: int | slice) -> int | Trace:
        if isinstance(row, slice):
            if self.is_endless:
                raise ValueError("a constant trace is endless and has no slices")
            return Trace.from_sequence(self.sizes[row])
        if self.is_endless and row >= 0:
            return int(self.sizes[0])
        if self.is_endless or not -len(self.sizes) <= row < len(self.sizes):
            raise IndexError(f"the trace has no step {row}")
        return int(self.sizes[row])

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from self.sizes.tolist()
            if not self.is_endless:
                return

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        return self.is_endless == other.is_endless and np.array_equal(self.sizes, other.sizes)

    def __hash__(self) -> int:
        return hash((self.is_endless, self.sizes.tobytes()))

    def __repr__(self) -> str:
        if self.is_endless:
            return f"Trace.constant({self[0]})"
        shown = ", ".join(map(str, self.sizes[:6].tolist())) + (", …" if len(self.sizes) > 6 else "")
        return f"<Trace of {len(self.sizes)} steps: {shown}>"


def _plain(text: bytes) -> bytes:
    """The text without byte order mark and comments, every line on its old number and ended by a line feed."""
    text = text.removeprefix(b"\xef\xbb\xbf")
    if b"\r" in text:
        text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return _COMMENT.sub(b"", text) if b"#" in text else text


def _rows(text: bytes) -> Iterator[tuple[int, str]]:
    """Number and content of every line that is not blank, the header first; lazily, for that one is short."""
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
                _refuse(f"{source}:{line}", f"the header must name the column {column!r} once", repr(names)[:80])
        return names, line
    raise ValueError(f"{source}:1: the file is empty, expected the columns {','.join(COLUMNS)}")


def _sizes_at_once(
    file: str | io.BytesIO, header_line: int, num_columns: int, columns: list[int]
) -> npt.NDArray[np.int64] | None:
    """The batch sizes below the header, read fast, if every row keeps every rule; else None."""
    import csv
    import warnings

    import pandas as pd

    try:
        with warnings.catch_warnings():
            # pandas raises if a row is too long, but for the first row only warns; mixed types are ours to see
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
    # a copy, as a column may be part of an array that holds them all
    return np.array(sizes) if steps[0] == 0 and follows.all() and sizes.min() > 0 else None


def _sizes_by_row(source: str, text: bytes, num_columns: int, columns: list[int]) -> npt.NDArray[np.int64]:
    """The batch sizes below the header, row by row: raises at the first row that breaks a rule, whichever it is."""
    (header_line, _), *rows = _rows(text)
    if not rows:
        _refuse(f"{source}:{header_line + 1}", "expected a row below the header", "nothing")
    sizes: list[int] = []
    expected = 0
    for line, content in rows:
        place = f"{source}:{line}"
        values = content.rstrip(", \t").split(",")
        if len(values) > num_columns:
            _refuse(place, f"a row must have {num_columns} values", len(values))
        pair: list[int] = []
        for name, column in zip(COLUMNS, columns, strict=True):
            value = values[column].strip() if column < len(values) else ""
            if not _INTEGER.fullmatch(value):
                _refuse(place, f"{name} must be an integer", value or "nothing")
            if int(value) > _LARGEST:
                _refuse(place, f"{name} must be below 2**63", value)
            pair.append(int(value))
        step, size = pair
        if step not in (0, expected):
            _refuse(place, f"step must be {expected}" + (" (or 0, to start again)" if expected else ""), step)
        sizes.append(_checked(size, place))
        expected = step + 1
    return np.array(sizes, dtype=np.int64)


def _checked(size: Any, place: str) -> int:
    is_integer = isinstance(size, (int, np.integer)) and not isinstance(size, (bool, np.bool_))
    if not is_integer or not 0 < size <= _LARGEST:
        _refuse(place, "batchsize must be a positive integer", size)
    return int(size)


def _refuse(place: str, rule: str, value: Any) -> NoReturn:
    raise ValueError(f"{place}: {rule}, got {value}")
