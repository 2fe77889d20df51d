"""The report of a comparison: the verdict as text, the tables, the page report.html, and the curves as a figure."""

import math
import os
import statistics
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from variable_batch_size.checks import import_extra
from variable_batch_size.comparison import experiment
from variable_batch_size.comparison.experiment import DIVERGED, DONE, REFERENCE, Outcome, Results, Run, Settings
from variable_batch_size.files import read_records, write_text
from variable_batch_size.planning.reports import STYLES, check_suffix, csv_text, new_figure

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


def number(value: float, *, like: float | None = None) -> str:
    """A number with two decimals, more if it or what it is compared with is below 1, and fewer if it is huge.

    >>> number(97.8125), number(0.97812), number(0.3, like=97.8), number(-3.2e20)
    ('97.81', '0.9781', '0.30', '-3.2e+20')
    """
    size = abs(value if like is None else like)
    if abs(value) >= 1e6:
        return f"{value:.3g}"
    decimals = 2 if size >= 1 or size == 0 or not math.isfinite(size) else 3 - math.floor(math.log10(size))
    return f"{value:.{decimals}f}"


class Estimate(NamedTuple):
    """A mean over seeds, with its standard deviation or half of its 95 % interval; a single seed has neither."""

    mean: float
    error: float | None

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.error is not None and abs(self.mean) > self.error

    def text(self, unit: str, *, like: float | None = None) -> str:
        """The estimate with the digits of `like`, by default of its mean."""
        like = self.mean if like is None else like
        error = "" if self.error is None else f" ± {number(self.error, like=like)}"
        return f"{number(self.mean, like=like)}{error}{unit}"


def spread(values: Iterable[float]) -> Estimate | None:
    """Mean and sample standard deviation; None without values."""
    numbers = list(values)
    if not numbers:
        return None
    return Estimate(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None)


def difference(values: Sequence[float]) -> Estimate | None:
    """The mean d of n paired differences, and its 95 % interval, d ± t · s / √n with Student's t; None without any."""
    found = spread(values)
    if found is None or found.error is None:
        return found
    # scipy.stats.t.ppf calls its stdtrit, but scipy.stats takes a second to load
    special, num = import_extra("scipy.special", "an interval needs scipy", "compare"), len(values)
    return found._replace(error=float(special.stdtrit(num - 1, 0.975)) * found.error / math.sqrt(num))


class Arm(NamedTuple):
    """All runs of a rule on a trace that have ended."""

    trace: str
    rule: str
    outcomes: tuple[tuple[Run, Outcome], ...]

    @property
    def is_reference(self) -> bool:
        return self.trace == REFERENCE

    def seeds(self, *statuses: str) -> set[int]:
        """The seeds of the runs with one of these statuses."""
        return {run.seed for run, outcome in self.outcomes if outcome.status in statuses}

    @property
    def share_diverged(self) -> float:
        """The fraction of diverged runs, not counting failed ones."""
        return len(self.seeds(DIVERGED)) / max(1, len(self.seeds(DIVERGED, DONE)))

    def values(self, quantity: str) -> dict[int, float]:
        """A field of the outcomes of the runs that are done, by seed, where it is not None."""
        found = {run.seed: getattr(outcome, quantity) for run, outcome in self.outcomes if outcome.status == DONE}
        return {seed: value for seed, value in found.items() if value is not None}

    @property
    def final(self) -> Estimate | None:
        return spread(self.values("final_metric").values())

    def above(self, other: "Arm") -> Estimate | None:
        """The final metric minus that of another arm; None if they have no seed in common."""
        mine, theirs = self.values("final_metric"), other.values("final_metric")
        return difference([mine[seed] - theirs[seed] for seed in mine if seed in theirs])

    @property
    def failures(self) -> str:
        """The numbers of diverged and failed runs, as text."""
        counts = [(len(self.seeds(status)), status) for status in (DIVERGED, experiment.FAILED)]
        return ", ".join(f"{number} of {len(self.outcomes)} {status}" for number, status in counts if number)


