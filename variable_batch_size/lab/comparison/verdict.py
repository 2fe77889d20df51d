"""The verdict of a comparison: estimates over seeds, the ranking of rules, and both in words."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from variable_batch_size.lab.comparison import experiment
from variable_batch_size.lab.comparison.experiment import DIVERGED, DONE, REFERENCE, Outcome, Results, Run, Settings
from variable_batch_size.lab.planning.profile import half_interval


def number(value: float, *, like: float | None = None) -> str:
    """A number with two decimals, more if `like`, by default itself, is below 1, and fewer if it is huge.

    >>> number(97.8125), number(0.97812), number(0.3, like=97.8), number(-3.2e20)
    ('97.81', '0.9781', '0.30', '-3.2e+20')
    """
    size = abs(value if like is None else like)
    if abs(value) >= 1e6:
        return f"{value:.3g}"
    decimals = 2 if size >= 1 or size == 0 or not math.isfinite(size) else 3 - math.floor(math.log10(size))
    return f"{value:.{decimals}f}"


class Estimate(NamedTuple):
    """A mean over seeds, with its standard deviation or half of its 95 % interval; a single seed has neither."""

    mean: float
    error: float | None

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.error is not None and abs(self.mean) > self.error

    def text(self, unit: str, *, like: float | None = None) -> str:
        """The estimate with the digits of `like`, by default of its mean."""
        like = self.mean if like is None else like
        error = "" if self.error is None else f" ± {number(self.error, like=like)}"
        return f"{number(self.mean, like=like)}{error}{unit}"


def spread(values: Iterable[float]) -> Estimate | None:
    """Mean and sample standard deviation; None without values."""
    numbers = list(values)
    if not numbers:
        return None
    return Estimate(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None)


def difference(values: Sequence[float], *, level: float = 0.95) -> Estimate | None:
    """The mean d of n paired differences, and its interval, d ± t · s / √n with Student's t; None without any.

    >>> [round(number, 3) for number in difference([1.0, 2.0, 3.0], level=0.9)]  # t is 2.92 for three
    [2.0, 1.686]
    """
    found = spread(values)
    if found is None or found.error is None:
        return found
    return found._replace(error=half_interval(values, level=level))


class Arm(NamedTuple):
    """All runs of a rule on a trace that have ended."""

    trace: str
    rule: str
    outcomes: tuple[tuple[Run, Outcome], ...]

    @property
    def is_reference(self) -> bool:
        return self.trace == REFERENCE

    def seeds(self, *statuses: str) -> set[int]:
        """The seeds of the runs with one of these statuses."""
        return {run.seed for run, outcome in self.outcomes if outcome.status in statuses}

    @property
    def share_diverged(self) -> float:
        """The fraction of diverged runs, not counting failed ones."""
        return len(self.seeds(DIVERGED)) / max(1, len(self.seeds(DIVERGED, DONE)))

    def values(self, quantity: str) -> dict[int, float]:
        """A field of the outcomes of the runs that are done, by seed, where it is not None."""
        found = {run.seed: getattr(outcome, quantity) for run, outcome in self.outcomes if outcome.status == DONE}
        return {seed: value for seed, value in found.items() if value is not None}

    @property
    def final(self) -> Estimate | None:
        return spread(self.values("final_metric").values())

    def above(self, other: "Arm") -> Estimate | None:
        """The final metric minus that of another arm; None if they have no seed in common."""
        mine, theirs = self.values("final_metric"), other.values("final_metric")
        return difference([mine[seed] - theirs[seed] for seed in mine if seed in theirs])

    def num_common(self, other: "Arm") -> int:
        """The number of seeds with a final metric in both arms."""
        return len(self.values("final_metric").keys() & other.values("final_metric").keys())

    @property
    def failures(self) -> str:
        """The numbers of diverged and failed runs, as text."""
        counts = [(len(self.seeds(status)), status) for status in (DIVERGED, experiment.FAILED)]
        return ", ".join(f"{number} of {len(self.outcomes)} {status}" for number, status in counts if number)


def arms_of(results: Results) -> tuple[Arm | None, dict[str, list[Arm]]]:
    """The baseline, and the arms of each trace on which a run has ended, in the order of the command."""
    outcomes: dict[tuple[str, str], list[tuple[Run, Outcome]]] = {}
    for run, outcome in results.runs():
        outcomes.setdefault((run.trace, run.rule), []).append((run, outcome))
    found = [Arm(*names, tuple(ended)) for names, ended in outcomes.items()]
    on_traces = {name: [arm for arm in found if arm.trace == name] for name in results.read_experiment()["traces"]}
    reference = next((arm for arm in found if arm.is_reference), None)
    return reference, {name: arms for name, arms in on_traces.items() if arms}


def ranking(arms: Iterable[Arm], *, is_higher_better: bool) -> list[Arm]:
    """Arms with a final metric, from the best to the worst; an arm with fewer diverged runs is better."""
    sign = -1 if is_higher_better else 1
    finals = [(arm.share_diverged, sign * arm.final.mean, arm) for arm in arms if arm.final is not None]
    return [arm for *_, arm in sorted(finals, key=lambda final: final[:2])]


def is_ahead(arm: Arm, other: Arm, *, is_higher_better: bool) -> bool:
    """Whether an arm is significantly better than one ranked below it, or diverged for fewer of their common seeds."""
    gap = arm.above(other)
    is_better = gap is not None and gap.is_clear and (gap.mean > 0) == is_higher_better
    common = arm.seeds(DONE, DIVERGED) & other.seeds(DONE, DIVERGED)
    return is_better or len(other.seeds(DIVERGED) & common) > len(arm.seeds(DIVERGED) & common)


def verdict(settings: Settings, arms: Sequence[Arm], reference: Arm | None) -> str:
    """The best rule on a trace, if one is ahead of all others, and the differences from it with 95 % intervals."""
    found = tiers(settings, arms)
    sentences = []
    if found:
        sentences = [_rules_sentence(settings, found), _reference_sentence(settings, found[0][0], reference)]
    sentences += [f"{arm.rule}: {arm.failures}." for arm in arms if arm.failures]
    if any(arm.final is not None and arm.final.error is None for tier in found for arm in tier):
        sentences.append("A single seed cannot tell a difference from chance.")
    return " ".join(sentence for sentence in sentences if sentence)


def tiers(settings: Settings, arms: Iterable[Arm]) -> list[list[Arm]]:
    """The ranking in groups: all arms of a group are ahead of all after it, and not all within it can be told apart."""
    ranked = ranking(arms, is_higher_better=settings.is_higher_better)
    found: list[list[Arm]] = []
    for number, arm in enumerate(ranked):
        if not number or _are_ahead(settings, ranked[:number], ranked[number:]):
            found.append([])
        found[-1].append(arm)
    return found


def ranking_in_words(settings: Settings, arms: Sequence[Arm]) -> str:
    """The groups from the best to the worst, separated by >; then the rules without a result."""
    found = tiers(settings, arms)
    words = " > ".join(
        ", ".join(arm.rule + (f" ({arm.failures})" if arm.failures else "") for arm in tier) for tier in found
    )
    without = [f"{arm.rule} ({arm.failures})" for arm in arms if arm.final is None]
    return "; without a result: ".join(part for part in (words, ", ".join(without)) if part)


def _are_ahead(settings: Settings, arms: Sequence[Arm], others: Sequence[Arm]) -> bool:
    """Whether each of some arms is ahead of each of those ranked below them."""
    return all(is_ahead(arm, other, is_higher_better=settings.is_higher_better) for arm in arms for other in others)


def _rules_sentence(settings: Settings, found: Sequence[Sequence[Arm]]) -> str:
    first, *others = [arm for tier in found for arm in tier]
    assert first.final is not None
    level = level_with_best(settings, found)
    behind = [f"{arm.rule} {gap_text(settings, arm, first)}" for arm in others if arm not in level]
    result = f"{first.rule} with {first.final.text(settings.unit)}"
    not_behind = joined([f"{arm.rule} ({gap_text(settings, arm, first)})" for arm in level])
    start = f"undecided, as {result} is not clearly ahead of {not_behind}" if level else f"best is {result}"
    return "; ".join([start, *behind]) + "."


def level_with_best(settings: Settings, found: Sequence[Sequence[Arm]]) -> list[Arm]:
    """The arms that the best one is not ahead of; they are in its group, and there are none if it is alone there."""
    first, *others = found[0]
    return [arm for arm in others if not _are_ahead(settings, [first], [arm])]


def joined(parts: Sequence[str]) -> str:
    """Parts with commas, and "and" before the last."""
    return " and ".join(part for part in (", ".join(parts[:-1]), *parts[-1:]) if part)


def gap_text(settings: Settings, arm: Arm, other: Arm) -> str:
    """The difference from another arm, as text with as many decimals as that arm's metric."""
    gap = arm.above(other)
    if gap is None or other.final is None:
        return "without a seed in common"
    where = " where it did not diverge" if arm.seeds(DIVERGED) and not other.is_reference else ""
    return f"{size_text(settings, gap, other)} {'lower' if gap.mean < 0 else 'higher'}{where}"


def size_text(settings: Settings, gap: Estimate, other: Arm) -> str:
    """A difference from an arm without its sign, as text."""
    assert other.final is not None
    return gap._replace(mean=abs(gap.mean)).text(unit_of_gaps(settings), like=other.final.mean)


def unit_of_gaps(settings: Settings) -> str:
    return " points" if settings.unit.strip() == "%" else settings.unit


def _reference_sentence(settings: Settings, first: Arm, reference: Arm | None) -> str:
    gap = first.above(reference) if reference else None
    if gap is None or reference is None or reference.final is None:
        return ""
    always = f"Against a constant batch of {settings.ref_batchsize} ({reference.final.text(settings.unit)})"
    doubt = "" if gap.is_clear else ", which may be chance"
    return f"{always}, {first.rule} is {gap_text(settings, first, reference)}{doubt}."
