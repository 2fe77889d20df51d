"""Growing the batch instead of decaying the learning rate: Smith et al. 2018, "Don't decay the learning rate".

python reproduce/smith_cifar10.py --datadir DIR               # 200 epochs as in the paper; a GPU: about an hour
python reproduce/smith_cifar10.py --datadir DIR --epochs 40   # the same schedules, five times as fast
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cifar10_run
import experiment
import results

import variable_batch_size as vbs

# ------------------------------------------------------------------------------------------------- from the paper
NUM_EPOCHS, DATASET_SIZE = 200, 50_000
AT_EPOCHS, FACTOR = (60, 120, 160), 5  # epochs after which the learning rate is divided, or the batch size multiplied
WEIGHT_DECAY = 5e-4
# the paper trains a Wide ResNet 16-4; this is the ResNet-18 of the other tables


@dataclass(frozen=True)
class Schedule:
    """One of the four schedules.

    Attributes:
        start: the initial batch size.
        cap: the maximum batch size; None for no limit, `start` for a constant batch size.
        lr: the initial learning rate.
        momentum: of SGD.
        updates: the published number of updates of the entire training.
    """

    start: int
    cap: int | None
    lr: float
    momentum: float
    updates: int


SCHEDULES = {
    "decaying-lr": Schedule(start=128, cap=128, lr=0.1, momentum=0.9, updates=78_125),
    "growing-batch": Schedule(start=128, cap=None, lr=0.1, momentum=0.9, updates=28_875),
    "larger-lr": Schedule(start=640, cap=5120, lr=0.5, momentum=0.9, updates=6_406),
    "larger-momentum": Schedule(start=3200, cap=5120, lr=0.5, momentum=0.98, updates=2_305),
}
# ----------------------------------------------------------------------------------------------------- tolerance
OFF_ACCURACY = 0.5  # of growth from decay, in percent
# --------------------------------------------------------------------------------------------------- --small, ours
SMALL_EPOCHS, SMALL_DATASET, SMALL_FACTOR = 5, 160, 2


def trace_of(
    schedule: Schedule, *, num_epochs: int, dataset_size: int, minibatch_size: int = 128, factor: int = FACTOR
) -> vbs.Trace:
    """The batch sizes of a schedule, with changes at 30 %, 60 % and 80 % of the epochs."""
    return vbs.traces.growth_for_decay(
        schedule.start * minibatch_size // 128,
        factor=factor,
        at_epochs=[epoch * num_epochs // NUM_EPOCHS for epoch in AT_EPOCHS],
        num_epochs=num_epochs,
        dataset_size=dataset_size,
        minibatch_size=minibatch_size,
        cap=None if schedule.cap is None else schedule.cap * minibatch_size // 128,
    )


def decay(step: int, *, num_steps: float, factor: int) -> float:
    """The decay of a constant batch size: the growing factor of the linear rule cancels it."""
    return float(factor ** -sum(step >= epoch / NUM_EPOCHS * num_steps for epoch in AT_EPOCHS))


def runs(options: argparse.Namespace) -> dict[str, Any]:
    return {
        name if len(options.seeds) == 1 else f"{name}-seed-{seed}": partial(_train, seed, name)
        for name in SCHEDULES
        for seed in options.seeds
    }


def _train(seed: int, name: str, options: argparse.Namespace, folder: Path) -> experiment.Row:
    schedule, minibatch = SCHEDULES[name], 4 if options.small else 128
    epochs = SMALL_EPOCHS if options.small else options.epochs
    size = SMALL_DATASET if options.small else DATASET_SIZE
    factor = SMALL_FACTOR if options.small else FACTOR
    trace = trace_of(schedule, num_epochs=epochs, dataset_size=size, minibatch_size=minibatch, factor=factor)
    ref_batchsize = trace[0]
    num_steps = sum(trace) / ref_batchsize
    run = cifar10_run.Run(
        trace=trace,
        rule="linear",
        lr=schedule.lr,
        schedule=partial(decay, num_steps=num_steps, factor=factor),
        num_steps=num_steps,
        momentum=schedule.momentum,
        weight_decay=WEIGHT_DECAY,
        ref_batchsize=ref_batchsize,
        minibatch_size=minibatch,
        follows="samples",
    )
    row = cifar10_run.train(run, options, folder, seed=seed)
    return {"schedule": name, "epochs": epochs, "seed": seed, "steps_of_trace": len(trace), **row}


def judge(options: argparse.Namespace, rows: dict[str, experiment.Row]) -> list[results.Claim]:
    claims = []
    for name, schedule in SCHEDULES.items():
        trace = trace_of(schedule, num_epochs=NUM_EPOCHS, dataset_size=DATASET_SIZE)
        claims.append(results.Claim.near(name, "updates in 200 epochs", schedule.updates, len(trace), within=0))
    for row in rows.values():
        claims.append(
            results.Claim.near(
                row["run"], f"updates in {row['epochs']} epochs", row["steps_of_trace"], row["updates"], within=0
            )
        )
    if not options.small:
        means = {name: _mean(rows, name) for name in SCHEDULES}
        for name in ("growing-batch", "larger-lr"):
            claims.append(
                results.Claim.near(
                    name, "test accuracy, % (decaying-lr)", means["decaying-lr"], means[name], within=OFF_ACCURACY
                )
            )
    return claims


def _mean(rows: dict[str, experiment.Row], name: str) -> float:
    found = [row["accuracy"] for row in rows.values() if row["schedule"] == name]
    return sum(found) / len(found)


def draw(rows: dict[str, experiment.Row], curves: list[experiment.Row], path: Path) -> None:
    """Test accuracy over epochs, and over updates."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (by_epochs, by_updates) = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    for number, name in enumerate(rows):
        points = [point for point in curves if point["run"] == name]
        accuracies = [point["accuracy"] for point in points]
        label = f"{name}: {rows[name]['updates']:,} updates, {rows[name]['accuracy']:.1f} %"
        by_epochs.plot(
            [point["samples"] / DATASET_SIZE for point in points], accuracies, color=f"C{number}", label=label
        )
        by_updates.plot([point["step"] for point in points], accuracies, color=f"C{number}")
    by_epochs.set(xlabel="epochs", ylabel="test accuracy, %", ylim=(50, 97))
    by_updates.set(xlabel="updates", xscale="log")
    by_epochs.legend(fontsize=8, loc="lower right")
    for axes in (by_epochs, by_updates):
        axes.grid(alpha=0.2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


EXPERIMENT = experiment.Experiment("smith_cifar10", __doc__, runs, judge, draw)

if __name__ == "__main__":
    parser = experiment.parser_of(EXPERIMENT)
    cifar10_run.add_options(parser)
    parser.add_argument(
        "--epochs", type=int, default=NUM_EPOCHS, help="epochs of training; changes are moved in proportion"
    )
    sys.exit(experiment.main(EXPERIMENT, parser))
