"""AdaScale on CIFAR-10 with a ResNet-18: Johnson et al. 2020, "AdaScale SGD".

python reproduce/adascale_cifar10.py --datadir DIR            # a GPU: 20 to 30 minutes
python reproduce/adascale_cifar10.py --datadir DIR --jobs 6   # all runs at once
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cifar10_run
import experiment
import results

# ------------------------------------------------------------------------------------------------- from the paper
NUM_STEPS = 39_100  # at the batch size 128; runs end at this progress
BATCHSIZE = 128
LR, DECAY = 0.08, 0.0133  # lr = 0.08 · 0.0133^(progress / 39,100)
MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4
UPDATES = {1: 39_100, 8: 5_850, 16: 3_360, 32: 2_080}  # by AdaScale, per scale
ACCURACY = 94.1  # percent, with AdaScale at every scale
# the linear rule's learning rate rises from lr to 32 · lr in 5.5 % of training: 5 of 90 epochs (Goyal et al. 2017)
WARMUP = 0.055
# a ResNet-18 (He et al. 2015) with a 3 × 3 first layer; --network v2 is its pre-activation variant (He et al. 2016)
# ----------------------------------------------------------------------------------------------------- tolerance
OFF_UPDATES, OFF_ACCURACY = 0.05, 0.5
# --------------------------------------------------------------------------------------------------- --small, ours
SMALL_STEPS, SMALL_BATCHSIZE, SMALL_SCALES = 24, 8, (1, 2, 4)


def decay(step: int, *, num_steps: int) -> float:
    return float(DECAY ** (step / num_steps))


def warmed_up(step: int, *, num_steps: int, scale: int) -> float:
    """Warm up from 1/scale of the learning rate to all of it: the linear rule then starts like the run at scale 1."""
    done = min(1.0, step / (WARMUP * num_steps))
    return (1 / scale + (1 - 1 / scale) * done) * decay(step, num_steps=num_steps)


def settings(options: argparse.Namespace) -> dict[str, tuple[int, str, Callable[[int], float]]]:
    """Scale, rule and schedule of each run."""
    scales = SMALL_SCALES if options.small else tuple(UPDATES)
    num_steps, largest = _num_steps(options), scales[-1]
    plain = partial(decay, num_steps=num_steps)
    runs = {f"AdaScale-{scale}": (scale, "adascale", plain) for scale in scales if scale > 1}
    runs[f"linear-{largest}"] = (largest, "linear", plain)
    runs[f"linear-{largest}-warm-up"] = (
        largest,
        "linear",
        partial(warmed_up, num_steps=num_steps, scale=largest),
    )
    # the longest first, in case all run at once; at scale 1 all rules are the same
    return {"SGD-1": (1, "constant", plain), **runs}


def _num_steps(options: argparse.Namespace) -> int:
    return SMALL_STEPS if options.small else NUM_STEPS


def runs(options: argparse.Namespace) -> dict[str, Any]:
    return {
        name if len(options.seeds) == 1 else f"{name}-seed-{seed}": partial(_train, seed, *what)
        for name, what in settings(options).items()
        for seed in options.seeds
    }


def _train(
    seed: int, scale: int, rule: str, schedule: Callable[[int], float], options: argparse.Namespace, folder: Path
) -> experiment.Row:
    batchsize = SMALL_BATCHSIZE if options.small else BATCHSIZE
    run = cifar10_run.Run(
        trace=scale * batchsize,
        rule=rule,
        lr=LR,
        schedule=schedule,
        num_steps=_num_steps(options),
        momentum=MOMENTUM,
        weight_decay=WEIGHT_DECAY,
        ref_batchsize=batchsize,
        minibatch_size=batchsize,
    )
    row = cifar10_run.train(run, options, folder, seed=seed)
    return {"rule": rule, "scale": scale, "seed": seed, **row}


def judge(options: argparse.Namespace, rows: dict[str, experiment.Row]) -> list[results.Claim]:
    if options.small:
        return _judge_small(rows)
    claims = []
    of_adascale = [row for row in rows.values() if "linear" not in row["run"]]
    for row in of_adascale:
        published = UPDATES[row["scale"]]
        within = 0 if row["scale"] == 1 else OFF_UPDATES * published
        claims.append(results.Claim.near(row["run"], "updates", published, row["updates"], within=within))
        claims.append(
            results.Claim.near(row["run"], "test accuracy, %", ACCURACY, row["accuracy"], within=OFF_ACCURACY)
        )
    at_largest = min(row["accuracy"] for row in of_adascale if row["scale"] == 32)
    for row in rows.values():
        if "linear" in row["run"]:
            claims.append(
                results.Claim(row["run"], "test accuracy, %", "below AdaScale", row["accuracy"], 0, at_largest)
            )
    return claims


def _judge_small(rows: dict[str, experiment.Row]) -> list[results.Claim]:
    """Only counts: runs of 24 steps on synthetic images."""
    claims = []
    for row in rows.values():
        fewest = -(-SMALL_STEPS // row["scale"])
        most = SMALL_STEPS if row["rule"] == "adascale" else fewest
        claims.append(
            results.Claim(row["run"], "updates", f"{SMALL_STEPS} / scale or more", row["updates"], fewest, most)
        )
        claims.append(results.Claim(row["run"], "points of the curve", "one a test", len(row["curve"]), 3, 4))
    return claims


def draw(rows: dict[str, experiment.Row], curves: list[experiment.Row], path: Path) -> None:
    """Test accuracy over updates and over progress; updates published and ours."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (by_updates, by_progress, counts) = plt.subplots(1, 3, figsize=(12, 3.8), width_ratios=[3, 3, 2])
    for number, name in enumerate(rows):
        points = [point for point in curves if point["run"] == name]
        style = {"color": f"C{number}", "linestyle": "--" if "linear" in name else "-", "label": name}
        accuracies = [point["accuracy"] for point in points]
        by_updates.plot([point["step"] for point in points], accuracies, **style)
        by_progress.plot([point["progress"] / 1000 for point in points], accuracies, **style)
    for axes in (by_updates, by_progress):
        axes.axhline(ACCURACY, color="0.6", linewidth=0.8)
        axes.set_ylim(60, 97)
        axes.grid(alpha=0.2)
    by_updates.set(xscale="log", xlabel="updates", ylabel="test accuracy, %")
    by_progress.set(xlabel="progress, thousand steps at scale 1")
    by_progress.legend(fontsize=8, loc="lower right")
    scales = list(UPDATES)
    ours = {row["scale"]: row["updates"] for row in rows.values() if "linear" not in row["run"]}
    counts.loglog(scales, list(UPDATES.values()), "o", color="0.5", markersize=9, label="published")
    counts.loglog(list(ours), list(ours.values()), "x", color="C3", markersize=8, label="ours")
    counts.loglog(scales, [NUM_STEPS / scale for scale in scales], ":", color="0.6", label="linear: 39,100 / S")
    counts.set_xticks(scales, [str(scale) for scale in scales])
    counts.minorticks_off()
    counts.set(xlabel="scale S", ylabel="updates, AdaScale")
    counts.legend(fontsize=8)
    figure.suptitle("AdaScale, CIFAR-10, ResNet-18 (grey line: 94.1 %, published at every scale)", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


EXPERIMENT = experiment.Experiment("adascale_cifar10", __doc__, runs, judge, draw)

if __name__ == "__main__":
    parser = experiment.parser_of(EXPERIMENT)
    cifar10_run.add_options(parser)
    sys.exit(experiment.main(EXPERIMENT, parser))
