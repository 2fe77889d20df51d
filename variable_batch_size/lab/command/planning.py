"""``vbs plan``, ``simulate``, ``profile``, ``fit``, ``cbs``, ``advise``: predict runs, and measure what that needs."""

import argparse
import itertools
import json
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from variable_batch_size.checks import check_not_negative_number
from variable_batch_size.files import write_text
from variable_batch_size.lab.command.options import (
    RECORDING,
    add_minibatch,
    add_plot,
    add_recording,
    check_seeds,
    draw_picture,
    positive,
    print_text,
    read_recording,
    require,
    selected,
)
from variable_batch_size.lab.comparison import experiment
from variable_batch_size.lab.planning import figures, reports
from variable_batch_size.lab.planning.advise import advice_report, advise, core_numbers
from variable_batch_size.lab.planning.forecast import RunSoFar, basis_of, forecast, named_policy, with_largest
from variable_batch_size.lab.planning.plan import RULES as PLANNED_RULES
from variable_batch_size.lab.planning.plan import Plan, planned_rules
from variable_batch_size.lab.planning.profile import Measured, Profile
from variable_batch_size.lab.planning.rental import RENTALS, Prices, Rental
from variable_batch_size.lab.planning.simulate import Availability, NoiseCurve, NoiseCurves, simulate_with_ends
from variable_batch_size.policies.builtin import POLICIES
from variable_batch_size.policies.policy import Policy, Situation
from variable_batch_size.policies.throughput import best_split
from variable_batch_size.rules.registry import RULES, described_names
from variable_batch_size.schedules.schedule import ON_END, Schedule
from variable_batch_size.schedules.token_plan import TOO_LONG, TokenPlan, read_lengths
from variable_batch_size.traces.trace import Trace


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(refuse=parser.error)
    add = parser.add_argument
    add("trace", metavar="TRACE", help="a trace file, stages as in '0:64 20:128', or a constant batch size")
    add("--dataset-size", type=positive, metavar="N", help="samples in the data set")
    add_minibatch(parser, required=False)
    add("--cores", type=positive, metavar="C", help="the number of cores")
    _add_token_budget(parser.add_argument_group("a token budget, in place of --dataset-size and --minibatch-size"))
    add("--epochs", type=positive, metavar="E", help="epochs to train (default: all epochs of the trace)")
    help = "what follows the last row of the trace (default: stop; hold for stages)"
    add("--on-end", choices=ON_END, help=help)
    add("--lockstep", action="store_true", help="all cores run equally many minibatches in a step, as with fully_shard")
    add("--tokens-per-sample", type=positive, metavar="T", help="also count tokens: the tokens of a sample")
    help = f"a rule to show, one of {described_names()}, some with a setting as in legw:5000; may be repeated"
    add("--rule", action="append", metavar="RULE", help=f"{help} (default: {', '.join(PLANNED_RULES)})")
    help = "the gradient noise scale to assume; adds adascale if no rule measures the noise"
    add("--noise-scale", type=float, metavar="V", help=help)
    help = "batch size of the unscaled learning rate (default: the first batch size)"
    add("--ref-batchsize", type=positive, metavar="B0", help=help)
    add("--checkpoint-every", type=positive, metavar="K", help="also show the position after every K steps")
    add("--json", action="store_true", help="print all numbers as JSON")
    add_plot(parser, "the plan")


def _add_token_budget(parser: Any) -> None:
    add = parser.add_argument
    help = "the tokens of each sample: a .npy file, or one number in each line; the trace is then in tokens"
    add("--lengths", metavar="FILE", help=help)
    add("--tokens", type=positive, metavar="T", help="the most tokens of a minibatch, padding included")
    add("--packed", action="store_true", help="the samples of a minibatch are packed into one row")
    help = "the most shapes of padded minibatches (default: 32)"
    add("--max-shapes", type=positive, default=32, metavar="K", help=help)
    add("--multiple-of", type=positive, default=1, metavar="M", help="padded lengths are multiples of M (default: 1)")
    add("--too-long", choices=TOO_LONG, default="raise", help="what happens to longer samples (default: raise)")


