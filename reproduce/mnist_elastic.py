"""MNIST on an elastic trace, 5 epochs, all rules for SGD, 5 seeds: runs `vbs compare` and checks the result.

python reproduce/mnist_elastic.py --datadir DIR --jobs 2    # a CPU: about 70 minutes on 2 cores

The trace is traces/mnist.csv, batch sizes of 32 to 2,048 around a reference of 128.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import experiment
import results
import torch

# ---------------------------------------------------------------------------------------------------------- settings
TRACE, NUM_SEEDS = "traces/mnist.csv", 5
RULES = ("linear", "linear_momentum", "adascale", "root", "constant")
# test accuracy in percent after 300,000 samples, from docs/comparing.md with 3 seeds; linear_momentum as linear
ACCURACY = {"linear": 98.5, "linear_momentum": 98.5, "adascale": 97.8, "root": 97.5, "constant": 96.3}
UPDATES = 529
# ----------------------------------------------------------------------------------------------------- tolerance
OFF_ACCURACY = {"linear": 0.2, "linear_momentum": 0.2, "adascale": 0.3, "root": 0.3, "constant": 0.7}
# --------------------------------------------------------------------------------------------------- --small, ours
SMALL_TRACE, SMALL_RULES, SMALL_SAMPLES = "traces/ramp.csv", ("linear", "constant"), 2048


def runs(options: argparse.Namespace) -> dict[str, Any]:
    return {"compare": _compare}


def _compare(options: argparse.Namespace, folder: Path) -> experiment.Row:
    """Run `vbs compare`; after an interruption it makes only the missing runs."""
    rules = SMALL_RULES if options.small else RULES
    what = ["--workload", "digits", "--samples", str(SMALL_SAMPLES), "--tests", "2", "--seeds", "1"]
    if not options.small:
        if options.datadir is None:
            raise SystemExit("--datadir must be the folder that contains MNIST; --small needs no data")
        what = ["--workload", "mnist", "--datadir", str(options.datadir), "--seeds", str(NUM_SEEDS)]
    trace = SMALL_TRACE if options.small else TRACE
    command = [sys.executable, "-m", "variable_batch_size", "compare", *what, "--rules", ",".join(rules)]
    command += ["--traces", str(results.ROOT / trace), "--out", str(folder), "--jobs", str(options.jobs)]
    subprocess.run(command, check=True)
    with open(folder / "results.csv", encoding="utf-8") as file:
        found = [row for row in csv.DictReader(file) if row["trace"] != "reference"]
    return {
        "rows": [{**row, "final_metric": float(row["final_metric"]), "updates": int(row["updates"])} for row in found]
    }


def judge(options: argparse.Namespace, rows: dict[str, experiment.Row]) -> list[results.Claim]:
    found = rows["compare"]["rows"]
    claims = []
    for rule in SMALL_RULES if options.small else RULES:
        of_rule = [row for row in found if row["rule"] == rule]
        claims.append(results.Claim.near(rule, "runs", 1 if options.small else NUM_SEEDS, len(of_rule), within=0))
        if not options.small:
            claims.append(
                results.Claim.near(rule, "updates", UPDATES, max(row["updates"] for row in of_rule), within=0)
            )
            mean, half = interval([row["final_metric"] for row in of_rule])
            claims.append(
                results.Claim.near(
                    rule, f"test accuracy, % (± {half:.2f})", ACCURACY[rule], mean, within=OFF_ACCURACY[rule]
                )
            )
    return claims


def interval(values: list[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % confidence interval (Student's t)."""
    from scipy import stats

    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.fmean(values), float(half)


EXPERIMENT = experiment.Experiment("mnist_elastic", __doc__, runs, judge)

if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = experiment.parser_of(EXPERIMENT)
    parser.add_argument("--datadir", type=Path, help="folder that contains torchvision's MNIST")
    sys.exit(experiment.main(EXPERIMENT, parser))
