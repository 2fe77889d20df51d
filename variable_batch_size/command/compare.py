"""``vbs compare``: trains with every rule on every trace from every seed, and makes a page of what came out."""

from __future__ import annotations

import argparse
import math
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from variable_batch_size.command.options import add_minibatch_size, positive
from variable_batch_size.command.report import print_verdicts
from variable_batch_size.comparison.experiment import (
    FAILED,
    MEASURING_RULES,
    POLICY,
    REFERENCE,
    RULES,
    UNTIL,
    Settings,
    default_traces,
)
from variable_batch_size.comparison.results import Results
from variable_batch_size.policies.builtin import parse_policy
from variable_batch_size.policies.policy import Situation
from variable_batch_size.schedules.batch_sizes import ON_END, OnEnd
from variable_batch_size.schedules.schedule import Schedule
from variable_batch_size.traces.trace import Trace

EXIT_INTERRUPTED = 130

_DEFAULT_RULES = "linear,root,adascale,constant"
_DEVICES = ("cpu", "cuda", "xla")
_OPTIMIZER_SETTINGS = ("lr", "momentum", "betas", "weight_decay", "nesterov")
_PACKAGES = ("variable_batch_size", "torch", "torch_xla", "numpy")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rules",
        default=_DEFAULT_RULES,
        help=f"some of {', '.join(RULES)}, with commas and no blanks between them; legw:5000 and adam:half-life give a "
        f"rule its setting (default: {_DEFAULT_RULES})",
    )
    parser.add_argument(
        "--traces",
        nargs="+",
        metavar="FILE",
        help=f"trace files, or policies such as {POLICY}autoscale:max_batch_size=1024 (default: a ramp and a spot "
        "market)",
    )
    parser.add_argument(
        "--seeds", type=positive, default=3, metavar="N", help="how many runs of each rule on each trace (default: 3)"
    )
    parser.add_argument(
        "--workload",
        default="digits",
        metavar="NAME",
        help="what to train: digits, mnist, cifar10, or module:function of your own, which returns a "
        "variable_batch_size.Workload (default: digits)",
    )
    parser.add_argument("--datadir", metavar="DIR", help="where mnist or cifar10 is: torchvision's files or NAME.npz")
    parser.add_argument("--out", default="results", metavar="DIR", help="for the results (default: results)")
    parser.add_argument(
        "--jobs", type=positive, metavar="N", help="runs at once (default: one for each CPU; on others 1)"
    )
    parser.add_argument(
        "--executor",
        metavar="FILE.py:FUNCTION",
        help="a function of yours that returns a concurrent.futures.Executor, such as that of a cluster: it makes "
        "the runs instead of processes of this machine",
    )
    parser.add_argument(
        "--until",
        choices=UNTIL,
        default="samples",
        help="when runs end: after as many samples as the yardstick; or when AdaScale has made as much progress, and "
        "the other rules as many updates as AdaScale (default: samples)",
    )
    parser.add_argument(
        "--samples",
        type=positive,
        metavar="N",
        help="samples to train on (default: the workload's, or what the traces hold)",
    )
    parser.add_argument(
        "--on-end",
        choices=ON_END,
        help="what follows the last row of a trace (default: stop, but cycle with --until progress)",
    )
    parser.add_argument(
        "--lr", type=_learning_rate, help="learning rate at the reference batch size (default: the workload's)"
    )
    parser.add_argument(
        "--ref-batchsize", type=positive, metavar="B0", help="batch size of the yardstick (default: the workload's)"
    )
    add_minibatch_size(parser, is_required=False)
    parser.add_argument("--device", choices=_DEVICES, default="cpu", help="what to train on (default: cpu)")
    parser.add_argument("--cores", type=positive, default=1, metavar="C", help="cores that share each run (default: 1)")
    parser.add_argument(
        "--threads", type=positive, default=1, metavar="N", help="CPU threads of each core (default: 1)"
    )
    parser.add_argument(
        "--exact", action="store_true", help="runs with the same weights to the last bit on any number of cores"
    )
    parser.add_argument(
        "--tests", type=positive, default=20, metavar="N", help="tests of the model in a run (default: 20)"
    )
    parser.add_argument(
        "--log-steps", type=positive, metavar="N", help="steps from one record to the next (default: about 500 records)"
    )


