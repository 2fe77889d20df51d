"""Stages: batch sizes that hold for a while, as a compact text such as ``0:768 250K:1536 500K:3072``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

import numpy as np

from variable_batch_size.checks import check_one_of
from variable_batch_size.traces.limits import MOST_STEPS
from variable_batch_size.traces.trace import Trace

Unit = Literal["steps", "samples"]
UNITS: tuple[Unit, ...] = get_args(Unit)

_SUFFIXES = {"B": 10**9, "M": 10**6, "K": 10**3, "": 1}
_COUNT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([KMB]?)", re.IGNORECASE)


@dataclass(frozen=True)
class Stages:
    """Batch sizes, where each of them begins, and where the last one ends.

    Counted in samples, a stage from s to t with the batch size B is worth (t − s) / B updates. A change comes at the
    step nearest to the updates so far, so that rounding errors never add up over stages; a stage of less than half an
    update may have no step.

    Args:
        starts: where each stage begins, in `unit`; the first at 0.
        sizes: the batch size of each stage.
        until: where the last stage ends, in `unit`.
        unit: ``"steps"`` or ``"samples"``.

    >>> stages = Stages.parse("0:768 250K:1536 500K:3072", until=1_000_000, unit="samples")
    >>> [250_000 / 768, 250_000 / 1536, 500_000 / 3072]
    [325.5208333333333, 162.76041666666666, 162.76041666666666]
    >>> stages.trace()
    <Trace of 651 steps: 768, 768, 768, 768, 768, 768, …>
    >>> str(Stages.of(stages.trace(), unit="steps"))
    '0:768 326:1536 488:3072'
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    until: int
    unit: Unit

    def __post_init__(self) -> None:
        check_one_of(UNITS, unit=self.unit)
        if not self.starts or self.starts[0] != 0:
            raise ValueError(f"the first stage must begin at 0, got {self.starts[0] if self.starts else 'no stage'}")
        for number, (start, end) in enumerate(zip(self.starts, (*self.starts[1:], self.until), strict=True), start=1):
            if end <= start:
                raise ValueError(f"stage {number} must end after its start at {start}, got {end}")
        for number, size in enumerate(self.sizes, start=1):
            if size <= 0:
                raise ValueError(f"the batch size of stage {number} must be positive, got {size}")

    @classmethod
    def parse(cls, text: str, *, until: int, unit: Unit) -> Stages:
        """Read ``start:size`` pairs, separated by blanks or commas; numbers may end in K, M or B."""
        pairs = []
        for number, stage in enumerate(re.split(r"[\s,]+", text.strip()), start=1):
            start, colon, size = stage.partition(":")
            if not colon:
                raise ValueError(f"stage {number} must be written start:size, got {stage!r}")
            pairs.append((parse_count(start), parse_count(size)))
        starts, sizes = zip(*pairs, strict=True)
        return cls(starts, sizes, until, unit)

    @classmethod
    def of(cls, trace: Trace, *, unit: Unit) -> Stages:
        """The stages of a trace, which :meth:`trace` turns back into the same trace, in either unit."""
        if trace.is_endless:
            raise ValueError("a constant trace is endless and has no stages")
        changes = np.concatenate(([0], np.flatnonzero(np.diff(trace.sizes)) + 1))
        positions = np.concatenate(([0], np.cumsum(trace.sizes))) if unit == "samples" else np.arange(len(trace) + 1)
        return cls(tuple(positions[changes].tolist()), tuple(trace.sizes[changes].tolist()), int(positions[-1]), unit)

    def trace(self) -> Trace:
        """The trace that these stages make."""
        sizes = np.array(self.sizes, dtype=np.int64)
        ends = np.array((*self.starts[1:], self.until), dtype=np.int64)
        if self.unit == "samples":
            updates = np.cumsum(np.diff(ends, prepend=0) / sizes)
            ends = np.floor(updates + 0.5).astype(np.int64)
        if not 0 < ends[-1] <= MOST_STEPS:
            raise ValueError(f"the stages must make from 1 to {MOST_STEPS} steps, got {ends[-1]}")
        return Trace.from_sequence(np.repeat(sizes, np.diff(ends, prepend=0)))

    def __str__(self) -> str:
        return " ".join(f"{format_count(s)}:{format_count(b)}" for s, b in zip(self.starts, self.sizes, strict=True))


def parse_count(text: str) -> int:
    """A whole number that may end in K (thousand), M (million) or B (billion).

    >>> parse_count("250K"), parse_count("1.5M"), parse_count("96")
    (250000, 1500000, 96)
    """
    found = _COUNT.fullmatch(text)
    value = Fraction(found[1]) * _SUFFIXES[found[2].upper()] if found else None
    if value is None or value.denominator != 1 or value >= 2**63:
        raise ValueError(f"expected a whole number such as 96, 250K, 1.5M or 2B, got {text!r}")
    return int(value)


def format_count(value: int) -> str:
    """The shortest text that :func:`parse_count` reads back without a decimal point.

    >>> format_count(250_000), format_count(1_500_000), format_count(96)
    ('250K', '1500K', '96')
    """
    suffix, factor = next((s, f) for s, f in _SUFFIXES.items() if value % f == 0 and (value or not s))
    return f"{value // factor}{suffix}"
