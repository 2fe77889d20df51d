"""Figures of traces, plans, decisions and simulations."""

import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from variable_batch_size.checks import import_extra
from variable_batch_size.lab.planning.plan import Plan
from variable_batch_size.lab.planning.reports import cores_text, simulation_table, table_page, verdict
from variable_batch_size.lab.planning.simulate import Runs
from variable_batch_size.schedules.schedule import Schedule
from variable_batch_size.traces.trace import Trace

SUFFIXES = (".png", ".svg")
# the colour-blind safe palette of Okabe and Ito; dashes distinguish lines that coincide
STYLES: list[dict[str, Any]] = [
    {"color": "#000000", "linestyle": "-"},
    {"color": "#D55E00", "linestyle": (0, (6, 2))},
    {"color": "#0072B2", "linestyle": (0, (2, 1.5))},
    {"color": "#009E73", "linestyle": (0, (6, 2, 1, 2))},
    {"color": "#CC79A7", "linestyle": (0, (1, 1))},
    {"color": "#E69F00", "linestyle": (0, (10, 3))},
    {"color": "#56B4E9", "linestyle": (0, (4, 1, 1, 1, 1, 1))},
]
_AXIS_UNITS = (("days", 86_400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
_MOST_EPOCHS = 41  # whose borders are drawn
_LONGEST_NAME = 120
Curve = npt.NDArray[np.float64]  # three rows: minimum, mean and maximum of each bin of steps


def plot_plan(plan: Plan, schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Save a figure of a plan, 1200 pixels wide, as PNG or SVG according to the path's suffix.

    With more than 1000 steps, lines show means over neighbouring steps and bands their range.
    """
    check_suffix(path)
    figure = new_figure(12, 9)
    from matplotlib.ticker import MaxNLocator  # after new_figure, which asks to install matplotlib if it is missing

    edges = np.linspace(0, plan.num_steps, min(plan.num_steps, 1000) + 1).round().astype(np.int64).tolist()
    rows = _curves(plan, schedule, edges)
    borders = [epoch.first_step for epoch in plan.epochs[1:]] if plan.num_epochs <= _MOST_EPOCHS else []
    name = plan.trace if len(plan.trace) <= _LONGEST_NAME else "…" + plan.trace[-_LONGEST_NAME:]
    samples = f"{plan.num_samples:,} {plan.unit}, {plan.num_epochs:,} epochs of {plan.dataset_size:,}"
    cores = f"{plan.num_cores:,} core{'s' if plan.num_cores > 1 else ''}, minibatches of {plan.minibatch_size:,}"
    figure.suptitle(f"{name}\n{plan.num_steps:,} steps, {samples}; {cores}", fontsize=12)
    panels = figure.subplots(len(rows), 2, sharex="col", sharey="row", squeeze=False)
    units: dict[str, Callable[[int], int]] = {"steps": int, plan.unit: schedule.samples_before}
    for column, (unit, at) in zip(panels.T, units.items(), strict=True):
        positions = list(map(at, edges))
        for panel, curves in zip(column, rows.values(), strict=True):
            _draw(panel, positions, curves)
            _add_grid(panel, map(at, borders))
        column[-1].set_xlabel(f"{unit} done", fontsize=11)
        column[-1].set_xlim(0, positions[-1])
        column[-1].xaxis.set_major_formatter("{x:,.0f}")
        column[-1].xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10], integer=True))
    if borders:
        panels[0, 1].plot([], [], color="0.75", linewidth=0.8, label="epochs begin")
    for (left, right), (label, curves) in zip(panels, rows.items(), strict=True):
        left.set_ylabel(label, fontsize=11)
        _add_legend(right, fontsize=10, borderaxespad=0.2)
        values = np.concatenate([curve[[0, 2]].ravel() for curve in curves.values()])
        if values.min() > 0 and values.max() / values.min() >= 8:
            left.set_yscale("log", base=2)
            left.set_ylim(values.min() / 1.3, values.max() * 1.3)
        else:
            left.set_ylim(-0.03 * values.max(), values.max() * 1.1)  # keep a line at 0 visible
        left.yaxis.set_major_formatter("{x:,g}")
    figure.savefig(path)


def new_figure(width: float, height: float, *, extra: str = "report") -> Any:
    """A figure in inches of 100 pixels; `extra` is the extra of this package that installs matplotlib."""
    matplotlib = import_extra("matplotlib.figure", "a plot needs matplotlib", extra)
    return matplotlib.Figure(figsize=(width, height), dpi=100, layout="constrained")


def check_suffix(path: str | os.PathLike[str]) -> None:
    if os.path.splitext(os.fspath(path))[1].lower() not in SUFFIXES:
        raise ValueError(f"the file name of a plot must end in {' or '.join(SUFFIXES)}, got {os.fspath(path)!r}")


def _curves(plan: Plan, schedule: Schedule, edges: list[int]) -> dict[str, dict[str, Curve]]:
    """The curves of each panel, by label and name."""
    all_sizes = np.array([size.batch_size for size in plan.sizes])
    bins = []
    for begin, end in pairwise(edges):
        sizes, counts = schedule.size_counts(range(begin, end))
        bins.append((np.searchsorted(all_sizes, sizes), counts / counts.sum()))

    def curve(quantities: Iterable[float]) -> Curve:
        """Of a quantity of each batch size."""
        of_size = np.array(list(quantities), dtype=np.float64)
        values = [of_size[which] for which, _ in bins]
        means = [value @ share for value, (_, share) in zip(values, bins, strict=True)]
        return np.array([[value.min() for value in values], means, [value.max() for value in values]])

    rows = {"batch size (samples)": {"batch size": curve(size.batch_size for size in plan.sizes)}}
    if plan.rules:
        label = f"learning-rate factor\n(reference batch size {plan.ref_batchsize:,})"
        rows[label] = {rule: curve(size.factors[rule] for size in plan.sizes) for rule in plan.rules}
    load = {"core 0": curve(size.depth for size in plan.sizes)}
    if plan.num_cores > 1:
        load["mean of cores"] = curve(size.num_minibatches / plan.num_cores for size in plan.sizes)
        load[f"core {plan.num_cores - 1}"] = curve(size.num_minibatches // plan.num_cores for size in plan.sizes)
    rows["minibatches of a core in a step"] = load
    return rows


def _draw(panel: Any, positions: list[int], curves: dict[str, Curve]) -> None:
    for number, (name, curve) in enumerate(curves.items()):
        least, mean, most = np.append(curve, curve[:, -1:], axis=1)  # extend each step to the start of the next
        _draw_line(panel, positions, mean, number, label=name)
        if (least < most).any():
            fill = {"step": "post", "color": STYLES[number % len(STYLES)]["color"], "alpha": 0.15, "linewidth": 0}
            band = panel.fill_between(positions, least, most, **fill)
            band.set_label("range of neighbours" if len(curves) == 1 else None)
    panel.tick_params(labelsize=10)


def _draw_line(panel: Any, positions: Sequence[float], values: Any, number: int, **options: Any) -> None:
    """Draw a line of steps in the style with this number; after the last colour they repeat with other dashes."""
    colour, dashes = STYLES[number % len(STYLES)], STYLES[(number + number // len(STYLES)) % len(STYLES)]
    style = {"drawstyle": "steps-post", "linewidth": 1.5, **colour, "linestyle": dashes["linestyle"]}
    panel.plot(positions, values, **style | options)


def _add_grid(panel: Any, borders: Iterable[float] = ()) -> None:
    """Horizontal lines, and vertical ones at some positions."""
    panel.grid(axis="y", color="0.92")
    panel.set_axisbelow(True)
    for border in borders:
        panel.axvline(border, color="0.85", linewidth=0.8, zorder=0.5)


def _add_legend(panel: Any, **options: Any) -> None:
    panel.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=6, frameon=False, **options)


def plot_traces(traces: Mapping[str, Trace], path: str | os.PathLike[str]) -> None:
    """Save a figure of traces, by their names, over steps and over samples, as PNG or SVG.

    For a long trace, it shows the batch sizes at 2,000 of its steps.
    """
    check_suffix(path)
    figure = new_figure(10, 6)
    panels = figure.subplots(2, 1)
    for number, (name, trace) in enumerate(traces.items()):
        sizes = trace.sizes
        shown = np.unique(np.linspace(0, len(sizes) - 1, min(len(sizes), 2000)).astype(np.int64))
        samples = np.concatenate(([0], np.cumsum(sizes)))
        for panel, positions in zip(panels, (np.arange(len(sizes) + 1), samples), strict=True):
            at = [*positions[shown].tolist(), int(positions[-1])]
            _draw_line(panel, at, [*sizes[shown].tolist(), int(sizes[-1])], number, label=name)
    for panel, label in zip(panels, ("steps", "samples"), strict=True):
        panel.set_ylabel("batch size (samples)")
        panel.set_xlabel(label)
        panel.set_xlim(left=0)
        panel.xaxis.set_major_formatter("{x:,.0f}")
        _add_grid(panel)
    if max(trace.sizes.max() / trace.sizes.min() for trace in traces.values()) >= 8 or len(traces) > 1:
        for panel in panels:
            panel.set_yscale("log", base=2)
            panel.yaxis.set_major_formatter("{x:,g}")
    _add_legend(panels[0])
    figure.savefig(path)


def plot_decisions(trace: Trace, records: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Save a figure of an executed trace and the decisions of its policy, from decisions.jsonl, as PNG or SVG."""
    check_suffix(path)
    figure = new_figure(9, 6)
    panels = sizes, cores, noise = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 2))
    restarts = [record["step"] for before, record in pairwise(records) if before["cores"] != record["cores"]]
    steps = [*(record["step"] for record in records), len(trace)]
    numbers = [record["cores"] for record in records]
    scales = [np.nan if record["noise_scale"] is None else record["noise_scale"] for record in records]
    _draw_line(sizes, range(len(trace) + 1), [*trace, trace[-1]], 0)
    sizes.set_yscale("log", base=2)
    sizes.yaxis.set_major_formatter("{x:,g}")
    _draw_line(cores, steps, [*numbers, numbers[-1]], 1, linestyle="-")
    cores.set_ylim(0, max(numbers) + 1)
    _draw_line(noise, steps, [*scales, scales[-1]], 2, linestyle="-")
    noise.set_yscale("log")
    noise.set_xlabel("steps done")
    noise.set_xlim(0, len(trace))
    for panel, label in zip(panels, ("batch size (samples)", "cores", "noise scale (samples)"), strict=True):
        panel.set_ylabel(label)
        _add_grid(panel, restarts)
    figure.savefig(path)


def plot_simulations(runs: Runs, file: Any, *, format: str) -> None:
    """Save a figure of simulated runs, with the verdict as its title, to a path or a file object, as PNG or SVG."""
    has_same = len({name for name, _ in runs}) < len(runs)
    labels = [f"{name} on {cores_text(run)}" if has_same else name for name, run in runs]
    columns = max(1, int(10 / (0.6 + 0.08 * max(map(len, labels)))))  # about 0.08 inches per character
    figure = new_figure(10, 8 + 0.2 * len(runs) // columns)
    figure.suptitle(verdict(runs).replace(". ", ".\n"), fontsize=10)
    panels = figure.subplots(3, 1, sharex=True)
    longest = max(run.seconds for _, run in runs)
    unit, size = next((item for item in _AXIS_UNITS if longest >= 2 * item[1]), _AXIS_UNITS[-1])
    for number, (_, run) in enumerate(runs):
        seconds, cores, sizes, progress = zip(*run.moments, strict=True)
        times = [value / size for value in seconds]
        _draw_line(panels[0], times, sizes, number, label=labels[number])
        _draw_line(panels[1], times, cores, number)
        _draw_line(panels[2], times, progress, number, drawstyle="default")
        for end in run.ends or ():
            points = [(moment.seconds / size, moment.progress) for moment in end.moments]
            thin = {"drawstyle": "default", "linewidth": 0.6, "alpha": 0.6}
            _draw_line(panels[2], [at for at, _ in points], [progress for _, progress in points], number, **thin)
    for panel, label in zip(
        panels, ("batch size (samples)", "cores", "progress (steps at the reference)"), strict=True
    ):
        panel.set_ylabel(label)
        _add_grid(panel)
    panels[0].set_yscale("log", base=2)
    panels[0].yaxis.set_major_formatter("{x:,g}")
    figure.legend(loc="outside lower center", ncols=columns, frameon=False)
    panels[1].set_ylim(bottom=0)
    panels[-1].set_xlabel(unit)
    panels[-1].set_xlim(left=0)
    figure.savefig(file, format=format)


def simulation_page(runs: Runs, *, facts: Mapping[str, str], command: str) -> str:
    """An HTML page of simulated runs: the verdict, the table, the figure, their common settings, and the command."""
    figure = io.StringIO()
    plot_simulations(runs, figure, format="svg")
    svg = figure.getvalue()[figure.getvalue().index("<svg") :]  # without the prologue of a file
    table = simulation_table(runs)
    lead = verdict(runs)
    return table_page("Simulated policies", table, lead=lead, facts=facts, command=command, figure=svg)
