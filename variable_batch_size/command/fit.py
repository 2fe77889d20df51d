"""``vbs fit``: fits a model to a profile, and says what it predicts."""

from __future__ import annotations

import argparse
import json

from variable_batch_size.command.options import positive, print_text
from variable_batch_size.planning.profile import Profile


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", metavar="FILE", help="a profile, as vbs profile writes it")
    parser.add_argument("--cores", type=positive, nargs="+", metavar="C", help="also say the times on these many cores")
    parser.add_argument(
        "--minibatch-size", type=positive, metavar="M", help="of those times (default: the largest that was measured)"
    )
    parser.add_argument("--machines", type=positive, default=1, metavar="N", help="that the cores are on (default: 1)")
    parser.add_argument("--json", action="store_true", help="print the seven parameters as JSON")


def run(options: argparse.Namespace) -> None:
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
        seconds = model.updating(options.machines, cores, size)
        print_text(f"updating with it on {cores} cores: {1000 * seconds:.4g} ms")
