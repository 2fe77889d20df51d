"""Text, tables and pages of traces, conversions, plans, decisions and simulations."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

import numpy as np
import numpy.typing as npt

from variable_batch_size.lab.planning.plan import Plan
from variable_batch_size.lab.planning.profile import MEASURED, Profile, free_parameters
from variable_batch_size.lab.planning.simulate import NoiseCurve, NoiseCurves, Runs, Simulation
from variable_batch_size.traces.recording import Conversion
from variable_batch_size.traces.trace import Trace

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-=+*%#"
Table = list[list[str]]  # rows of cells, of which the first is the head
_SLOWED = 1.5  # times of accumulating a minibatch should not differ by a larger factor between numbers of cores


def sparkline(
    values: npt.NDArray[Any], *, width: int, weights: npt.NDArray[Any] | None = None, is_ascii: bool = False
) -> str:
    """Positive numbers as a line of block characters, with heights from 0 to the largest number.

    A character is the mean over its width; numbers are equally wide, or as wide as their weights.
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
    changes = counted(int(np.count_nonzero(np.diff(sizes))), "change")
    return (
        f"{counted(len(trace), 'step')}, {counted(int(sizes.sum()), 'sample')}\n"
        f"batch sizes   {span}, mean {mean}, {len(np.unique(sizes)):,} distinct, {changes}\n"
        f"over steps    {steps}\nover samples  {samples}"
    )


def conversion_report(conversion: Conversion) -> str:
    """A conversion as text, with the effect of rounding."""
    difference = conversion.samples - conversion.samples_before_rounding
    share = difference / conversion.samples_before_rounding
    steps = counted(len(conversion.trace), "step")
    return (
        f"recording      {duration(conversion.seconds_recorded)}, of which {duration(conversion.seconds_empty)} "
        f"without a device; {_number(conversion.recorded_rate)} samples per second\n"
        f"trace          {steps} of {duration(conversion.seconds_per_step)}, "
        f"{counted(conversion.samples, 'sample')}; {_number(conversion.rate)} samples per second\n"
        f"rounding       changed {conversion.num_steps_rounded:,} of {steps}, "
        f"{_number(difference, sign='+')} samples ({100 * share:+.2f} %)\n"
        f"left at end    {duration(conversion.seconds_left)}, less than a step"
    )


