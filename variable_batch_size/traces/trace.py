"""Trace: the batch size of every step, read from a file or made from numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from variable_batch_size.checks import is_integer
from variable_batch_size.traces.csv import LARGEST, checked_size, find_line, read_comment, read_sizes, write_sizes

Integer: TypeAlias = int | np.integer[Any]


class Column(Protocol):
    """Convertible to an array by numpy, such as a pandas column."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __array__(self) -> npt.NDArray[Any]: ...


Sizes: TypeAlias = Sequence[Integer] | npt.NDArray[np.integer[Any]] | Column

_NO_SEQUENCES = (int, np.integer, bytes, dict, set)


class Trace:
    """The global batch size of every optimizer step, in order.

    A trace is finite, or constant and endless. It is immutable, takes 8 bytes per step, and keeps the source of each
    number, so that errors can name file and line.

    >>> trace = Trace.from_sequence([64, 96, 32])
    >>> len(trace), trace[1], list(trace)
    (3, 96, [64, 96, 32])
    >>> Trace.constant(128)[10**12]
    128
    """

    def __init__(
        self,
        sizes: npt.NDArray[np.int64],
        *,
        is_endless: bool = False,
        source: str | None = None,
        content: bytes | None = None,
    ) -> None:
        self.sizes = sizes
        self.sizes.flags.writeable = False
        self.is_endless = is_endless
        self._source = source
        self._kept = content  # of a source that can be read only once

    @classmethod
    def of(cls, source: TraceLike) -> Trace:
        """Convert a path, sequence, array, column, integer or trace to a trace."""
        if isinstance(source, Trace):
            return source
        if isinstance(source, (str, os.PathLike)):
            return cls.read(source)
        if is_integer(source):
            return cls.constant(source)
        if hasattr(source, "__len__") and not isinstance(source, _NO_SEQUENCES):
            return cls.from_sequence(source)
        raise ValueError(f"`trace` must be a path, a sequence of batch sizes or an integer, got {source!r}")

    @classmethod
    def constant(cls, size: Integer) -> Trace:
        """The same batch size forever."""
        return cls(np.array([checked_size(size, "trace")], dtype=np.int64), is_endless=True)

    @classmethod
    def from_sequence(cls, sizes: Sizes) -> Trace:
        """A trace of the given batch sizes: a list, a tuple, an array or a pandas column."""
        # numpy would convert a True among integers to 1, so untyped sequences are checked value by value
        array = np.asarray(sizes, dtype=None if hasattr(sizes, "dtype") else object)
        if array.ndim != 1:
            raise ValueError(f"`trace` must be one-dimensional, got the shape {array.shape}")
        if not len(array):
            raise ValueError("`trace` must hold at least one batch size, got an empty sequence")
        if array.dtype.kind not in "iu" or array.min() <= 0 or array.max() > LARGEST:
            values = list(sizes)
            array = np.array([checked_size(value, f"trace[{row}]") for row, value in enumerate(values)], dtype=np.int64)
        return cls(np.array(array, dtype=np.int64))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a CSV file with the columns ``step`` and ``batchsize``.

        Rows in file order are the steps; ``step`` counts 0, 1, 2 … and may restart at 0 (several recordings in one
        file). Spaces around numbers, trailing commas, any line endings, blank lines, ``#`` comments and additional
        columns are allowed.

        Raises:
            ValueError: with file, line and value of the first row that breaks a rule.
        """
        source = os.fspath(path)
        content = Path(source).read_bytes()
        return cls(read_sizes(source, content), source=source, content=None if os.path.isfile(source) else content)

    def with_rows(self, sizes: npt.NDArray[np.int64]) -> Trace:
        """A finite trace of the given batch sizes, with the name of this one."""
        return Trace(sizes, source=self._source, content=self._kept)

    def write(self, path: str | os.PathLike[str], *, comment: str | None = None) -> None:
        """Write a CSV file for :meth:`read`, with the lines of `comment` at the top, after ``#``."""
        if self.is_endless:
            raise ValueError("a constant trace is endless and cannot be written to a file")
        write_sizes(path, self.sizes, comment=comment or "")

    def place(self, row: int) -> str:
        """The source of a row's batch size: ``spot.csv:17`` or ``trace[3]``."""
        if self._source is None:
            return "trace" if self.is_endless else f"trace[{row}]"
        return f"{self._source}:{find_line(self._content(self._source), row)}"

    @property
    def name(self) -> str:
        """The file the trace was read from, or ``trace``."""
        return self._source or "trace"

    @property
    def comment(self) -> str:
        """The comment at the top of the file, as passed to :meth:`write`."""
        return "" if self._source is None else read_comment(self._content(self._source))

    def _content(self, source: str) -> bytes:
        """The content of the file; a pipe cannot be opened again and is kept in memory."""
        return Path(source).read_bytes() if self._kept is None else self._kept

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


TraceLike: TypeAlias = str | os.PathLike[str] | Sizes | Integer | Trace
"""Accepted as a trace: a path, the batch sizes, or an integer for a constant batch size."""
