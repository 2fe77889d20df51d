"""The report of a comparison: the tables, the curves, the page report.html, and the curves as a figure."""

import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from variable_batch_size.files import read_records, write_text
from variable_batch_size.lab.comparison import experiment
from variable_batch_size.lab.comparison.experiment import DIVERGED, DONE, REFERENCE, Results, Settings
from variable_batch_size.lab.comparison.page import rendered
from variable_batch_size.lab.comparison.summary import summary
from variable_batch_size.lab.comparison.verdict import (
    Arm,
    Estimate,
    arms_of,
    number,
    ranking,
    ranking_in_words,
    spread,
    verdict,
)
from variable_batch_size.lab.planning.figures import STYLES, check_suffix, new_figure
from variable_batch_size.lab.planning.reports import csv_text, duration

AXES = ("step", "samples", "progress")
TRAINING = ("batch_size", "lr", "loss", "gain", "noise_scale")
TESTS = ("test_loss", "metric")
LOGARITHMIC = ("loss", "test_loss", "noise_scale")  # quantities with a logarithmic axis
_MOST_POINTS = 500
_TINY = 1e-30
_COLOURS = (*(style["color"] for style in STYLES[1:]), "#8E7CC3")

Values = npt.NDArray[np.float64]
Curves = dict[str, Any]
"""The values of each axis, the ``mean`` of each quantity, with ``low`` and ``high`` if seeds differ; gaps are NaN."""


def curves(results: Results, arm: Arm) -> dict[str, Curves]:
    """The training and test curves of an arm: records with the same index are averaged over the seeds that have them.

    Axes are averaged, too, as progress may differ between seeds. The loss is a moving average over 2 % of the run.
    """
    ended = [run for run, outcome in arm.outcomes if outcome.status in experiment.ENDED]
    seeds = [read_records(results.run_directory(run) / "steps.jsonl") for run in ended]
    return {
        "training": _together([_smooth([r for r in records if "loss" in r]) for records in seeds], TRAINING),
        "tests": _together([[r for r in records if "metric" in r] for records in seeds], TESTS),
    }


