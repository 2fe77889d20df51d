"""Text, tables and HTML pages of traces, conversions, plans, simulations and programs."""

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

import numpy as np
import numpy.typing as npt

from variable_batch_size.planning.pictures import plot_simulations
from variable_batch_size.planning.plan import Plan
from variable_batch_size.planning.simulate import Simulation
from variable_batch_size.planning.tpu import GIB, Program, Programs
from variable_batch_size.traces.convert import Conversion
from variable_batch_size.traces.trace import Trace

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-=+*%#"


def sparkline(
    values: npt.NDArray[Any], *, width: int, weights: npt.NDArray[Any] | None = None, is_ascii: bool = False
) -> str:
    """Positive numbers as a line of block characters, with heights from 0 to the largest number.

    A character is the mean over its width; numbers are equally wide, or as wide as their weights.

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
    span, mean = _span(int(sizes.min()), int(sizes.max())), _number(float(sizes.mean()))
    changes = _counted(int(np.count_nonzero(np.diff(sizes))), "change")
    return (
        f"{_counted(len(trace), 'step')}, {_counted(int(sizes.sum()), 'sample')}\n"
        f"batch sizes   {span}, mean {mean}, {len(np.unique(sizes)):,} distinct, {changes}\n"
        f"over steps    {steps}\nover samples  {samples}"
    )


def conversion_report(conversion: Conversion) -> str:
    """A conversion as text, with the effect of rounding."""
    difference = conversion.samples - conversion.samples_before_rounding
    share = difference / conversion.samples_before_rounding
    steps = _counted(len(conversion.trace), "step")
    return (
        f"recording      {_seconds(conversion.seconds_recorded)} s, of which {_seconds(conversion.seconds_empty)} "
        f"s without a device; {_number(conversion.recorded_rate)} samples per second\n"
        f"trace          {steps} of {_seconds(conversion.seconds_per_step)} s, "
        f"{_counted(conversion.samples, 'sample')}; {_number(conversion.rate)} samples per second\n"
        f"rounding       changed {conversion.num_steps_rounded:,} of {steps}, "
        f"{_number(difference, sign='+')} samples ({100 * share:+.2f} %)\n"
        f"left at end    {_seconds(conversion.seconds_left)} s, less than a step"
    )


def decisions_report(records: Sequence[Mapping[str, Any]]) -> str:
    """The decisions that changed the batch size or came after a change of cores, one per line.

    >>> start = {"step": 0, "from_step": 0, "batch_size": 64, "cores": 2, "noise_scale": None, "why": "first decision"}
    >>> print(decisions_report([start, {**start, "step": 20, "why": "kept"}]))
    at step  from step  batch size  cores  noise scale  why
          0          0          64      2            –  first decision
    (1 more decision without a change)
    """
    states = [(record["batch_size"], record["cores"]) for record in records]
    changes = [record for index, record in enumerate(records) if index == 0 or states[index - 1] != states[index]]
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
    factors = f"; learning-rate factor of {', '.join(plan.rules)} at the reference batch size {plan.ref_batchsize:,}"
    title, each = factors if plan.rules else "", plan.tokens_per_sample

    def tokens(count: int) -> list[int]:
        return [] if each is None else [each * count]

    blocks, load, with_tokens = [_summary(plan)], ["deep", "idle cores", *plan.rules], each is not None
    head = ["batch size", *["tokens"] * with_tokens, "steps", "minibatches", *load]
    rows: list[list[Any]] = [[size[0], *tokens(size[0]), *size[1:5], *size.factors.values()] for size in plan.sizes]
    blocks.append(f"batch sizes{title}\n{_shortened(head, rows)}")
    head = ["epoch", "first step", "steps", "samples", "left over "]
    rows = [[*at[:4], f"{at.num_left_over:,}{'*' if at.ends_with_trace else ' '}"] for at in plan.epochs]
    note = "\n* ends with the trace" if plan.epochs[-1].ends_with_trace else ""
    blocks.append(f"epochs\n{_shortened(head, rows)}{note}")
    head = ["step", "samples before", *["tokens before"] * with_tokens, "epoch", "batch size", *load]
    rows = [[at.step, at[2], *tokens(at[2]), at.epoch, *at[3:6], *at.factors.values()] for at in plan.moments]
    blocks.append(f"over time{title}\n{_shortened(head, rows)}")
    if plan.checkpoints:
        head = ["steps done", "samples done", "epoch", "steps done in it"]
        rows = [[at.steps_done, at.samples_done, at.epoch, at.epoch_step] for at in plan.checkpoints]
        blocks.append(f"checkpoints\n{_shortened(head, rows)}")
    return "\n\n".join(blocks)


def _summary(plan: Plan) -> str:
    least, most, last, each = plan.sizes[0], plan.sizes[-1], plan.epochs[-1], plan.tokens_per_sample
    sizes, in_step = _span(least.batch_size, most.batch_size), _span(least.num_minibatches, most.num_minibatches)
    load = f"{_span(min(plan.core_minibatches), max(plan.core_minibatches))} minibatches"
    busy = f"busy {100 * plan.busy_share:.1f} % of the time if all minibatches take equally long"
    idle = _span(min(plan.core_idle_steps), max(plan.core_idle_steps))
    lines = [
        ("steps", f"{plan.num_steps:,}"),
        ("samples", f"{plan.num_samples:,} in {_counted(plan.num_epochs, 'epoch')} of {plan.dataset_size:,}"),
        ("left over", f"{_counted(plan.num_left_over, 'sample')} that did not fit into their epoch"),
        ("batch size", f"{sizes}, mean {_number(plan.mean_batch_size)}, {len(plan.sizes):,} distinct"),
        ("minibatches", f"{plan.num_minibatches:,} of {plan.minibatch_size:,} samples, {in_step} in a step"),
        ("load", f"{load} on each of {_counted(plan.num_cores, 'core')}, {busy}"),
        ("idle", f"{100 * plan.idle_share:.1f} % of all cores in all steps, {idle} steps on a core"),
        ("accumulation", f"{_span(least.depth, most.depth)} minibatches deep, mean {_number(plan.mean_depth)}"),
    ]
    if each is not None:
        span, mean = _span(each * least.batch_size, each * most.batch_size), _number(each * plan.mean_batch_size)
        total = f"{each * plan.num_samples:,} at {each:,} in a sample"
        lines.insert(2, ("tokens", f"{total}; {span} in a step, mean {mean}"))
    if plan.lockstep:
        share = 100 * plan.num_padding / (plan.num_minibatches + plan.num_padding)
        padding = _counted(plan.num_padding, "padding minibatch", "padding minibatches")
        text = f"{_counted(plan.num_rounds, 'round')} of all cores, {padding} ({share:.1f} % of all minibatches run)"
        lines.append(("lockstep", text))
    if last.ends_with_trace:
        share = 100 * last.num_samples / plan.dataset_size
        used = f"{last.num_samples:,} of {plan.dataset_size:,} samples ({share:.1f} %)"
        lines.append(("note", f"the trace ends in epoch {last.epoch}, after {used}"))
    if plan.num_rows_unused:
        is_are = "is" if plan.num_rows_unused == 1 else "are"
        lines.append(("note", f"{_counted(plan.num_rows_unused, 'row')} at the end of the trace {is_are} not reached"))
    return "\n".join(f"{name:<14}{text}" for name, text in lines)


def _shortened(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table that shows only the first and the last of many rows."""
    note = ""
    if len(rows) > 14:
        note = f"\n({len(rows) - 14:,} more rows: use --json to see all)"
        rows = [*rows[:7], ["…"] * len(head), *rows[-7:]]
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else _count(cell) for cell in row] for row in rows]
    return as_text([[*head], *cells], is_left=False) + note


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


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


