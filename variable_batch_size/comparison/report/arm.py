"""An arm of a comparison: all seeds of a rule on a trace, taken together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from variable_batch_size.comparison.experiment import DIVERGED, DONE, FAILED, REFERENCE, Outcome, Run
from variable_batch_size.comparison.report.estimates import Difference, Spread
from variable_batch_size.comparison.results import Results


@dataclass(frozen=True)
class Arm:
    """All seeds of a rule on a trace that have ended."""

    trace: str
    rule: str
    outcomes: tuple[tuple[Run, Outcome], ...]

    @property
    def is_reference(self) -> bool:
        return self.trace == REFERENCE

    def num(self, status: str) -> int:
        """How many of the runs ended so."""
        return sum(outcome.status == status for _, outcome in self.outcomes)

    def seeds(self, *statuses: str) -> set[int]:
        """The seeds of the runs that ended so."""
        return {run.seed for run, outcome in self.outcomes if outcome.status in statuses}

    @property
    def share_diverged(self) -> float:
        """Of the runs that have ended without failing."""
        return self.num(DIVERGED) / max(1, self.num(DIVERGED) + self.num(DONE))

    def spread(self, quantity: Callable[[Outcome], float | None]) -> Spread | None:
        """Of a quantity over the runs that are done."""
        return Spread.of(quantity(outcome) for _, outcome in self.outcomes if outcome.status == DONE)

    @property
    def final(self) -> Spread | None:
        return self.spread(lambda outcome: outcome.final_metric)

    def above(self, other: Arm) -> Difference | None:
        """By how much the final metric is above that of another arm; None if no seed is done in both."""
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


@dataclass(frozen=True)
class Arms:
    """All arms of a comparison: the yardstick, and those on each trace, in the order in which traces were asked for."""

    reference: Arm | None
    on_traces: Mapping[str, list[Arm]]

    @classmethod
    def of(cls, results: Results) -> Arms:
        """Of the runs that have ended; a trace on which none has is left out."""
        outcomes: dict[tuple[str, str], list[tuple[Run, Outcome]]] = {}
        for run, outcome in results.runs():
            outcomes.setdefault((run.trace, run.rule), []).append((run, outcome))
        found = [Arm(trace, rule, tuple(ended)) for (trace, rule), ended in outcomes.items()]
        on_traces = {name: [arm for arm in found if arm.trace == name] for name in results.read_experiment()["traces"]}
        reference = next((arm for arm in found if arm.is_reference), None)
        return cls(reference, {name: arms for name, arms in on_traces.items() if arms})


def ranking(arms: Iterable[Arm], *, is_higher_better: bool) -> list[Arm]:
    """Arms that have a final metric, from the best to the worst; one of which fewer runs have diverged is better."""

    def key(arm: Arm) -> tuple[float, float]:
        assert arm.final is not None
        return arm.share_diverged, -arm.final.mean if is_higher_better else arm.final.mean

    return sorted((arm for arm in arms if arm.final is not None), key=key)


def is_ahead(arm: Arm, other: Arm, *, is_higher_better: bool) -> bool:
    """Whether an arm is told apart from one ranked below it, which diverged from more seeds or is clearly worse.

    Both are told by the seeds that have ended in both: one arm may have more of them than the other.
    """
    gap = arm.above(other)
    is_better = gap is not None and gap.is_clear and (gap.mean > 0) == is_higher_better
    common = arm.seeds(DONE, DIVERGED) & other.seeds(DONE, DIVERGED)
    return is_better or len(other.seeds(DIVERGED) & common) > len(arm.seeds(DIVERGED) & common)
