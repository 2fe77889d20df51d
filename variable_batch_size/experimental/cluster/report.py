"""Tables, a Gantt chart and pages of pools: simulated ones, and the state of a real one."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from variable_batch_size.experimental.cluster.simulate import Outcome
from variable_batch_size.lab.planning.reports import Table, counted, duration, table_page

Spans = Sequence[tuple[str, float, Sequence[Sequence[float]]]]  # name, arrival; begin, end and cores
_ROW, _LEFT, _WIDTH = 16, 120, 840
_MOST_ROWS = 200
_GOALS = {"progress": "progress_goal", "samples": "samples_goal"}  # names in hints


def outcomes_table(outcomes: Sequence[Outcome]) -> Table:
    """A row for each policy."""
    head = ["policy", "mean time", "99th percentile", "makespan", "utilisation", "worst ratio", "restarts"]
    rows = [
        [
            outcome.policy,
            f"{outcome.mean / 3600:.3f} h",
            f"{outcome.percentile_99 / 3600:.2f} h",
            f"{outcome.makespan / 3600:.2f} h",
            f"{100 * outcome.utilisation:.0f} %",
            f"{outcome.unfairness:.2f}",
            f"{sum(run.restarts for run in outcome.runs):,}",
        ]
        for outcome in outcomes
    ]
    return [head, *rows]


def jobs_table(outcomes: Sequence[Outcome]) -> Table:
    """A row for each job and policy, for a CSV file."""
    head = ["policy", "job", "application", "arrived", "ended", "completion_seconds", "core_seconds", "restarts"]
    return [
        head,
        *(
            [
                outcome.policy,
                run.submitted.name,
                run.submitted.application,
                f"{run.submitted.time:.6g}",
                f"{run.ended:.6g}",
                f"{(run.ended or math.nan) - run.submitted.time:.6g}",
                f"{run.service:.6g}",
                str(run.restarts),
            ]
            for outcome in outcomes
            for run in outcome.runs
        ),
    ]


def outcomes_page(outcomes: Sequence[Outcome], *, facts: Mapping[str, str], command: str) -> str:
    """An HTML page with the table and a Gantt chart of each policy."""
    best = min(outcomes, key=lambda outcome: outcome.mean)
    lead = f"{best.policy} has the shortest mean completion time: {best.mean / 3600:.3f} h."
    charts = []
    for outcome in outcomes:
        spans = [(run.submitted.name, run.submitted.time, run.spans) for run in outcome.runs]
        charts.append(f"<h2>{escape(outcome.policy)}</h2>\n{gantt(spans, outcome.num_cores)}")
    figure = "\n".join(charts)
    return table_page(
        "A simulated pool", outcomes_table(outcomes), lead=lead, facts=facts, command=command, figure=figure
    )


def gantt(jobs: Spans, num_cores: int) -> str:
    """An SVG chart: for each job, a line from its arrival and a bar while it has cores, darker with more cores."""
    jobs = jobs[:_MOST_ROWS]
    first = min((arrived for _, arrived, _ in jobs), default=0.0)
    last = max((span[1] for _, _, spans in jobs for span in spans), default=first + 1.0)
    scale = (_WIDTH - _LEFT) / max(last - first, 1e-9)
    parts = []
    for number, (name, arrived, spans) in enumerate(jobs):
        y = number * _ROW
        x = _LEFT + (arrived - first) * scale
        end = _LEFT + (max((span[1] for span in spans), default=arrived) - first) * scale
        parts.append(f'<text x="0" y="{y + 11}" font-size="10">{escape(name[:20])}</text>')
        parts.append(f'<path d="M{x:.1f} {y + 7}H{max(end, x):.1f}" stroke="#b6bdc6"/>')
        for begin, until, cores in spans:
            left, width = _LEFT + (begin - first) * scale, max((until - begin) * scale, 0.5)
            shade = 0.3 + 0.7 * cores / max(num_cores, 1)
            title = f"{name}: {cores:g} cores, {duration(begin - first)} to {duration(until - first)}"
            parts.append(
                f'<rect x="{left:.1f}" y="{y + 1}" width="{width:.1f}" height="{_ROW - 4}" fill="#1f5fa8" '
                f'fill-opacity="{shade:.2f}"><title>{escape(title)}</title></rect>'
            )
    height = len(jobs) * _ROW + 20
    parts.append(f'<text x="{_LEFT}" y="{height - 6}" font-size="10">0</text>')
    parts.append(
        f'<text x="{_WIDTH}" y="{height - 6}" font-size="10" text-anchor="end">{escape(duration(last - first))}</text>'
    )
    box = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    label = 'role="img" aria-label="cores of each job over time"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box} {label}>\n' + "\n".join(parts) + "\n</svg>"


# ------------------------------------------------------------------------------------------------------- a real pool


def state_table(state: Mapping[str, Any]) -> Table:
    """A row for each job of a pool."""
    head = ["job", "state", "cores", "progress", "left", "starts", "killed", "failures", "why"]
    rows = []
    for job in state["jobs"]:
        hints = job["hints"] or {}
        rows.append(
            [
                job["name"],
                job["state"],
                str(job["cores"] or "–"),
                _progress(hints),
                _left(job, hints),
                str(job["starts"]),
                str(job["kills"]),
                str(job["failures"]),
                job["problem"] if job["state"] == "failed" or not job["why"] else job["why"],
            ]
        )
    return [head, *rows]


def _progress(hints: Mapping[str, Any]) -> str:
    for name, goal in _GOALS.items():
        if hints.get(goal):
            return f"{100 * min(1.0, hints[name] / hints[goal]):.0f} %"
    return f"{hints['steps']:,} steps" if hints.get("steps") else "–"


def _left(job: Mapping[str, Any], hints: Mapping[str, Any]) -> str:
    by = "progress" if hints.get("progress_goal") else "samples"
    speeds, goal = hints.get("goodput" if by == "progress" else "throughput"), hints.get(_GOALS[by])
    if not job["cores"] or not speeds or not goal:
        return "–"
    speed = speeds[min(job["cores"], len(speeds)) - 1]
    return duration(max(goal - hints[by], 0) / speed) if speed else "–"


def state_lead(state: Mapping[str, Any]) -> str:
    """A sentence about the pool."""
    used, total = sum(job["cores"] for job in state["jobs"]), sum(state["nodes"])
    ended = [job for job in state["jobs"] if job["state"] == "done"]
    text = (
        f"{used} of {total} cores on {counted(len(state['nodes']), 'node')} are in use by the policy {state['policy']}"
    )
    text += f", {len(ended)} of {len(state['jobs'])} jobs are done after {duration(state['seconds'])}."
    if ended:
        mean = sum(job["ended"] - job["arrived"] for job in ended) / len(ended)
        text += f" Their mean completion time is {duration(mean)}."
    if state["suggestion"]:
        text += f" Suggested size: {state['suggestion']['nodes']} nodes, as {state['suggestion']['why']}."
    return text


def state_page(state: Mapping[str, Any]) -> str:
    """An HTML page of a pool: jobs, cores over time, and the latest decisions with their reasons."""
    spans = [(job["name"], job["arrived"] or 0.0, job["spans"]) for job in state["jobs"]]
    figure = gantt(spans, sum(state["nodes"]) or 1)
    decisions = []
    for record in reversed(state["decisions"]):
        cores = ", ".join(f"{name} {number}" for name, number in record["cores"].items()) or "none"
        reasons = "; ".join(f"{name}: {why}" for name, why in record["why"].items())
        decisions.append(f"<li>{escape(duration(record['time']))}: {escape(cores)}. {escape(reasons)}</li>")
    figure += "\n<h2>Decisions</h2>\n<ol reversed>" + "\n".join(decisions) + "</ol>"
    facts = {"file": state["file"], "policy": state["policy"], "nodes": " ".join(map(str, state["nodes"]))}
    facts |= {f"log of {job['name']}": job["log"] for job in state["jobs"]}
    title, command = "A pool of jobs", state["command"]
    return table_page(title, state_table(state), lead=state_lead(state), facts=facts, command=command, figure=figure)
