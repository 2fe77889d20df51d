"""``vbs compare`` and ``vbs report``: train with every rule on every trace, and write a page with the results."""

import argparse
import platform
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from variable_batch_size.checks import check_extra
from variable_batch_size.lab.command.options import (
    add_training,
    check_training,
    interruptible,
    positive,
    print_text,
    selected,
)
from variable_batch_size.lab.comparison import experiment
from variable_batch_size.lab.comparison.experiment import POLICY, REFERENCE, Results, Settings
from variable_batch_size.lab.comparison.report import draw_picture, summaries, write_report
from variable_batch_size.policies.builtin import parse_policy
from variable_batch_size.policies.policy import Situation
from variable_batch_size.rules.registry import RULES, described_names
from variable_batch_size.schedules.schedule import ON_END, Schedule
from variable_batch_size.traces import zoo
from variable_batch_size.traces.trace import Trace

_DEFAULT_RULES = "linear,root,adascale,constant"


def add_compare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    help = f"some of {described_names()}, separated by commas, some with a setting as in legw:5000"
    add("--rules", default=_DEFAULT_RULES, help=f"{help} (default: {_DEFAULT_RULES})")
    help = f"trace files, or policies such as {POLICY}autoscale:max_batch_size=1024 (default: a ramp and a spot market)"
    add("--traces", nargs="+", metavar="FILE", help=help)
    add("--seeds", type=positive, default=3, metavar="N", help="runs of each rule on each trace (default: 3)")
    add("--out", default="results", metavar="DIR", help="for the results (default: results)")
    help = "end with as many samples, or as much progress of AdaScale, as the yardstick (default: samples)"
    add("--until", choices=experiment.UNTIL, default="samples", help=help)
    help = "samples to train on (default: the workload's, or as many as the traces have)"
    add("--samples", type=positive, metavar="N", dest="num_samples", help=help)
    add("--on-end", choices=ON_END, help="after the last row of a trace (default: stop; cycle with --until progress)")
    help = "digits, mnist, or module:function, which returns a variable_batch_size.Workload (default: digits)"
    add("--workload", default="digits", metavar="NAME", help=help)
    add_training(parser, experiment.DEVICES)
    add("--cores", type=positive, default=1, metavar="C", help="cores of each run (default: 1)")
    add("--exact", action="store_true", help="bitwise identical weights on any number of cores")
    add("--tests", type=positive, default=20, metavar="N", dest="num_tests", help="evaluations in a run (default: 20)")
    add("--log-steps", type=positive, metavar="N", help="steps between log records (default: for about 500 records)")


def run_compare(options: argparse.Namespace) -> None:
    rules = _rules(options.rules, options.until, options.on_end)
    check_training(options, cores=options.cores)
    if "://" in options.out:
        raise ValueError(f"--out must be a local directory, got {options.out}")
    check_extra(
        "vbs compare needs", "compare", "jinja2", "plotly", "scipy", *(() if options.executor else ("tensorboardX",))
    )
    # these import torch, which takes seconds, and so come after the options are parsed
    from variable_batch_size.lab.comparison.compare import compare
    from variable_batch_size.lab.comparison.train import checked_workload

    device = None if options.executor else options.device
    settings, traces = _settings(options, checked_workload(options.workload, options.datadir, device, rules))
    how: dict[str, Any] = {
        "num_seeds": options.seeds,
        "directory": Path(options.out),
        "origin": _origin(options.command),
    }
    with interruptible(f"runs missing in {options.out}"):
        compare(settings, traces=traces, rules=rules, **how, **selected(options, "jobs", "datadir", "executor"))
    results = Results(Path(options.out))
    _print_summaries(results)
    num_failed = sum(outcome.status == experiment.FAILED for _, outcome in results.runs())
    if num_failed:
        raise ValueError(f"{num_failed} runs failed: the page has the reasons, and the same command retries them")


