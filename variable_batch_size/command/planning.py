"""``vbs plan``, ``simulate``, ``profile``, ``fit`` and ``cbs``: predict runs, and measure what predictions need."""

import argparse
import json
import os
from pathlib import Path

from variable_batch_size.command.options import (
    RECORDING,
    add_minibatch,
    add_recording,
    positive,
    print_text,
    read_recording,
    selected,
)
from variable_batch_size.comparison import experiment
from variable_batch_size.files import write_text
from variable_batch_size.planning import reports
from variable_batch_size.planning.plan import RULES, Plan, planned_rules
from variable_batch_size.planning.profile import Profile
from variable_batch_size.planning.simulate import Availability, NoiseCurve, simulate
from variable_batch_size.policies.builtin import POLICIES, parse_policy
from variable_batch_size.schedules.schedule import ON_END, Schedule
from variable_batch_size.traces.trace import Trace


def add_plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", metavar="TRACE", help="a trace file, or a number for a constant batch size")
    add("--dataset-size", type=positive, required=True, metavar="N", help="samples in the data set")
    add_minibatch(parser)
    add("--cores", type=positive, required=True, metavar="C", help="the number of cores")
    add("--epochs", type=positive, metavar="E", help="epochs to train (default: all epochs of the trace)")
    add("--on-end", choices=ON_END, default="stop", help="what follows the last row of the trace (default: stop)")
    add("--lockstep", action="store_true", help="all cores run equally many minibatches in a step, as with fully_shard")
    add("--tokens-per-sample", type=positive, metavar="T", help="also count tokens: the tokens of a sample")
    help = f"a rule to show, one of {', '.join(experiment.RULES)}, some with a setting as in legw:5000; may be repeated"
    add("--rule", action="append", metavar="RULE", help=f"{help} (default: {', '.join(RULES)})")
    help = "the gradient noise scale to assume; adds adascale if no rule measures the noise"
    add("--noise-scale", type=float, metavar="V", help=help)
    help = "of an unscaled learning rate (default: the first batch size)"
    add("--ref-batchsize", type=positive, metavar="B0", help=help)
    add("--checkpoint-every", type=positive, metavar="K", help="also show the position after every K steps")
    add("--json", action="store_true", help="print all numbers as JSON")
    add("--plot", metavar="FILE", help="also draw the plan, as a .png or .svg file (needs matplotlib)")


def run_plan(options: argparse.Namespace) -> None:
    if options.plot is not None:
        reports.check_suffix(options.plot)
    is_number = options.trace.isdecimal() and not Path(options.trace).exists()
    trace = Trace.constant(int(options.trace)) if is_number else Trace.read(options.trace)
    given = selected(options, "dataset_size", "minibatch_size", "on_end", "lockstep")
    schedule = Schedule(trace, num_replicas=options.cores, **given)
    rules = planned_rules(options.rule or list(RULES), noise_scale=options.noise_scale)
    given = selected(options, "ref_batchsize", "checkpoint_every", "tokens_per_sample")
    plan = Plan.of(schedule, num_epochs=options.epochs, rules=rules, **given)
    if options.plot is not None:
        reports.plot_plan(plan, schedule, options.plot)
    if options.json:
        print_text(json.dumps({**plan.as_dict(), "comment": trace.comment}))
        return
    if trace.comment:
        print_text(trace.comment)
    print_text(reports.plan_report(plan))


