"""Draws what a policy decided: batch size, cores and noise scale over the steps of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from variable_batch_size.checks import install
from variable_batch_size.planning.picture import STYLES, check_suffix
from variable_batch_size.traces.trace import Trace

Record = Mapping[str, Any]


def plot_decisions(trace: Trace, records: Sequence[Record], path: str | os.PathLike[str]) -> None:
    """Save a picture of an executed trace and the decisions that it was made of, a PNG or SVG file.

    Args:
        trace: the batch sizes of all steps.
        records: the decisions, as decisions.jsonl has them.
        path: of the picture.
    """
    check_suffix(path)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(f"a plot needs matplotlib: {install('report')}") from None
    num_steps = len(trace)
    figure = Figure(figsize=(9, 6), dpi=100, layout="constrained")
    sizes, cores, noise = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 2))
    restarts = [record["step"] for before, record in pairwise(records) if _moved(before, record)]
    _draw(sizes, range(num_steps + 1), [*trace, trace[num_steps - 1]], STYLES[0])
    sizes.set_yscale("log", base=2)
    sizes.yaxis.set_major_formatter("{x:,g}")
    sizes.set_ylabel("batch size (samples)")
    _draw(cores, [record["step"] for record in records] + [num_steps], _held(records, "cores"), STYLES[1])
    cores.set_ylim(0, max(record["cores"] for record in records) + 1)
    cores.set_ylabel("cores")
    _draw(noise, [record["step"] for record in records] + [num_steps], _held(records, "noise_scale"), STYLES[2])
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


def _moved(before: Record, record: Record) -> bool:
    return bool(before["cores"] != record["cores"])


def _held(records: Sequence[Record], name: str) -> list[float]:
    """A number of each record, the last one held to the end; a gap where there is none."""
    values = [np.nan if record[name] is None else float(record[name]) for record in records]
    return [*values, values[-1]]


def _draw(panel: Any, positions: Sequence[int], values: Sequence[float], style: Mapping[str, Any]) -> None:
    panel.plot(positions, values, drawstyle="steps-post", linewidth=1.5, color=style["color"])