def _token_plan(options: argparse.Namespace) -> TokenPlan | None:
    if options.lengths is None and options.tokens is None:
        instead = "--lengths and --tokens, for a token budget"
        require(options, "dataset_size", "minibatch_size", "cores", instead=instead)
        return None
    require(options, "lengths", "tokens", "cores")
    for name in ("dataset_size", "minibatch_size", "tokens_per_sample"):
        if getattr(options, name) is not None:
            options.refuse(f"--lengths and --tokens replace --{name.replace('_', '-')}")
    how = selected(options, "tokens", "packed", "max_shapes", "multiple_of", "too_long")
    return TokenPlan(read_lengths(options.lengths), **how)


def run_plan(options: argparse.Namespace) -> None:
    if options.plot is not None:
        figures.check_suffix(options.plot)
    budget = _token_plan(options)
    is_number = options.trace.isdecimal() and not Path(options.trace).exists()
    trace = Trace.of(int(options.trace) if is_number else options.trace)
    given = selected(options, "dataset_size", "minibatch_size", "on_end", "lockstep")
    if budget is not None:
        given |= {"dataset_size": budget.num_minibatches * budget.tokens, "minibatch_size": budget.tokens}
        given["unit"] = "tokens"
    schedule = Schedule(trace, num_replicas=options.cores, **given)
    rules = planned_rules(options.rule or list(PLANNED_RULES), noise_scale=options.noise_scale)
    given = selected(options, "ref_batchsize", "checkpoint_every", "tokens_per_sample")
    plan = Plan.of(schedule, num_epochs=options.epochs, rules=rules, token_plan=budget, **given)
    draw_picture(options, lambda path: figures.plot_plan(plan, schedule, path))
    if options.json:
        print_text(json.dumps({**plan.as_dict(), "comment": trace.comment}))
        return
    if trace.comment:
        print_text(trace.comment)
    print_text(reports.plan_report(plan))


def add_simulate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    named = f"one of {', '.join(POLICIES)}, as in autoscale:max_batch_size=4096,threshold=1.1"
    help = f"a batch size, {named}; {', '.join(RENTALS)}, which also choose the cores, as in by_deadline:hours=9,…"
    help += "; or file.py:name, a policy or a function of the situation"
    add("policies", nargs="*", metavar="POLICY", help=help)
    help = "instead, forecast the rest of this run, a directory or URL with its log, with its own times and noise; its"
    help += " policy, cores and minibatch size are the defaults"
    add("--from", dest="run_so_far", metavar="RUN", help=help)
    help = "times of minibatches, from vbs profile; with --from, for numbers of cores other than the run's own"
    add("--profile", metavar="FILE", help=help)
    help = "the log of a run with AdaScale, a CSV file (progress,noise_scale,batch_size), or a constant noise scale"
    help += ", as in 128:500 for batch size 128; may be repeated, for runs at several batch sizes"
    add("--noise", action="append", metavar="LOG", help=help)
    cores = parser.add_mutually_exclusive_group()
    help = "constant numbers of cores; with several, a run on each"
    cores.add_argument("--cores", type=positive, nargs="+", metavar="C", help=help)
    cores.add_argument("--recording", metavar="FILE", help="recorded devices, as read by vbs convert")
    cores.add_argument("--market", metavar="TRACE", help="a trace of numbers of devices, as from vbs make spot")
    help = "cores of a machine; machines are filled one after the other (needed for profiles of several machines)"
    add("--cores-per-machine", type=positive, metavar="K", help=help)
    add("--seconds-per-row", type=float, default=60.0, metavar="T", help="seconds per row of --market (default: 60)")
    add_recording(parser.add_argument_group("the recording"))
    add_minibatch(parser, required=False)
    add("--ref-batchsize", type=positive, metavar="B0", help="batch size of a unit of progress")
    help = "samples to train on at B0, or the equivalent progress; with --from, at which the unchanged run ends"
    add("--samples", type=positive, metavar="N", help=help)
    add("--trace", metavar="TRACE", help="with --from: the trace of the run, which it follows if unchanged")
    help = "with --from: also simulate the run's policy, or autoscale, with this largest batch size"
    add("--max-batch-size", type=positive, metavar="B", help=help)
    add("--dataset-size", type=positive, metavar="N", help="bounds the batch size (default: no bound)")
    add("--restart-seconds", type=float, default=0.0, metavar="T", help="seconds per restart (default: 0)")
    help = "seconds between checkpoints, if devices leave without notice (default: a signal lets the run save)"
    add("--checkpoint-seconds", type=float, metavar="T", help=help)
    add("--price", type=float, metavar="P", help="per device-hour (default: no costs)")
    help = "a CSV file of times, as dates or in seconds, and prices per device-hour, repeated after its end"
    add("--prices", metavar="FILE", help=help)
    add("--extrapolate", action="store_true", help="allow more than twice the cores and samples of the profile")
    add("--out", metavar="DIR", help="for a page, a picture, the table and the traces (default: none)")
    parser.set_defaults(refuse=parser.error)