def add_simulate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    help = f"a batch size or one of {', '.join(POLICIES)}, as in autoscale:max_batch_size=4096,threshold=1.1"
    add("policies", nargs="+", metavar="POLICY", help=help)
    add("--profile", required=True, metavar="FILE", help="times of minibatches, from vbs profile")
    add("--noise", required=True, metavar="LOG", help="the log of a run with AdaScale, or a constant noise scale")
    cores = parser.add_mutually_exclusive_group(required=True)
    cores.add_argument("--cores", type=positive, metavar="C", help="a constant number of cores")
    cores.add_argument("--recording", metavar="FILE", help="recorded devices, as read by vbs convert")
    cores.add_argument("--market", metavar="TRACE", help="a trace of numbers of devices, as from vbs make spot")
    add("--seconds-per-row", type=float, default=60.0, metavar="T", help="of such a trace (default: 60)")
    add_recording(parser.add_argument_group("the recording"))
    add_minibatch(parser)
    add("--ref-batchsize", type=positive, required=True, metavar="B0", help="batch size of a unit of progress")
    add("--samples", type=positive, required=True, metavar="N", help="to train on at B0, or the equivalent progress")
    add("--dataset-size", type=positive, metavar="N", help="bounds the batch size (default: no bound)")
    add("--restart-seconds", type=float, default=0.0, metavar="T", help="of each restart (default: 0)")
    add("--price", type=float, metavar="P", help="per device-hour (default: no costs)")
    add("--extrapolate", action="store_true", help="allow more than twice the cores and samples of the profile")
    add("--out", metavar="DIR", help="for a page, a picture, the table and the traces (default: none)")


def run_simulate(options: argparse.Namespace) -> None:
    given = selected(options, "minibatch_size", "ref_batchsize", "restart_seconds")
    given["profile"] = Profile.read(options.profile, extrapolates=options.extrapolate)
    given["noise"], given["availability"] = _noise(options.noise), _availability(options)
    given["progress"] = options.samples / options.ref_batchsize
    given["capacity"] = options.dataset_size and options.dataset_size // options.minibatch_size * options.minibatch_size
    runs = {text: simulate(parse_policy(text), **given) for text in dict.fromkeys(options.policies)}
    table = reports.simulation_table(runs, price=options.price)
    print_text(reports.as_text(table))
    if options.out is None:
        return
    directory = Path(options.out)
    (directory / "traces").mkdir(parents=True, exist_ok=True)
    for name, run in runs.items():
        path = directory / "traces" / f"{name.replace(':', '-').replace(',', '-')}.csv"
        run.trace.write(path, comment=f"decided by {name} in a simulation\nmade by: {options.command}")
    # keep the commas in names, drop the thousands separators of numbers
    rows = ([name, *(cell.replace(",", "") for cell in cells)] for name, *cells in table)
    write_text(directory / "table.csv", reports.csv_text(rows))
    reports.plot_simulations(runs, directory / "simulation.png", format="png")
    facts = {
        "cores": given["availability"].name,
        "profile": options.profile,
        "noise": options.noise,
        "minibatch": f"{options.minibatch_size} samples",
        "ends after": f"{options.samples:,} samples at a batch size of {options.ref_batchsize}, or as much worth",
        "restart": f"{options.restart_seconds:g} s",
    }
    page = reports.simulation_page(runs, table, facts=facts, command=options.command)
    write_text(directory / "simulation.html", page)
    print_text(f"{directory / 'simulation.html'}")


def _noise(text: str) -> NoiseCurve:
    try:
        return NoiseCurve.constant(float(text))
    except ValueError:
        if not os.path.exists(text):
            raise ValueError(f"--noise must be the log of a run or a positive number, got {text!r}") from None
    return NoiseCurve.read(text)


def _availability(options: argparse.Namespace) -> Availability:
    if options.recording is not None:
        return Availability.of_recording(read_recording(options.recording, options))
    for name, value in selected(options, *RECORDING).items():
        if value is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for a --recording, got {value} without one")
    if options.cores is not None:
        return Availability.constant(options.cores)
    return Availability.of_market(Trace.read(options.market), seconds_per_row=options.seconds_per_row)