def decisions_report(records: Sequence[Mapping[str, Any]]) -> str:
    """The decisions that changed the batch size or came after a change of cores, one per line."""
    states = [(record["batch_size"], record["cores"]) for record in records]
    changes = [record for index, record in enumerate(records) if index == 0 or states[index - 1] != states[index]]
    lines = ["at step  from step  batch size  cores  noise scale  why"]
    for record in changes:
        noise = "–" if record["noise_scale"] is None else f"{record['noise_scale']:,.4g}"
        counts = f"{record['step']:7,}  {record['from_step']:9,}  {record['batch_size']:10,}  {record['cores']:5,}"
        lines.append(f"{counts}  {noise:>11}  {record['why']}".rstrip())
    if len(changes) < len(records):
        lines.append(f"({counted(len(records) - len(changes), 'more decision')} without a change)")
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
    if plan.token_plan is not None:
        rows = [[*shape.values()] for shape in plan.token_plan["shapes"]]
        table = as_text(_cells(["rows", "tokens", "minibatches of an epoch"], rows), is_left=False)
        blocks.append(f"shapes of minibatches\n{table}")
    head = ["epoch", "first step", "steps", plan.unit, "left over "]
    rows = [[*at[:4], f"{at.num_left_over:,}{'*' if at.ends_with_trace else ' '}"] for at in plan.epochs]
    note = "\n* ends with the trace" if plan.epochs[-1].ends_with_trace else ""
    blocks.append(f"epochs\n{_shortened(head, rows)}{note}")
    head = ["step", f"{plan.unit} before", *["tokens before"] * with_tokens, "epoch", "batch size", *load]
    rows = [[at.step, at[2], *tokens(at[2]), at.epoch, *at[3:6], *at.factors.values()] for at in plan.moments]
    blocks.append(f"over time{title}\n{_shortened(head, rows)}")
    if plan.checkpoints:
        head = ["steps done", f"{plan.unit} done", "epoch", "steps done in it"]
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
        (plan.unit, f"{plan.num_samples:,} in {counted(plan.num_epochs, 'epoch')} of {plan.dataset_size:,}"),
        ("left over", f"{counted(plan.num_left_over, plan.unit[:-1])} that did not fit into their epoch"),
        ("batch size", f"{sizes}, mean {_number(plan.mean_batch_size)}, {len(plan.sizes):,} distinct"),
        ("minibatches", f"{plan.num_minibatches:,} of {plan.minibatch_size:,} {plan.unit}, {in_step} in a step"),
        ("load", f"{load} on each of {counted(plan.num_cores, 'core')}, {busy}"),
        ("idle", f"{100 * plan.idle_share:.1f} % of all cores in all steps, {idle} steps on a core"),
        ("accumulation", f"{_span(least.depth, most.depth)} minibatches deep, mean {_number(plan.mean_depth)}"),
    ]
    if each is not None:
        span, mean = _span(each * least.batch_size, each * most.batch_size), _number(each * plan.mean_batch_size)
        total = f"{each * plan.num_samples:,} at {each:,} in a sample"
        lines.insert(2, ("tokens", f"{total}; {span} in a step, mean {mean}"))
    if plan.token_plan is not None:
        lines[2:2] = _budget_lines(plan.token_plan)
    if plan.lockstep:
        share = 100 * plan.num_padding / (plan.num_minibatches + plan.num_padding)
        padding = counted(plan.num_padding, "padding minibatch", "padding minibatches")
        text = f"{counted(plan.num_rounds, 'round')} of all cores, {padding} ({share:.1f} % of all minibatches run)"
        lines.append(("lockstep", text))
    if last.ends_with_trace:
        share = 100 * last.num_samples / plan.dataset_size
        used = f"{last.num_samples:,} of {plan.dataset_size:,} {plan.unit} ({share:.1f} %)"
        lines.append(("note", f"the trace ends in epoch {last.epoch}, after {used}"))
    if plan.num_rows_unused:
        is_are = "is" if plan.num_rows_unused == 1 else "are"
        lines.append(("note", f"{counted(plan.num_rows_unused, 'row')} at the end of the trace {is_are} not reached"))
    return "\n".join(f"{name:<14}{text}" for name, text in lines)


