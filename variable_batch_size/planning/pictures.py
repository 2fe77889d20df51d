"""Figures of plans, decisions and simulations."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from variable_batch_size.checks import install
from variable_batch_size.planning.plan import Plan, PlannedSize
from variable_batch_size.planning.simulate import Moment, Simulation
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
_MOST_BINS = 1000
_MOST_EPOCH_LINES = 40
_LONGEST_NAME = 120

Curve = npt.NDArray[np.float64]
"""Three rows: minimum, mean and maximum of each bin of steps."""


def plot_plan(plan: Plan, schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Save a figure of a plan, 1200 pixels wide, as PNG or SVG according to the path's suffix.

    With more than 1000 steps, lines show means over neighbouring steps and bands their range.
    """
    check_suffix(path)
    figure = _figure(12, 9)
    edges = np.linspace(0, plan.num_steps, min(plan.num_steps, _MOST_BINS) + 1).round().astype(np.int64).tolist()
    rows = _curves(plan, schedule, edges)
    figure.suptitle(_title(plan), fontsize=12)
    panels = figure.subplots(len(rows), 2, sharex="col", sharey="row", squeeze=False)
    for column, unit in enumerate(("steps", "samples")):
        positions = edges if unit == "steps" else [schedule.samples_before(edge) for edge in edges]
        borders = [epoch.first_step for epoch in plan.epochs[1:]]
        borders = borders if unit == "steps" else [schedule.samples_before(border) for border in borders]
        for row, (label, curves) in enumerate(rows.items()):
            panel = panels[row, column]
            _draw(panel, positions, curves)
            if len(borders) <= _MOST_EPOCH_LINES:
                for border in borders:
                    panel.axvline(border, color="0.85", linewidth=0.8, zorder=0.5)
            if column == 0:
                panel.set_ylabel(label, fontsize=11)
            else:
                _add_legend(panel, has_lines=0 < len(borders) <= _MOST_EPOCH_LINES and row == 0)
        panels[-1, column].set_xlabel(f"{unit} done", fontsize=11)
        panels[-1, column].set_xlim(0, positions[-1])
        panels[-1, column].xaxis.set_major_formatter("{x:,.0f}")
        panels[-1, column].xaxis.set_major_locator(_round_positions())
    for row, curves in enumerate(rows.values()):
        _scale(panels[row, 0], np.concatenate([curve[[0, 2]].ravel() for curve in curves.values()]))
    figure.savefig(path)


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(f"a plot needs matplotlib: {install('report')}") from None
    return Figure(figsize=(width, height), dpi=100, layout="constrained")


def check_suffix(path: str | os.PathLike[str]) -> None:
    """Reject paths other than PNG and SVG files."""
    if os.path.splitext(os.fspath(path))[1].lower() not in SUFFIXES:
        raise ValueError(f"the file name of a plot must end in {' or '.join(SUFFIXES)}, got {os.fspath(path)!r}")


def _title(plan: Plan) -> str:
    name = plan.trace if len(plan.trace) <= _LONGEST_NAME else "…" + plan.trace[-_LONGEST_NAME:]
    cores = f"{plan.num_cores:,} core" + ("s" if plan.num_cores > 1 else "")
    return (
        f"{name}\n{plan.num_steps:,} steps, {plan.num_samples:,} samples, {plan.num_epochs:,} epochs of "
        f"{plan.dataset_size:,}; {cores}, minibatches of {plan.minibatch_size:,}"
    )


def _curves(plan: Plan, schedule: Schedule, edges: list[int]) -> dict[str, dict[str, Curve]]:
    """The curves of each panel, by label and name."""
    all_sizes = np.array([size.batch_size for size in plan.sizes])
    bins = []
    for begin, end in itertools.pairwise(edges):
        sizes, counts = schedule.size_counts(range(begin, end))
        bins.append((np.searchsorted(all_sizes, sizes), counts / counts.sum()))

    def curve(quantity: Callable[[PlannedSize], float]) -> Curve:
        of_size = np.array([quantity(size) for size in plan.sizes], dtype=np.float64)
        values = [of_size[which] for which, _ in bins]
        means = [value @ share for value, (_, share) in zip(values, bins, strict=True)]
        return np.array([[value.min() for value in values], means, [value.max() for value in values]])

    def factor(rule: str) -> Curve:
        return curve(lambda size: size.factors[rule])

    rows = {"batch size (samples)": {"batch size": curve(lambda size: size.batch_size)}}
    if plan.rules:
        label = f"learning-rate factor\n(reference batch size {plan.ref_batchsize:,})"
        rows[label] = {rule: factor(rule) for rule in plan.rules}
    load = {"core 0": curve(lambda size: size.depth)}
    if plan.num_cores > 1:
        load["mean of cores"] = curve(lambda size: size.num_minibatches / plan.num_cores)
        load[f"core {plan.num_cores - 1}"] = curve(lambda size: size.num_minibatches // plan.num_cores)
    rows["minibatches of a core in a step"] = load
    return rows


def _draw(panel: Any, positions: list[int], curves: dict[str, Curve]) -> None:
    for number, (name, curve) in enumerate(curves.items()):
        style = STYLES[number % len(STYLES)]
        least, mean, most = np.append(curve, curve[:, -1:], axis=1)  # extend each step to the start of the next
        panel.plot(positions, mean, drawstyle="steps-post", label=name, linewidth=1.5, **style)
        if (least < most).any():
            band = panel.fill_between(
                positions, least, most, step="post", color=style["color"], alpha=0.15, linewidth=0
            )
            band.set_label("range of neighbours" if len(curves) == 1 else None)
    panel.grid(axis="y", color="0.92")
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=10)


