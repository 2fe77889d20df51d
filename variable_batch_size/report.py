"""Says in words and tables what a trace, a conversion or a plan is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from variable_batch_size.convert import Conversion
from variable_batch_size.plan import Plan
from variable_batch_size.sparkline import sparkline
from variable_batch_size.trace import Trace

_MOST_ROWS = 14


def trace_report(trace: Trace, *, width: int, is_ascii: bool = False) -> str:
    """A trace as two sparklines, over steps and over samples, and its numbers.

    >>> print(trace_report(Trace.from_sequence([32] * 20 + [128] * 10), width=44))
    30 steps, 1,920 samples
    batch sizes   32 to 128, mean 64, 2 distinct, 1 change
    over steps    ▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂██████████
    over samples  ▂▂▂▂▂▂▂▂▂▂████████████████████
    """
    if trace.is_endless:
        return f"batch size {trace[0]:,} for ever"
    sizes = trace.sizes
    steps = sparkline(sizes, width=width - 14, is_ascii=is_ascii)
    samples = sparkline(sizes, width=width - 14, weights=sizes, is_ascii=is_ascii)
    return "\n".join(
        [
            f"{_counted(len(trace), 'step')}, {_counted(int(sizes.sum()), 'sample')}",
            f"batch sizes   {sizes.min():,} to {sizes.max():,}, mean {_number(float(sizes.mean()))}, "
            f"{len(np.unique(sizes)):,} distinct, {_counted(int(np.count_nonzero(np.diff(sizes))), 'change')}",
            f"over steps    {steps}",
            f"over samples  {samples}",
        ]
    )


def conversion_report(conversion: Conversion) -> str:
    """What a conversion has kept of a recording, and what rounding has changed."""
    difference = conversion.samples - conversion.samples_before_rounding
    share = difference / conversion.samples_before_rounding
    return "\n".join(
        [
            f"recording      {_number(conversion.seconds_recorded)} s, of which {_number(conversion.seconds_empty)} s "
            f"without a device; {_number(conversion.recorded_rate)} samples per second",
            f"trace          {_counted(len(conversion.trace), 'step')} of {_number(conversion.seconds_per_step)} s, "
            f"{_counted(conversion.samples, 'sample')}; {_number(conversion.rate)} samples per second",
            f"rounding       changed {conversion.num_steps_rounded:,} of {_counted(len(conversion.trace), 'step')}, "
            f"{_number(difference, sign='+')} samples ({100 * share:+.2f} %)",
            f"left at end    {_number(conversion.seconds_left)} s, less than a step",
        ]
    )


def plan_report(plan: Plan) -> str:
    """A plan as text."""
    blocks = [_summary(plan), _sizes(plan), _epochs(plan), _over_time(plan)]
    if plan.checkpoints:
        blocks.append(_checkpoints(plan))
    return "\n\n".join(blocks)


def _summary(plan: Plan) -> str:
    sizes = plan.sizes
    lines = [
        ("steps", f"{plan.num_steps:,}"),
        ("samples", f"{plan.num_samples:,} in {_counted(plan.num_epochs, 'epoch')} of {plan.dataset_size:,}"),
        ("left over", f"{_counted(plan.num_left_over, 'sample')} that did not fit into their epoch"),
        (
            "batch size",
            f"{sizes[0].batch_size:,} to {sizes[-1].batch_size:,}, mean {_number(plan.mean_batch_size)}, "
            f"{len(sizes):,} distinct",
        ),
        (
            "minibatches",
            f"{plan.num_minibatches:,} of {plan.minibatch_size:,} samples; {sizes[0].num_minibatches:,} to "
            f"{sizes[-1].num_minibatches:,} in a step",
        ),
        (
            "load",
            f"{min(plan.core_minibatches):,} to {max(plan.core_minibatches):,} minibatches on each of "
            f"{_counted(plan.num_cores, 'core')}; cores are busy {100 * plan.busy_share:.1f} % of the time",
        ),
        (
            "idle",
            f"{100 * plan.idle_share:.1f} % of all cores in all steps; {min(plan.core_idle_steps):,} to "
            f"{_counted(max(plan.core_idle_steps), 'step')} on a core",
        ),
        (
            "accumulation",
            f"{sizes[0].depth:,} to {_counted(sizes[-1].depth, 'minibatch', 'minibatches')} deep, "
            f"mean {_number(plan.mean_depth)}",
        ),
    ]
    last = plan.epochs[-1]
    if last.ends_with_trace:
        share = 100 * last.num_samples / plan.dataset_size
        text = f"the trace ends in epoch {last.epoch}, after {last.num_samples:,} of {plan.dataset_size:,} samples"
        lines.append(("note", f"{text} ({share:.1f} %)"))
    if plan.num_rows_unused:
        lines.append(("note", f"the last {_counted(plan.num_rows_unused, 'row')} of the trace are not reached"))
    return "\n".join(f"{name:<14}{text}" for name, text in lines)


def _sizes(plan: Plan) -> str:
    rows = [
        [f"{s.batch_size:,}", f"{s.num_steps:,}", f"{s.num_minibatches:,}", f"{s.depth:,}", f"{s.num_idle_cores:,}"]
        + [f"{factor:.4g}" for factor in s.factors.values()]
        for s in plan.sizes
    ]
    head = ["batch size", "steps", "minibatches", "deep", "idle cores", *plan.rules]
    return f"{_rules_title('batch sizes', plan)}\n{_table(head, rows)}"


def _epochs(plan: Plan) -> str:
    rows = [
        [
            f"{e.epoch:,}",
            f"{e.first_step:,}",
            f"{e.num_steps:,}",
            f"{e.num_samples:,}",
            f"{e.num_left_over:,}" + ("*" if e.ends_with_trace else " "),
        ]
        for e in plan.epochs
    ]
    note = "\n* ends with the trace" if plan.epochs[-1].ends_with_trace else ""
    return "epochs\n" + _table(["epoch", "first step", "steps", "samples", "left over "], rows) + note


def _over_time(plan: Plan) -> str:
    rows = [
        [
            f"{m.step:,}",
            f"{m.samples_before:,}",
            f"{m.epoch:,}",
            f"{m.batch_size:,}",
            f"{m.depth:,}",
            f"{m.num_idle_cores:,}",
            *(f"{factor:.4g}" for factor in m.factors.values()),
        ]
        for m in plan.moments
    ]
    head = ["step", "samples before", "epoch", "batch size", "deep", "idle cores", *plan.rules]
    return f"{_rules_title('over time', plan)}\n{_table(head, rows)}"


def _checkpoints(plan: Plan) -> str:
    rows = [[f"{p.steps_done:,}", f"{p.samples_done:,}", f"{p.epoch:,}", f"{p.epoch_step:,}"] for p in plan.checkpoints]
    return "checkpoints\n" + _table(["steps done", "samples done", "epoch", "steps done in it"], rows)


def _rules_title(title: str, plan: Plan) -> str:
    if not plan.rules:
        return title
    return (
        f"{title}; learning-rate factor of {', '.join(plan.rules)} at the reference batch size {plan.ref_batchsize:,}"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned to the right; of many rows, the first and the last."""
    shown = [list(row) for row in rows]
    if len(rows) > _MOST_ROWS:
        half = _MOST_ROWS // 2
        shown = [*map(list, rows[:half]), ["…"] * len(head), *map(list, rows[-half:])]
    widths = [max(map(len, column)) for column in zip(head, *shown, strict=True)]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in (head, *shown)]
    if len(rows) > _MOST_ROWS:
        lines.append(f"({len(rows) - _MOST_ROWS:,} rows more: --json has them all)")
    return "\n".join(line.rstrip() for line in lines)


def _counted(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _number(value: float, sign: str = "") -> str:
    """Up to two decimals, none where they would be 0."""
    text = f"{value:{sign},.2f}"
    return text.rstrip("0").rstrip(".")