def arms_of(results: Results) -> tuple[Arm | None, dict[str, list[Arm]]]:
    """The baseline, and the arms of each trace on which a run has ended, in the order of the command."""
    outcomes: dict[tuple[str, str], list[tuple[Run, Outcome]]] = {}
    for run, outcome in results.runs():
        outcomes.setdefault((run.trace, run.rule), []).append((run, outcome))
    found = [Arm(*names, tuple(ended)) for names, ended in outcomes.items()]
    on_traces = {name: [arm for arm in found if arm.trace == name] for name in results.read_experiment()["traces"]}
    reference = next((arm for arm in found if arm.is_reference), None)
    return reference, {name: arms for name, arms in on_traces.items() if arms}


def ranking(arms: Iterable[Arm], *, is_higher_better: bool) -> list[Arm]:
    """Arms with a final metric, from the best to the worst; an arm with fewer diverged runs is better."""
    sign = -1 if is_higher_better else 1
    finals = [(arm.share_diverged, sign * arm.final.mean, arm) for arm in arms if arm.final is not None]
    return [arm for *_, arm in sorted(finals, key=lambda final: final[:2])]


def is_ahead(arm: Arm, other: Arm, *, is_higher_better: bool) -> bool:
    """Whether an arm is significantly better than one ranked below it, or diverged for fewer of their common seeds."""
    gap = arm.above(other)
    is_better = gap is not None and gap.is_clear and (gap.mean > 0) == is_higher_better
    common = arm.seeds(DONE, DIVERGED) & other.seeds(DONE, DIVERGED)
    return is_better or len(other.seeds(DIVERGED) & common) > len(arm.seeds(DIVERGED) & common)


def verdict(settings: Settings, arms: Sequence[Arm], reference: Arm | None) -> str:
    """The best rule on a trace, if one is ahead of all others, and the differences from it with 95 % intervals."""
    ranked = ranking(arms, is_higher_better=settings.is_higher_better)
    sentences = []
    if ranked:
        sentences = [_rules_sentence(settings, ranked), _reference_sentence(settings, ranked[0], reference)]
    sentences += [f"{arm.rule}: {arm.failures}." for arm in arms if arm.failures]
    if any(arm.final is not None and arm.final.error is None for arm in ranked):
        sentences.append("A single seed cannot tell a difference from chance.")
    return " ".join(sentence for sentence in sentences if sentence)


def ranking_in_words(settings: Settings, arms: Sequence[Arm]) -> str:
    """Rules from the best to the worst, with > where all before it are ahead of all after it; then any others."""
    ranked = ranking(arms, is_higher_better=settings.is_higher_better)
    words = ""
    for number, arm in enumerate(ranked):
        if number:
            words += " > " if _are_ahead(settings, ranked[:number], ranked[number:]) else " ≈ "
        words += arm.rule + (f" ({arm.failures})" if arm.failures else "")
    without = [f"{arm.rule} ({arm.failures})" for arm in arms if arm not in ranked]
    return "; without a result: ".join(part for part in (words, ", ".join(without)) if part)


def _are_ahead(settings: Settings, arms: Sequence[Arm], others: Sequence[Arm]) -> bool:
    """Whether each of some arms is ahead of each of those ranked below them."""
    return all(is_ahead(arm, other, is_higher_better=settings.is_higher_better) for arm in arms for other in others)


def _rules_sentence(settings: Settings, ranked: Sequence[Arm]) -> str:
    first, others = ranked[0], ranked[1:]
    assert first.final is not None
    behind = [arm for arm in others if _are_ahead(settings, [first], [arm])]
    level = [f"{arm.rule} ({_gap(settings, arm, first)})" for arm in others if arm not in behind]
    result = f"{first.rule} with {first.final.text(settings.unit)}"
    joined = " and ".join(part for part in (", ".join(level[:-1]), *level[-1:]) if part)
    start = f"undecided, as {result} is not clearly ahead of {joined}" if level else f"best is {result}"
    return "; ".join([start, *(f"{arm.rule} {_gap(settings, arm, first)}" for arm in behind)]) + "."


