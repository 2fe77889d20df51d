"""The gain reported by FairScale, AdaptDL and this library when the scale changes, compared with the true gain.

make .peers; python reproduce/adascale_peers.py     # FairScale 0.4.13 and AdaptDL 0.2.11 from PyPI; a CPU: a minute

All receive the same minibatches of the same network with fixed weights (lr = 0). The true gain of a step of batch
size B is therefore computed by brute force, from the gradient of every sample:

    gain(B) = (V/B0 + G²) / (V/B + G²),   G = mean of all gradients,   V = mean of their squared distances from G
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import multiprocessing
import statistics
import sys
import warnings
from copy import deepcopy
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import experiment
import results
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import variable_batch_size as vbs

sys.path.append(str(results.ROOT / "bench"))
import peers

# ---------------------------------------------------------------------------------------------------------- settings
MINIBATCH = 8  # and the reference batch size
NUM_SAMPLES, NUM_INPUTS, NUM_CLASSES = 16_384, 20, 5
CASES = {  # the scales of the steps
    "4-then-32": [4] * 200 + [32] * 100,
    "32-then-4": [32] * 100 + [4] * 200,
    "1-between-8s": [8, 8, 8, 1] * 75,
}
# ----------------------------------------------------------------------------------------------------- tolerance
OFF = 0.10  # of ours from the true gain, over the steps after the change
# ------------------------------------------------------------------------------------------------ --small, ours alone
SMALL_CASES = {"4-then-32": [4] * 30 + [32] * 10, "1-between-8s": [8, 1] * 20}


def problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """An untrained network, and synthetic data."""
    torch.manual_seed(0)
    x = torch.randn(NUM_SAMPLES, NUM_INPUTS)
    y = (x @ torch.randn(NUM_INPUTS, NUM_CLASSES) + 3 * torch.randn(NUM_SAMPLES, NUM_CLASSES)).argmax(1)
    return nn.Sequential(nn.Linear(NUM_INPUTS, 32), nn.Tanh(), nn.Linear(32, NUM_CLASSES)), x, y


def true_noise() -> tuple[float, float]:
    """V and G², from the gradient of every sample."""
    model, x, y = problem()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, torch.Tensor], one: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(torch.func.functional_call(model, values, (one[None],)), target[None])

    of_each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, y)
    gradients = torch.cat([gradient.flatten(1) for gradient in of_each.values()], 1).double()
    mean = gradients.mean(0)
    return (gradients - mean).square().sum(1).mean().item(), mean.square().sum().item()


def true_gain(scale: int, variance: float, square: float) -> float:
    return (variance / MINIBATCH + square) / (variance / (scale * MINIBATCH) + square)


def steps(scales: list[int]) -> list[list[list[int]]]:
    """The samples of each minibatch of each step, the same for all implementations."""
    trace = [scale * MINIBATCH for scale in scales]
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=trace, minibatch_size=MINIBATCH)
    dealt = []
    for epoch in range(sampler.schedule.num_epochs or 0):
        sampler.set_epoch(epoch)
        dealt += list(sampler)
    minibatches = iter(dealt)
    return [[next(minibatches) for _ in range(scale)] for scale in scales]


def gains_of_ours(scales: list[int]) -> list[float]:
    model, x, y = problem()
    trace = [scale * MINIBATCH for scale in scales]
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=trace, minibatch_size=MINIBATCH)
    optimizer = vbs.AdaScaleOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), sampler, ref_batchsize=MINIBATCH)
    gains = []
    for epoch in range(sampler.schedule.num_epochs or 0):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for indices in sampler:
            cross_entropy(model(x[indices]), y[indices]).backward()
            if optimizer.step():
                gains.append(optimizer.gain())
    return gains


def gains_of_fairscale(scales: list[int]) -> list[float]:
    kind = peers.fairscale_adascale()
    if kind is None:
        return []
    model, x, y = problem()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = kind(sgd, world_size=1, num_gradients_to_accumulate=max(scales[0], 2), is_scaled_loss=False)
    gains = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's division by 0 at a scale of 1
        for scale, minibatches in zip(scales, steps(scales), strict=True):
            optimizer.set_scale(float(scale))
            optimizer.set_num_gradients_to_accumulate(scale)
            for indices in minibatches:
                cross_entropy(model(x[indices]), y[indices]).backward()
            optimizer.step()
            gains.append(float(optimizer.gain()))
            optimizer.zero_grad()
    return gains


def gains_of_adaptdl(scales: list[int]) -> list[float]:
    """In a separate process, because AdaptDL initializes a process group and installs a SIGTERM handler."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_send_gains_of_adaptdl, args=(scales, there))
    process.start()
    there.close()
    try:
        return list(here.recv())
    finally:
        process.kill()
        process.join()


