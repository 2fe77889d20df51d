"""report.html: the results of a comparison as one page that needs nothing else."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from variable_batch_size.comparison.experiment import DIVERGED, Outcome, Run, Settings
from variable_batch_size.comparison.report.arm import Arm, Arms, ranking
from variable_batch_size.comparison.report.charts import charts
from variable_batch_size.comparison.report.estimates import Spread
from variable_batch_size.comparison.report.numbers import number, with_deviation
from variable_batch_size.comparison.report.verdict import ranking_in_words, verdicts
from variable_batch_size.comparison.results import Results
from variable_batch_size.files import write_text

_COLUMNS = ("rule", "final", "against the yardstick", "best", "updates", "samples", "seconds", "runs")


def write_page(results: Results) -> None:
    """Make ``report.html`` of what is in a directory."""
    experiment = results.read_experiment()
    settings = results.settings()
    arms = Arms.of(results)
    runs = list(results.runs())
    said = verdicts(results)
    traces = list(arms.on_traces)
    parts = {
        "title": f"Learning-rate rules on {html.escape(settings.workload)}",
        "summary": _summary(settings, traces),
        "missing": _missing(len(results.planned()), len(runs)),
        "verdicts": "".join(f"<p><b>{html.escape(name)}</b>: {html.escape(said[name])}</p>" for name in traces)
        or "<p>No run on a trace has ended yet.</p>",
        "traces": "".join(_section(settings, name, arms.on_traces[name], arms.reference) for name in traces),
        "runs": _runs_table(runs),
        "reproduce": _reproduce(experiment),
        "data": _json(charts(results, arms)),
        "style": _resource("page.css"),
        "script": _resource("page.js"),
        "library": _plotly(),
    }
    write_text(results.page_file, Template(_resource("page.html")).substitute(parts))


def _resource(name: str) -> str:
    return (files("variable_batch_size.comparison.report") / name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ImportError("the page needs plotly: pip install 'variable_batch_size[compare]'") from None
    return str(get_plotlyjs())


def _json(data: Any) -> str:
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # else a name might end the script


# --------------------------------------------------------------------------------------------------------------- text


def _summary(settings: Settings, traces: Sequence[str]) -> str:
    end = {
        "samples": f"A run ends with the step that reaches {settings.num_samples:,} samples.",
        "progress": f"AdaScale trains to a progress of {settings.progress_goal:,}, and the other rules make as many "
        "updates as it does, with their schedules stretched.",
    }[settings.until]
    return html.escape(
        f"{settings.optimizer}, {len(traces)} trace{'s' * (len(traces) != 1)}, {settings.cores} × {settings.device}. "
        f"{end} The yardstick is always a batch of {settings.ref_batchsize}, to {settings.num_samples:,} samples. Runs "
        "of the same seed see the same data from the same weights. Behind a metric, ± is the standard deviation over "
        "seeds; behind a difference, the 95 % interval over pairs of runs of the same seed. Progress counts steps by "
        "what they are worth at the reference batch size: the gain with AdaScale, with other rules the factor of the "
        "learning rate."
    )


def _missing(num_planned: int, num_ended: int) -> str:
    if num_ended == num_planned:
        return ""
    return f'<p class="missing">{num_ended} of {num_planned} runs have ended: what follows is not complete.</p>'


def _section(settings: Settings, name: str, members: Sequence[Arm], reference: Arm | None) -> str:
    ranked = ranking(members, is_higher_better=settings.is_higher_better)
    ranked += [arm for arm in members if arm not in ranked]
    rows = [_row(settings, arm, reference) for arm in ranked]
    kinds = ["done" if arm.final else "diverged" if arm.num(DIVERGED) else "failed" for arm in ranked]
    if reference is not None:
        rows.append(_row(settings, reference, None))
        kinds.append("yardstick")
    title = html.escape(name)
    return f"""
<section id="trace-{title}">
<h2>{title}</h2>
{_table(_COLUMNS, rows, kinds, name="results")}
<p class="ranking">Ranking: {html.escape(ranking_in_words(settings, members))}</p>
<div class="axes" role="group" aria-label="horizontal axis">
<button data-axis="step">steps</button><button data-axis="samples">samples</button>
<button data-axis="progress">progress</button>
</div>
<div class="chart" data-trace="{title}"></div>
</section>"""


def _row(settings: Settings, arm: Arm, reference: Arm | None) -> list[str]:
    def mean(spread: Spread | None) -> str:
        return "–" if spread is None else f"{spread.mean:,.0f}"

    final, best = arm.final, arm.spread(lambda outcome: outcome.best_metric)
    against = "–"
    if final is not None and reference is not None and reference.final is not None:
        gap = final.mean - reference.final.mean
        against = ("+" if gap >= 0 else "−") + number(abs(gap), like=reference.final.mean)
    seconds = arm.spread(lambda outcome: outcome.seconds)
    return [
        f"always {settings.ref_batchsize} (yardstick)" if arm.is_reference else arm.rule,
        "–" if final is None else with_deviation(final, unit=settings.unit),
        against,
        "–" if best is None else with_deviation(best, unit=settings.unit),
        mean(arm.spread(lambda outcome: outcome.updates)),
        mean(arm.spread(lambda outcome: outcome.samples)),
        "–" if seconds is None else f"{seconds.mean:.1f}",
        arm.failures or f"{len(arm.outcomes)} done",
    ]


def _runs_table(runs: Sequence[tuple[Run, Outcome]]) -> str:
    columns = ("trace", "rule", "seed", "status", "updates", "samples", "progress", "final", "best", "reason")

    def cell(value: float | None, text: Callable[[float], str]) -> str:
        return "–" if value is None else text(value)

    def row(outcome: Outcome) -> list[str]:
        return [
            outcome.status,
            cell(outcome.updates, "{:,}".format),
            cell(outcome.samples, "{:,}".format),
            cell(outcome.progress, "{:,.1f}".format),
            cell(outcome.final_metric, number),
            cell(outcome.best_metric, number),
            outcome.reason,
        ]

    rows = [[run.trace, run.rule, str(run.seed), *row(outcome)] for run, outcome in runs]
    return _table(columns, rows, [outcome.status for _, outcome in runs], name="runs")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], kinds: Sequence[str], *, name: str) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(
        f'<tr class="{kind}">' + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row, kind in zip(rows, kinds, strict=True)
    )
    return f'<div class="wide"><table class="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _reproduce(experiment: dict[str, Any]) -> str:
    def lines(values: dict[str, Any]) -> str:
        return "".join(
            f"<tr><td>{html.escape(str(name))}</td><td>{html.escape(str(value))}</td></tr>"
            for name, value in values.items()
            if value is not None
        )

    commands = [html.escape(origin["command"]) for origin in experiment["origins"]]
    latest = experiment["origins"][-1]
    return f"""
<pre>{"<br>".join(dict.fromkeys(commands))}</pre>
<div class="wide"><table class="plain">
{lines({**latest["versions"], "commit": latest["commit"]})}
{lines({f"SHA-256 of {name}": value for name, value in experiment["traces"].items()})}
{lines(experiment["settings"])}
</table></div>"""
