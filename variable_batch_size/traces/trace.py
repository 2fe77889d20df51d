"""Trace: the batch size of every step, from numbers, stages (``0:64 20:128``) or a CSV file of either."""

import csv
import io
import itertools
import os
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, overload

import numpy as np
import numpy.typing as npt

from variable_batch_size.checks import check_one_of, check_positive, is_integer, refuse
from variable_batch_size.files import write
from variable_batch_size.traces import zoo
from variable_batch_size.urls import is_url

COLUMNS = ("step", "batchsize")
LARGEST = 2**63 - 1
MOST_STEPS = 20_000_000  # of generated traces: more is probably a typo. A file may have more

Integer: TypeAlias = int | np.integer[Any]


Sizes: TypeAlias = Collection[Any]  # integers in a list, a tuple, an array or a pandas column
Rows: TypeAlias = npt.NDArray[np.int64]
_INTEGER = re.compile(r"[+-]?[0-9]{1,99}")
_LINE = re.compile(rb"[^\n]*\n?")
_COMMENT = re.compile(rb"#[^\n]*")
_STAGES = re.compile(r"\s*0:")  # the first stage begins at 0
_OTHER_NAME = "batch_size"  # of the column of batch sizes
_FEW_BYTES = 100_000  # are read row by row, in 0.1 s at most; importing pandas takes four times as long

Unit = Literal["steps", "samples", "tokens"]
UNITS: tuple[Unit, ...] = get_args(Unit)
Change = Literal["nearest", "after"]
CHANGES: tuple[Change, ...] = get_args(Change)

_SUFFIXES = {"T": 10**12, "B": 10**9, "M": 10**6, "K": 10**3, "": 1}
_COUNT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([KMBT]?)", re.IGNORECASE)


