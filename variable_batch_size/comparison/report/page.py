"""report.html: the results of a comparison as one page that needs nothing else."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from variable_batch_size.comparison.experiment import DIVERGED, REFERENCE, Outcome, Settings
from variable_batch_size.comparison.report.curves import curves
from variable_batch_size.comparison.report.groups import Group, Spread, groups, ranking
from variable_batch_size.comparison.report.verdict import number, ranking_in_words, shown, verdicts
from variable_batch_size.comparison.results import Results
from variable_batch_size.files import write_text

_COLUMNS = ("rule", "final", "against the yardstick", "best", "updates", "samples", "seconds", "runs")


def write_page(results: Results) -> None:
    """Make ``report.html`` of what is in a directory."""
    experiment = results.read_experiment()
    settings = results.settings()
    found = groups(results)
    reference = next((group for group in found if group.is_reference), None)
    said = verdicts(results)
    traces = [name for name in experiment["traces"] if any(group.trace == name for group in found)]
    of_trace = {name: [group for group in found if group.trace == name] for name in traces}
    parts = {
        "title": f"Learning-rate rules on {html.escape(settings.workload)}",
        "summary": _summary(settings, traces),
        "missing": _missing(len(results.planned()), sum(len(group.outcomes) for group in found)),
        "verdicts": "".join(f"<p><b>{html.escape(name)}</b>: {html.escape(said[name])}</p>" for name in traces)
        or "<p>No run on a trace has ended yet.</p>",
        "traces": "".join(_section(settings, name, of_trace[name], reference) for name in traces),
        "runs": _runs_table(found),
        "reproduce": _reproduce(experiment),
        "data": _json(_data(results, settings, of_trace, reference)),
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


# ------------------------------------------------------------------------------------------------------------- charts


def _data(
    results: Results, settings: Settings, of_trace: dict[str, list[Group]], reference: Group | None
) -> dict[str, Any]:
    def of(group: Group) -> dict[str, Any]:
        return {"rule": group.rule, **_plain(curves(results, group))}

    return {
        "metric": settings.metric_name + settings.unit,
        "reference": {**of(reference), "rule": REFERENCE} if reference is not None else None,
        "traces": {name: [of(group) for group in members] for name, members in of_trace.items()},
    }


def _plain(found: Any) -> Any:
    """Curves as JSON knows them, with as many digits as a picture needs; NaN becomes null, a gap."""
    if isinstance(found, dict):
        return {name: _plain(part) for name, part in found.items()}
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in found.tolist()]


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


def _section(settings: Settings, name: str, members: Sequence[Group], reference: Group | None) -> str:
    ranked = ranking(members, is_higher_better=settings.is_higher_better)
    ranked += [group for group in members if group not in ranked]
    rows = [_row(settings, group, reference) for group in ranked]
    kinds = ["done" if group.final else "diverged" if group.num(DIVERGED) else "failed" for group in ranked]
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


def _row(settings: Settings, group: Group, reference: Group | None) -> list[str]:
    def mean(spread: Spread | None) -> str:
        return "–" if spread is None else f"{spread.mean:,.0f}"

    final, best = group.final, group.spread(lambda outcome: outcome.best_metric)
    against = "–"
    if final is not None and reference is not None and reference.final is not None:
        gap = final.mean - reference.final.mean
        against = ("+" if gap >= 0 else "−") + number(abs(gap), like=reference.final.mean)
    seconds = group.spread(lambda outcome: outcome.seconds)
    return [
        f"always {settings.ref_batchsize} (yardstick)" if group.is_reference else group.rule,
        "–" if final is None else shown(settings, final),
        against,
        "–" if best is None else shown(settings, best),
        mean(group.spread(lambda outcome: outcome.updates)),
        mean(group.spread(lambda outcome: outcome.samples)),
        "–" if seconds is None else f"{seconds.mean:.1f}",
        group.failures or f"{len(group.outcomes)} done",
    ]


def _runs_table(found: Iterable[Group]) -> str:
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

    runs = [pair for group in found for pair in group.outcomes]
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
