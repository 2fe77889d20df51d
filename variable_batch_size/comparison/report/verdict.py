"""The verdict on a trace in words, computed from the numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from variable_batch_size.comparison.experiment import DIVERGED, Settings
from variable_batch_size.comparison.report.groups import Difference, Group, Spread, groups, ranking
from variable_batch_size.comparison.results import Results


def verdicts(results: Results) -> dict[str, str]:
    """The verdict on every trace of an experiment, by its name."""
    settings = results.settings()
    found = groups(results)
    reference = next((group for group in found if group.is_reference), None)
    by_trace: dict[str, list[Group]] = {}
    for group in found:
        if not group.is_reference:
            by_trace.setdefault(group.trace, []).append(group)
    return {name: verdict(settings, members, reference) for name, members in by_trace.items()}


def verdict(settings: Settings, groups: Sequence[Group], reference: Group | None) -> str:
    """How the rules did on a trace: which is best, how far behind the others are, and the yardstick.

    A difference is told with its 95 % interval over the seeds (:class:`Difference`); where that does not leave out 0,
    the rules are not told apart.
    """
    ranked = ranking(groups, is_higher_better=settings.is_higher_better)
    sentences = []
    if ranked:
        best, others = ranked[0], [(group, group.above(ranked[0])) for group in ranked[1:]]
        assert best.final is not None
        parts = [f"best is {best.rule} with {shown(settings, best.final)}"]
        level = [_behind(settings, group, gap, best.final) for group, gap in others if gap is None or not gap.is_clear]
        if level:
            parts.append(f"not told apart from it: {', '.join(level)}")
        parts += [
            _behind(settings, group, gap, best.final) for group, gap in others if gap is not None and gap.is_clear
        ]
        sentences.append("; ".join(parts) + ".")
        if reference is not None and reference.final is not None:
            sentences.append(_about_the_reference(settings, best, reference, reference.final))
    sentences += [f"{group.rule}: {group.failures}." for group in groups if group.failures]
    if any(group.final is not None and group.final.deviation is None for group in ranked):
        sentences.append("A single seed cannot tell a difference from chance.")
    return " ".join(sentences)


def ranking_in_words(settings: Settings, groups: Sequence[Group]) -> str:
    """Rules from the best to the worst: > where neighbours are told apart, ≈ where they are not; then those without."""
    ranked = ranking(groups, is_higher_better=settings.is_higher_better)
    words = ""
    for before, group in zip([None, *ranked], ranked, strict=False):
        if before is not None:
            gap = group.above(before)
            is_worse = group.num(DIVERGED) > before.num(DIVERGED) or (gap is not None and gap.is_clear)
            words += " > " if is_worse else " ≈ "
        words += group.rule + (f" ({group.failures})" if group.failures else "")
    without = [f"{group.rule} ({group.failures})" for group in groups if group not in ranked]
    return "; without a result: ".join(part for part in (words, ", ".join(without)) if part)


def number(value: float, like: float | None = None) -> str:
    """With two decimals, and more if it is, or is to be compared with what is, below 1; huge ones in short.

    >>> number(97.8125), number(0.97812), number(0.3, like=97.8), number(-3.2e20)
    ('97.81', '0.9781', '0.30', '-3.2e+20')
    """
    size = abs(value if like is None else like)
    if abs(value) >= 1e6:
        return f"{value:.3g}"
    decimals = 2 if size >= 1 or size == 0 or not math.isfinite(size) else 3 - math.floor(math.log10(size))
    return f"{value:.{decimals}f}"


def shown(settings: Settings, spread: Spread) -> str:
    """A mean and its deviation, such as ``97.81 ± 0.32 %``."""
    deviation = "" if spread.deviation is None else f" ± {number(spread.deviation, like=spread.mean)}"
    return f"{number(spread.mean)}{deviation}{settings.unit}"


def _gap(settings: Settings, gap: Difference, like: Spread) -> str:
    """A difference and its interval, such as ``2.10 ± 0.30 points lower``."""
    width = "" if gap.half_width is None else f" ± {number(gap.half_width, like=like.mean)}"
    unit = " points" if settings.unit.strip() == "%" else settings.unit
    return f"{number(abs(gap.mean), like=like.mean)}{width}{unit} {'lower' if gap.mean < 0 else 'higher'}"


def _behind(settings: Settings, group: Group, gap: Difference | None, best: Spread) -> str:
    return group.rule if gap is None else f"{group.rule} {_gap(settings, gap, best)}"


def _about_the_reference(settings: Settings, best: Group, reference: Group, yardstick: Spread) -> str:
    gap = best.above(reference)
    if gap is None:
        return ""
    doubt = "" if gap.is_clear else ", which may be chance"
    return (
        f"Against always a batch of {settings.ref_batchsize} ({shown(settings, yardstick)}), {best.rule} is "
        f"{_gap(settings, gap, yardstick)}{doubt}."
    )