def run(options: argparse.Namespace) -> None:
    rules = _rules(options.rules, options.until, options.on_end)
    if "://" in options.out:
        raise ValueError(f"--out must be a directory of this machine, got {options.out}")
    if options.executor and options.jobs:
        raise ValueError("--executor decides how many runs are made at once: leave --jobs out")
    # torch comes with these, which takes seconds: after the options have been understood
    from variable_batch_size.comparison.compare import compare
    from variable_batch_size.comparison.executors import load_executor
    from variable_batch_size.comparison.train import inner_optimizer, refuse_impossible
    from variable_batch_size.comparison.workload import load_workload, source_of

    workload = load_workload(options.workload, options.datadir)
    refuse_impossible(workload, None if options.executor else options.device, rules)
    train_size, test_size = len(workload.train), len(workload.test)  # type: ignore[arg-type]
    ref_batchsize = options.ref_batchsize or workload.ref_batchsize
    minibatch_size = options.minibatch_size or workload.minibatch_size
    on_end: OnEnd = options.on_end or ("cycle" if options.until == "progress" else "stop")
    num_samples = options.samples or workload.num_samples
    traces: dict[str, Trace | str] = (
        _read_traces(options.traces, 16 * ref_batchsize)
        if options.traces
        else {**default_traces(ref_batchsize, num_samples, train_size)}
    )
    files = {name: trace for name, trace in traces.items() if isinstance(trace, Trace)}
    for trace in [Trace.constant(ref_batchsize), *files.values()]:
        Schedule(trace, dataset_size=train_size, minibatch_size=minibatch_size)  # refuses what does not fit
    for policy in [trace for trace in traces.values() if isinstance(trace, str)]:
        _refuse_policy(policy, options.cores, minibatch_size, ref_batchsize, train_size)
    if on_end == "stop":
        num_samples = _num_samples(files, num_samples, is_asked_for=options.samples is not None)
    settings = Settings(
        workload=options.workload,
        source=source_of(options.workload),
        optimizer=_in_words(inner_optimizer(workload, workload.model(), options.lr)),
        train_size=train_size,
        test_size=test_size,
        metric_name=workload.metric_name,
        unit=workload.unit,
        is_higher_better=workload.is_higher_better,
        device=options.device,
        cores=options.cores,
        threads=options.threads,
        minibatch_size=minibatch_size,
        ref_batchsize=ref_batchsize,
        lr=options.lr,
        num_samples=num_samples,
        until=options.until,
        on_end=on_end,
        num_tests=options.tests,
        log_steps=options.log_steps,
        exact=options.exact,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an interruption, too: workers must not be left behind
    try:
        compare(
            settings,
            traces=traces,
            rules=rules,
            num_seeds=options.seeds,
            directory=Path(options.out),
            jobs=options.jobs or _jobs(options),
            datadir=options.datadir,
            origin={"command": options.command, "versions": _versions(), "commit": _commit()},
            make_executor=load_executor(options.executor) if options.executor else None,
        )
    except KeyboardInterrupt:
        sys.stderr.write(f"vbs: interrupted; the same command goes on with what {options.out} does not hold yet\n")
        sys.exit(EXIT_INTERRUPTED)
    results = Results(Path(options.out))
    print_verdicts(results)
    num_failed = sum(outcome.status == FAILED for _, outcome in results.runs())
    if num_failed:
        raise ValueError(f"{num_failed} runs failed: the page says why, and the same command tries them again")


def _learning_rate(text: str) -> float:
    """The type of an option that is a learning rate."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def _in_words(optimizer: Any) -> str:
    """The kind of an optimizer and the settings that matter here."""
    group = optimizer.param_groups[0]
    settings = [f"{name}={group[name]}" for name in _OPTIMIZER_SETTINGS if group.get(name)]
    return f"{type(optimizer).__name__}({', '.join(settings)})"


def _rules(text: str, until: str, on_end: str | None) -> list[str]:
    rules = text.split(",")
    for rule in rules:
        if rule.partition(":")[0] not in RULES or rules.count(rule) > 1:
            raise ValueError(f"`rules` must be some of {', '.join(RULES)}, each once, got {text!r}")
    if until == "progress" and on_end == "stop":
        raise ValueError(
            "--until progress needs --on-end hold or cycle: AdaScale takes more samples than the yardstick"
        )
    if until == "progress" and not set(rules) & set(MEASURING_RULES):
        raise ValueError(f"--until progress needs {' or '.join(MEASURING_RULES)} among the rules, got {text!r}")
    return rules


def _read_traces(texts: Sequence[str], largest: int) -> dict[str, Trace | str]:
    """The traces by the names of their files, and policies by what they were asked for as."""
    traces: dict[str, Trace | str] = {}
    for text in texts:
        name = text if text.startswith(POLICY) else Path(text).stem
        if name in traces or name == REFERENCE:
            raise ValueError(f"each trace needs a name of its own, other than {REFERENCE!r}, got {name!r} in {text}")
        traces[name] = _with_largest(text, largest) if text.startswith(POLICY) else Trace.read(text)
    return traces


def _with_largest(text: str, largest: int) -> str:
    """A policy with a largest batch size, as that of the traces that are there by default, if it has none."""
    if "max_batch_size=" in text or text.removeprefix(POLICY).isdecimal():
        return text
    return f"{text}{',' if ':' in text.removeprefix(POLICY) else ':'}max_batch_size={largest}"


def _refuse_policy(text: str, cores: int, minibatch_size: int, ref_batchsize: int, dataset_size: int) -> None:
    """Say at once what every run with a policy would fail by."""
    policy = parse_policy(text.removeprefix(POLICY))
    capacity = dataset_size // minibatch_size * minibatch_size
    policy.answer(Situation(cores=cores, minibatch_size=minibatch_size, ref_batchsize=ref_batchsize, capacity=capacity))


def _num_samples(traces: Mapping[str, Trace], num_samples: int, *, is_asked_for: bool) -> int:
    """How many samples to train on: no more than every trace holds."""
    for trace in traces.values():
        held = int(trace.sizes.sum())
        if is_asked_for and held < num_samples:
            raise ValueError(
                f"{trace.name} holds {held} samples, got --samples {num_samples}; --on-end hold or cycle goes on beyond"
            )
        if held < num_samples:
            sys.stderr.write(f"all runs end after the {held:,} samples that {trace.name} holds\n")
        num_samples = min(num_samples, held)
    return num_samples


def _jobs(options: argparse.Namespace) -> int:
    """As many as there are processors for, where each run has its own."""
    return max(1, (os.cpu_count() or 1) // (options.cores * options.threads)) if options.device == "cpu" else 1


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _commit() -> str | None:
    """Of the repository in the working directory, if it is one."""
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
