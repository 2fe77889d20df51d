"""The summary of a comparison: what the best rule on a trace saves and costs, what is decided, and what went wrong."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from variable_batch_size.lab.comparison.experiment import Settings
from variable_batch_size.lab.comparison.verdict import (
    Arm,
    gap_text,
    joined,
    level_with_best,
    number,
    size_text,
    tiers,
    unit_of_gaps,
)

_DEEP = 0.1  # a reported dip is at least this fraction of the range of all test metrics
_ABOVE_NOISE = 2  # and at least this multiple of the standard deviation over seeds


class Dip(NamedTuple):
    """The deepest drop of a test metric below its best value so far."""

    depth: float  # positive
    metric: float  # the worst value
    step: int  # of that value
    batch_size: int | None  # after its largest change, by factor, since the best value; None if it was constant


def deepest_dip(curves: Mapping[str, Any], *, is_higher_better: bool) -> Dip | None:
    """The deepest dip in the mean curves of an arm; None if its metric never got worse."""
    tests = curves["tests"]
    if not tests:
        return None
    steps, metrics = np.asarray(tests["step"]), np.asarray(tests["metric"]["mean"])
    signed = metrics if is_higher_better else -metrics
    depths = np.fmax.accumulate(signed) - signed
    if not np.nanmax(depths, initial=0.0) > 0:
        return None
    worst = int(np.nanargmax(depths))
    best = int(np.nanargmax(signed[:worst]))
    jump = _jump(curves["training"], float(steps[best]), float(steps[worst]))
    return Dip(float(depths[worst]), float(metrics[worst]), int(steps[worst]), jump)


def _jump(training: Mapping[str, Any], after: float, until: float) -> int | None:
    """The batch size after its largest change, by factor, in these steps; None if it did not change."""
    if not training:
        return None
    steps, sizes = np.asarray(training["step"]), np.asarray(training["batch_size"]["mean"])
    within = np.flatnonzero((steps > after) & (steps <= until) & (np.arange(len(steps)) > 0))
    factors = np.abs(np.log(sizes[within] / sizes[within - 1]))
    return round(float(sizes[within[factors.argmax()]])) if len(within) and factors.max() > 0 else None


def summary(
    settings: Settings, arms: Sequence[Arm], reference: Arm | None, curves: Mapping[str, Mapping[str, Any]]
) -> str:
    """The sentences about a trace.

    Args:
        settings: of the experiment.
        arms: of the trace.
        reference: the baseline.
        curves: of the training and the tests of each rule, over its completed runs.
    """
    found = tiers(settings, arms)
    sentences = ["No rule has a result."]
    if found:
        sentences = [_cost(settings, found[0][0], reference), _decision(settings, found)]
    sentences.append(_dips(settings, [arm for tier in found for arm in tier], curves))
    sentences += [f"{arm.rule}: {arm.failures}." for arm in arms if arm.failures]
    return " ".join(sentence for sentence in sentences if sentence)


def _cost(settings: Settings, first: Arm, reference: Arm | None) -> str:
    """The updates of the best rule and its metric, compared with the baseline."""
    assert first.final is not None
    updates = statistics.fmean(first.values("updates").values())
    makes = f"{first.rule} makes {updates:,.0f} updates"
    gap = None if reference is None else first.above(reference)
    if reference is None or gap is None:
        metric = f"{settings.metric_name} {first.final.text(settings.unit)}"
        return f"{makes}, with {metric}; there is no baseline to compare with."
    usual = statistics.fmean(reference.values("updates").values())
    instead = ", as many as" if round(usual) == round(updates) else f" instead of the {usual:,.0f} of"
    makes += f"{instead} a constant batch size of {settings.ref_batchsize}"
    size = f"{size_text(settings, gap, reference)} {'less' if gap.mean < 0 else 'more'} {settings.metric_name}"
    if gap.error is None:
        return f"{makes}, with {size} in a single seed."
    if not gap.is_clear:
        how = f"no clear difference in {settings.metric_name} ({gap_text(settings, first, reference)})"
        return f"{makes}, with {how}."
    return f"{makes}, at {size}."


def _decision(settings: Settings, found: Sequence[Sequence[Arm]]) -> str:
    """Whether the best rule is ahead, and if not, what is missing."""
    first, level = found[0][0], level_with_best(settings, found)
    if not level:
        others = [arm.rule for tier in found[1:] for arm in tier]
        ahead = f"{first.rule} is clearly ahead of"
        return f"{ahead} {others[0] if len(others) == 1 else 'all other rules'}." if others else ""
    gaps = {arm.rule: gap for arm in level if (gap := arm.above(first)) is not None}
    widths = [(gap.error, first.num_common(arm)) for arm in level if (gap := gaps.get(arm.rule)) and not gap.is_clear]
    known = [(error, num_seeds) for error, num_seeds in widths if error is not None]
    why = "a single one cannot tell a difference from chance" if widths else "the runs that failed had other seeds"
    if known and first.final is not None:
        error, num_seeds = max(known)
        width = f"± {number(error, like=first.final.mean)}{unit_of_gaps(settings)}"
        why = f"{'up to ' if len(level) > 1 else ''}{width} with {num_seeds}"
    return f"More seeds are needed to tell {first.rule} from {joined([arm.rule for arm in level])} ({why})."


def _dips(settings: Settings, arms: Sequence[Arm], curves: Mapping[str, Mapping[str, Any]]) -> str:
    """How far the test metric got worse on the way, with which rule and where; empty if never by much."""
    tested = [curves[arm.rule]["tests"]["metric"]["mean"] for arm in arms if curves[arm.rule]["tests"]]
    if not tested:
        return ""
    values = np.concatenate(tested)
    whole = float(np.nanmax(values) - np.nanmin(values)) if np.isfinite(values).any() else 0.0
    parts = []
    for arm in arms:
        dip = deepest_dip(curves[arm.rule], is_higher_better=settings.is_higher_better)
        noise = 0.0 if arm.final is None or arm.final.error is None else arm.final.error
        if dip is not None and dip.depth >= max(_DEEP * whole, _ABOVE_NOISE * noise):
            where = f"at update {dip.step:,}" if dip.batch_size is None else f"at the jump to {dip.batch_size:,}"
            parts.append((-dip.depth, f"to {number(dip.metric)}{settings.unit} with {arm.rule} {where}"))
    verb = "fell" if settings.is_higher_better else "rose"
    return f"On the way, {settings.metric_name} {verb} {joined([text for _, text in sorted(parts)])}." if parts else ""