def _gap(settings: Settings, arm: Arm, other: Arm) -> str:
    """The difference from another arm, as text with the digits of that one."""
    gap = arm.above(other)
    if gap is None or other.final is None:
        return "without a seed in common"
    unit = " points" if settings.unit.strip() == "%" else settings.unit
    size = gap._replace(mean=abs(gap.mean)).text(unit, like=other.final.mean)
    where = " where it did not diverge" if arm.seeds(DIVERGED) and not other.is_reference else ""
    return f"{size} {'lower' if gap.mean < 0 else 'higher'}{where}"


def _reference_sentence(settings: Settings, first: Arm, reference: Arm | None) -> str:
    gap = first.above(reference) if reference else None
    if gap is None or reference is None or reference.final is None:
        return ""
    always = f"Against always a batch of {settings.ref_batchsize} ({reference.final.text(settings.unit)})"
    doubt = "" if gap.is_clear else ", which may be chance"
    return f"{always}, {first.rule} is {_gap(settings, first, reference)}{doubt}."


def curves(results: Results, arm: Arm) -> dict[str, Curves]:
    """The curves of the training and the tests of an arm, averaged over the seeds that have a record, by its index.

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
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns about NaN where no seed or one has a value
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


def write_report(results: Results) -> None:
    """Write results.csv, timings.csv with the seconds, so that the former is reproducible, and ``report.html``."""
    rows = [{**asdict(run), **asdict(outcome)} for run, outcome in results.runs()]
    for file, names in (("results.csv", (*_RUN, *_ENDED)), ("timings.csv", (*_RUN, "seconds"))):
        write_text(results.directory / file, csv_text([names, *([row[name] for name in names] for row in rows)]))
    jinja2 = import_extra("jinja2", "the page needs jinja2", "compare")
    plotly = import_extra("plotly.offline", "the page needs plotly", "compare")
    recorded, settings, (reference, on_traces) = results.read_experiment(), results.settings(), arms_of(results)

    def curves_of(arm: Arm) -> dict[str, Any]:
        return {"rule": REFERENCE if arm.is_reference else arm.rule, **_plain(curves(results, arm))}

    # with autoescape, because names may contain HTML
    options = {"autoescape": True, "trim_blocks": True, "keep_trailing_newline": True}
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, **options)
    environment.filters["count"] = "{:,.0f}".format
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    # together with the commands, these reproduce the experiment
    latest = recorded["origins"][-1]
    traces = recorded["traces"].items()
    hashes = {name if name.startswith(experiment.POLICY) else f"SHA-256 of {name}": value for name, value in traces}
    facts = {**latest["versions"], "commit": latest["commit"], **hashes, **recorded["settings"]}
    columns = [name for name in (*_RUN, *_ENDED) if name != "final_loss"]
    page = environment.from_string(_resource("page.html")).render(
        settings=settings,
        num_planned=len(results.planned()),
        traces=[_trace(settings, name, arms, reference) for name, arms in on_traces.items()],
        result_columns=("rule", "final", "against the baseline", "best", "updates", "samples", "seconds", "runs"),
        runs=[(row["status"], [_or_dash(row[name], _FORMATS.get(name, str)) for name in columns]) for row in rows],
        run_columns=[name.replace("final_metric", "final").replace("best_metric", "best") for name in columns],
        commands=list(dict.fromkeys(origin["command"] for origin in recorded["origins"])),
        facts=[(name, value) for name, value in facts.items() if value is not None],
        charts={
            "metric": settings.metric_name + settings.unit,
            "reference": curves_of(reference) if reference is not None else None,
            "traces": {name: [curves_of(arm) for arm in arms] for name, arms in on_traces.items()},
        },
        style=_resource("page.css"),
        script=_resource("page.js"),
        library=plotly.get_plotlyjs(),
    )
    write_text(results.page_file, page)


def _resource(name: str) -> str:
    return (files("variable_batch_size.comparison") / name).read_text(encoding="utf-8")


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
        cell("seconds", lambda found: f"{found.mean:.1f}"),
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