def add_profile(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_workload(parser, "what to train, as for vbs compare")
    add("--cores", type=positive, nargs="+", metavar="C", help="(default: 1, 2, 4 … up to the CPUs of this machine)")
    add("--minibatch-sizes", type=positive, nargs="+", metavar="M", help="(default: the workload's)")
    add("--device", choices=experiment.DEVICES, default="cpu", help="(default: cpu)")
    add("--threads", type=positive, default=1, metavar="N", help="CPU threads of each core (default: 1)")
    add("--steps", type=positive, default=20, metavar="N", help="of each kind (default: 20)")
    add("--out", default="profile.csv", metavar="FILE", help="(default: profile.csv)")


def _add_workload(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("workload", metavar="WORKLOAD", help=help)
    parser.add_argument("--rule", choices=experiment.RULES, default="adascale", help="the rule (default: adascale)")
    parser.add_argument("--datadir", metavar="DIR", help="the directory of mnist")


def run_profile(options: argparse.Namespace) -> None:
    # these import torch, which takes seconds, and so come after the options are parsed
    from variable_batch_size.comparison.measure import measure
    from variable_batch_size.comparison.train import checked_workload

    workload = checked_workload(options.workload, options.datadir, options.device, [options.rule])
    print_text("cores  minibatch  accumulating (ms)  updating (ms)")
    rows = []
    for row in measure(
        options.workload,
        cores=options.cores or [2**k for k in range((os.cpu_count() or 1).bit_length())],
        minibatch_sizes=options.minibatch_sizes or [workload.minibatch_size],
        **selected(options, "device", "threads", "rule", "steps", "datadir"),
    ):
        rows.append(row)
        times = f"{1000 * row.seconds_accumulating:17.4g}  {1000 * row.seconds_updating:13.4g}"
        print_text(f"{row.cores:5}  {row.minibatch_size:9}  {times}")
        # after each row, because the next may fail after minutes
        Profile(tuple(rows)).write(options.out, comment=f"made by: {options.command}")


def add_fit(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("profile", metavar="FILE", help="a profile written by vbs profile")
    add("--cores", type=positive, nargs="+", metavar="C", help="numbers of cores to predict (default: as measured)")
    add("--minibatch-size", type=positive, metavar="M", help="to predict (default: the largest one measured)")
    add("--machines", type=positive, default=1, metavar="N", help="on which the cores are (default: 1)")
    add("--json", action="store_true", help="print the seven parameters as JSON")


def run_fit(options: argparse.Namespace) -> None:
    profile = Profile.read(options.profile)
    model = profile.throughput
    if options.json:
        print_text(json.dumps(model._asdict()))
        return
    size = options.minibatch_size or max(row.minibatch_size for row in profile.rows)
    for name, value in model._asdict().items():
        print_text(f"{name:<8}  {value:.4g}")
    print_text(f"accumulating a minibatch of {size}: {1000 * model.accumulating(size):.4g} ms")
    for cores in options.cores or sorted({row.cores for row in profile.rows if row.machines == options.machines}):
        profile.refuse_other_network(options.machines, cores)
        print_text(f"updating with it on {cores} cores: {1000 * model.updating(options.machines, cores, size):.4g} ms")


def add_cbs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_workload(parser, "what to train on this CPU, as for vbs compare")
    add("--batch-size", type=positive, metavar="B", help="to start from (default: the workload's)")
    add("--factors", type=positive, nargs="+", default=[1, 2, 4], metavar="F", help="of it to try (default: 1 2 4)")
    add("--after", type=positive, required=True, metavar="N", help="samples to train on before the branches")
    add("--samples", type=positive, required=True, metavar="N", help="of each branch")
    add("--seeds", type=positive, default=3, metavar="N", help="to average over (default: 3)")
    add("--tolerance", type=float, default=0.01, metavar="T", help="relative increase of the loss (default: 0.01)")


def run_cbs(options: argparse.Namespace) -> None:
    # these import torch, which takes seconds, and so come after the options are parsed
    from variable_batch_size.comparison.measure import branches, critical_batch_size
    from variable_batch_size.comparison.train import checked_workload

    if not options.tolerance >= 0:
        raise ValueError(f"--tolerance must not be negative, got {options.tolerance!r}")
    workload = checked_workload(options.workload, options.datadir, "cpu", [options.rule])
    sizes = [(options.batch_size or workload.ref_batchsize) * factor for factor in sorted({1, *options.factors})]
    found = branches(workload, sizes, samples_before=options.after, **selected(options, "samples", "rule", "seeds"))
    print_text("batch size  updates  test loss")
    for branch in found:
        print_text(f"{branch.batch_size:10,}  {branch.updates:7,}  {branch.loss:9.4f}")
    size = critical_batch_size(found, tolerance=options.tolerance)
    found_after = f"after {options.after:,} samples, a batch size of {size:,}"
    print_text(f"{found_after} costs nothing (within {options.tolerance:g})")