def _smooth(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records with the moving average of their losses."""
    window = max(1, len(records) // 50)
    losses = np.array([record["loss"] for record in records], dtype=np.float64)
    means = [losses[max(0, end - window) : end].mean() for end in range(1, len(losses) + 1)]
    return [{**record, "loss": mean} for record, mean in zip(records, means, strict=True)]


def _together(seeds: Sequence[Sequence[dict[str, Any]]], quantities: Iterable[str]) -> Curves:
    length = max(map(len, seeds), default=0)
    if not length:
        return {}
    kept = sorted({*range(0, length, -(-length // _MOST_POINTS)), length - 1})

    def values(name: str) -> Values:
        """A row for each seed, NaN where it has no record."""
        rows = [[records[number][name] if number < len(records) else None for number in kept] for records in seeds]
        return np.array(rows, dtype=np.float64)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns about NaN where at most one seed has a value
        found: Curves = {axis: np.nanmean(values(axis), axis=0) for axis in AXES}
        for quantity in quantities:
            if any(records and quantity in records[0] for records in seeds):
                found[quantity] = _band(values(quantity), is_logarithmic=quantity in LOGARITHMIC)
    return found


def _band(values: Values, *, is_logarithmic: bool) -> Curves:
    """The mean, and one deviation below and above it; as a factor on logarithmic axes, so that both are positive."""
    mean = np.nanmean(values, axis=0)
    if not (np.nanmax(values, axis=0) > np.nanmin(values, axis=0)).any():
        return {"mean": mean}
    if is_logarithmic:
        factor = np.exp(np.nanstd(np.log(np.maximum(values, _TINY)), axis=0, ddof=1))
        return {"mean": mean, "low": mean / factor, "high": mean * factor}
    deviation = np.nanstd(values, axis=0, ddof=1)
    return {"mean": mean, "low": mean - deviation, "high": mean + deviation}


def _plain(found: Any) -> Any:
    """Curves for JSON, with as many digits as a chart needs, and null for NaN."""
    if isinstance(found, dict):
        return {name: _plain(part) for name, part in found.items()}
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in found.tolist()]


_RUN = ("trace", "rule", "seed")
_ENDED = ("status", "updates", "samples", "progress", "final_loss", "final_metric", "best_metric", "reason")
_FORMATS: dict[str, Callable[[Any], str]] = {  # of the table of runs; other cells are shown as they are
    **dict.fromkeys(("updates", "samples"), "{:,.0f}".format),
    "progress": "{:,.1f}".format,
    **dict.fromkeys(("final_metric", "best_metric"), number),
}


def summaries(results: Results) -> dict[str, str]:
    """The summary for each trace on which a run has ended."""
    settings, (reference, on_traces) = results.settings(), arms_of(results)

    def completed(arm: Arm) -> Arm:
        return arm._replace(outcomes=tuple((run, outcome) for run, outcome in arm.outcomes if outcome.status == DONE))

    return {
        name: summary(settings, arms, reference, {arm.rule: curves(results, completed(arm)) for arm in arms})
        for name, arms in on_traces.items()
    }


def write_report(results: Results) -> None:
    """Write ``report.html``, ``results.csv``, which is reproducible, and ``timings.csv`` with the seconds."""
    rows = [{**asdict(run), **asdict(outcome)} for run, outcome in results.runs()]
    for file, names in (("results.csv", (*_RUN, *_ENDED)), ("timings.csv", (*_RUN, "seconds"))):
        write_text(results.directory / file, csv_text([names, *([row[name] for name in names] for row in rows)]))
    recorded, settings, (reference, on_traces) = results.read_experiment(), results.settings(), arms_of(results)

    def curves_of(arm: Arm) -> dict[str, Any]:
        return {"rule": REFERENCE if arm.is_reference else arm.rule, **_plain(curves(results, arm))}

    # together with the commands, these reproduce the experiment
    latest = recorded["origins"][-1]
    traces = recorded["traces"].items()
    hashes = {name if name.startswith(experiment.POLICY) else f"SHA-256 of {name}": value for name, value in traces}
    facts = {**latest["versions"], "commit": latest["commit"], **hashes, **recorded["settings"]}
    columns = [name for name in (*_RUN, *_ENDED) if name != "final_loss"]
    page = rendered(
        "variable_batch_size.lab.comparison",
        "page",
        title=f"Learning-rate rules on {settings.workload}",
        settings=settings,
        num_planned=len(results.planned()),
        summaries=summaries(results),
        traces=[_trace(settings, name, arms, reference) for name, arms in on_traces.items()],
        result_columns=("rule", "final", "against the baseline", "best", "updates", "samples", "time", "runs"),
        runs=[(row["status"], [_or_dash(row[name], _FORMATS.get(name, str)) for name in columns]) for row in rows],
        run_columns=[name.replace("final_metric", "final").replace("best_metric", "best") for name in columns],
        commands=list(dict.fromkeys(origin["command"] for origin in recorded["origins"])),
        facts=[(name, value) for name, value in facts.items() if value is not None],
        charts={
            "metric": settings.metric_name + settings.unit,
            "reference": curves_of(reference) if reference is not None else None,
            "traces": {name: [curves_of(arm) for arm in arms] for name, arms in on_traces.items()},
        },
    )
    write_text(results.page_file, page)


def _trace(settings: Settings, name: str, arms: Sequence[Arm], reference: Arm | None) -> dict[str, Any]:
    """The verdict and the table of a trace."""
    ranked = ranking(arms, is_higher_better=settings.is_higher_better)
    ranked += [arm for arm in arms if arm not in ranked]
    kinds = ["done" if arm.final else "diverged" if arm.seeds(DIVERGED) else "failed" for arm in ranked]
    rows = [(kind, _result_cells(settings, arm, reference)) for kind, arm in zip(kinds, ranked, strict=True)]
    if reference is not None:
        rows.append(("baseline", _result_cells(settings, reference, None)))
    words = {"verdict": verdict(settings, arms, reference), "ranking": ranking_in_words(settings, arms)}
    return {"name": name, "rows": rows, **words}


def _result_cells(settings: Settings, arm: Arm, reference: Arm | None) -> list[str]:
    def cell(quantity: str, text: Callable[[Estimate], str]) -> str:
        return _or_dash(spread(arm.values(quantity).values()), text)

    against = "–"
    if arm.final and reference and reference.final:
        gap = arm.final.mean - reference.final.mean
        against = ("+" if gap >= 0 else "−") + number(abs(gap), like=reference.final.mean)
    return [
        f"always {settings.ref_batchsize} (baseline)" if arm.is_reference else arm.rule,
        cell("final_metric", lambda found: found.text(settings.unit)),
        against,
        cell("best_metric", lambda found: found.text(settings.unit)),
        *(cell(quantity, lambda found: f"{found.mean:,.0f}") for quantity in ("updates", "samples")),
        cell("seconds", lambda found: duration(found.mean)),
        arm.failures or f"{len(arm.outcomes)} done",
    ]


def _or_dash(value: Any, text: Callable[[Any], str]) -> str:
    return "–" if value is None else text(value)


def draw_picture(results: Results, path: str | os.PathLike[str]) -> None:
    """Save batch size, training loss and test metric over samples, as PNG or SVG according to the path's suffix."""
    check_suffix(path)
    (reference, on_traces), settings = arms_of(results), results.settings()
    if not on_traces:
        raise ValueError(f"no run on a trace has ended in {results.directory}, so there is nothing to draw")
    figure = new_figure(6 * max(len(on_traces), 1.5), 7, extra="compare")
    panels = figure.subplots(3, len(on_traces), sharex="col", sharey="row", squeeze=False, height_ratios=(1, 2, 3))
    rules = list(dict.fromkeys(arm.rule for arms in on_traces.values() for arm in arms))
    latest: list[float] = []
    for column, (trace, arms) in zip(panels.T, on_traces.items(), strict=True):
        for arm in [*([reference] if reference else []), *arms]:
            style = {"color": "0.45", "linestyle": ":", "label": f"always {settings.ref_batchsize}"}
            if not arm.is_reference:
                style = {"color": _COLOURS[rules.index(arm.rule) % len(_COLOURS)], "linestyle": "-", "label": arm.rule}
            latest += _draw(column, curves(results, arm), style)
        column[0].set_title(trace)
        column[2].set_xlabel("samples")
        column[2].xaxis.set_major_formatter("{x:,.0f}")
    labels = ("batch size", "training loss", f"test {settings.metric_name}{settings.unit}")
    for panel, label in zip(panels[:, 0], labels, strict=True):
        panel.set_ylabel(label)
    panels[1, 0].set_yscale("log")
    panels[2, -1].legend(loc="lower right")
    if latest:
        margin = (max(latest) - min(latest)) / 10 or 1.0
        panels[2, 0].set_ylim(min(latest) - margin, max(latest) + margin)
    figure.savefig(path)


def _draw(panels: Any, found: dict[str, Curves], style: dict[str, Any]) -> list[float]:
    """Draw the curves of an arm into a column; returns its metrics after the first quarter of the run."""
    training, tests = found["training"], found["tests"]
    if training:
        sizes = training["batch_size"]["mean"]  # the same for all rules
        colour = {"color": style["color"] if style["linestyle"] == ":" else "black"}
        panels[0].step(training["samples"], sizes, where="pre", **style | colour)
    for panel, curve, quantity in ((panels[1], training, "loss"), (panels[2], tests, "metric")):
        if curve:
            samples, values = curve["samples"], curve[quantity]
            panel.plot(samples, values["mean"], **style)
            if "low" in values:
                fill = {"color": style["color"], "alpha": 0.15, "linewidth": 0}
                panel.fill_between(samples, values["low"], values["high"], **fill)
    if not tests:
        return []
    metrics = tests["metric"]["mean"][tests["samples"] >= tests["samples"][-1] / 4]
    return [float(metric) for metric in metrics if np.isfinite(metric)]