def _budget_lines(budget: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a token budget does to the samples of an epoch."""
    number, shapes = budget["num_minibatches"], counted(len(budget["shapes"]), "shape")
    dropped = f", {budget['num_dropped']:,} longer ones dropped" if budget["num_dropped"] else ""
    held = budget["num_tokens"] / number
    share = f"{held:,.0f} without padding in a minibatch, which counts as {budget['tokens']:,}"
    way = "packed" if budget["packed"] else "padded"
    return [
        ("in an epoch", f"{budget['num_samples']:,} samples of {budget['num_tokens']:,} tokens{dropped}"),
        (way, f"to {counted(number, 'minibatch', 'minibatches')} of {shapes}; {share}"),
        ("padding", f"{100 * budget['padding']:.1f} % of the tokens in minibatches"),
    ]


def _shortened(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table that shows only the first and the last of many rows."""
    note = ""
    if len(rows) > 14:
        note = f"\n({len(rows) - 14:,} more rows: use --json to see all)"
        rows = [*rows[:7], ["…"] * len(head), *rows[-7:]]
    return as_text(_cells(head, rows), is_left=False) + note


def _cells(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    return [[*head], *([f"{cell:.4g}" if isinstance(cell, float) else _count(cell) for cell in row] for row in rows)]


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _span(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def counted(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _number(value: float, sign: str = "") -> str:
    """At most two decimals, without trailing zeros."""
    return f"{value:{sign},.2f}".rstrip("0").rstrip(".")


def duration(seconds: float) -> str:
    """A duration as text: three digits below a minute, the two largest units above.

    >>> [duration(seconds) for seconds in (0, 0.0625, 7, 59.96, 226.9, 3600, 90_000)]
    ['0 s', '62.5 ms', '7 s', '1 min', '3 min 47 s', '1 h', '1 d 1 h']
    """
    if not seconds:
        return "0 s"
    for unit, factor, limit in (("µs", 1e6, 1000), ("ms", 1e3, 1000), ("s", 1, 60)):
        digits = f"{factor * seconds:.3g}"
        if float(digits) < limit:  # after rounding
            return f"{digits} {unit}"
    size, units = 1, ("min", "s")
    if round(seconds) >= 3600:
        size, units = 60, ("h", "min")
    if round(seconds / 60) >= 24 * 60:
        size, units = 3600, ("d", "h")
    whole, rest = divmod(round(seconds / size), 24 if size == 3600 else 60)
    return f"{whole:,} {units[0]}" + (f" {rest} {units[1]}" if rest else "")


def money(amount: float) -> str:
    """An amount with two decimals, or with two digits if it is small.

    >>> money(1234.567), money(0.0123), money(0)
    ('1,234.57', '0.012', '0.00')
    """
    return f"{amount:.2g}" if 0 < amount < 0.095 else f"{amount:,.2f}"


def fit_report(profile: Profile) -> str:
    """The parameters of the fitted model, and its errors in each row of the profile."""
    model, free = profile.throughput, free_parameters(profile.rows)
    lines = [f"{name:<8}  {value:.4g}{'' if name in free else ' (fixed)'}" for name, value in model._asdict().items()]
    table = [["machines", "cores", "minibatch", *("accumulating", "model", "error"), *("updating", "model", "error")]]
    for row in profile.rows:
        pairs = [
            (row.seconds_accumulating, model.accumulating(row.minibatch_size)),
            (row.seconds_updating, model.updating(*row[:3])),
        ]
        cells = [[duration(seen), duration(fitted), f"{100 * (fitted / seen - 1):+.1f} %"] for seen, fitted in pairs]
        table.append([*map(_count, row[:3]), *cells[0], *cells[1]])
    return "\n".join([*lines, as_text(table, is_left=False)])


def profile_warnings(profile: Profile) -> list[str]:
    """Where accumulating a minibatch, which needs no other core, takes a different time on more cores."""
    found = []
    for machines, size in dict.fromkeys((row.machines, row.minibatch_size) for row in profile.rows):
        where = {"machines": machines, "minibatch_size": size}
        numbers = sorted({row.cores for row in profile.rows if (row.machines, row.minibatch_size) == (machines, size)})
        few, *more = [(number, profile.times(cores=number, **where).accumulating) for number in numbers]
        for cores, seconds in more:
            ratio = seconds / few[1]
            if 1 / _SLOWED <= ratio <= _SLOWED:
                continue
            what = f"accumulating a minibatch of {size} takes {duration(seconds)} on {cores} cores"
            other = f"{ratio:.1f} times the {duration(few[1])} on {counted(few[0], 'core')}"
            in_all = f", so {cores} cores train no faster" if ratio * few[0] >= cores else ""
            why = "the machine is busy with other work, or has too few CPUs or too little memory bandwidth"
            why = why if ratio > 1 else "the machine was busy with other work when the fewer cores were measured"
            found.append(f"{what}, {other}{in_all}: {why}")
    return found


def simulation_table(runs: Runs, *, is_csv: bool = False) -> Table:
    """One row per run, the fastest first; with costs if there was a price.

    In a CSV file times are hours, and numbers have no thousands separators.
    """
    times = ["hours", "device-hours"] if is_csv else ["time", "device time"]
    has_cost, has_ends = (any(getattr(run, name) is not None for _, run in runs) for name in ("cost", "ends"))
    if has_ends:
        times[1:1] = ["hours from", "hours to"] if is_csv else ["95 % interval"]
    head = ["updates", "samples", "progress", "restarts", "lost hours" if is_csv else "lost", "batch sizes", "times"]
    table = [["policy", "cores", *times, *(["cost"] if has_cost else []), *head]]
    for name, run in sorted(runs, key=lambda item: item[1].seconds):
        sizes, seconds = [size for size, _ in run.made], (run.seconds, run.device_seconds)
        cells = [cores_text(run), *(_time(time, is_csv=is_csv) for time in seconds)]
        if has_ends:
            between = [_time(end.seconds, is_csv=is_csv) for end in run.ends or (run, run)]
            cells[2:2] = between if is_csv else [_interval(run) or "–"]
        if run.cost is not None:
            cells.append(f"{run.cost:.6g}" if is_csv else money(run.cost))
        cells += map(_count, (run.updates, run.samples, round(run.progress), run.restarts))
        cells += [_time(run.lost_seconds, is_csv=is_csv), _span(min(sizes), max(sizes)), run.basis]
        table.append([name, *(cell.replace(",", "") if is_csv else cell for cell in cells)])
    return table


def _time(seconds: float, *, is_csv: bool) -> str:
    return f"{seconds / 3600:.6g}" if is_csv else duration(seconds)


def _interval(run: Simulation) -> str:
    """The shortest and the longest time; empty if they read the same."""
    times = dict.fromkeys(duration(end.seconds) for end in run.ends or ())
    return " to ".join(times) if len(times) > 1 else ""


def noise_warnings(runs: Runs, noise: NoiseCurve | NoiseCurves) -> list[str]:
    """How far the simulated runs are beyond the progress and the batch sizes at which the noise was measured."""
    curves, found = noise.curves if isinstance(noise, NoiseCurves) else [noise], []
    ends = [curve.progress[-1] for curve in curves if not curve.is_constant]
    goal = max(run.progress for _, run in runs)
    if ends and min(ends) < goal / 1.01:
        steps = f"{min(ends):,.0f} of {goal:,.0f} steps at the reference batch size"
        found.append(f"the noise was measured for {steps}, and is assumed to stay as it was at the end of these")
    used = [size for _, run in runs for size, _ in run.made]
    sizes = [size for curve in curves for size in curve.batch_sizes or ()]
    if sizes and (min(used) < min(sizes) / 1.01 or max(used) > max(sizes) * 1.01):
        measured = _span(round(min(sizes)), round(max(sizes)))
        where = f"at batch size {measured}, and used at {_span(min(used), max(used))}"
        found.append(f"the noise was measured {where}: beyond, it is assumed to be that at the nearest measured one")
    elif not sizes and ends:
        found.append("the noise has no batch sizes, and is assumed to be the same at all of them")
    return found


def cores_text(run: Simulation) -> str:
    numbers = [moment.cores for moment in run.moments]
    return _span(min(numbers), max(numbers))


def fastest(runs: Runs) -> tuple[str, Simulation]:
    """The fastest run; of several, the cheapest."""
    return min(runs, key=lambda item: (item[1].seconds, item[1].device_seconds))


def cheapest(runs: Runs) -> tuple[str, Simulation]:
    """The run with the least cost, or device time without a price; of several, the fastest."""
    return min(runs, key=lambda item: (item[1].cost or 0.0, item[1].device_seconds, item[1].seconds))


def verdict(runs: Runs) -> str:
    """The fastest and the cheapest run, a sentence each; without a price, cheap is little device time."""
    first, last = fastest(runs), cheapest(runs)
    if len(runs) == 1:
        return f"One run: {choice(*first)}."
    if first == last:
        return f"Fastest and cheapest: {choice(*first)}."
    return f"Fastest: {choice(*first)}. Cheapest: {choice(*last)}."


def choice(name: str, run: Simulation) -> str:
    """A simulated run in words: its policy, cores, time and cost, and whether its times are a guess."""
    policy = f"batch size {int(name):,}" if name.isdecimal() else name
    cost = f"{duration(run.device_seconds)} of device time" if run.cost is None else f"cost {money(run.cost)}"
    guess = "" if run.basis == MEASURED else f" ({run.basis})"
    time = duration(run.seconds) + (f" ({_interval(run)})" if _interval(run) else "")
    return f"{policy} on {cores_text(run)} core{'s' * (cores_text(run) != '1')}, {time}, {cost}{guess}"


def as_text(table: Table, *, is_left: bool = True) -> str:
    """The table with right-aligned columns, or with the first one left-aligned."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    texts = []
    for line in table:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        texts.append("  ".join([line[0].ljust(widths[0]), *cells[1:]] if is_left else cells).rstrip())
    return "\n".join(texts)


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Rows of a CSV file, with lines that end in ``\\n``."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def table_page(
    title: str, table: Table, *, facts: Mapping[str, str], command: str, figure: str = "", lead: str = ""
) -> str:
    """An HTML page of a table, a figure as SVG, the common settings, and the command that generated it.

    `lead` is the paragraph under the title.
    """
    template = (files("variable_batch_size.lab.planning") / "page.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        title=escape(title),
        lead=f"<p>{escape(lead)}</p>" if lead else "",
        head="".join(f"<th>{escape(cell)}</th>" for cell in table[0]),
        rows=_html_rows(table[1:]),
        figure=figure,
        settings=_html_rows(facts.items()),
        command=escape(command),
    )


def _html_rows(rows: Iterable[Iterable[str]]) -> str:
    return "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