_NOT_WITH_FROM = (
    *("noise", "recording", "market", "prices"),
    *("checkpoint_seconds", "cores_per_machine", "dataset_size", "out"),
)


def run_simulate(options: argparse.Namespace) -> None:
    if options.run_so_far is not None:
        return _run_forecast(options)
    needed = ["policies", "profile", "noise", "minibatch_size", "ref_batchsize", "samples"]
    names = [name for name in needed if not getattr(options, name)]
    if options.cores is None and options.recording is None and options.market is None:
        names.append("cores")
    if names:
        missing = ["POLICY" if name == "policies" else f"--{name.replace('_', '-')}" for name in names]
        options.refuse(f"the following arguments are required: {', '.join(missing)} (or --from)")
    if options.max_batch_size is not None:
        raise ValueError(
            "--max-batch-size needs --from; otherwise it is a setting of a policy, as in autoscale:max_batch_size=512"
        )
    return _run_simulation(options)


def _run_forecast(options: argparse.Namespace) -> None:
    """Print the forecast of the rest of a run."""
    for name in _NOT_WITH_FROM:
        if getattr(options, name):
            raise ValueError(f"--{name.replace('_', '-')} cannot be used with --from, got {getattr(options, name)}")
    run = RunSoFar.read(options.run_so_far, **selected(options, "minibatch_size", "ref_batchsize"))
    others = None if options.profile is None else Profile.read(options.profile, extrapolates=True)
    trace = None if options.trace is None else Trace.of(options.trace)
    given: dict[str, Any] = {"cores": options.cores or (), "profile": others, "trace": trace}
    given |= selected(options, "samples", "price", "restart_seconds")
    names = [*options.policies, *([with_largest(run, options.max_batch_size)] if options.max_batch_size else [])]
    runs = forecast(run, {name: _policy(name) for name in names}, **given)
    print_text(basis_of(run))
    print_text(reports.as_text(reports.simulation_table(runs)))
    print_text(reports.verdict(runs))


def _run_simulation(options: argparse.Namespace) -> None:
    if options.price is not None and options.prices is not None:
        raise ValueError("pass --price or --prices, not both")
    given = selected(options, "minibatch_size", "ref_batchsize", "restart_seconds", "checkpoint_seconds")
    given["profile"] = Profile.read(options.profile, extrapolates=options.extrapolate)
    given["noise"] = noise = _noises(options.noise)
    given["price"] = options.price if options.prices is None else Prices.read(options.prices)
    given["progress"] = options.samples / options.ref_batchsize
    given["capacity"] = options.dataset_size and options.dataset_size // options.minibatch_size * options.minibatch_size
    cores = _availabilities(options)
    cases = list(itertools.product(dict.fromkeys(options.policies), cores))
    runs = [(policy, simulate_with_ends(_policy(policy), availability=where, **given)) for policy, where in cases]
    print_text(reports.as_text(reports.simulation_table(runs)))
    print_text(reports.verdict(runs))
    doubts = reports.noise_warnings(runs, noise)
    _warn(doubts)
    if options.out is None:
        return
    directory = Path(options.out)
    (directory / "traces").mkdir(parents=True, exist_ok=True)
    for (name, run), (_, where) in zip(runs, cases, strict=True):
        file = f"{re.sub('[:,/]', '-', name)}{f' on {where.name}' if len(cores) > 1 else ''}.csv"
        comment = f"decided by {name} on {where.name} in a simulation\nmade by: {options.command}"
        run.trace.write(directory / "traces" / file.replace(" ", "-"), comment=comment)
    write_text(directory / "table.csv", reports.csv_text(reports.simulation_table(runs, is_csv=True)))
    figures.plot_simulations(runs, directory / "simulation.png", format="png")
    facts = {
        "cores": ", ".join(where.name for where in cores),
        "profile": options.profile,
        "noise": "; ".join([", ".join(options.noise), *doubts]),
        "minibatch": f"{options.minibatch_size} samples",
        "ends after": f"{options.samples:,} samples at a batch size of {options.ref_batchsize}, or that progress",
        "restart": reports.duration(options.restart_seconds),
    }
    if options.prices is not None:
        facts["prices"] = options.prices
    if options.cores_per_machine is not None:
        facts["machines"] = f"of {reports.counted(options.cores_per_machine, 'core')}"
    if options.checkpoint_seconds is not None:
        facts["checkpoints"] = f"every {reports.duration(options.checkpoint_seconds)}"
    page = figures.simulation_page(runs, facts=facts, command=options.command)
    write_text(directory / "simulation.html", page)
    print_text(f"{directory / 'simulation.html'}")