def _add_legend(panel: Any, *, has_lines: bool) -> None:
    """Place the legend above the panel."""
    if has_lines:
        panel.plot([], [], color="0.75", linewidth=0.8, label="epochs begin")
    panel.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=6, frameon=False, fontsize=10, borderaxespad=0.2)


def _scale(panel: Any, values: npt.NDArray[np.float64]) -> None:
    """A logarithmic axis for a wide range of values, else a linear axis from 0."""
    if values.min() > 0 and values.max() / values.min() >= 8:
        panel.set_yscale("log", base=2)
        panel.yaxis.set_major_formatter("{x:,g}")
        panel.set_ylim(values.min() / 1.3, values.max() * 1.3)
    else:
        panel.yaxis.set_major_formatter("{x:,g}")
        panel.set_ylim(-0.03 * values.max(), values.max() * 1.1)  # keep a line at 0 visible


def _round_positions() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=5, steps=[1, 2, 5, 10], integer=True)


Record = Mapping[str, Any]


def plot_decisions(trace: Trace, records: Sequence[Record], path: str | os.PathLike[str]) -> None:
    """Save a figure of an executed trace and the decisions of its policy as PNG or SVG.

    Args:
        trace: the batch sizes of all steps.
        records: the decisions, from decisions.jsonl.
        path: of the figure.
    """
    check_suffix(path)
    num_steps = len(trace)
    figure = _figure(9, 6)
    sizes, cores, noise = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 2))
    restarts = [record["step"] for before, record in pairwise(records) if before["cores"] != record["cores"]]
    _draw_decisions(sizes, range(num_steps + 1), [*trace, trace[num_steps - 1]], STYLES[0])
    sizes.set_yscale("log", base=2)
    sizes.yaxis.set_major_formatter("{x:,g}")
    sizes.set_ylabel("batch size (samples)")
    steps = [*(record["step"] for record in records), num_steps]
    _draw_decisions(cores, steps, _held(records, "cores"), STYLES[1])
    cores.set_ylim(0, max(record["cores"] for record in records) + 1)
    cores.set_ylabel("cores")
    _draw_decisions(noise, steps, _held(records, "noise_scale"), STYLES[2])
    noise.set_yscale("log")
    noise.set_ylabel("noise scale (samples)")
    noise.set_xlabel("steps done")
    noise.set_xlim(0, num_steps)
    for panel in (sizes, cores, noise):
        panel.grid(axis="y", color="0.92")
        panel.set_axisbelow(True)
        for step in restarts:
            panel.axvline(step, color="0.85", linewidth=0.8, zorder=0.5)
    figure.savefig(path)


def _held(records: Sequence[Record], name: str) -> list[float]:
    """A value of each record, with the last one repeated; NaN for None."""
    values = [np.nan if record[name] is None else float(record[name]) for record in records]
    return [*values, values[-1]]


def _draw_decisions(panel: Any, positions: Sequence[int], values: Sequence[float], style: Mapping[str, Any]) -> None:
    panel.plot(positions, values, drawstyle="steps-post", linewidth=1.5, color=style["color"])


_PANELS: tuple[tuple[str, Callable[[Moment], float]], ...] = (
    ("batch size (samples)", lambda moment: moment.batch_size),
    ("cores", lambda moment: moment.cores),
    ("progress (steps at the reference)", lambda moment: moment.progress),
)


def plot_simulations(simulations: Mapping[str, Simulation], path: str | os.PathLike[str]) -> None:
    """Save a figure of simulated runs as PNG or SVG according to the path's suffix."""
    check_suffix(path)
    _simulation_figure(simulations).savefig(path)


def simulations_as_svg(simulations: Mapping[str, Simulation]) -> str:
    """The figure of simulated runs as an SVG element for an HTML page."""
    with io.StringIO() as file:
        _simulation_figure(simulations).savefig(file, format="svg")
        text = file.getvalue()
    return text[text.index("<svg") :]


def _simulation_figure(simulations: Mapping[str, Simulation]) -> Any:
    figure = _figure(10, 8)
    panels = figure.subplots(len(_PANELS), 1, sharex=True)
    for panel, (label, value) in zip(panels, _PANELS, strict=True):
        kind = "default" if "progress" in label else "steps-post"
        for number, (name, run) in enumerate(simulations.items()):
            hours, values = zip(*((moment.seconds / 3600, value(moment)) for moment in run.moments), strict=True)
            panel.plot(hours, values, drawstyle=kind, label=name, linewidth=1.5, **STYLES[number % len(STYLES)])
        panel.set_ylabel(label)
        panel.grid(axis="y", color="0.92")
        panel.set_axisbelow(True)
    panels[0].set_yscale("log", base=2)
    panels[0].yaxis.set_major_formatter("{x:,g}")
    panels[0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, frameon=False)
    panels[1].set_ylim(bottom=0)
    panels[-1].set_xlabel("hours")
    panels[-1].set_xlim(left=0)
    return figure
