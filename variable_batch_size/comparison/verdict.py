"""The verdict on a trace in words, computed from the numbers."""

from __future__ import annotations

from collections.abc import Sequence

from variable_batch_size.comparison.experiment import DONE, Results, Settings
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
    """How the rules did on a trace: which are level with the best, how far behind the others are, and the yardstick.

    Two groups are level if their means differ by no more than the larger of their standard deviations.
    """
    in_order = ranking(groups, is_higher_better=settings.is_higher_better)
    ranked = [(group, group.final) for group in in_order if group.final is not None]
    sentences = []
    if ranked:
        best, best_spread = ranked[0]
        level = [group.rule for group, spread in ranked if are_level(best_spread, spread)]
        behind = [
            f"{group.rule} {difference(settings, spread, best_spread)}"
            for group, spread in ranked
            if not are_level(best_spread, spread)
        ]
        sentences.append("; ".join([_about_the_best(settings, level, best_spread), *behind]) + ".")
        if reference is not None and reference.final is not None:
            sentences.append(_about_the_reference(settings, best.rule, best_spread, reference.final))
    sentences += [f"{group.rule}: {group.failures}." for group in in_order if group.failures]
    if any(group.num(DONE) == 1 for group, _ in ranked):
        sentences.append("A single seed cannot tell a difference from chance.")
    return " ".join(sentences)


def are_level(one: Spread, other: Spread) -> bool:
    """Whether two means differ by no more than one deviation, the larger; for single seeds, whether they are equal.

    >>> are_level(Spread(98.0, 0.3), Spread(97.8, 0.1)), are_level(Spread(98.0, 0.3), Spread(97.6, 0.1))
    (True, False)
    """
    return abs(one.mean - other.mean) <= max(one.deviation or 0.0, other.deviation or 0.0)


def shown(settings: Settings, spread: Spread) -> str:
    """A mean and its deviation, such as ``97.81 ± 0.32 %``."""
    deviation = "" if spread.deviation is None else f" ± {spread.deviation:.2f}"
    return f"{spread.mean:.2f}{deviation}{settings.unit}"


def difference(settings: Settings, spread: Spread, other: Spread) -> str:
    """How much lower or higher a mean is than another, such as ``2.10 points lower``."""
    gap = spread.mean - other.mean
    unit = " points" if settings.unit.strip() == "%" else settings.unit
    return f"{abs(gap):.2f}{unit} {'lower' if gap < 0 else 'higher'}"


def _about_the_best(settings: Settings, rules: Sequence[str], best: Spread) -> str:
    if len(rules) == 1:
        return f"best is {rules[0]} with {shown(settings, best)}"
    together = f"{', '.join(rules[:-1])} and {rules[-1]}"
    return f"{together} within one deviation, at best {shown(settings, best)}"


def _about_the_reference(settings: Settings, rule: str, spread: Spread, reference: Spread) -> str:
    against = f"always a batch of {settings.ref_batchsize} ({shown(settings, reference)})"
    how = "within one deviation" if are_level(spread, reference) else difference(settings, spread, reference)
    return f"Against {against}, {rule} is {how}."
