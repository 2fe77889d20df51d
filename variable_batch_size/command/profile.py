"""``vbs profile``: measures how long minibatches take."""

from __future__ import annotations

import argparse
import os

from variable_batch_size.command.options import positive, print_text
from variable_batch_size.comparison.experiment import RULES
from variable_batch_size.planning.profile import Profile


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", metavar="WORKLOAD", help="what to train, as of vbs compare")
    parser.add_argument(
        "--cores",
        type=positive,
        nargs="+",
        metavar="C",
        help="numbers of cores (default: 1, 2, 4 … all of this machine)",
    )
    parser.add_argument(
        "--minibatch-sizes", type=positive, nargs="+", metavar="M", help="samples at once (default: the workload's)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "xla"), default="cpu", help="(default: cpu)")
    parser.add_argument(
        "--threads", type=positive, default=1, metavar="N", help="CPU threads of each core (default: 1)"
    )
    parser.add_argument("--rule", choices=RULES, default="adascale", help="to update with (default: adascale)")
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="of each kind (default: 20)")
    parser.add_argument("--datadir", metavar="DIR", help="where mnist or cifar10 is")
    parser.add_argument("--out", default="profile.csv", metavar="FILE", help="(default: profile.csv)")


def run(options: argparse.Namespace) -> None:
    # torch comes with these, which takes seconds: after the options have been understood
    from variable_batch_size.comparison.profile import measure, numbers_up_to
    from variable_batch_size.comparison.train import refuse_impossible
    from variable_batch_size.comparison.workload import load_workload

    workload = load_workload(options.workload, options.datadir)
    refuse_impossible(workload, options.device, [options.rule])
    print_text("cores  minibatch  accumulating (ms)  updating (ms)")
    rows = []
    for row in measure(
        options.workload,
        cores=options.cores or numbers_up_to(os.cpu_count() or 1),
        minibatch_sizes=options.minibatch_sizes or [workload.minibatch_size],
        device=options.device,
        threads=options.threads,
        rule=options.rule,
        steps=options.steps,
        datadir=options.datadir,
    ):
        rows.append(row)
        times = f"{1000 * row.seconds_accumulating:17.4g}  {1000 * row.seconds_updating:13.4g}"
        print_text(f"{row.cores:5}  {row.minibatch_size:9}  {times}")
        # one by one, for the next may fail after minutes
        Profile(tuple(rows)).write(options.out, comment=f"made by: {options.command}")
