"""Stages: a piecewise constant batch size, written as ``0:768 250K:1536 500K:3072``."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

import numpy as np

from variable_batch_size.checks import check_one_of, check_positive
from variable_batch_size.traces.trace import MOST_STEPS, Trace

Unit = Literal["steps", "samples", "tokens"]
UNITS: tuple[Unit, ...] = get_args(Unit)
Change = Literal["nearest", "after"]
CHANGES: tuple[Change, ...] = get_args(Change)

_SUFFIXES = {"T": 10**12, "B": 10**9, "M": 10**6, "K": 10**3, "": 1}
_COUNT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([KMBT]?)", re.IGNORECASE)


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
    """

    starts: tuple[int, ...]  # the start of each stage, in `unit`; the first is 0
    sizes: tuple[int, ...]  # the batch size of each stage, in samples
    until: int  # the end of the last stage, in `unit`
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
            if end <= start:
                raise ValueError(f"stage {number} must end after its start at {start}, got {end}")
            if size <= 0:
                raise ValueError(f"the batch size of stage {number} must be positive, got {size}")

    @classmethod
    def parse(cls, text: str, *, until: int, unit: Unit, tokens_per_sample: int | None = None) -> "Stages":
        """Parse ``start:size`` pairs, separated by whitespace or commas; numbers may end in K, M, B or T."""
        pairs = []
        for number, stage in enumerate(re.split(r"[\s,]+", text.strip()), start=1):
            start, colon, size = stage.partition(":")
            if not colon:
                raise ValueError(f"stage {number} must have the form start:size, got {stage!r}")
            pairs.append((parse_count(start), parse_count(size)))
        starts, sizes = zip(*pairs, strict=True)
        return cls(starts, sizes, until, unit, tokens_per_sample)

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
        if self.unit == "steps":
            last_steps = list(self._ends)
        elif change == "after":
            last_steps = self._last_steps_after()
        else:
            lengths = np.diff(np.array(self._ends, dtype=np.int64), prepend=0)
            updates = np.cumsum(lengths / np.array(self.sizes, dtype=np.int64) / (self.tokens_per_sample or 1))
            last_steps = [int(number) for number in np.floor(updates + 0.5)]
        if not 0 < last_steps[-1] <= MOST_STEPS:
            raise ValueError(f"the stages must make 1 to {MOST_STEPS} steps, got {last_steps[-1]}")
        return Trace.from_sequence(np.repeat(np.array(self.sizes, dtype=np.int64), np.diff(last_steps, prepend=0)))

    def _last_steps_after(self) -> list[int]:
        steps = samples = 0
        found, fits = list[int](), True
        ends = [end // (self.tokens_per_sample or 1) for end in self._ends]
        for size, end in zip(self.sizes, ends, strict=True):
            wanted = -(-max(0, end - samples) // size)
            number = min(wanted, (ends[-1] - samples) // size) if fits else 0
            fits = fits and number == wanted  # otherwise the next step of this size exceeds the end
            steps, samples = steps + number, samples + number * size
            found.append(steps)
        return found

    @property
    def _ends(self) -> tuple[int, ...]:
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
