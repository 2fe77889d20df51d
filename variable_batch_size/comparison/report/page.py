"""report.html and results.csv: the results of a comparison as one page and as tables."""

from __future__ import annotations

import csv
import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from variable_batch_size.checks import install
from variable_batch_size.comparison.experiment import (
    DIVERGED,
    DONE,
    POLICY,
    REFERENCE,
    Outcome,
    Run,
    Settings,
)
from variable_batch_size.comparison.report.summary import (
    Arm,
    Arms,
    number,
    ranking,
    ranking_in_words,
    verdict,
    with_deviation,
)
from variable_batch_size.comparison.results import Results
from variable_batch_size.files import read_records, write_text

if TYPE_CHECKING:
    from jinja2 import Template


AXES = ("step", "samples", "progress")

TRAINING = ("batch_size", "lr", "loss", "gain", "noise_scale")
TESTS = ("test_loss", "metric")
"""What is recorded while training, and what when the model is tested."""

LOGARITHMIC = ("loss", "test_loss", "noise_scale")
"""What is drawn on a logarithmic axis."""

_MOST_POINTS = 500
_WINDOWS = 50
_TINY = 1e-30

Values = npt.NDArray[np.float64]
Curves = dict[str, Any]
"""The values of each axis by its name, and by that of each quantity its ``mean``, with ``low`` and ``high`` if seeds
differ. What is not finite is NaN."""


def curves(results: Results, arm: Arm) -> dict[str, Curves]:
    """The curves of an arm, from the ``steps.jsonl`` of its runs: those of the training and those of the tests.

    Records are put together by their number; where some seeds have ended or diverged, the others go on. An axis is
    the mean over the seeds, too: their progress may differ. The loss of each record becomes the mean over the latest
    2 % of the run, as that of a few small batches says little.
    """
    ended = [run for run, outcome in arm.outcomes if outcome.status in (DONE, DIVERGED)]
    seeds = [read_records(results.run_directory(run) / "steps.jsonl") for run in ended]
    return {
        "training": _together([_smooth([r for r in records if "loss" in r]) for records in seeds], TRAINING),
        "tests": _together([[r for r in records if "metric" in r] for records in seeds], TESTS),
    }