class Trace:
    """The global batch size of every optimizer step, in order.

    A trace is finite; or constant and endless; or open, where its last batch size lasts as long as the run. It is
    immutable, takes 8 bytes per step, and keeps the source of each number, so that errors can name file and line.

    >>> trace = Trace.from_sequence([64, 96, 32])
    >>> len(trace), trace[1], list(trace)
    (3, 96, [64, 96, 32])
    >>> Trace.constant(128)[10**12]
    128
    """

    def __init__(
        self,
        sizes: Rows,
        *,
        is_endless: bool = False,
        is_open: bool = False,
        source: str | None = None,
        content: bytes | None = None,
    ) -> None:
        if not isinstance(sizes, np.ndarray):
            raise ValueError(
                f"`sizes` must be an array of int64, got {sizes!r}: use Trace.of(…), which converts and checks"
            )
        self.sizes, self.is_endless, self.is_open, self._source = sizes, is_endless, is_open, source
        self.sizes.flags.writeable = False
        self._kept = content  # of a source that can be read only once

    @classmethod
    def of(cls, source: "TraceLike") -> "Trace":
        """Convert a path, stages, a sequence, array, column, integer or trace to a trace.

        Stages are text such as ``"0:64 20:128 40:256"``, a dictionary such as ``{0: 64, 20: 128, 40: 256}``, in steps,
        or :class:`Stages`, in any unit.

        >>> Trace.of("0:64 2:128"), Trace.of({0: 64, 2: 128}) == Trace.of("0:64 2:128")
        (<open Trace of 3 steps: 64, 64, 128>, True)
        """
        if isinstance(source, Trace):
            return source
        if isinstance(source, type):
            raise ValueError(
                f"`trace` must be an object, got the class {source.__name__}: make one, {source.__name__}(…)"
            )
        if isinstance(source, Mapping) or (isinstance(source, str) and _STAGES.match(source)):
            source = Stages.of_steps(source)
        if isinstance(source, Stages):
            return source.trace()
        if isinstance(source, (str, os.PathLike)):
            return cls.read(source)
        if is_integer(source):
            return cls.constant(source)
        if hasattr(source, "__len__") and not isinstance(source, (int, np.integer, bytes, set)):
            return cls.from_sequence(source)
        raise ValueError(f"`trace` must be a path, stages, a sequence of batch sizes or an integer, got {source!r}")

    @classmethod
    def constant(cls, size: Integer) -> "Trace":
        """The same batch size forever."""
        return cls(np.array([_checked_size(size, "trace")], dtype=np.int64), is_endless=True)

    @classmethod
    def from_sequence(cls, sizes: Sizes) -> "Trace":
        """A trace of the given batch sizes: a list, a tuple, an array or a pandas column."""
        # numpy would convert a True among integers to 1, so untyped sequences are checked value by value
        array = np.asarray(sizes, dtype=None if hasattr(sizes, "dtype") else object)
        if array.ndim != 1:
            raise ValueError(f"`trace` must be one-dimensional, got the shape {array.shape}")
        if not len(array):
            raise ValueError("`trace` must hold at least one batch size, got an empty sequence")
        if array.dtype.kind not in "iu" or array.min() <= 0 or array.max() > LARGEST:
            array = np.array([_checked_size(value, f"trace[{row}]") for row, value in enumerate(list(sizes))])
        return cls(np.array(array, dtype=np.int64))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Trace":
        """Read a CSV file with the columns ``step`` and ``batchsize`` (or ``batch_size``), at a path or a URL.

        Rows in file order are the steps; ``step`` counts 0, 1, 2 … and may restart at 0 (several recordings in one
        file). Spaces around numbers, trailing commas, any line endings, blank lines, ``#`` comments and additional
        columns are allowed. A ValueError has file, line and value of the first row that breaks a rule.

        In a file of stages, the first column is ``steps``, ``samples`` or ``tokens``: where each batch size begins. A
        last row without a batch size is the end. In tokens, the column ``tokens_per_sample`` has the sequence length.

        ``zoo:NAME`` is a trace that comes with the package, see :mod:`variable_batch_size.traces.zoo`.
        """
        source = os.fspath(path)
        try:
            content = zoo.read_trace(path)
        except (FileNotFoundError, IsADirectoryError) as error:
            found = f"{source!r} is a directory" if os.path.isdir(source) else f"there is no file {source!r}"
            kinds = "a CSV file of step,batchsize, stages that begin at 0, such as '0:64 20:128', or a list"
            raise type(error)(f"{found}: `trace` must be {kinds} of batch sizes") from None
        kept = None if os.path.isfile(source) else content
        return cls._of_file(source, content, kept)

    @classmethod
    def parse(cls, content: bytes, *, source: str) -> "Trace":
        """The content of a file for :meth:`read`, which may have changed since."""
        return cls._of_file(source, content, content, is_on_disk=False)

    @classmethod
    def _of_file(cls, source: str, content: bytes, kept: bytes | None, *, is_on_disk: bool = True) -> "Trace":
        stages = Stages.in_file(source, content)
        if stages is not None:
            trace = stages.trace()
            return cls(trace.sizes, is_open=trace.is_open, source=source, content=kept)
        return cls(_read_sizes(source, content, is_on_disk=is_on_disk), source=source, content=kept)

    def with_rows(self, sizes: Rows) -> "Trace":
        """A finite trace of the given batch sizes, with the name of this one."""
        return Trace(sizes, source=self._source, content=self._kept)

    def write(self, path: str | os.PathLike[str], *, comment: str | None = None) -> None:
        """Write a CSV file for :meth:`read`, with the lines of `comment` at the top, after ``#``."""
        if self.is_endless:
            raise ValueError("a constant trace is endless and cannot be written to a file")
        if self.is_open:
            raise ValueError("stages without an end cannot be written to a file: make them with `until`")
        if is_url(path):
            raise ValueError(f"a trace must be written to a path on this machine, got {path}")

        def fill(path: Path) -> None:
            # the comment may be a command line, which need not be Unicode
            with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
                file.writelines(f"# {line}\n" for line in (comment or "").splitlines())
                file.write(",".join(COLUMNS) + "\n")
                file.writelines(f"{step},{size}\n" for step, size in enumerate(self.sizes.tolist()))

        target = Path(path)
        if target.is_symlink() or (target.exists() and not target.is_file()):  # don't replace it by a file
            fill(target)
        else:
            write(target, fill)  # atomically: a truncated trace would be a valid trace

    def place(self, row: int) -> str:
        """The source of a row's batch size: ``spot.csv:17`` or ``trace[3]``."""
        if self._source is None:
            return "trace" if self.is_endless else f"trace[{row}]"
        text = _plain(self._content(self._source))
        if _unit_of(text) is not None:
            return f"{self._source}: step {row}"
        return f"{self._source}:{next(itertools.islice(_rows(text), row + 1, None))[0]}"

    @property
    def name(self) -> str:
        """The file the trace was read from, or ``trace``."""
        return self._source or "trace"

    @property
    def comment(self) -> str:
        """The comment at the top of the file, as passed to :meth:`write`."""
        if self._source is None:
            return ""
        with io.TextIOWrapper(io.BytesIO(self._content(self._source)), encoding="utf-8-sig", errors="replace") as file:
            return "\n".join(line[1:].strip() for line in itertools.takewhile(lambda line: line.startswith("#"), file))

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
    def __getitem__(self, row: slice) -> "Trace": ...
    def __getitem__(self, row: int | slice) -> "int | Trace":
        if isinstance(row, slice):
            if self.is_endless:
                raise ValueError("a constant trace is endless and has no slices")
            return Trace.from_sequence(self.sizes[row])
        if not (row >= 0 if self.is_endless else -len(self.sizes) <= row < len(self.sizes)):
            raise IndexError(f"the trace has no step {row}")
        return int(self.sizes[0 if self.is_endless else row])

    def __iter__(self) -> Iterator[int]:
        return itertools.repeat(self[0]) if self.is_endless else iter(self.sizes.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        is_alike = (self.is_endless, self.is_open) == (other.is_endless, other.is_open)
        return is_alike and np.array_equal(self.sizes, other.sizes)

    def __hash__(self) -> int:
        return hash((self.is_endless, self.sizes.tobytes()))

    def __repr__(self) -> str:
        if self.is_endless:
            return f"Trace.constant({self[0]})"
        shown = ", ".join(map(str, self.sizes[:6].tolist())) + (", …" if len(self.sizes) > 6 else "")
        return f"<{'open ' if self.is_open else ''}Trace of {len(self.sizes)} steps: {shown}>"


@dataclass(frozen=True)
class Stages:
    """A piecewise constant batch size.

    In samples, a stage begins at the step nearest to the cumulative number of updates, so rounding errors don't
    accumulate; a stage of less than half an update may have no step. In tokens, each sample counts as
    `tokens_per_sample`; sizes remain in samples.

    >>> stages = Stages.parse("0:768 250K:1536 500K:3072", until=1_000_000, unit="samples")
    >>> stages.trace()
    <Trace of 651 steps: 768, 768, 768, 768, 768, 768, …>
    >>> str(Stages.of(stages.trace(), unit="steps"))
    '0:768 326:1536 488:3072'
    >>> stages = Stages.parse("0:768 1B:1536", until=2 * 10**9, unit="tokens", tokens_per_sample=4096)
    >>> str(Stages.of(stages.trace(), unit="steps")), 10**9 / (768 * 4096)
    ('0:768 318:1536', 317.8914388020833)
    >>> Stages.parse("0:64 2:128", unit="steps").trace()
    <open Trace of 3 steps: 64, 64, 128>
    """

    starts: tuple[int, ...]  # the start of each stage, in `unit`; the first is 0
    sizes: tuple[int, ...]  # the batch size of each stage, in samples
    until: int | None  # the end of the last stage, in `unit`; None if it lasts as long as the run
    unit: Unit  # ``"steps"``, ``"samples"`` or ``"tokens"``
    tokens_per_sample: int | None = None  # the sequence length if `unit` is ``"tokens"``, else None

    def __post_init__(self) -> None:
        check_one_of(UNITS, unit=self.unit)
        if self.unit == "tokens":
            check_positive(tokens_per_sample=self.tokens_per_sample)
        elif (tokens := self.tokens_per_sample) is not None:
            found = f"{tokens!r} with {self.unit!r}"
            raise ValueError(f"`tokens_per_sample` must be None unless `unit` is 'tokens', got {found}")
        if not self.starts or self.starts[0] != 0:
            raise ValueError(f"the first stage must begin at 0, got {self.starts[0] if self.starts else 'no stage'}")
        for number, (start, end, size) in enumerate(zip(self.starts, self._ends, self.sizes, strict=True), start=1):
            if end is not None and end <= start:
                what = f"stage {number + 1} must begin" if number < len(self.sizes) else "the last stage must end"
                raise ValueError(f"{what} after {start}, where stage {number} begins, got {end}")
            if not 0 < size <= LARGEST:
                rule = "positive" if size <= 0 else "below 2**63"
                raise ValueError(f"the batch size of stage {number} must be {rule}, got {size}")

    @classmethod
    def parse(
        cls, text: str, *, until: int | None = None, unit: Unit, tokens_per_sample: int | None = None
    ) -> "Stages":
        """Parse ``start:size`` pairs, separated by whitespace or commas; numbers may end in K, M, B or T."""
        pairs = []
        for number, stage in enumerate(re.split(r"[\s,]+", text.strip()), start=1):
            start, colon, size = stage.partition(":")
            if not colon:
                raise ValueError(f"stage {number} must have the form start:size, got {stage!r}")
            try:
                pairs.append((parse_count(start), parse_count(size)))
            except ValueError as error:
                raise ValueError(f"stage {number} ({stage}): {error}") from None
        starts, sizes = zip(*pairs, strict=True)
        return cls(starts, sizes, until, unit, tokens_per_sample)

    @classmethod
    def in_file(cls, source: str, content: bytes) -> "Stages | None":
        """The stages in a file of them, see :meth:`Trace.read`; None if it is one of another kind."""
        text = _plain(content)
        unit = _unit_of(text)
        if unit is None:
            return None
        (line, header), *rows = _rows(text)
        names = [COLUMNS[1] if name == _OTHER_NAME else name for name in map(str.strip, header.split(","))]
        expected = [unit, COLUMNS[1], *(["tokens_per_sample"] if unit == "tokens" else [])]
        if names != expected:
            refuse(f"{source}:{line}", f"the columns of stages in {unit} must be {','.join(expected)}", header)
        starts, sizes, lengths = list[int](), list[int](), set[int]()
        until: int | None = None
        for line, row in rows:
            place, cells = f"{source}:{line}", row.split(",")
            if len(cells) != len(names):
                refuse(place, f"a row must have {len(names)} values", len(cells))
            if until is not None:
                refuse(place, "the row without a batch size must be the last", row)
            start, size, *length = cells
            begin = _integer(place, unit, start.strip())
            if size.strip():
                starts.append(begin)
                sizes.append(_checked_size(_integer(place, COLUMNS[1], size.strip()), place))
            else:
                until = begin
            lengths |= {_integer(place, names[2], cell.strip()) for cell in length}
            if len(lengths) > 1:
                refuse(place, "tokens_per_sample must be the same in all rows", sorted(lengths))
        try:
            return cls(tuple(starts), tuple(sizes), until, unit, *lengths)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    @classmethod
    def of_steps(cls, stages: str | Mapping[int, int]) -> "Stages":
        """Stages in steps without an end: text for :meth:`parse`, or the batch size by the step at which it begins."""
        if isinstance(stages, str):
            return cls.parse(stages, unit="steps")
        for start, size in stages.items():
            if not (is_integer(start) and is_integer(size)):
                raise ValueError(f"stages must map integer steps to integer batch sizes, got {start!r}: {size!r}")
        return cls(tuple(map(int, stages)), tuple(map(int, stages.values())), None, "steps")

    @classmethod
    def of(cls, trace: Trace, *, unit: Unit, tokens_per_sample: int | None = None) -> "Stages":
        """The stages of a trace; :meth:`trace` converts them back to the same trace, in any unit."""
        if trace.is_endless:
            raise ValueError("a constant trace is endless and has no stages")
        changes = np.concatenate(([0], np.flatnonzero(np.diff(trace.sizes)) + 1))
        ends = np.arange(len(trace) + 1) if unit == "steps" else np.concatenate(([0], np.cumsum(trace.sizes)))
        per = tokens_per_sample or 1
        starts = tuple(per * end for end in ends[changes].tolist())
        return cls(starts, tuple(trace.sizes[changes].tolist()), per * int(ends[-1]), unit, tokens_per_sample)

    def trace(self, *, change: Change = "nearest") -> Trace:
        """Convert the stages to a trace.

        Args:
            change: in samples or tokens, a stage begins at the ``"nearest"`` step, or as in Megatron-LM at the first
                step at or ``"after"`` its start (tokens are rounded down to samples). With ``"after"`` the trace ends
                with the last step that fits.
        """
        check_one_of(CHANGES, change=change)
        ends = [end for end in self._ends if end is not None]
        if self.unit == "steps":
            last_steps = ends
        elif change == "after":
            last_steps = self._last_steps_after(ends)
        else:
            lengths = np.diff(np.array(ends, dtype=np.int64), prepend=0)
            sizes = np.array(self.sizes[: len(ends)], dtype=np.int64)
            updates: npt.NDArray[np.float64] = np.cumsum(lengths / sizes / (self.tokens_per_sample or 1))
            last_steps = [int(number) for number in np.floor(updates + 0.5)]
        if self.until is None:  # one step of the last stage, which lasts
            last_steps = [*last_steps, 1 + (last_steps[-1] if last_steps else 0)]
        if not 0 < last_steps[-1] <= MOST_STEPS:
            raise ValueError(f"the stages must make 1 to {MOST_STEPS} steps, got {last_steps[-1]}")
        of_steps = np.repeat(np.array(self.sizes, dtype=np.int64), np.diff(last_steps, prepend=0))
        return Trace(of_steps, is_open=self.until is None)

    def _last_steps_after(self, ends: list[int]) -> list[int]:
        steps = samples = 0
        found, fits = list[int](), True
        ends = [end // (self.tokens_per_sample or 1) for end in ends]
        for size, end in zip(self.sizes, ends, strict=self.until is not None):
            wanted = -(-max(0, end - samples) // size)
            number = wanted
            if self.until is not None:
                number = min(wanted, (ends[-1] - samples) // size) if fits else 0
                fits = fits and number == wanted  # otherwise the next step of this size exceeds the end
            steps, samples = steps + number, samples + number * size
            found.append(steps)
        return found

    @property
    def _ends(self) -> tuple[int | None, ...]:
        return (*self.starts[1:], self.until)

    def __str__(self) -> str:
        return " ".join(f"{format_count(s)}:{format_count(b)}" for s, b in zip(self.starts, self.sizes, strict=True))


def parse_count(text: str) -> int:
    """Parse an integer that may end in K (thousand), M (million), B (billion) or T (trillion): ``1.5M``."""
    found = _COUNT.fullmatch(text)
    value = Fraction(found[1]) * _SUFFIXES[found[2].upper()] if found else None
    if value is None or value.denominator != 1 or value >= 2**63:
        raise ValueError(f"expected an integer such as 96, 250K, 1.5M or 2B, got {text!r}")
    return int(value)


def format_count(value: int) -> str:
    """The shortest text for :func:`parse_count` without a decimal point: ``250K``, ``1500K``, ``96``."""
    suffix, factor = next((s, f) for s, f in _SUFFIXES.items() if value % f == 0 and (value or not s))
    return f"{value // factor}{suffix}"


TraceLike: TypeAlias = str | os.PathLike[str] | Sizes | Mapping[int, int] | Integer | Trace | Stages
"""Accepted as a trace: a path, stages, the batch sizes, or an integer for a constant batch size."""


def _unit_of(text: bytes) -> Unit | None:
    """The unit of the stages in a plain text; None if it is not one of stages."""
    _, header = next(_rows(text), (1, ""))
    names = [name.strip() for name in header.split(",")]
    return next((unit for unit in UNITS if unit == names[0] and COLUMNS[0] not in names), None)


def _read_sizes(source: str, content: bytes, *, is_on_disk: bool = True) -> npt.NDArray[np.int64]:
    """The batch sizes in a file; ValueError with line and value of the first invalid row."""
    text = _plain(content)
    line, header = next(_rows(text), (1, ""))
    if not header:
        raise ValueError(f"{source}:1: the file is empty, expected the columns {','.join(COLUMNS)}")
    names = [name.strip().strip('"') for name in header.split(",")]
    names = names if COLUMNS[1] in names else [COLUMNS[1] if name == _OTHER_NAME else name for name in names]
    for column in COLUMNS:
        if names.count(column) != 1:
            hint = ", with commas between columns" if len(names) == 1 else ""
            refuse(f"{source}:{line}", f"the header must name the column {column!r} once{hint}", repr(names)[:80])
    sizes = None
    if len(text) > _FEW_BYTES:
        # pandas reads files nearly twice as fast as bytes, but a pipe can be read only once
        is_file = is_on_disk and text == content and os.path.isfile(source)
        sizes = _sizes_at_once(os.path.abspath(source) if is_file else io.BytesIO(text), line, names)
    return _sizes_by_row(source, text, names) if sizes is None else sizes


def _plain(text: bytes) -> bytes:
    """The text without byte order mark and comments, with line feeds and unchanged line numbers."""
    text = text.removeprefix(b"\xef\xbb\xbf")
    if b"\r" in text:
        text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return _COMMENT.sub(b"", text) if b"#" in text else text


def _rows(text: bytes) -> Iterator[tuple[int, str]]:
    """Number and content of every non-blank line, the header first; lazy, because often only the header is needed."""
    for line, found in enumerate(_LINE.finditer(text), start=1):
        if content := found[0].strip(b" \t\n"):
            yield line, content.decode(errors="replace")


def _sizes_at_once(file: str | io.BytesIO, header_line: int, names: list[str]) -> npt.NDArray[np.int64] | None:
    """The batch sizes after the header if all rows are valid, else None; pandas reads millions in a moment."""
    import pandas as pd

    try:
        with warnings.catch_warnings():
            # pandas only warns if the first row is too long; mixed types are detected below
            warnings.simplefilter("error", pd.errors.ParserWarning)
            warnings.simplefilter("ignore", pd.errors.DtypeWarning)
            exactly: Any = {"compression": None, "quoting": csv.QUOTE_NONE, "na_filter": False, "index_col": False}
            exactly |= {"header": None, "names": range(len(names)), "encoding_errors": "replace"}
            frame = pd.read_csv(file, skiprows=header_line, **exactly)
    except (pd.errors.EmptyDataError, pd.errors.ParserError, pd.errors.ParserWarning):
        return None
    steps, sizes = (np.asarray(frame[names.index(column)]) for column in COLUMNS)
    if not len(frame) or steps.dtype != np.int64 or sizes.dtype != np.int64:
        return None
    follows = (steps[1:] == 0) | (steps[1:] == steps[:-1] + 1)
    # copy: a column may be a view of the whole table
    return np.array(sizes) if steps[0] == 0 and follows.all() and sizes.min() > 0 else None


def _sizes_by_row(source: str, text: bytes, names: list[str]) -> npt.NDArray[np.int64]:
    """The batch sizes after the header, row by row; raises at the first invalid row."""
    (header_line, _), *rows = _rows(text)
    if not rows:
        refuse(f"{source}:{header_line + 1}", "expected a row below the header", "nothing")
    sizes, expected = [], 0
    for line, content in rows:
        place, values = f"{source}:{line}", content.rstrip(", \t").split(",")
        if len(values) > len(names):
            refuse(place, f"a row must have {len(names)} values", len(values))
        of_columns = dict(zip(names, map(str.strip, values), strict=False))
        step, size = (_integer(place, column, of_columns.get(column, "")) for column in COLUMNS)
        if step not in (0, expected):
            refuse(place, f"step must be {expected}" + (" (or 0, to start again)" if expected else ""), step)
        sizes.append(_checked_size(size, place))
        expected = step + 1
    return np.array(sizes, dtype=np.int64)


def _integer(place: str, name: str, text: str) -> int:
    if not _INTEGER.fullmatch(text):
        refuse(place, f"{name} must be an integer", text or "nothing")
    if int(text) > LARGEST:
        refuse(place, f"{name} must be below 2**63", text)
    return int(text)


def _checked_size(size: Any, place: str) -> int:
    """Return a valid batch size as int, or raise ValueError with its place."""
    if not is_integer(size) or not 0 < size <= LARGEST:
        refuse(place, "batchsize must be a positive integer", size)
    return int(size)
