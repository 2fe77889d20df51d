"""The verdict on a trace in words, computed from the numbers."""

from __future__ import annotations

from collections.abc import Sequence

from variable_batch_size.comparison.experiment import DIVERGED, Settings
from variable_batch_size.comparison.report.arm import Arm, Arms, ranking
from variable_batch_size.comparison.report.estimates import Difference, Spread
from variable_batch_size.comparison.report.numbers import with_deviation, with_interval
from variable_batch_size.comparison.results import Results


def verdicts(results: Results) -> dict[str, str]:
    """The verdict on every trace of an experiment, by its name."""
    settings, arms = results.settings(), Arms.of(results)
    return {name: verdict(settings, on_trace, arms.reference) for name, on_trace in arms.on_traces.items()}


def verdict(settings: Settings, arms: Sequence[Arm], reference: Arm | None) -> str:
    """How the rules did on a trace: which is best, how far behind the others are, and the yardstick.

    A difference is told with its 95 % interval over the seeds (:class:`Difference`); where that does not leave out 0,
    the rules are not told apart.
    """
    ranked = ranking(arms, is_higher_better=settings.is_higher_better)
    sentences = []
    if ranked:
        best, others = ranked[0], [(arm, arm.above(ranked[0])) for arm in ranked[1:]]
        assert best.final is not None
        parts = [f"best is {best.rule} with {with_deviation(best.final, unit=settings.unit)}"]
        level = [_behind(settings, arm, gap, best.final) for arm, gap in others if gap is None or not gap.is_clear]
        if level:
            parts.append(f"not told apart from it: {', '.join(level)}")
        parts += [_behind(settings, arm, gap, best.final) for arm, gap in others if gap is not None and gap.is_clear]
        sentences.append("; ".join(parts) + ".")
        if reference is not None and reference.final is not None:
            sentences.append(_about_the_reference(settings, best, reference, reference.final))
    sentences += [f"{arm.rule}: {arm.failures}." for arm in arms if arm.failures]
    if any(arm.final is not None and arm.final.deviation is None for arm in ranked):
        sentences.append("A single seed cannot tell a difference from chance.")
    return " ".join(sentences)


def ranking_in_words(settings: Settings, arms: Sequence[Arm]) -> str:
    """Rules from the best to the worst: > where neighbours are told apart, ≈ where they are not; then those without."""
    ranked = ranking(arms, is_higher_better=settings.is_higher_better)
    words = ""
    for before, arm in zip([None, *ranked], ranked, strict=False):
        if before is not None:
            gap = arm.above(before)
            is_worse = arm.num(DIVERGED) > before.num(DIVERGED) or (gap is not None and gap.is_clear)
            words += " > " if is_worse else " ≈ "
        words += arm.rule + (f" ({arm.failures})" if arm.failures else "")
    without = [f"{arm.rule} ({arm.failures})" for arm in arms if arm not in ranked]
    return "; without a result: ".join(part for part in (words, ", ".join(without)) if part)


def _behind(settings: Settings, arm: Arm, gap: Difference | None, best: Spread) -> str:
    return arm.rule if gap is None else f"{arm.rule} {with_interval(gap, unit=settings.unit, like=best.mean)}"


def _about_the_reference(settings: Settings, best: Arm, reference: Arm, yardstick: Spread) -> str:
    gap = best.above(reference)
    if gap is None:
        return ""
    doubt = "" if gap.is_clear else ", which may be chance"
    return (
        f"Against always a batch of {settings.ref_batchsize} ({with_deviation(yardstick, unit=settings.unit)}), "
        f"{best.rule} is {with_interval(gap, unit=settings.unit, like=yardstick.mean)}{doubt}."
    )
