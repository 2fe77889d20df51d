"""report.html: the results of a comparison as one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from variable_batch_size.checks import install
from variable_batch_size.comparison.experiment import DIVERGED, POLICY, Outcome, Run, Settings
from variable_batch_size.comparison.report.arm import Arm, Arms, ranking
from variable_batch_size.comparison.report.charts import charts
from variable_batch_size.comparison.report.numbers import number, with_deviation
from variable_batch_size.comparison.report.verdict import ranking_in_words, verdict
from variable_batch_size.comparison.results import Results
from variable_batch_size.files import write_text

if TYPE_CHECKING:
    from jinja2 import Template

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
