"""``vbs plan``: checks a trace and says what a run with it will do."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from variable_batch_size.command.options import add_minibatch_size, add_tokens_per_sample, count, print_text
from variable_batch_size.planning.pictures import check_suffix, plot_plan
from variable_batch_size.planning.plan import NAMES, RULES, Plan, planned_rules
from variable_batch_size.planning.reports import plan_report
from variable_batch_size.schedules.batch_sizes import ON_END
from variable_batch_size.schedules.schedule import Schedule
from variable_batch_size.traces.trace import Trace


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="a trace file, or a number for a constant batch size")
    parser.add_argument("--dataset-size", type=count, required=True, metavar="N", help="samples in the data set")
    add_minibatch_size(parser)
    parser.add_argument("--cores", type=count, required=True, metavar="C", help="cores that share the work")
    parser.add_argument("--epochs", type=count, metavar="E", help="epochs to train (default: all the trace holds)")
    parser.add_argument(
        "--on-end", choices=ON_END, default="stop", help="what follows the last row of the trace (default: stop)"
    )
    parser.add_argument(
        "--lockstep",
        action="store_true",
        help="all cores run as many minibatches in a step, as a model in fully_shard makes them",
    )
    add_tokens_per_sample(parser, "also count tokens")
    parser.add_argument(
        "--rule",
        action="append",
        metavar="RULE",
        help=f"a learning-rate rule to show, one of {', '.join(NAMES)}; legw:5000 and adam:half-life give a rule its "
        f"setting; may be given more than once (default: {', '.join(RULES)})",
    )
    parser.add_argument(
        "--noise-scale",
        type=float,
        metavar="V",
        help="the gradient noise scale that the run is taken to measure, for adascale, adamscale and surge; without "
        "any of them adascale is shown, too",
    )
    parser.add_argument(
        "--ref-batchsize",
        type=count,
        metavar="B0",
        help="batch size at which the learning rate is right (default: that of the first step)",
    )
    parser.add_argument(
        "--checkpoint-every", type=count, metavar="K", help="also show the position after every K steps"
    )
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON")
    parser.add_argument("--plot", metavar="FILE", help="also draw the plan, as a .png or .svg file (needs matplotlib)")


def run(options: argparse.Namespace) -> None:
    if options.plot is not None:
        check_suffix(options.plot)
    trace = _trace(options.trace)
    schedule = Schedule(
        trace,
        dataset_size=options.dataset_size,
        minibatch_size=options.minibatch_size,
        num_replicas=options.cores,
        on_end=options.on_end,
        lockstep=options.lockstep,
    )
    plan = Plan.of(
        schedule,
        num_epochs=options.epochs,
        rules=planned_rules(options.rule or list(RULES), noise_scale=options.noise_scale),
        ref_batchsize=options.ref_batchsize,
        checkpoint_every=options.checkpoint_every,
        tokens_per_sample=options.tokens_per_sample,
    )
    if options.plot is not None:
        plot_plan(plan, schedule, options.plot)
    if options.json:
        print_text(json.dumps({**plan.as_dict(), "comment": trace.comment}))
        return
    if trace.comment:
        print_text(trace.comment)
    print_text(plan_report(plan))


def _trace(text: str) -> Trace:
    return Trace.constant(count(text)) if text.isdecimal() and not Path(text).exists() else Trace.read(text)
