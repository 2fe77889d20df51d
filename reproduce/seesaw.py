"""Seesaw: larger batches instead of part of the decay, 63.7 % of the updates at equal loss (Meterez et al. 2025).

python reproduce/seesaw.py --seeds 0 1 2 --jobs 6     # a GPU: about 2 minutes
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import characters_run
import experiment
import results

import variable_batch_size as vbs

# ------------------------------------------------------------------------------------------------- from the paper
SHARE = 2 / math.pi  # of the updates of the cosine schedule at a constant batch size
# lr = lr0 · cos(π/2 · s/S) after s of S samples; Seesaw has B = B0 / cos(π/2 · s/S) and lr · √(B/B0)
# ----------------------------------------------------------------------- ours: the paper trains up to 600 M parameters
BATCHSIZE, NUM_UPDATES = 32, 6000  # windows of 128 characters; updates at that batch size
LR, BETAS = 1e-3, (0.9, 0.95)
WARMUP = 0.02  # of the samples
# ----------------------------------------------------------------------------------------------------- tolerance
OFF_SHARE, OFF_LOSS = 0.001, 0.02  # nats per character
# --------------------------------------------------------------------------------------------------- --small, ours
SMALL_BATCHSIZE, SMALL_UPDATES = 4, 40


def schedule(samples: int, *, num_samples: int) -> float:
    """The cosine over samples of both runs."""
    done = samples / num_samples
    return min(1.0, (done + 1e-3) / WARMUP) * math.cos(math.pi / 2 * min(1.0, done))


def runs(options: argparse.Namespace) -> dict[str, Any]:
    return {
        f"{name}-seed-{seed}": partial(_train, seed, name) for seed in options.seeds for name in ("cosine", "seesaw")
    }


def _train(seed: int, name: str, options: argparse.Namespace, folder: Path) -> experiment.Row:
    batchsize, num_updates = (SMALL_BATCHSIZE, SMALL_UPDATES) if options.small else (BATCHSIZE, NUM_UPDATES)
    num_samples = batchsize * num_updates
    if name == "seesaw":
        trace = vbs.traces.seesaw(batchsize, num_samples=num_samples, minibatch_size=batchsize)
    else:
        trace = vbs.traces.constant_trace(batchsize, num_steps=num_updates)
    run = characters_run.Run(
        trace=trace,
        rule="root",
        lr=LR,
        betas=BETAS,
        schedule=partial(schedule, num_samples=num_samples),
        ref_batchsize=batchsize,
        minibatch_size=batchsize,
        num_samples=num_samples,
    )
    return {"schedule": name, "seed": seed, **characters_run.train(run, options, folder, seed=seed)}


def judge(options: argparse.Namespace, rows: dict[str, experiment.Row]) -> list[results.Claim]:
    of = {name: [row for row in rows.values() if row["schedule"] == name] for name in ("cosine", "seesaw")}
    share = of["seesaw"][0]["updates"] / of["cosine"][0]["updates"]
    off_share = 0.02 if options.small else OFF_SHARE
    claims = [
        results.Claim.near("seesaw", "updates / those of cosine", SHARE, share, within=off_share),
        results.Claim.near(
            "seesaw", "samples", of["cosine"][0]["samples"], of["seesaw"][0]["samples"], within=BATCHSIZE
        ),
    ]
    if not options.small:
        loss = {name: statistics.mean(row["test_loss"] for row in found) for name, found in of.items()}
        claims.append(
            results.Claim(
                "seesaw",
                "test loss − that of cosine, nats",
                "0",
                loss["seesaw"] - loss["cosine"],
                -OFF_LOSS,
                OFF_LOSS,
            )
        )
    return claims


def draw(rows: dict[str, experiment.Row], curves: list[experiment.Row], path: Path) -> None:
    """Test loss over samples, and over updates."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (by_samples, by_updates) = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    for name, row in rows.items():
        points = [point for point in curves if point["run"] == name]
        losses = [point["test_loss"] for point in points]
        color = "C0" if row["schedule"] == "cosine" else "C3"
        label = f"{row['schedule']}: {row['updates']:,} updates" if name.endswith("-0") else None
        by_samples.plot([point["samples"] for point in points], losses, color=color, linewidth=1, label=label)
        by_updates.plot([point["step"] for point in points], losses, color=color, linewidth=1)
    by_samples.set(xlabel="windows of 128 characters", ylabel="test loss, nats a character", ylim=(0.9, 2.2))
    by_updates.set(xlabel="updates")
    by_samples.legend()
    for axes in (by_samples, by_updates):
        axes.grid(alpha=0.2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


EXPERIMENT = experiment.Experiment("seesaw", __doc__, runs, judge, draw)

if __name__ == "__main__":
    parser = experiment.parser_of(EXPERIMENT)
    characters_run.add_options(parser)
    sys.exit(experiment.main(EXPERIMENT, parser))
