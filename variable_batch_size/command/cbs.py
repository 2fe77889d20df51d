"""``vbs cbs``: looks for the critical batch size with short branches from one state."""

from __future__ import annotations

import argparse

from variable_batch_size.command.options import positive, print_text
from variable_batch_size.comparison.experiment import RULES


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", metavar="WORKLOAD", help="what to train, as of vbs compare; on this CPU")
    parser.add_argument("--batch-size", type=positive, metavar="B", help="to start from (default: the workload's)")
    parser.add_argument(
        "--factors", type=positive, nargs="+", default=[1, 2, 4], metavar="F", help="of the branches (default: 1 2 4)"
    )
    parser.add_argument(
        "--after", type=positive, required=True, metavar="N", help="samples to train on before the branches"
    )
    parser.add_argument("--samples", type=positive, required=True, metavar="N", help="of each branch")
    parser.add_argument("--rule", choices=RULES, default="adascale", help="for the learning rate (default: adascale)")
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="to average over (default: 3)")
    parser.add_argument(
        "--tolerance", type=float, default=0.01, metavar="T", help="loss that costs nothing, as a share (default: 0.01)"
    )
    parser.add_argument("--datadir", metavar="DIR", help="where mnist or cifar10 is")


def run(options: argparse.Namespace) -> None:
    # torch comes with these, which takes seconds: after the options have been understood
    from variable_batch_size.comparison.branches import Branching, branches, critical_batch_size
    from variable_batch_size.comparison.train import refuse_impossible
    from variable_batch_size.comparison.workload import load_workload

    if not options.tolerance >= 0:
        raise ValueError(f"--tolerance must be a share from 0 on, got {options.tolerance!r}")
    workload = load_workload(options.workload, options.datadir)
    refuse_impossible(workload, "cpu", [options.rule])
    branching = Branching(
        batch_size=options.batch_size or workload.ref_batchsize,
        factors=sorted({1, *options.factors}),
        samples_before=options.after,
        samples=options.samples,
        rule=options.rule,
        seeds=options.seeds,
    )
    found = branches(workload, branching)
    print_text("batch size  updates  test loss")
    for branch in found:
        print_text(f"{branch.batch_size:10,}  {branch.updates:7,}  {branch.loss:9.4f}")
    size = critical_batch_size(found, tolerance=options.tolerance)
    print_text(
        f"after {options.after:,} samples, a batch size of {size:,} costs nothing (within {options.tolerance:g})"
    )