Table = list[list[str]]  # rows of cells, of which the first is the head


def simulation_table(simulations: Mapping[str, Simulation], *, price: float | None) -> Table:
    """One row per policy, the fastest first; with a cost if there is a price per device-hour."""
    head = ["updates", "samples", "progress", "restarts", "batch sizes"]
    table = [["policy", "hours", "device-hours", *(["cost"] if price is not None else []), *head]]
    for name, run in sorted(simulations.items(), key=lambda item: item[1].seconds):
        times = [f"{seconds / 3600:,.4g}" for seconds in (run.seconds, run.device_seconds)]
        cost = [] if price is None else [f"{run.cost(price):,.2f}"]
        sizes = [size for size, _ in run.made]
        counts = map(_count, (run.updates, run.samples, round(run.progress), run.restarts))
        table.append([name, *times, *cost, *counts, _span(min(sizes), max(sizes))])
    return table


def as_text(table: Table, *, is_left: bool = True) -> str:
    """The table with right-aligned columns, or with the first one left-aligned."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    texts = []
    for line in table:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        texts.append("  ".join([line[0].ljust(widths[0]), *cells[1:]] if is_left else cells).rstrip())
    return "\n".join(texts)


def as_csv(table: Table) -> str:
    # keep the commas in names, drop the thousands separators of numbers
    return csv_text([name, *(cell.replace(",", "") for cell in cells)] for name, *cells in table)


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Rows of a CSV file, with lines that end in ``\\n``."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def programs_table(found: Programs) -> Table:
    """One row per compiled program of a training."""
    table = [["program", "needs (GiB)", "donated", "GFLOP", "GB accessed", "collectives", "at least (ms)"]]
    for number, program in enumerate(found.programs, start=1):
        cells = ["–"] * 6
        if program.error is None:
            costs = [f"{program.flops / 1e9:,.4g}", f"{program.bytes_accessed / 1e9:,.4g}", _collectives(program)]
            milliseconds = f"{1000 * program.seconds(found.chip, found.devices):,.3g}"
            cells = [f"{found.needed(program) / GIB:,.3f}", str(program.donated), *costs, milliseconds]
        table.append([str(number), *cells])
    return table


def _collectives(program: Program) -> str:
    """How many there are of each kind, and their bytes."""
    sizes = Counter[str]()
    for kind, size in program.collectives:
        sizes[kind] += size
    return ", ".join(f"{program.count(kind)} {kind} of {_size(size)}" for kind, size in sizes.items()) or "none"


def _size(num_bytes: int) -> str:
    """
    >>> _size(640), _size(98304), _size(3 * 2**30)
    ('640 B', '96 KiB', '3 GiB')
    """
    for unit, divisor in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= divisor:
            return f"{num_bytes / divisor:.4g} {unit}"
    return f"{num_bytes} B"


def programs_summary(found: Programs) -> str:
    """Whether all programs compile and fit, and which exact mode or other code makes slow."""
    chip, number = found.topology.partition(":")[0], _counted(len(found.programs), "program")
    of_chip = f"{_counted(found.devices, 'device')} with {found.chip.memory / GIB:g} GiB each"
    lines = [f"{number} for {found.topology}, {of_chip}"]
    if found.problems:
        lines += found.problems
    else:
        most = max(map(found.needed, found.programs))
        share = 100 * most / found.chip.memory
        lines.append(f"all compile and fit: at most {most / GIB:,.3f} GiB, {share:.1f} % of a {chip}")
    emulated = [str(place) for place, program in enumerate(found.programs, start=1) if program.doubles]
    if emulated:
        lines.append(f"64-bit floats, which TPUs emulate, in program {', '.join(emulated)}")
    return "\n".join(lines)


def simulation_page(runs: Mapping[str, Simulation], table: Table, *, facts: Mapping[str, str], command: str) -> str:
    """An HTML page of simulated runs, their table, their common settings, and the command that generated it."""
    figure = io.StringIO()
    plot_simulations(runs, figure, format="svg")
    svg = figure.getvalue()[figure.getvalue().index("<svg") :]  # without the prologue of a file
    return table_page("Simulated policies", table, facts=facts, command=command, figure=svg)


def table_page(title: str, table: Table, *, facts: Mapping[str, str], command: str, figure: str = "") -> str:
    """An HTML page of a table, a figure as SVG, the common settings, and the command that generated it."""
    template = (files("variable_batch_size.planning") / "page.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        title=escape(title),
        head="".join(f"<th>{escape(cell)}</th>" for cell in table[0]),
        rows=_html_rows(table[1:]),
        figure=figure,
        settings=_html_rows(facts.items()),
        command=escape(command),
    )


def _html_rows(rows: Iterable[Iterable[str]]) -> str:
    return "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
