"""Arms of a comparison, their estimates over seeds, and the verdict in words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from variable_batch_size.checks import install
from variable_batch_size.comparison.experiment import (
    DIVERGED,
    DONE,
    FAILED,
    REFERENCE,
    Outcome,
    Run,
    Settings,
)
from variable_batch_size.comparison.results import Results


def number(value: float, *, like: float | None = None) -> str:
    """With two decimals, and more if it is, or is to be compared with what is, below 1; huge ones in short.

    >>> number(97.8125), number(0.97812), number(0.3, like=97.8), number(-3.2e20)
    ('97.81', '0.9781', '0.30', '-3.2e+20')
    """
    size = abs(value if like is None else like)
    if abs(value) >= 1e6:
        return f"{value:.3g}"
    decimals = 2 if size >= 1 or size == 0 or not math.isfinite(size) else 3 - math.floor(math.log10(size))
    return f"{value:.{decimals}f}"


def with_deviation(spread: Spread, *, unit: str) -> str:
    """A mean and its deviation.

    >>> with_deviation(Spread(97.8125, 0.318), unit=" %")
    '97.81 ± 0.32 %'
    """
    deviation = "" if spread.deviation is None else f" ± {number(spread.deviation, like=spread.mean)}"
    return f"{number(spread.mean)}{deviation}{unit}"


def with_interval(gap: Difference, *, unit: str, like: float) -> str:
    """A difference and its interval, with the digits of what differs.

    >>> with_interval(Difference(-2.1, 0.3), unit=" %", like=97.8)
    '2.10 ± 0.30 points lower'
    """
    width = "" if gap.half_width is None else f" ± {number(gap.half_width, like=like)}"
    unit = " points" if unit.strip() == "%" else unit
    return f"{number(abs(gap.mean), like=like)}{width}{unit} {'lower' if gap.mean < 0 else 'higher'}"


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
    """By how much one number is above another, from the differences of runs of the same seed.

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
        half_width = _student(len(values) - 1) * spread.deviation / math.sqrt(len(values))
        return cls(spread.mean, half_width)


def _student(degrees: int) -> float:
    """The quantile of Student's distribution that leaves 2.5 % above it."""
    try:
        from scipy.special import stdtrit  # what scipy.stats.t.ppf calls; scipy.stats takes a second to load
    except ImportError:
        raise ImportError(f"an interval needs scipy: {install('compare')}") from None
    return float(stdtrit(degrees, 0.975))


def verdicts(results: Results) -> dict[str, str]:
    """The verdict on every trace of an experiment, by its name."""
    settings, arms = results.settings(), Arms.of(results)
    return {name: verdict(settings, on_trace, arms.reference) for name, on_trace in arms.on_traces.items()}


def verdict(settings: Settings, arms: Sequence[Arm], reference: Arm | None) -> str:
    """How the rules did on a trace: which is best, if one is, how far behind the others are, and the yardstick.

    A difference is told with its 95 % interval over the seeds. The best is a rule that is told apart from each other
    one (:func:`is_ahead`); without such a rule, the verdict names none.
    """
    ranked = ranking(arms, is_higher_better=settings.is_higher_better)
    sentences = []
    if ranked:
        sentences = [_about_the_rules(settings, ranked), _about_the_reference(settings, ranked[0], reference)]
    sentences += [f"{arm.rule}: {arm.failures}." for arm in arms if arm.failures]
    if any(arm.final is not None and arm.final.deviation is None for arm in ranked):
        sentences.append("A single seed cannot tell a difference from chance.")
    return " ".join(sentence for sentence in sentences if sentence)


def ranking_in_words(settings: Settings, arms: Sequence[Arm]) -> str:
    """Rules from the best to the worst, then those without a result.

    A > says that each rule before it is told apart from each behind it, a ≈ that not all are.
    """
    ranked = ranking(arms, is_higher_better=settings.is_higher_better)
    words = ""
    for number, arm in enumerate(ranked):
        if number:
            words += " > " if _are_ahead(settings, ranked[:number], ranked[number:]) else " ≈ "
        words += arm.rule + (f" ({arm.failures})" if arm.failures else "")
    without = [f"{arm.rule} ({arm.failures})" for arm in arms if arm not in ranked]
    return "; without a result: ".join(part for part in (words, ", ".join(without)) if part)


def _are_ahead(settings: Settings, arms: Sequence[Arm], others: Sequence[Arm]) -> bool:
    """Whether each of some arms is told apart from each of those ranked below them."""
    is_higher_better = settings.is_higher_better
    return all(is_ahead(arm, other, is_higher_better=is_higher_better) for arm in arms for other in others)


def _about_the_rules(settings: Settings, ranked: Sequence[Arm]) -> str:
    first, others = ranked[0], ranked[1:]
    assert first.final is not None
    behind = [arm for arm in others if _are_ahead(settings, [first], [arm])]
    level = [f"{arm.rule} ({_gap(settings, arm, first)})" for arm in others if arm not in behind]
    result = f"{first.rule} with {with_deviation(first.final, unit=settings.unit)}"
    start = f"undecided, as {result} is not clearly ahead of {_joined(level)}" if level else f"best is {result}"
    return "; ".join([start, *(f"{arm.rule} {_gap(settings, arm, first)}" for arm in behind)]) + "."


def _gap(settings: Settings, arm: Arm, first: Arm) -> str:
    """How far an arm is from the first, in words."""
    gap = arm.above(first)
    if gap is None or first.final is None:
        return "without a seed in common"
    where = " where it did not diverge" if arm.num(DIVERGED) else ""
    return with_interval(gap, unit=settings.unit, like=first.final.mean) + where


def _joined(names: Sequence[str]) -> str:
    """Names with commas between them, and an "and" before the last."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _about_the_reference(settings: Settings, first: Arm, reference: Arm | None) -> str:
    if reference is None or reference.final is None:
        return ""
    gap = first.above(reference)
    if gap is None:
        return ""
    doubt = "" if gap.is_clear else ", which may be chance"
    return (
        f"Against always a batch of {settings.ref_batchsize} ({with_deviation(reference.final, unit=settings.unit)}), "
        f"{first.rule} is {with_interval(gap, unit=settings.unit, like=reference.final.mean)}{doubt}."
    )
