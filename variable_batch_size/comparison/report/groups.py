"""All seeds of a rule on a trace, taken together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from variable_batch_size.comparison.experiment import DIVERGED, DONE, FAILED, REFERENCE, Outcome, Run
from variable_batch_size.comparison.results import Results


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of what several seeds gave; the deviation, of a sample, is None for a single one."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Of those that are numbers; None if none is.

        >>> Spread.of([97.0, None, 99.0])
        Spread(mean=98.0, deviation=1.4142135623730951)
        """
        numbers = [value for value in values if value is not None]
        if not numbers:
            return None
        return cls(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None)


@dataclass(frozen=True)
class Difference:
    """By how much one group is above another, from the differences of runs of the same seed.

    Of n differences with mean d and standard deviation s the 95 % interval is d ± t · s / √n, with t of Student's
    distribution for n − 1 degrees of freedom; a single seed has none.
    """

    mean: float
    half_width: float | None

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0: else chance may have made the difference."""
        return self.half_width is not None and abs(self.mean) > self.half_width

    @classmethod
    def of(cls, values: Sequence[float]) -> Difference | None:
        """From the differences of all seeds; None if there are none.

        >>> gap = Difference.of([0.68, 0.74, 0.73])
        >>> print(f"{gap.mean:.4f} ± {gap.half_width:.4f}")
        0.7167 ± 0.0799
        """
        spread = Spread.of(values)
        if spread is None or spread.deviation is None:
            return None if spread is None else cls(spread.mean, None)
        t = _STUDENT[min(len(values) - 1, len(_STUDENT)) - 1]
        return cls(spread.mean, t * spread.deviation / math.sqrt(len(values)))


_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""The 97.5 % quantiles of Student's distribution for 1, 2 … degrees of freedom; with more, the last is cautious."""


@dataclass(frozen=True)
class Group:
    """All seeds of a rule on a trace."""

    trace: str
    rule: str
    outcomes: tuple[tuple[Run, Outcome], ...]

    @property
    def is_reference(self) -> bool:
        return self.trace == REFERENCE

    def num(self, status: str) -> int:
        """How many of the runs ended so."""
        return sum(outcome.status == status for _, outcome in self.outcomes)

    def spread(self, quantity: Callable[[Outcome], float | None]) -> Spread | None:
        """Of a quantity over the runs that are done."""
        return Spread.of(quantity(outcome) for _, outcome in self.outcomes if outcome.status == DONE)

    @property
    def final(self) -> Spread | None:
        return self.spread(lambda outcome: outcome.final_metric)

    def above(self, other: Group) -> Difference | None:
        """By how much the final metric is above that of another group; None if no seed is done in both."""
        mine, theirs = self._finals(), other._finals()
        return Difference.of([mine[seed] - theirs[seed] for seed in mine if seed in theirs])

    def _finals(self) -> dict[int, float]:
        """The final metric by seed."""
        return {run.seed: o.final_metric for run, o in self.outcomes if o.status == DONE and o.final_metric is not None}

    @property
    def failures(self) -> str:
        """How many did not end well, in words."""
        counts = [(self.num(status), status) for status in (DIVERGED, FAILED)]
        return ", ".join(f"{number} of {len(self.outcomes)} {status}" for number, status in counts if number)


def groups(results: Results) -> list[Group]:
    """The runs that have ended, taken together by trace and rule, in order."""
    found: dict[tuple[str, str], list[tuple[Run, Outcome]]] = {}
    for run, outcome in results.runs():
        found.setdefault((run.trace, run.rule), []).append((run, outcome))
    return [Group(trace, rule, tuple(outcomes)) for (trace, rule), outcomes in found.items()]


def ranking(of_trace: Iterable[Group], *, is_higher_better: bool) -> list[Group]:
    """Groups that have a final metric, from the best to the worst; a rule that diverged from fewer seeds is better."""

    def key(group: Group) -> tuple[int, float]:
        assert group.final is not None
        return group.num(DIVERGED), -group.final.mean if is_higher_better else group.final.mean

    return sorted((group for group in of_trace if group.final is not None), key=key)
