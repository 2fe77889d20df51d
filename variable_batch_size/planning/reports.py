"""Text, tables and HTML pages of traces, conversions, plans and simulations."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from variable_batch_size.planning.pictures import simulations_as_svg
from variable_batch_size.planning.plan import Moment, Plan, PlannedEpoch, PlannedSize, Position
from variable_batch_size.planning.simulate import Simulation
from variable_batch_size.traces.convert import Conversion
from variable_batch_size.traces.trace import Trace

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-=+*%#"


def sparkline(
    values: npt.NDArray[Any], *, width: int, weights: npt.NDArray[Any] | None = None, is_ascii: bool = False
) -> str:
    """Positive numbers as a line of block characters, with heights from 0 to the largest number.

    Args:
        values: the numbers, in order.
        width: the largest number of characters; fewer for fewer numbers.
        weights: the relative width of each number; equal if None. A character shows the mean over its width.
        is_ascii: use ASCII instead of Unicode block characters.

    >>> sparkline(np.array([1, 2, 3, 4, 5, 6, 7, 8]), width=8)
    '▁▂▃▄▅▆▇█'
    >>> sparkline(np.array([2, 8, 8, 8, 8]), width=5, weights=np.array([4, 1, 1, 1, 1]))
    '▂▂▅██'
    """
    widths = np.ones(len(values)) if weights is None else weights.astype(np.float64)
    ends = np.concatenate(([0.0], np.cumsum(widths)))
    areas = np.concatenate(([0.0], np.cumsum(values * widths)))
    edges = np.linspace(0, ends[-1], min(width, len(values)) + 1)
    means = np.diff(np.interp(edges, ends, areas)) / np.diff(edges)
    blocks = _ASCII if is_ascii else _BLOCKS
    # a floating-point error may put a mean of integers just above its level
    levels = np.ceil(means / values.max() * len(blocks) - 1e-6).astype(np.int64)
    return "".join(blocks[level - 1] for level in np.clip(levels, 1, len(blocks)))


_MOST_ROWS = 14

_Row = TypeVar("_Row")


def trace_report(trace: Trace, *, width: int, is_ascii: bool = False) -> str:
    """A trace as two sparklines, over steps and over samples, and its numbers.

    >>> print(trace_report(Trace.from_sequence([32] * 20 + [128] * 10), width=44))
    30 steps, 1,920 samples
    batch sizes   32 to 128, mean 64, 2 distinct, 1 change
    over steps    ▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂██████████
    over samples  ▂▂▂▂▂▂▂▂▂▂████████████████████
    """
    if trace.is_endless:
        return f"batch size {trace[0]:,} forever"
    sizes = trace.sizes
    steps = sparkline(sizes, width=width - 14, is_ascii=is_ascii)
    samples = sparkline(sizes, width=width - 14, weights=sizes, is_ascii=is_ascii)
    return "\n".join(
        [
            f"{_counted(len(trace), 'step')}, {_counted(int(sizes.sum()), 'sample')}",
            f"batch sizes   {_span(int(sizes.min()), int(sizes.max()))}, mean {_number(float(sizes.mean()))}, "
            f"{len(np.unique(sizes)):,} distinct, {_counted(int(np.count_nonzero(np.diff(sizes))), 'change')}",
            f"over steps    {steps}",
            f"over samples  {samples}",
        ]
    )


def conversion_report(conversion: Conversion) -> str:
    """A conversion as text, with the effect of rounding."""
    difference = conversion.samples - conversion.samples_before_rounding
    share = difference / conversion.samples_before_rounding
    return "\n".join(
        [
            f"recording      {_seconds(conversion.seconds_recorded)} s, of which {_seconds(conversion.seconds_empty)} "
            f"s without a device; {_number(conversion.recorded_rate)} samples per second",
            f"trace          {_counted(len(conversion.trace), 'step')} of {_seconds(conversion.seconds_per_step)} s, "
            f"{_counted(conversion.samples, 'sample')}; {_number(conversion.rate)} samples per second",
            f"rounding       changed {conversion.num_steps_rounded:,} of {_counted(len(conversion.trace), 'step')}, "
            f"{_number(difference, sign='+')} samples ({100 * share:+.2f} %)",
            f"left at end    {_seconds(conversion.seconds_left)} s, less than a step",
        ]
    )


def decisions_report(records: Sequence[Mapping[str, Any]]) -> str:
    """The decisions that changed the batch size or came after a change of cores, one per line.

    >>> start = {"step": 0, "from_step": 0, "batch_size": 64, "cores": 2, "noise_scale": None, "why": "first decision"}
    >>> print(decisions_report([start, {**start, "step": 20, "why": "kept"}]))
    at step  from step  batch size  cores  noise scale  why
          0          0          64      2            –  first decision
    (1 more decision without a change)
    """
    changes = [
        record
        for before, record in zip([None, *records], records, strict=False)
        if before is None or any(before[name] != record[name] for name in ("batch_size", "cores"))
    ]
    lines = ["at step  from step  batch size  cores  noise scale  why"]
    for record in changes:
        noise = "–" if record["noise_scale"] is None else f"{record['noise_scale']:,.4g}"
        counts = f"{record['step']:7,}  {record['from_step']:9,}  {record['batch_size']:10,}  {record['cores']:5,}"
        lines.append(f"{counts}  {noise:>11}  {record['why']}".rstrip())
    if len(changes) < len(records):
        lines.append(f"({_counted(len(records) - len(changes), 'more decision')} without a change)")
    return "\n".join(lines)


def plan_report(plan: Plan) -> str:
    """A plan as text."""
    blocks = [_summary(plan), _sizes(plan), _epochs(plan), _over_time(plan)]
    if plan.checkpoints:
        blocks.append(_checkpoints(plan))
    return "\n\n".join(blocks)


def _summary(plan: Plan) -> str:
    least, most = plan.sizes[0], plan.sizes[-1]
    load = _span(min(plan.core_minibatches), max(plan.core_minibatches))
    idle = _span(min(plan.core_idle_steps), max(plan.core_idle_steps))
    lines = [
        ("steps", f"{plan.num_steps:,}"),
        ("samples", f"{plan.num_samples:,} in {_counted(plan.num_epochs, 'epoch')} of {plan.dataset_size:,}"),
        ("left over", f"{_counted(plan.num_left_over, 'sample')} that did not fit into their epoch"),
        (
            "batch size",
            f"{_span(least.batch_size, most.batch_size)}, mean {_number(plan.mean_batch_size)}, "
            f"{len(plan.sizes):,} distinct",
        ),
        (
            "minibatches",
            f"{plan.num_minibatches:,} of {plan.minibatch_size:,} samples, "
            f"{_span(least.num_minibatches, most.num_minibatches)} in a step",
        ),
        (
            "load",
            f"{load} minibatches on each of {_counted(plan.num_cores, 'core')}, "
            f"busy {100 * plan.busy_share:.1f} % of the time if all minibatches take equally long",
        ),
        ("idle", f"{100 * plan.idle_share:.1f} % of all cores in all steps, {idle} steps on a core"),
        ("accumulation", f"{_span(least.depth, most.depth)} minibatches deep, mean {_number(plan.mean_depth)}"),
    ]
    if plan.lockstep:
        share = 100 * plan.num_stand_ins / (plan.num_minibatches + plan.num_stand_ins)
        padding = _counted(plan.num_stand_ins, "padding minibatch", "padding minibatches")
        text = f"{_counted(plan.num_rounds, 'round')} of all cores, {padding} ({share:.1f} % of all minibatches run)"
        lines.append(("lockstep", text))
    if plan.tokens_per_sample is not None:
        lines.insert(2, ("tokens", _tokens(plan, plan.tokens_per_sample)))
    last = plan.epochs[-1]
    if last.ends_with_trace:
        share = 100 * last.num_samples / plan.dataset_size
        text = f"the trace ends in epoch {last.epoch}, after {last.num_samples:,} of {plan.dataset_size:,} samples"
        lines.append(("note", f"{text} ({share:.1f} %)"))
    if plan.num_rows_unused:
        is_are = "is" if plan.num_rows_unused == 1 else "are"
        rows = _counted(plan.num_rows_unused, "row")
        lines.append(("note", f"{rows} at the end of the trace {is_are} not reached"))
    return "\n".join(f"{name:<14}{text}" for name, text in lines)


def _tokens(plan: Plan, per_sample: int) -> str:
    span = _span(per_sample * plan.sizes[0].batch_size, per_sample * plan.sizes[-1].batch_size)
    mean = _number(per_sample * plan.mean_batch_size)
    return f"{per_sample * plan.num_samples:,} at {per_sample:,} in a sample; {span} in a step, mean {mean}"


def _tokens_of(plan: Plan, samples: int) -> list[int]:
    """The table cell with the tokens of these samples, if tokens are counted."""
    return [] if plan.tokens_per_sample is None else [plan.tokens_per_sample * samples]


def _tokens_head(plan: Plan, head: str) -> list[str]:
    return [] if plan.tokens_per_sample is None else [head]


def _sizes(plan: Plan) -> str:
    def cells(size: PlannedSize) -> list[str]:
        counts = (size.num_steps, size.num_minibatches, size.depth, size.num_idle_cores)
        sizes = (size.batch_size, *_tokens_of(plan, size.batch_size))
        return [*map(_count, (*sizes, *counts)), *map(_factor, size.factors.values())]

    head = ["batch size", *_tokens_head(plan, "tokens"), "steps", "minibatches", "deep", "idle cores", *plan.rules]
    return f"{_rules_title('batch sizes', plan)}\n{_table(head, plan.sizes, cells)}"


def _epochs(plan: Plan) -> str:
    def cells(epoch: PlannedEpoch) -> list[str]:
        counts = (epoch.epoch, epoch.first_step, epoch.num_steps, epoch.num_samples)
        return [*map(_count, counts), _count(epoch.num_left_over) + ("*" if epoch.ends_with_trace else " ")]

    note = "\n* ends with the trace" if plan.epochs[-1].ends_with_trace else ""
    return "epochs\n" + _table(["epoch", "first step", "steps", "samples", "left over "], plan.epochs, cells) + note


def _over_time(plan: Plan) -> str:
    def cells(moment: Moment) -> list[str]:
        before = (moment.step, moment.samples_before, *_tokens_of(plan, moment.samples_before))
        counts = (*before, moment.epoch, moment.batch_size, moment.depth, moment.num_idle_cores)
        return [*map(_count, counts), *map(_factor, moment.factors.values())]

    before = ["step", "samples before", *_tokens_head(plan, "tokens before")]
    head = [*before, "epoch", "batch size", "deep", "idle cores", *plan.rules]
    return f"{_rules_title('over time', plan)}\n{_table(head, plan.moments, cells)}"


def _checkpoints(plan: Plan) -> str:
    def cells(position: Position) -> list[str]:
        return [*map(_count, (position.steps_done, position.samples_done, position.epoch, position.epoch_step))]

    return "checkpoints\n" + _table(
        ["steps done", "samples done", "epoch", "steps done in it"], plan.checkpoints, cells
    )


def _rules_title(title: str, plan: Plan) -> str:
    if not plan.rules:
        return title
    return (
        f"{title}; learning-rate factor of {', '.join(plan.rules)} at the reference batch size {plan.ref_batchsize:,}"
    )


def _table(head: Sequence[str], rows: Sequence[_Row], cells: Callable[[_Row], list[str]]) -> str:
    """Right-aligned columns; of many rows, only the first and the last."""
    half = _MOST_ROWS // 2
    if len(rows) <= _MOST_ROWS:
        shown, note = [cells(row) for row in rows], []
    else:
        shown = [*map(cells, rows[:half]), ["…"] * len(head), *map(cells, rows[-half:])]
        note = [f"({len(rows) - 2 * half:,} more rows: use --json to see all)"]
    widths = [max(map(len, column)) for column in zip(head, *shown, strict=True)]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in (head, *shown)]
    return "\n".join(line.rstrip() for line in (*lines, *note))


def _count(number: int) -> str:
    return f"{number:,}"


def _factor(factor: float) -> str:
    return f"{factor:.4g}"


def _span(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _counted(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _number(value: float, sign: str = "") -> str:
    """At most two decimals, without trailing zeros."""
    return f"{value:{sign},.2f}".rstrip("0").rstrip(".")


def _seconds(value: float) -> str:
    """Like :func:`_number`, but with three digits for short times."""
    return f"{value:.3g}" if 1e-6 <= value < 0.1 else _number(value)


COLUMNS = ("policy", "hours", "device-hours", "cost", "updates", "samples", "progress", "restarts", "batch sizes")


class Table(NamedTuple):
    """A table of text cells."""

    head: tuple[str, ...]
    rows: list[list[str]]


def simulation_table(simulations: Mapping[str, Simulation], *, price: float | None) -> Table:
    """One row per policy, the fastest first; with a cost if there is a price per device-hour."""
    ranked = sorted(simulations.items(), key=lambda item: item[1].seconds)
    head = tuple(column for column in COLUMNS if column != "cost" or price is not None)
    rows = [dict(zip(COLUMNS, _cells(name, run, price or 0.0), strict=True)) for name, run in ranked]
    return Table(head, [[row[column] for column in head] for row in rows])


def _cells(name: str, run: Simulation, price: float) -> list[str]:
    return [
        name,
        f"{run.hours:,.4g}",
        f"{run.device_hours:,.4g}",
        f"{run.cost(price):,.2f}",
        f"{run.updates:,}",
        f"{run.samples:,}",
        f"{run.progress:,.0f}",
        f"{run.restarts:,}",
        _span(int(run.trace.sizes.min()), int(run.trace.sizes.max())),
    ]


def as_text(table: Table) -> str:
    """The table with aligned columns, for a terminal."""
    lines = [table.head, *table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )


def as_csv(table: Table) -> str:
    """The table as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.head)
    # keep the commas in names, drop the thousands separators of numbers
    writer.writerows([name, *(cell.replace(",", "") for cell in cells)] for name, *cells in table.rows)
    return text.getvalue()


_STYLE = """
body { margin: 0 auto; padding: 1rem; max-width: 70rem; font: 16px/1.5 system-ui, sans-serif; color: #1d232b; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.4rem 0.7rem; border-bottom: 1px solid #dfe3e8; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
pre { background: #f5f7f9; padding: 0.8rem; overflow-x: auto; font-size: 0.85rem; }
"""


def simulation_page(
    simulations: Mapping[str, Simulation], table: Table, *, facts: Mapping[str, str], command: str
) -> str:
    """An HTML page of simulated runs.

    Args:
        simulations: the runs, by policy.
        table: of these runs.
        facts: the common settings, by name.
        command: the command that generated the page.
    """
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in table.rows)
    settings = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>\n" for name, value in facts.items())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Simulated policies</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Simulated policies</h1>
<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>
{rows}</tbody></table></div>
{simulations_as_svg(simulations)}
<h2>Common settings</h2>
<div class="wide"><table><tbody>
{settings}</tbody></table></div>
<pre>{escape(command)}</pre>
</body>
</html>
"""