def _policy(text: str) -> Policy | Rental | Callable[[Situation], float]:
    """A policy or rental by its name and settings, or the object ``file.py:name``."""
    file, _, name = text.rpartition(":")
    if not file.endswith(".py"):
        return named_policy(text)
    # this imports torch, which takes seconds
    from variable_batch_size.lab.comparison.workload import load_module

    policy: Policy | Callable[[Situation], float] | None = getattr(load_module(file), name, None)
    if isinstance(policy, type) or policy is None or not (callable(policy) or isinstance(policy, Policy)):
        raise ValueError(f"{file} must have a policy, or a function of the situation, named {name!r}, got {policy!r}")
    return policy


def _noises(texts: Sequence[str]) -> NoiseCurve | NoiseCurves:
    curves = list(map(_noise, texts))
    for text, curve in zip(texts, curves, strict=True):
        if len(curves) > 1 and curve.batch_sizes is None:
            raise ValueError(f"with several --noise, each must have a batch size, got {text!r} without one")
    return NoiseCurves(curves) if len(curves) > 1 else curves[0]


def _noise(text: str) -> NoiseCurve:
    size, _, scale = text.rpartition(":")
    try:
        return NoiseCurve.constant(float(scale), batch_size=int(size) if size else None)
    except ValueError:
        if not os.path.exists(text):
            rule = "the log of a run, a CSV file, a positive number, or one for a batch size, as in 128:500"
            raise ValueError(f"--noise must be {rule}, got {text!r}") from None
    return NoiseCurve.read(text)


def _availabilities(options: argparse.Namespace) -> list[Availability]:
    given = selected(options, "cores_per_machine")
    if options.recording is not None:
        return [Availability.of_recording(read_recording(options.recording, options), **given)]
    for name, value in selected(options, *RECORDING).items():
        if value is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for a --recording, got {value} without one")
    if options.cores is not None:
        return [Availability.constant(number, **given) for number in dict.fromkeys(options.cores)]
    return [Availability.of_market(Trace.read(options.market), seconds_per_row=options.seconds_per_row, **given)]


def add_profile(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_workload(parser, "what to train, as for vbs compare")
    add("--cores", type=positive, nargs="+", metavar="C", help="(default: 1, 2, 4 … up to the CPUs of this machine)")
    add("--minibatch-sizes", type=positive, nargs="+", metavar="M", help="(default: the workload's)")
    _add_measuring(parser)
    add("--out", default="profile.csv", metavar="FILE", help="(default: profile.csv)")


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=experiment.DEVICES, default="cpu", help="(default: cpu)")
    add("--threads", type=positive, default=1, metavar="N", help="CPU threads of each core (default: 1)")
    add("--steps", type=positive, default=20, metavar="N", help="steps of each kind to time (default: 20)")


