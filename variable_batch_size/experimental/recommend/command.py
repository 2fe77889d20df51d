"""``vbs recommend``: recommend a rule for a trace, from short branches of one training."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from variable_batch_size.checks import check_extra, check_positive_number
from variable_batch_size.files import read_json, write_json, write_text
from variable_batch_size.lab.command.options import (
    add_training,
    check_seeds,
    check_training,
    interruptible,
    positive,
    print_text,
    selected,
)
from variable_batch_size.schedules.schedule import Schedule
from variable_batch_size.traces.trace import Trace, parse_count


def add_recommend(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    help = "digits, mnist, or module:function, which returns a variable_batch_size.Workload"
    add("workload", metavar="WORKLOAD", help=help)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--trace", metavar="FILE", help="the trace to train with")
    which.add_argument("--sizes", metavar="B0:B", help="or the reference batch size and the largest one")
    help = "samples to train on (default: the workload's, or as many as the trace has)"
    add("--samples", type=positive, metavar="N", dest="num_samples", help=help)
    help = "samples to use, as a fraction of a full comparison (default: 0.1)"
    add("--budget", type=float, default=0.1, metavar="F", help=help)
    add("--seeds", type=positive, default=3, metavar="N", help="seeds of each branch, at least 2 (default: 3)")
    help = "the seeds of the branches are N, N + 1 and so on (default: 0)"
    add("--first-seed", type=int, default=0, metavar="N", help=help)
    help = "samples for which the reference batch size was chosen, for a second opinion by a power law"
    add("--tuned-samples", type=positive, metavar="D", help=help)
    add("--out", default="recommended", metavar="DIR", help="for the branches and the page (default: recommended)")
    add_training(parser, ("cpu", "cuda"))


def run_recommend(options: argparse.Namespace) -> None:
    check_positive_number(budget=options.budget)
    check_seeds(options)
    if options.first_seed < 0:
        raise ValueError(f"--first-seed must not be negative, got {options.first_seed}")
    check_training(options)
    check_extra("vbs recommend needs", "compare", "jinja2", "plotly", "scipy")
    # these import torch, which takes seconds, and so come after the options are parsed
    from variable_batch_size.experimental.recommend import recommended
    from variable_batch_size.experimental.recommend.recommend import recommend_into

    source, plan = _planned(options)
    directory = Path(options.out)
    _check_settings(directory / "settings.json", {**source._asdict(), **asdict(plan)})
    with interruptible(f"branches missing in {directory}"):
        found = recommend_into(directory, source, plan, jobs=options.jobs, executor=options.executor)
    tuned = selected(options, "tuned_samples")
    page_file = directory / "report.html"
    write_text(page_file, recommended.page(found, command=options.command, **tuned))
    print_text(recommended.as_terminal(found, **tuned))
    print_text(str(page_file))


def _planned(options: argparse.Namespace) -> tuple[Any, Any]:
    from variable_batch_size.experimental.recommend.branching import Source
    from variable_batch_size.experimental.recommend.recommend import candidates, plan_of
    from variable_batch_size.lab.comparison.train import checked_workload, inner_optimizer
    from variable_batch_size.lab.comparison.workload import source_of

    device = None if options.executor else options.device
    workload = checked_workload(options.workload, options.datadir, device, ["constant"])
    values = {**vars(workload), **{name: value for name, value in vars(options).items() if value is not None}}
    size, ref_batchsize, num_samples = (values[name] for name in ("minibatch_size", "ref_batchsize", "num_samples"))
    if options.sizes is not None:
        trace = _constant_trace(options.sizes, ref_batchsize, num_samples)
    else:
        trace = Trace.read(options.trace)
        available = int(trace.sizes.sum())
        if options.num_samples is not None and available < num_samples:
            raise ValueError(f"{trace.name} has only {available} samples, got --samples {num_samples}")
        num_samples = min(num_samples, available)
    for one in (Trace.constant(ref_batchsize), trace):  # raises if it does not fit
        Schedule(one, dataset_size=len(values["train"]), minibatch_size=size)
    inner = inner_optimizer(workload, workload.model(), options.lr)
    where = (options.workload, source_of(options.workload), options.datadir, options.device, options.threads)
    source = Source(*where, options.lr, size, ref_batchsize, num_samples)
    rules = candidates(type(inner).__name__, inner.param_groups)
    return source, plan_of(trace, source, rules, **selected(options, "seeds", "budget", "first_seed"))


def _constant_trace(text: str, ref_batchsize: int, num_samples: int) -> Trace:
    """A constant trace of the second of two batch sizes, as in 128:4096; the first is the reference."""
    first, colon, last = text.partition(":")
    try:
        smallest, largest = parse_count(first), parse_count(last)
    except ValueError:
        smallest, largest = 0, 0
    if not colon or not 0 < smallest <= largest:
        raise ValueError(f"--sizes must be two batch sizes in ascending order, as in 128:4096, got {text!r}")
    if smallest != ref_batchsize:
        rule = f"must start with the reference batch size {ref_batchsize}"
        raise ValueError(f"--sizes {rule}, got {text!r}: --ref-batchsize sets another one")
    return Trace.from_sequence(np.repeat([largest], -(-num_samples // largest)))


def _check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Write the settings, or raise if the directory has branches with other settings."""
    if not path.exists():
        write_json(path, settings, indent=2)
        return
    old = read_json(path)
    for name, value in json.loads(json.dumps(settings)).items():  # with lists for tuples, as in the file
        if old.get(name) != value:
            different = f"another {name}, {old.get(name)} instead of {value}"
            raise ValueError(f"{path.parent} has branches with {different}: choose another --out")
