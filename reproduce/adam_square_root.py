"""The square root rule for Adam: as functions of samples, the curves of all batch sizes coincide (Malladi et al. 2022).

python reproduce/adam_square_root.py --seeds 0 1 2 --jobs 10        # a GPU: about 5 minutes
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import characters_run
import experiment
import results

import variable_batch_size as vbs

# ------------------------------------------------------------------------------------------------- from the paper
# κ times the batch size: lr · √κ, 1 − β = κ (1 − β0), ε / √κ; changing only the learning rate is not enough
KAPPAS = (1, 2, 4, 8)
# ---------------------------------------------------------------------------- ours: the paper has VGG, ResNet, RoBERTa
BATCHSIZE, NUM_UPDATES = 8, 8_000  # windows of 128 characters; updates at that batch size
LR, BETAS = 5e-4, (0.9, 0.999)
# ----------------------------------------------------------------------------------------------------- tolerance
OFF_CURVE = 0.03  # nats per character, mean over the second half of the curve; and less than without the betas
# --------------------------------------------------------------------------------------------------- --small, ours
SMALL_BATCHSIZE, SMALL_UPDATES = 2, 64

RULES = {"adam": "adam", "constant-betas": "root", "constant": "constant"}


def runs(options: argparse.Namespace) -> dict[str, Any]:
    return {
        f"{name}-{kappa}" + ("" if len(options.seeds) == 1 else f"-seed-{seed}"): partial(_train, seed, name, kappa)
        for kappa in KAPPAS
        for name in RULES
        for seed in options.seeds
        if kappa > 1 or name == "adam"
    }


def _train(seed: int, name: str, kappa: int, options: argparse.Namespace, folder: Path) -> experiment.Row:
    batchsize, num_updates = (SMALL_BATCHSIZE, SMALL_UPDATES) if options.small else (BATCHSIZE, NUM_UPDATES)
    run = characters_run.Run(
        trace=vbs.traces.constant_trace(batchsize * kappa, num_steps=num_updates // kappa),
        rule=RULES[name],
        lr=LR,
        betas=BETAS,
        schedule=lambda samples: 1.0,
        ref_batchsize=batchsize,
        minibatch_size=batchsize * kappa,
        num_samples=batchsize * num_updates,
    )
    return {"rule": name, "kappa": kappa, "seed": seed, **characters_run.train(run, options, folder, seed=seed)}


def gap(rows: dict[str, experiment.Row], name: str, kappa: int) -> float:
    """Mean distance of the mean curve of all seeds from that of κ = 1 in the second half, in nats."""
    ours, base = mean_curve(rows, name, kappa), mean_curve(rows, "adam", 1)
    gaps = [abs(one - other) for one, other in zip(ours, base, strict=True)]
    half = gaps[len(gaps) // 2 :]
    return sum(half) / len(half)


def mean_curve(rows: dict[str, experiment.Row], name: str, kappa: int) -> list[float]:
    """The test loss at each point, averaged over seeds, because two seeds differ by more than the tolerance."""
    chosen = [row["curve"] for row in rows.values() if (row["rule"], row["kappa"]) == (name, kappa)]
    return [sum(point["test_loss"] for point in points) / len(points) for points in zip(*chosen, strict=True)]


def judge(options: argparse.Namespace, rows: dict[str, experiment.Row]) -> list[results.Claim]:
    _, num_updates = (SMALL_BATCHSIZE, SMALL_UPDATES) if options.small else (BATCHSIZE, NUM_UPDATES)
    claims = [
        results.Claim.near(row["run"], "updates", num_updates // row["kappa"], row["updates"], within=0)
        for row in rows.values()
    ]
    if options.small:
        return claims
    what = "gap to the curve of κ = 1, nats"
    for kappa in KAPPAS[1:]:
        ours = gap(rows, "adam", kappa)
        claims.append(results.Claim(f"adam-{kappa}", what, "none", ours, 0.0, OFF_CURVE))
    for name in ("constant-betas", "constant"):
        other = gap(rows, name, KAPPAS[-1])
        claims.append(results.Claim(f"{name}-{KAPPAS[-1]}", what, "a gap", other, 1.5 * ours, float("inf")))
    return claims


def draw(rows: dict[str, experiment.Row], curves: list[experiment.Row], path: Path) -> None:
    """Test loss over samples for each κ, mean over seeds: with the rule, its learning rate only, and no rule."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(12, 3.8), sharey=True)
    titles = ("lr, betas and ε (the rule)", "lr alone", "nothing")
    for row in rows.values():
        row["curve"] = [point for point in curves if point["run"] == row["run"]]
    for axes, rule, title in zip(panels, RULES, titles, strict=True):
        for number, kappa in enumerate(KAPPAS):
            name = rule if kappa > 1 else "adam"  # at κ = 1 all curves are the same
            samples = [point["samples"] for point in rows[next(iter(rows))]["curve"]]
            axes.plot(samples, mean_curve(rows, name, kappa), color=f"C{number}", label=f"κ = {kappa}")
        axes.set(title=title, xlabel="windows of 128 characters")
        axes.grid(alpha=0.2)
    panels[0].set(ylabel="test loss, nats a character", ylim=(1.0, 2.6))
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


EXPERIMENT = experiment.Experiment("adam_square_root", __doc__, runs, judge, draw)

if __name__ == "__main__":
    parser = experiment.parser_of(EXPERIMENT)
    characters_run.add_options(parser)
    sys.exit(experiment.main(EXPERIMENT, parser))
