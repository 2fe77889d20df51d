"""results.csv and timings.csv, and the numbers of all seeds of a rule on a trace taken together."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from variable_batch_size.comparison.experiment import DIVERGED, DONE, FAILED, REFERENCE, Outcome, Results, Run
from variable_batch_size.files import write_text

COLUMNS = (
    "trace",
    "rule",
    "seed",
    "status",
    "updates",
    "samples",
    "progress",
    "final_loss",
    "final_metric",
    "best_metric",
    "reason",
)
"""Of results.csv: nothing that depends on how fast a machine is, so that the same experiment gives the same file."""


def write_tables(results: Results) -> None:
    """Write results.csv, and timings.csv with the seconds that each run took."""
    rows = [{**asdict(run), **asdict(outcome)} for run, outcome in results.runs()]
    write_text(results.directory / "results.csv", _csv(COLUMNS, rows))
    write_text(results.directory / "timings.csv", _csv(("trace", "rule", "seed", "seconds"), rows))


def _csv(columns: Iterable[str], rows: Iterable[dict[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


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
    """Groups from the best final metric to the worst; those without one last."""

    def key(group: Group) -> tuple[bool, float]:
        if group.final is None:
            return True, 0.0
        return False, -group.final.mean if is_higher_better else group.final.mean

    return sorted(of_trace, key=key)