def _settings(options: argparse.Namespace, workload: Any) -> tuple[Settings, dict[str, Trace | str]]:
    from variable_batch_size.lab.comparison.train import inner_optimizer
    from variable_batch_size.lab.comparison.workload import source_of

    values = {**vars(workload), **{name: value for name, value in vars(options).items() if value is not None}}
    train_size, size, ref_batchsize = len(values["train"]), values["minibatch_size"], values["ref_batchsize"]
    traces = _traces(options.traces or (), 16 * ref_batchsize)
    traces |= {} if traces else experiment.default_traces(ref_batchsize, values["num_samples"], train_size)
    files = [trace for trace in traces.values() if isinstance(trace, Trace)]
    for trace in [Trace.constant(ref_batchsize), *files]:
        Schedule(trace, dataset_size=train_size, minibatch_size=size)  # raises if it does not fit
    sizes = {"minibatch_size": size, "ref_batchsize": ref_batchsize, "capacity": train_size // size * size}
    for policy in traces.values():
        if isinstance(policy, str):  # raises what every run with it would raise
            parse_policy(policy.removeprefix(POLICY)).answer(Situation(cores=options.cores, **sizes))
    values["on_end"] = options.on_end or ("cycle" if options.until == "progress" else "stop")
    if values["on_end"] == "stop":
        values["num_samples"] = _num_samples(files, values["num_samples"], is_requested=options.num_samples is not None)
    values |= {"train_size": train_size, "test_size": len(values["test"]), "source": source_of(options.workload)}
    inner = inner_optimizer(workload, workload.model(), options.lr)
    group, names = inner.param_groups[0], ("lr", "momentum", "betas", "weight_decay", "nesterov")
    important = ", ".join(f"{name}={group[name]}" for name in names if group.get(name))
    values["optimizer"] = f"{type(inner).__name__}({important})"
    given: dict[str, Any] = {field.name: values.get(field.name) for field in fields(Settings)}
    return Settings(**given), traces


def _rules(text: str, until: str, on_end: str | None) -> list[str]:
    rules = text.split(",")
    if len(set(rules)) < len(rules) or not all(rule.partition(":")[0] in RULES for rule in rules):
        raise ValueError(f"`rules` must be some of {', '.join(RULES)}, each once, got {text!r}")
    if until == "progress" and on_end == "stop":
        reason = "AdaScale may take more samples than a trace has"
        raise ValueError(f"--until progress needs --on-end hold or cycle: {reason}")
    if until == "progress" and not any(map(experiment.measures_noise, rules)):
        needs = " or ".join(filter(experiment.measures_noise, RULES))
        raise ValueError(f"--until progress needs {needs} among the rules, got {text!r}")
    return rules


def _traces(texts: Iterable[str], largest: int) -> dict[str, Trace | str]:
    """The traces by file name, and the policies by their text as given; a policy needs a largest batch size."""
    traces: dict[str, Trace | str] = {}
    for text in texts:
        policy = text.removeprefix(POLICY)
        name = text if text.startswith(POLICY) else Path(text.removeprefix(zoo.PREFIX)).stem
        if name in traces or name == REFERENCE:
            raise ValueError(f"each trace needs a unique name other than {REFERENCE!r}, got {name!r} in {text}")
        if policy == text:
            traces[name] = Trace.read(text)
        elif "max_batch_size=" in policy or policy.isdecimal():
            traces[name] = text
        else:
            traces[name] = f"{text}{',' if ':' in policy else ':'}max_batch_size={largest}"
    return traces


def _num_samples(traces: Iterable[Trace], num_samples: int, *, is_requested: bool) -> int:
    """The number of samples to train on, at most those of the shortest trace."""
    for trace in traces:
        available = int(trace.sizes.sum())
        if is_requested and available < num_samples:
            shorter = f"{trace.name} has only {available} samples, got --samples {num_samples}"
            raise ValueError(f"{shorter}; --on-end hold or cycle continues after its end")
        if available < num_samples:
            sys.stderr.write(f"all runs end after the {available:,} samples of {trace.name}\n")
        num_samples = min(num_samples, available)
    return num_samples


def _origin(command: str) -> dict[str, Any]:
    """How to reproduce the results: the command, the versions, and the commit of the working directory, if any."""
    versions, commit = {"python": platform.python_version()}, None
    for package in ("variable_batch_size", "torch", "torch_xla", "numpy"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    with suppress(OSError, subprocess.CalledProcessError):
        describe = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    return {"command": command, "versions": versions, "commit": commit}


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", metavar="DIR", help="the directory of results of vbs compare")
    parser.add_argument("--plot", metavar="FILE", help="also draw the curves, as a .png or .svg file")


def run_report(options: argparse.Namespace) -> None:
    results = Results(Path(options.results))
    write_report(results)
    if options.plot is not None:
        draw_picture(results, options.plot)
    _print_summaries(results)


def _print_summaries(results: Results) -> None:
    for name, text in summaries(results).items():
        print_text(f"{name}: {text}")
    print_text(str(results.page_file))