def _add_workload(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("workload", metavar="WORKLOAD", help=help)
    parser.add_argument("--rule", choices=RULES, default="adascale", help="the rule (default: adascale)")
    parser.add_argument("--datadir", metavar="DIR", help="the directory of mnist")


def run_profile(options: argparse.Namespace) -> None:
    # these import torch, which takes seconds, and so come after the options are parsed
    from variable_batch_size.lab.comparison.measure import available_cores
    from variable_batch_size.lab.comparison.train import checked_workload

    workload = checked_workload(options.workload, options.datadir, options.device, [options.rule])
    cores = options.cores or core_numbers(available_cores(options.device, threads=options.threads))
    sizes = options.minibatch_sizes or [workload.minibatch_size]
    rows: list[Measured] = []
    for row in _measured(options, cores, sizes):
        rows.append(row)
        # after each row, because the next may fail after minutes
        Profile(tuple(rows)).write(options.out, comment=f"made by: {options.command}")
    _warn_of(Profile(tuple(rows)))


def _measured(options: argparse.Namespace, cores: list[int], minibatch_sizes: list[int]) -> Iterator[Measured]:
    """Measure a profile, and print its rows."""
    from variable_batch_size.lab.comparison.measure import measure

    print_text("cores  minibatch  accumulating  updating")
    settings = selected(options, "device", "threads", "rule", "steps", "datadir")
    for row in measure(options.workload, cores=cores, minibatch_sizes=minibatch_sizes, **settings):
        accumulating, updating = map(reports.duration, (row.seconds_accumulating, row.seconds_updating))
        print_text(f"{row.cores:5}  {row.minibatch_size:9}  {accumulating:>12}  {updating:>8}")
        yield row


def add_fit(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("profile", metavar="FILE", help="a profile written by vbs profile")
    add("--cores", type=positive, nargs="+", metavar="C", help="numbers of cores to predict (default: as measured)")
    add("--minibatch-size", type=positive, metavar="M", help="size to predict (default: the largest one measured)")
    add("--machines", type=positive, default=1, metavar="N", help="machines that the cores are on (default: 1)")
    add("--json", action="store_true", help="print the seven parameters as JSON")
    split = parser.add_argument_group("the best split into minibatches, at most as large as the largest one measured")
    split.add_argument("--noise-scale", type=float, metavar="V", help="the noise scale that the split is for")
    split.add_argument("--ref-batchsize", type=positive, metavar="B0", help="the smallest batch size")
    split.add_argument("--max-batch-size", type=positive, metavar="B", help="the largest batch size")


def run_fit(options: argparse.Namespace) -> None:
    profile, machines = Profile.read(options.profile), options.machines
    bounds = selected(options, "noise_scale", "ref_batchsize", "max_batch_size")
    if len({value is None for value in bounds.values()}) > 1:
        raise ValueError("the best split needs --noise-scale, --ref-batchsize and --max-batch-size, got only some")
    model = profile.throughput
    _warn_of(profile)
    if options.json:
        print_text(json.dumps(model._asdict()))
        return
    size = options.minibatch_size or max(row.minibatch_size for row in profile.rows)
    numbers = options.cores or sorted({row.cores for row in profile.rows if row.machines == machines})
    for cores in numbers:
        profile.refuse_other_network(machines, cores)
        _warn(f"{far}: the times are a guess" for far in profile.far(cores, size, machines))
    print_text(reports.fit_report(profile))
    print_text(f"accumulating a minibatch of {size}: {reports.duration(model.accumulating(size))}")
    for cores in numbers:
        updating = model.updating(machines, cores, size)
        print_text(f"updating with it on {reports.counted(cores, 'core')}: {reports.duration(updating)}")
        if None not in bounds.values():
            largest = max(row.minibatch_size for row in profile.rows)
            found = best_split(model, cores=cores, machines=machines, max_minibatch=largest, **bounds)
            per_core = reports.counted(found.depth, "minibatch", "minibatches")
            in_all = f"batch size {cores * found.depth * found.minibatch_size:,}"
            worth = f"worth {found.goodput:,.4g} samples per second at the reference batch size"
            print_text(f"best split: {per_core} of {found.minibatch_size} per core and step, {in_all}, {worth}")


def _warn_of(profile: Profile) -> None:
    _warn(reports.profile_warnings(profile))


def _warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        sys.stderr.write(f"vbs: warning: {warning}\n")


def add_cbs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_workload(parser, "what to train on this CPU, as for vbs compare")
    add("--batch-size", type=positive, metavar="B", help="batch size to start from (default: the workload's)")
    add("--factors", type=positive, nargs="+", default=[1, 2, 4], metavar="F", help="multiples to try (default: 1 2 4)")
    add("--after", type=positive, required=True, metavar="N", help="samples to train on before the branches")
    add("--samples", type=positive, required=True, metavar="N", help="samples of each branch")
    add("--seeds", type=positive, default=5, metavar="N", help="seeds for the intervals, at least 2 (default: 5)")
    help = "tolerated excess of samples to the same loss, as a fraction (default: 0.2)"
    add("--tolerance", type=float, default=0.2, metavar="T", help=help)


def run_cbs(options: argparse.Namespace) -> None:
    # these import torch, which takes seconds, and so come after the options are parsed
    from variable_batch_size.lab.comparison.measure import branches, critical_batch_size
    from variable_batch_size.lab.comparison.train import checked_workload

    check_not_negative_number(tolerance=options.tolerance)
    check_seeds(options)
    if max(options.factors) == 1:
        raise ValueError("--factors must have a number above 1, got only 1: the base size is not an answer")
    workload = checked_workload(options.workload, options.datadir, "cpu", [options.rule])
    sizes = [(options.batch_size or workload.ref_batchsize) * factor for factor in sorted({1, *options.factors})]
    found = branches(workload, sizes, samples_before=options.after, **selected(options, "samples", "rule", "seeds"))
    size = critical_batch_size(found, tolerance=options.tolerance)
    table = [["batch size", "updates", "test loss", "samples to the same loss (95 % interval)"]]
    for number, branch in enumerate(found):
        cost = branch.cost(found[0])
        words = "not reached"
        if cost is not None:
            low, mean, high = (math.exp(cost.mean + sign * (cost.error or 0)) for sign in (-1, 0, 1))
            words = f"× {mean:.2f} ({low:.2f} to {high:.2f})"
        loss = f"{fmean(branch.losses):.4f}"
        table.append([f"{branch.batch_size:,}", f"{branch.updates:,}", loss, words if number else "× 1"])
    print_text(reports.as_text(table, is_left=False))
    within = f"with at most {100 * options.tolerance:g} % more samples to the same loss"
    print_text(f"after {options.after:,} samples, the largest batch size {within}: {size}")


def add_advise(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_workload(parser, "what to train, as for vbs compare")
    add("--max-cores", type=positive, metavar="C", help="cores to choose from (default: those of this machine)")
    add("--price", type=float, metavar="P", help="per device-hour (default: no costs)")
    help = "samples to train on at the reference batch size, or the equivalent progress (default: the workload's)"
    add("--samples", type=positive, metavar="N", help=help)
    help = "the largest batch size to choose (default: 16 times the reference, at most the data set)"
    add("--max-batch-size", type=positive, metavar="B", help=help)
    _add_measuring(parser)
    help = "steps of each seed to measure the noise (default: 500, at most the whole training)"
    add("--noise-steps", type=positive, default=500, metavar="N", help=help)
    add("--seeds", type=positive, default=5, metavar="N", help="seeds for the noise, at least 2 (default: 5)")


def run_advise(options: argparse.Namespace) -> None:
    if options.price is not None:
        check_not_negative_number(price=options.price)
    check_seeds(options)
    # these import torch, which takes seconds, and so come after the options are parsed
    from variable_batch_size.lab.comparison.measure import available_cores, measure_noise
    from variable_batch_size.lab.comparison.train import checked_workload

    workload = checked_workload(options.workload, options.datadir, options.device, [options.rule])
    size, ref_batchsize = workload.minibatch_size, workload.ref_batchsize
    num_samples = options.samples or workload.num_samples
    here = available_cores(options.device, threads=options.threads)
    measured, doubts = core_numbers(min(options.max_cores or here, here)), _doubts_of_this_machine()
    profile = Profile(tuple(_measured(options, measured, [size])), extrapolates=True)
    given = selected(options, "device", "threads", "rule", "datadir", "seeds")
    steps = min(options.noise_steps, -(-num_samples // max(2 * size, ref_batchsize)))
    noise = measure_noise(options.workload, steps=steps, **given)
    capacity = len(workload.train) // size * size  # type: ignore[arg-type]
    advice = advise(
        profile,
        noise,
        cores=[*measured, *core_numbers(options.max_cores or here)],
        minibatch_size=size,
        ref_batchsize=ref_batchsize,
        num_samples=num_samples,
        max_batch_size=min(options.max_batch_size or 16 * ref_batchsize, capacity),
        price=options.price,
    )
    print_text(reports.as_text(reports.simulation_table(advice.best)))
    width = min(100, shutil.get_terminal_size().columns)
    print_text(textwrap.fill(advice_report(advice, profile, noise, doubts=doubts), width))


def _doubts_of_this_machine() -> list[str]:
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    return [f"the load was {load:.1f} on {reports.counted(cpus, 'CPU')} before"] if load > cpus / 2 else []
