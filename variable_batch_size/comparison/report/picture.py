"""The curves of a comparison as a picture for a paper or a README: a column for each trace."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from variable_batch_size.checks import install
from variable_batch_size.comparison.experiment import Settings
from variable_batch_size.comparison.report.page import Curves, Values, curves
from variable_batch_size.comparison.report.summary import Arm, Arms
from variable_batch_size.comparison.results import Results
from variable_batch_size.planning.pictures import check_suffix

# told apart by people of any colour vision
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8E7CC3")
_GREY = "0.45"


def draw_picture(results: Results, path: str | os.PathLike[str]) -> None:
    """Save batch size, training loss and test metric over samples, a PNG or SVG file by the path's suffix."""
    check_suffix(path)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(f"a plot needs matplotlib: {install('compare')}") from None

    arms, settings = Arms.of(results), results.settings()
    if not arms.on_traces:
        raise ValueError(f"{results.directory} holds no run that has ended, but perhaps those of the yardstick")
    num_traces = len(arms.on_traces)
    figure = Figure(figsize=(6 * max(num_traces, 1.5), 7), dpi=100, layout="constrained")
    panels = figure.subplots(3, num_traces, sharex="col", sharey="row", squeeze=False, height_ratios=(1, 2, 3))
    latest = _draw_columns(panels, results, settings, arms)
    _label_rows(panels, settings)
    if latest:
        margin = (max(latest) - min(latest)) / 10 or 1.0
        panels[2, 0].set_ylim(min(latest) - margin, max(latest) + margin)
    figure.savefig(path)


def _draw_columns(panels: Any, results: Results, settings: Settings, arms: Arms) -> list[float]:
    """Draw all arms, each trace into its column, and return their metrics after the first quarter of the run."""
    latest: list[float] = []
    rules = list(dict.fromkeys(arm.rule for on_trace in arms.on_traces.values() for arm in on_trace))
    for column, (trace, on_trace) in enumerate(arms.on_traces.items()):
        for arm in [*([arms.reference] if arms.reference else []), *on_trace]:
            latest += _draw(panels[:, column], curves(results, arm), _style(settings, arm, rules))
        panels[0, column].set_title(trace)
        panels[2, column].set_xlabel("samples")
        panels[2, column].xaxis.set_major_formatter("{x:,.0f}")
    return latest


def _style(settings: Settings, arm: Arm, rules: list[str]) -> dict[str, Any]:
    if arm.is_reference:
        return {"color": _GREY, "linestyle": ":", "label": f"always {settings.ref_batchsize}"}
    return {"color": _COLOURS[rules.index(arm.rule) % len(_COLOURS)], "linestyle": "-", "label": arm.rule}


def _label_rows(panels: Any, settings: Settings) -> None:
    labels = ("batch size", "training loss", f"test {settings.metric_name}{settings.unit}")
    for panel, label in zip(panels[:, 0], labels, strict=True):
        panel.set_ylabel(label)
    panels[1, 0].set_yscale("log")
    panels[2, -1].legend(loc="lower right")


def _draw(panels: Any, found: dict[str, Curves], style: dict[str, Any]) -> list[float]:
    """Draw the curves of an arm into a column, and return its metrics after the first quarter of the run."""
    training, tests = found["training"], found["tests"]
    if training:
        is_reference = style["linestyle"] == ":"
        sizes = training["batch_size"]["mean"]  # which are the same for all rules
        panels[0].step(training["samples"], sizes, where="pre", **style | ({} if is_reference else {"color": "black"}))
        _draw_band(panels[1], training["samples"], training["loss"], style)
    if not tests:
        return []
    _draw_band(panels[2], tests["samples"], tests["metric"], style)
    metrics = tests["metric"]["mean"][tests["samples"] >= tests["samples"][-1] / 4]
    return [float(metric) for metric in metrics if np.isfinite(metric)]


def _draw_band(panel: Any, samples: Values, quantity: Curves, style: dict[str, Any]) -> None:
    panel.plot(samples, quantity["mean"], **style)
    if "low" in quantity:
        panel.fill_between(samples, quantity["low"], quantity["high"], color=style["color"], alpha=0.15, linewidth=0)
