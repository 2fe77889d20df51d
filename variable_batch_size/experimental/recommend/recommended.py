"""A recommendation in words, as tables, as lines of Python, and as a page."""

import math
from typing import Any

from variable_batch_size.experimental.recommend.branching import arm_of
from variable_batch_size.experimental.recommend.recommend import (
    EXPONENTS,
    LAW,
    LEVEL,
    REFERENCE,
    Recommendation,
    State,
    extrapolated,
)
from variable_batch_size.lab.comparison.measure import CriticalBatchSize
from variable_batch_size.lab.comparison.page import rendered
from variable_batch_size.lab.comparison.verdict import Estimate, difference, joined
from variable_batch_size.lab.planning.reports import as_text, counted, duration

COLUMNS = ("after samples", "batch size", f"exponent ({LEVEL:.0%} interval)", "best rule", "lead", "stopped early")


def exponent_text(found: Estimate | None) -> str:
    """An exponent of S; at an end of the range that was tried, it is a bound.

    >>> exponent_text(Estimate(0.62, 0.1)), exponent_text(Estimate(1.0, 0.0))
    ('0.62 ± 0.10', '1 or more')
    """
    if found is None:
        return "–"
    if not found.error and found.mean in (EXPONENTS[0], EXPONENTS[-1]):
        return f"{found.mean:g} or {'less' if found.mean == EXPONENTS[0] else 'more'}"
    return f"{found.mean:.2f}" + ("" if found.error is None else f" ± {found.error:.2f}")


def rows(found: Recommendation) -> list[list[str]]:
    """The table of states."""
    return [_row(found, state) for state in found.states]


def _row(found: Recommendation, state: State) -> list[str]:
    leads = state.leads(state.best)
    lead = difference(leads, level=LEVEL)
    assert lead is not None
    stopped = ", ".join(arm for arm in state.stopped if arm != REFERENCE)
    size = f"{state.segment.batch_size:,}"
    texts = [exponent_text(state.exponent), state.best, _nats(lead), stopped or "none"]
    return [f"{state.segment.begin:,}", size, *texts]


def _nats(found: Estimate) -> str:
    """A difference of losses with four decimals, and its sign."""
    return f"{found.mean:+.4f}" + ("" if found.error is None else f" ± {found.error:.4f}")


def critical_text(found: CriticalBatchSize | str) -> str:
    """The bounds of the critical batch size in words.

    >>> critical_text(CriticalBatchSize(64, 256, (128,)))
    'up to 64 nothing is lost, at 256 something is, and 128 are undecided'
    """
    if isinstance(found, str):
        return found
    at_least, below, undecided = found
    parts = [f"up to {at_least:,} nothing is lost"] if at_least is not None else []
    parts += [f"at {below:,} something is"] if below is not None else []
    parts += [f"{joined([f'{size:,}' for size in undecided])} are undecided"] if undecided else []
    return joined(parts).replace(" and ", ", and ") if len(parts) > 2 else joined(parts)


def sentences(found: Recommendation, *, tuned_samples: int | None = None) -> list[str]:
    """The recommendation, one sentence or two for each subject."""
    plan = found.plan
    return [
        _choice(found),
        f"The exponent of S over the whole trace is {exponent_text(found.exponent)} ({LEVEL:.0%} interval).",
        f"Batch sizes that take at most 20 % more samples to the same loss: {critical_text(found.critical)}.",
        f"State ref_batchsize={plan.ref_batchsize}, the batch size for which the learning rate was chosen.",
        _jumps(found),
        _expected(found),
        "The branches are short, and start from one training. Their intervals were calibrated on other workloads.",
        _cost(found),
        second_opinion(plan.ref_batchsize, plan.num_samples, tuned_samples),
    ]


def _choice(found: Recommendation) -> str:
    level, more = found.level_with, found.more_samples
    if found.is_start_untried and found.plan.starts_large:
        start = f"no rule was tried at the start, at batch size {found.plan.first_size:,}"
        return f"Undecided, as {start}: warm up, and use {joined([found.rule, *level])}, or a larger --budget."
    if not level:
        return f"Use {found.rule}: it is clearly ahead of all other rules."
    doubts = []
    for rule, gap in level.items():
        assert gap is not None
        by = f"{rule} by {_nats(gap)}"
        if more[rule] is None:
            doubts.append(f"{by}, which more samples would not decide")
        else:
            doubts.append(f"{by}, and about {more[rule]:,} more samples would decide")
    names = joined([found.rule, *level])
    return f"Use {found.rule}, undecided between {names}, which differ from it (95 % interval): {'; '.join(doubts)}."


def _jumps(found: Recommendation) -> str:
    untried = " The start has no branches, as there are too few samples: warm up." if found.is_start_untried else ""
    if found.failed_at_start:
        untried = f" A new model fails with {joined(found.failed_at_start)}, unless there is a warm-up."
    steps = found.steps_to_recover
    if not steps:
        needed = "smoothing is not needed" if untried else "neither warm-up nor smoothing is needed"
        return f"No jump of the batch size raises the loss: {needed}.{untried}"
    where = joined([f"after {samples:,} samples" for samples in steps])
    how = []
    if 0 in steps:
        how.append(f"warm up over {counted(steps[0], 'step')}")
    later = [number for samples, number in steps.items() if samples]
    if later:
        how.append(f"spread jumps over {counted(max(later), 'step')} (smooth_steps)")
    return f"A jump of the batch size raises the loss {where}: {joined(how)}.{untried}"


