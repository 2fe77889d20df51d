"""Draws simulated runs: batch size, cores and progress over time, policies over one another."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from typing import Any

from variable_batch_size.checks import install
from variable_batch_size.planning.picture import STYLES, check_suffix
from variable_batch_size.planning.simulate import Moment, Simulation

_PANELS: tuple[tuple[str, Callable[[Moment], float]], ...] = (
    ("batch size (samples)", lambda moment: moment.batch_size),
    ("cores", lambda moment: moment.cores),
    ("progress (steps at the reference)", lambda moment: moment.progress),
)


def plot_simulations(simulations: Mapping[str, Simulation], path: str | os.PathLike[str]) -> None:
    """Save a picture of simulated runs, a PNG or SVG file by the path's suffix."""
    check_suffix(path)
    _figure(simulations).savefig(path)


def simulations_as_svg(simulations: Mapping[str, Simulation]) -> str:
    """The same picture as text, to be put into a page."""
    with io.StringIO() as file:
        _figure(simulations).savefig(file, format="svg")
        text = file.getvalue()
    return text[text.index("<svg") :]


def _figure(simulations: Mapping[str, Simulation]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(f"a picture needs matplotlib: {install('report')}") from None
    figure = Figure(figsize=(10, 8), dpi=100, layout="constrained")
    panels = figure.subplots(len(_PANELS), 1, sharex=True)
    for panel, (label, value) in zip(panels, _PANELS, strict=True):
        for number, (name, run) in enumerate(simulations.items()):
            _draw(panel, run, value, name, STYLES[number % len(STYLES)], is_line="progress" in label)
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


def _draw(
    panel: Any, run: Simulation, value: Callable[[Moment], float], name: str, style: Mapping[str, Any], *, is_line: bool
) -> None:
    hours = [moment.seconds / 3600 for moment in run.moments]
    kind = "default" if is_line else "steps-post"
    panel.plot(hours, [value(moment) for moment in run.moments], drawstyle=kind, label=name, linewidth=1.5, **style)