def _smooth(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records with the mean of the losses of the latest records instead of their own."""
    window = max(1, len(records) // _WINDOWS)
    losses = np.array([record["loss"] for record in records], dtype=np.float64)
    means = [losses[max(0, end - window) : end].mean() for end in range(1, len(losses) + 1)]
    return [{**record, "loss": mean} for record, mean in zip(records, means, strict=True)]


def _together(seeds: Sequence[Sequence[dict[str, Any]]], quantities: Iterable[str]) -> Curves:
    length = max(map(len, seeds), default=0)
    if not length:
        return {}
    every = -(-length // _MOST_POINTS)
    kept = sorted({*range(0, length, every), length - 1})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, where no seed, or one, has a number: that is NaN
        found: Curves = {axis: np.nanmean(_values(seeds, kept, axis), axis=0) for axis in AXES}
        for quantity in quantities:
            if any(records and quantity in records[0] for records in seeds):
                values = _values(seeds, kept, quantity)
                found[quantity] = {"mean": np.nanmean(values, axis=0)}
                if (np.nanmax(values, axis=0) > np.nanmin(values, axis=0)).any():
                    low, high = _band(values, is_logarithmic=quantity in LOGARITHMIC)
                    found[quantity] |= {"low": low, "high": high}
    return found


def _values(seeds: Sequence[Sequence[dict[str, Any]]], kept: Sequence[int], name: str) -> Values:
    """A row for each seed, NaN where it has no record."""
    rows = [[records[number][name] if number < len(records) else None for number in kept] for records in seeds]
    return np.array(rows, dtype=np.float64)


def _band(values: Values, *, is_logarithmic: bool) -> tuple[Values, Values]:
    """One deviation below and above the mean; by a factor where the axis is logarithmic, so that both are positive."""
    mean = np.nanmean(values, axis=0)
    if is_logarithmic:
        factor = np.exp(np.nanstd(np.log(np.maximum(values, _TINY)), axis=0, ddof=1))
        return mean / factor, mean * factor
    deviation = np.nanstd(values, axis=0, ddof=1)
    return mean - deviation, mean + deviation


def charts(results: Results, arms: Arms) -> dict[str, Any]:
    """The curves of the yardstick and of each arm, by trace, and the name of the metric."""
    settings, reference = results.settings(), arms.reference

    def of(arm: Arm) -> dict[str, Any]:
        return {"rule": arm.rule, **_plain(curves(results, arm))}

    return {
        "metric": settings.metric_name + settings.unit,
        "reference": {**of(reference), "rule": REFERENCE} if reference is not None else None,
        "traces": {name: [of(arm) for arm in on_trace] for name, on_trace in arms.on_traces.items()},
    }


def _plain(found: Any) -> Any:
    """Curves as JSON knows them, with as many digits as a picture needs; NaN becomes null, a gap."""
    if isinstance(found, dict):
        return {name: _plain(part) for name, part in found.items()}
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in found.tolist()]


COLUMNS = (
    "trace",
    "rule",
    "seed",
    "status",
    "updates",
    "samples",
    "progress",
    "final_loss",
    "final_metric",
    "best_metric",
    "reason",
)
"""Of results.csv: nothing that depends on how fast a machine is, so that the same experiment gives the same file."""


def write_tables(results: Results) -> None:
    """Write results.csv, and timings.csv with the seconds that each run took."""
    rows = [{**asdict(run), **asdict(outcome)} for run, outcome in results.runs()]
    write_text(results.directory / "results.csv", _csv(COLUMNS, rows))
    write_text(results.directory / "timings.csv", _csv(("trace", "rule", "seed", "seconds"), rows))


def _csv(columns: Iterable[str], rows: Iterable[dict[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


RESULT_COLUMNS = ("rule", "final", "against the yardstick", "best", "updates", "samples", "seconds", "runs")
RUN_COLUMNS = ("trace", "rule", "seed", "status", "updates", "samples", "progress", "final", "best", "reason")

Row = tuple[str, list[str]]
"""What kind of row of a table it is, which decides how it looks; and its cells."""


def write_page(results: Results) -> None:
    """Make ``report.html`` of what is in a directory."""
    experiment, settings, arms = results.read_experiment(), results.settings(), Arms.of(results)
    page = _template().render(
        settings=settings,
        num_planned=len(results.planned()),
        traces=[_trace(settings, name, on_trace, arms.reference) for name, on_trace in arms.on_traces.items()],
        result_columns=RESULT_COLUMNS,
        runs=[_run_row(run, outcome) for run, outcome in results.runs()],
        run_columns=RUN_COLUMNS,
        commands=list(dict.fromkeys(origin["command"] for origin in experiment["origins"])),
        facts=[(name, value) for name, value in _facts(experiment) if value is not None],
        charts=charts(results, arms),
        style=_resource("page.css"),
        script=_resource("page.js"),
        library=_plotly(),
    )
    write_text(results.page_file, page)


def _template() -> Template:
    """The page without its data, which is escaped as it is filled in: names may hold what HTML takes for its own."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["count"] = _count
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.from_string(_resource("page.html"))


def _resource(name: str) -> str:
    return (files("variable_batch_size.comparison.report") / name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ImportError(f"the page needs plotly: {install('compare')}") from None
    return str(get_plotlyjs())


def _trace(settings: Settings, name: str, arms: Sequence[Arm], reference: Arm | None) -> dict[str, Any]:
    """What the page says of a trace."""
    ranked = ranking(arms, is_higher_better=settings.is_higher_better)
    ranked += [arm for arm in arms if arm not in ranked]
    rows = [(_kind(arm), _result_cells(settings, arm, reference)) for arm in ranked]
    if reference is not None:
        rows.append(("yardstick", _result_cells(settings, reference, None)))
    return {
        "name": name,
        "verdict": verdict(settings, arms, reference),
        "ranking": ranking_in_words(settings, arms),
        "rows": rows,
    }


def _kind(arm: Arm) -> str:
    return "done" if arm.final else "diverged" if arm.num(DIVERGED) else "failed"


def _result_cells(settings: Settings, arm: Arm, reference: Arm | None) -> list[str]:
    def mean(quantity: Callable[[Outcome], float | None], text: Callable[[float], str]) -> str:
        spread = arm.spread(quantity)
        return _or_dash(None if spread is None else spread.mean, text)

    best = arm.spread(lambda outcome: outcome.best_metric)
    return [
        f"always {settings.ref_batchsize} (yardstick)" if arm.is_reference else arm.rule,
        "–" if arm.final is None else with_deviation(arm.final, unit=settings.unit),
        _against(arm, reference),
        "–" if best is None else with_deviation(best, unit=settings.unit),
        mean(lambda outcome: outcome.updates, _count),
        mean(lambda outcome: outcome.samples, _count),
        mean(lambda outcome: outcome.seconds, "{:.1f}".format),
        arm.failures or f"{len(arm.outcomes)} done",
    ]


def _against(arm: Arm, reference: Arm | None) -> str:
    """By how much the mean of the final metric is above that of the yardstick."""
    if arm.final is None or reference is None or reference.final is None:
        return "–"
    gap = arm.final.mean - reference.final.mean
    return ("+" if gap >= 0 else "−") + number(abs(gap), like=reference.final.mean)


def _run_row(run: Run, outcome: Outcome) -> Row:
    cells = [
        run.trace,
        run.rule,
        str(run.seed),
        outcome.status,
        _or_dash(outcome.updates, _count),
        _or_dash(outcome.samples, _count),
        _or_dash(outcome.progress, "{:,.1f}".format),
        _or_dash(outcome.final_metric, number),
        _or_dash(outcome.best_metric, number),
        outcome.reason,
    ]
    return outcome.status, cells


def _or_dash(value: float | None, text: Callable[[float], str]) -> str:
    return "–" if value is None else text(value)


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _facts(experiment: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values of what is needed, beside the commands, to reproduce an experiment."""
    latest = experiment["origins"][-1]
    yield from latest["versions"].items()
    yield "commit", latest["commit"]
    for name, value in experiment["traces"].items():
        yield (name if name.startswith(POLICY) else f"SHA-256 of {name}"), value
    yield from experiment["settings"].items()