def _send_gains_of_adaptdl(scales: list[int], there: Connection) -> None:
    if not peers.has_adaptdl():
        there.send([])
        return
    logging.disable()
    warnings.simplefilter("ignore")  # it warns for every minibatch after the first of a step
    model, x, y = problem()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    adaptdl = peers.AdaptDL(model, sgd, minibatch_size=MINIBATCH, num_minibatches=1)
    gains = []
    for scale, minibatches in zip(scales, steps(scales), strict=True):
        adaptdl.loader._state.accumulation_steps = scale - 1
        adaptdl.run([partial(_loss, x[indices], y[indices]) for indices in minibatches])
        gains.append(float(adaptdl.model.gns.gain(scale)))
    there.send(gains)


def _loss(x: torch.Tensor, y: torch.Tensor, model: nn.Module) -> torch.Tensor:
    return cross_entropy(model(x), y)


SIDES = {"ours": gains_of_ours, "FairScale": gains_of_fairscale, "AdaptDL": gains_of_adaptdl}


def runs(options: argparse.Namespace) -> dict[str, Any]:
    return {case: partial(_compare, case) for case in (SMALL_CASES if options.small else CASES)}


def _compare(case: str, options: argparse.Namespace, folder: Path) -> experiment.Row:
    scales = deepcopy((SMALL_CASES if options.small else CASES)[case])
    variance, square = true_noise()
    truth = [true_gain(scale, variance, square) for scale in scales]
    gains = {}
    for side, gains_of in list(SIDES.items())[: 1 if options.small else None]:
        gains[side] = gains_of(scales)
        print(f"{case:24}{side}: {'done' if gains[side] else 'not installed'}", flush=True)
    counted = counted_steps(scales)
    row = {"noise_scale": variance / square, "true_gain": truth[counted[0]], "steps": len(scales)}
    for side, found in gains.items():
        if found:
            ratios = [found[step] / truth[step] for step in counted]
            row[f"{side}_first"] = ratios[0]
            row[f"{side}_mean"] = statistics.fmean(ratios)
            row[f"{side}_worst"] = max(ratios, key=lambda ratio: abs(ratio - 1) if math.isfinite(ratio) else math.inf)
    curve = [
        {
            "step": step,
            "scale": scale,
            "truth": truth[step],
            **{side: found[step] for side, found in gains.items() if found},
        }
        for step, scale in enumerate(scales)
    ]
    return {**row, "curve": curve}


def counted_steps(scales: list[int]) -> list[int]:
    """The steps that are checked: 50 after the change of scale, or all of the larger scale in the second half."""
    changes = [step for step in range(1, len(scales)) if scales[step] != scales[step - 1]]
    if len(changes) == 1:
        return list(range(changes[0], min(len(scales), changes[0] + 50)))
    return [step for step in range(len(scales) // 2, len(scales)) if scales[step] > 1]


def judge(options: argparse.Namespace, rows: dict[str, experiment.Row]) -> list[results.Claim]:
    claims = []
    off = 3 * OFF if options.small else OFF
    for case, row in rows.items():
        claims.append(results.Claim.near(case, "ours: gain / true gain, mean", 1.0, row["ours_mean"], within=off))
        claims.append(results.Claim.near(case, "ours: … in the first step", 1.0, row["ours_first"], within=2 * off))
        for side in ("FairScale", "AdaptDL"):
            if f"{side}_mean" in row:
                for what in ("first", "mean", "worst"):
                    ratio = row[f"{side}_{what}"]
                    claims.append(results.Claim(case, f"{side}: … {what}", 1.0, ratio, 0.0, 0.0, is_judged=False))
    return claims


def draw(rows: dict[str, experiment.Row], curves: list[experiment.Row], path: Path) -> None:
    """The gains over steps, a panel for each case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(rows), figsize=(12, 3.8))
    for axes, case in zip(panels, rows, strict=True):
        points = [point for point in curves if point["run"] == case and point["scale"] > 1]
        for side, color in (("truth", "black"), ("FairScale", "C1"), ("AdaptDL", "C0"), ("ours", "C2")):
            with contextlib.suppress(KeyError):
                values = [point[side] if isinstance(point[side], float) else math.nan for point in points]
                axes.plot([point["step"] for point in points], values, color=color, label=side, linewidth=1)
        axes.set(title=f"scale {case}", xlabel="step", ylim=(0, None))
        axes.grid(alpha=0.2)
    panels[0].set_ylabel("gain")
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


EXPERIMENT = experiment.Experiment("adascale_peers", __doc__, runs, judge, draw)

if __name__ == "__main__":
    sys.exit(experiment.main(EXPERIMENT, experiment.parser_of(EXPERIMENT)))
