"""The linear rule with momentum at a jump of the batch size, with and without smoothing (Lin et al. 2019).

python reproduce/momentum_jump.py --seeds 0 1 2 3 4    # a CPU: about 2 minutes

After a jump, momentum accumulated at one learning rate is applied at another. `smooth_steps` distributes the jump of
the learning rate over several steps; `linear_momentum` keeps the momentum in units of the samples' gradients.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import experiment
import results
import torch
from experiment import Progress, curve_of
from torch import nn
from torch.nn.functional import cross_entropy

import variable_batch_size as vbs

# ---------------------------------------------------------------------------------------------------------- settings
MINIBATCH, SCALE = 32, 32  # batches of 32, then of 1,024
STEPS_BEFORE, STEPS_AFTER = 400, 60
LR, MOMENTUM = 0.05, 0.9
SMOOTH_STEPS = 40
NUM_SAMPLES, NUM_INPUTS, NUM_CLASSES = 32_768, 32, 10
# ----------------------------------------------------------------------------------------------------- tolerance
LEAST_SPIKE, MOST_SMOOTHED = 0.0, 0.5  # the maximum share of the spike that remains with smoothing
# --------------------------------------------------------------------------------------------------- --small, ours
SMALL_BEFORE, SMALL_AFTER = 20, 5

KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rule": "linear"},
    "linear-smoothed": {"rule": "linear", "smooth_steps": SMOOTH_STEPS},
    "linear-momentum": {"rule": "linear_momentum"},
}


def runs(options: argparse.Namespace) -> dict[str, Any]:
    return {f"{name}-seed-{seed}": partial(_train, seed, name) for name in KINDS for seed in options.seeds}


def data(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Classes from a random network with one hidden layer, a tenth of them wrong."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, NUM_INPUTS, generator=generator)
    hidden = torch.tanh(x @ torch.randn(NUM_INPUTS, 64, generator=generator) / 4)
    y = (hidden @ torch.randn(64, NUM_CLASSES, generator=generator)).argmax(1)
    is_wrong = torch.rand(NUM_SAMPLES, generator=generator) < 0.1
    y = torch.where(is_wrong, torch.randint(0, NUM_CLASSES, y.shape, generator=generator), y)
    return x.to(device), y.to(device)


def _train(seed: int, name: str, options: argparse.Namespace, folder: Path) -> experiment.Row:
    before, after = (SMALL_BEFORE, SMALL_AFTER) if options.small else (STEPS_BEFORE, STEPS_AFTER)
    device, kind = torch.device(options.device), dict(KINDS[name])
    x, y = data(device)
    held_out = slice(0, 4096)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(NUM_INPUTS, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    model.to(device)
    trace = [MINIBATCH] * before + [SCALE * MINIBATCH] * after
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES - 4096, trace=trace, minibatch_size=MINIBATCH, seed=seed)
    inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    rule = vbs.rules.make_rule(kind.pop("rule"))
    optimizer = vbs.CustomOptimizer(inner, sampler, rule=rule, ref_batchsize=MINIBATCH, **kind)
    checkpoint = vbs.Checkpoint(folder, model=model, optimizer=optimizer, every_seconds=60, keep=1)
    sinks = [vbs.JsonLines(folder / "records.jsonl"), Progress(folder.name, "step", before + after)]
    with vbs.Log(optimizer, every=1000, to=sinks) as log:
        for _ in checkpoint.epochs(sampler.schedule.num_epochs or 1):
            for indices in sampler:
                numbers = torch.tensor(indices, device=device) + 4096
                loss = cross_entropy(model(x[numbers]), y[numbers])
                loss.backward()
                if optimizer.step() and optimizer.steps_done >= before - 20:
                    with torch.no_grad():
                        log.write(test_loss=cross_entropy(model(x[held_out]), y[held_out]).item())
                log.step(loss)
                checkpoint.step()
    curve = curve_of(folder, "step", "samples", "test_loss")
    losses = {point["step"]: point["test_loss"] for point in curve}
    start = losses[before]
    highest = max(loss for step, loss in losses.items() if step >= before)
    return {
        "kind": name,
        "seed": seed,
        "updates": optimizer.steps_done,
        "loss_before": start,
        "spike": highest - start,
        "loss_after": losses[before + after],
        "curve": curve,
    }


def judge(options: argparse.Namespace, rows: dict[str, experiment.Row]) -> list[results.Claim]:
    total = SMALL_BEFORE + SMALL_AFTER if options.small else STEPS_BEFORE + STEPS_AFTER
    claims = [results.Claim.near(row["run"], "updates", total, row["updates"], within=0) for row in rows.values()]
    if options.small:
        return claims
    spike = {name: statistics.fmean(row["spike"] for row in rows.values() if row["kind"] == name) for name in KINDS}
    claims = [results.Claim("linear", "spike of the test loss, nats", "a spike", spike["linear"], 0.05, math.inf)]
    for name in ("linear-smoothed", "linear-momentum"):
        claims.append(
            results.Claim(
                name, "spike / that of linear", "smaller", spike[name] / spike["linear"], LEAST_SPIKE, MOST_SMOOTHED
            )
        )
    return claims


def draw(rows: dict[str, experiment.Row], curves: list[experiment.Row], path: Path) -> None:
    """The test loss around the jump."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.8))
    for number, kind in enumerate(KINDS):
        for name, row in rows.items():
            if row["kind"] == kind:
                points = [point for point in curves if point["run"] == name]
                axes.plot(
                    [point["step"] - STEPS_BEFORE for point in points],
                    [point["test_loss"] for point in points],
                    color=f"C{number}",
                    linewidth=1,
                    label=kind if name.endswith("-0") else None,
                )
    axes.axvline(0, color="0.6", linewidth=0.8)
    axes.set(xlabel="updates since the batch size went from 32 to 1,024", ylabel="test loss", ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


EXPERIMENT = experiment.Experiment("momentum_jump", __doc__, runs, judge, draw)

if __name__ == "__main__":
    sys.exit(experiment.main(EXPERIMENT, experiment.parser_of(EXPERIMENT)))
