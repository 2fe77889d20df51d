"""The verdict on a trace in words, computed from the numbers."""

from __future__ import annotations

from collections.abc import Sequence

from variable_batch_size.comparison.experiment import DIVERGED, Settings
from variable_batch_size.comparison.report.arm import Arm, Arms, is_ahead, ranking
from variable_batch_size.comparison.report.numbers import with_deviation, with_interval
from variable_batch_size.comparison.results import Results


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