def _expected(found: Recommendation) -> str:
    reference, lead = found.reference_loss, found.lead
    against = f"{_nats(lead)} ({LEVEL:.0%} interval) against a constant batch of {found.plan.ref_batchsize}"
    both = f"{reference + lead.mean:.4f}, {against} with {reference:.4f}"
    return f"Expected loss at the end: {both}, extrapolated as c + a/n after n samples."


def _cost(found: Recommendation) -> str:
    full, share = found.plan.comparison, found.samples / found.plan.comparison
    spent = f"{found.samples:,} samples and {duration(found.seconds)}, {share:.0%} of"
    seconds = found.seconds / found.samples * full
    return f"This took {spent} the {full:,} samples and about {duration(seconds)} of a full comparison."


def second_opinion(ref_batchsize: int, num_samples: int, tuned_samples: int | None) -> str:
    """The batch size by the power law.

    >>> second_opinion(128, 10_000_000, 1_000_000)[:76]
    'A second opinion, from the literature and not from these runs: the law B ∝ D'
    """
    law = f"A second opinion, from the literature and not from these runs: the law B ∝ D^{LAW}"
    if tuned_samples is None:
        factor = 10**LAW
        return f"{law} makes the best batch size {factor:.1f} times as large for 10 times the samples."
    size = ref_batchsize * (num_samples / tuned_samples) ** LAW
    from_run = f"from {ref_batchsize:,}, chosen for {tuned_samples:,} samples"
    return f"{law} makes the best batch size for {num_samples:,} samples {size:,.0f}, {from_run}."


def python_lines(found: Recommendation) -> str:
    """What to put into the training script."""
    options = [f'rule="{found.rule}"', f"ref_batchsize={found.plan.ref_batchsize}"]
    later = [number for samples, number in found.steps_to_recover.items() if samples]
    if later:
        options.append(f"smooth_steps={max(later)}")
    size = found.plan.minibatch_size
    return (
        f'loader = vbs.DataLoader(dataset, trace="trace.csv", minibatch_size={size})\n'
        f"optimizer = vbs.Optimizer(inner, loader, {', '.join(options)})\n"
    )


def as_terminal(found: Recommendation, *, tuned_samples: int | None = None) -> str:
    """The table, the sentences and the lines of Python."""
    lines = sentences(found, tuned_samples=tuned_samples)
    return "\n".join([as_text([list(COLUMNS), *rows(found)]), *lines, "", python_lines(found).rstrip()])


def page(found: Recommendation, *, command: str, tuned_samples: int | None = None) -> str:
    """The same as HTML, with charts, and the losses of all branches."""
    branches = [
        [f"{state.segment.begin:,}", arm, f"{end:,}", *(f"{loss:+.4f}" for loss in losses[arm])]
        for state in found.states
        for end, losses in state.rungs
        for arm in losses
    ]
    return rendered(
        "variable_batch_size.experimental.recommend",
        "recommended",
        title=f"Recommended for {found.source.workload}",
        sentences=sentences(found, tuned_samples=tuned_samples),
        columns=COLUMNS,
        rows=rows(found),
        branch_columns=["state", "branch", "samples", *(f"seed {seed}" for seed in found.plan.branch_seeds)],
        branches=branches,
        python=python_lines(found),
        command=command,
        charts={"states": [_of_state(state) for state in found.states], "curve": _curve(found)},
    )


def _of_state(state: State) -> dict[str, Any]:
    """The predicted losses by exponent, with intervals where all seeds have one, and the exponent."""
    points = []
    for exponent in EXPONENTS:
        leads = state.leads(arm_of(exponent))
        found = difference(leads, level=LEVEL) if all(map(math.isfinite, leads)) else None
        if found is not None:
            points.append({"exponent": exponent, "mean": found.mean, "error": found.error})
    name = f"after {state.segment.begin:,} samples, at batch size {state.segment.batch_size:,}"
    return {"name": name, "points": points, "exponent": state.exponent._asdict() if state.exponent else None}


def _curve(found: Recommendation) -> dict[str, Any]:
    """The training at the reference batch size, its extrapolation, and the expected loss at the end."""
    loss_at, end = extrapolated(found.trunk), found.plan.num_samples
    measured = [point for point in found.trunk if math.isfinite(point[1])]
    # without the steep part before the fit
    start = measured[-1][0] / 5
    samples = [start + (end - start) * number / 50 for number in range(51)]
    lead = found.lead
    return {
        "measured": [point for point in measured if point[0] >= start],
        "extrapolated": [(number, loss_at(number)) for number in samples],
        "rule": found.rule,
        "expected": {"samples": end, "mean": found.reference_loss + lead.mean, "error": lead.error},
        "ref_batchsize": found.plan.ref_batchsize,
    }
