"""The verdict on a trace in words, computed from the numbers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from variable_batch_size.comparison.experiment import Results, Settings
from variable_batch_size.comparison.results import Group, Spread, groups, ranking


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
    """How the rules did on a trace: which are level with the best, how far behind the others are, and the yardstick."""
    in_order = ranking(groups, is_higher_better=settings.is_higher_better)
    ranked = [(group.rule, group.final) for group in in_order if group.final is not None]
    one = one_deviation(groups if reference is None else [*groups, reference])
    sentences = []
    if ranked:
        best_rule, best = ranked[0]
        level = [rule for rule, spread in ranked if abs(spread.mean - best.mean) <= one]
        behind = [
            f"{rule} {difference(settings, spread, best)} ({shown(settings, spread)})"
            for rule, spread in ranked[len(level) :]
        ]
        sentences.append("; ".join([_about_the_best(settings, level, best), *behind]) + ".")
        if reference is not None and reference.final is not None:
            yardstick = reference.final
            is_level = abs(best.mean - yardstick.mean) <= one
            sentences.append(
                f"Against always a batch of {settings.ref_batchsize} ({shown(settings, yardstick)}), {best_rule} is "
                f"{'within one deviation' if is_level else difference(settings, best, yardstick)}."
            )
    sentences += [f"{group.rule}: {group.failures}." for group in in_order if group.failures]
    if any(spread.deviation is None for _, spread in ranked):
        sentences.append("A single seed cannot tell a difference from chance.")
    return " ".join(sentences)


def one_deviation(groups: Iterable[Group]) -> float:
    """By how much means may differ and still be level: the median of the standard deviations over seeds.

    The median, because a rule whose seeds differ wildly is not level with the others for that.
    """
    deviations = [group.final.deviation for group in groups if group.final is not None]
    return statistics.median([deviation for deviation in deviations if deviation is not None] or [0.0])


def number(value: float) -> str:
    """With two decimals, unless it is so large that they would mean nothing.

    >>> number(97.8125), number(-3.2e20)
    ('97.81', '-3.2e+20')
    """
    return f"{value:.2f}" if abs(value) < 1e6 else f"{value:.3g}"


def shown(settings: Settings, spread: Spread) -> str:
    """A mean and its deviation, such as ``97.81 ± 0.32 %``."""
    deviation = "" if spread.deviation is None else f" ± {number(spread.deviation)}"
    return f"{number(spread.mean)}{deviation}{settings.unit}"


def difference(settings: Settings, spread: Spread, other: Spread) -> str:
    """How much lower or higher a mean is than another, such as ``2.10 points lower``."""
    gap = spread.mean - other.mean
    unit = " points" if settings.unit.strip() == "%" else settings.unit
    return f"{number(abs(gap))}{unit} {'lower' if gap < 0 else 'higher'}"


def _about_the_best(settings: Settings, rules: Sequence[str], best: Spread) -> str:
    if len(rules) == 1:
        return f"best is {rules[0]} with {shown(settings, best)}"
    together = f"{', '.join(rules[:-1])} and {rules[-1]}"
    return f"{together} within one deviation, at best {shown(settings, best)}"
