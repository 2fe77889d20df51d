"""The gradient noise scale rises during training: McCandlish et al. 2018, "An empirical model of large-batch training".

python reproduce/noise_rises.py --datadir DIR         # MNIST; a CPU: a minute

The curve of CIFAR-10 is read from the committed result of the run AdaScale-8 of adascale_cifar10.py.
"""

from __future__ import annotations

import argparse
import gzip
import math
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import experiment
import numpy as np
import results
import torch
from experiment import Progress, curve_of
from torch import nn
from torch.nn.functional import cross_entropy

import variable_batch_size as vbs

# ------------------------------------------------------------------------------------------------- from the paper
# the noise scale increases as the loss decreases, on MNIST and on CIFAR-10
AVERAGE = 900  # samples, on MNIST
# ---------------------------------------------------------------------------------------------------------- settings
BATCHSIZE, MINIBATCH, NUM_STEPS = 128, 32, 480  # about an epoch
LR, MOMENTUM = 0.02, 0.5
REF_BATCHSIZE = 4  # at S = 32 the averages span 1000 / 32 steps
NUM_POINTS = 24
# ----------------------------------------------------------------------------------------------------- tolerance
OFF_AVERAGE = 10  # a factor in either direction: the order of magnitude
BEGIN, LEAST_RISE = 0.2, 3.0  # from a fifth of the curve, when the loss has started to fall, to its end
# --------------------------------------------------------------------------------------------------- --small, ours
SMALL_STEPS = 48


def read(datadir: Path, name: str) -> torch.Tensor:
    """A file of MNIST in torchvision's folder, compressed or not."""
    path = datadir / "MNIST" / "raw" / name
    raw = path.read_bytes() if path.exists() else gzip.decompress(Path(f"{path}.gz").read_bytes())
    shape = [int.from_bytes(raw[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(raw[3])]
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * len(shape)).reshape(shape).copy())


def data(options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    if options.small:
        generator = torch.Generator().manual_seed(0)
        y = torch.randint(0, 10, (1024,), generator=generator)
        return torch.randn(1024, 1, 28, 28, generator=generator) + y.view(-1, 1, 1, 1) / 5, y
    if options.datadir is None:
        raise SystemExit("--datadir must be the folder that contains MNIST; --small needs no data")
    x = read(options.datadir, "train-images-idx3-ubyte")
    return (x[:, None] / 255 - 0.1307) / 0.3081, read(options.datadir, "train-labels-idx1-ubyte").long()


def network() -> nn.Sequential:
    layers = [nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10))


def runs(options: argparse.Namespace) -> dict[str, Any]:
    return {f"MNIST-seed-{seed}": partial(_train, seed) for seed in options.seeds}


def _train(seed: int, options: argparse.Namespace, folder: Path) -> experiment.Row:
    device = torch.device(options.device)
    num_steps = SMALL_STEPS if options.small else NUM_STEPS
    x, y = (part.to(device) for part in data(options))
    torch.manual_seed(seed)
    model = network().to(device)
    sampler = vbs.CustomSampler(dataset_size=len(y), trace=BATCHSIZE, minibatch_size=MINIBATCH, seed=seed)
    inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    optimizer = vbs.ConstantOptimizer(inner, sampler, ref_batchsize=REF_BATCHSIZE, measure_noise=True)
    checkpoint = vbs.Checkpoint(folder, model=model, optimizer=optimizer, every_seconds=60, keep=1)
    sinks = [vbs.JsonLines(folder / "records.jsonl"), Progress(folder.name, "step", num_steps)]
    with vbs.Log(optimizer, every=num_steps // NUM_POINTS, to=sinks) as log:
        for _ in checkpoint.epochs(num_steps):
            for indices in sampler if optimizer.steps_done < num_steps else ():
                numbers = torch.tensor(indices, device=device)
                loss = cross_entropy(model(x[numbers]), y[numbers])
                loss.backward()
                optimizer.step()
                log.step(loss)
                checkpoint.step()
                if optimizer.steps_done == num_steps:
                    break
            if optimizer.steps_done == num_steps:
                break
    curve = curve_of(folder, "step", "samples", "loss", "noise_scale")
    scales = [point["noise_scale"] for point in curve]
    row = {"seed": seed, "updates": optimizer.steps_done, "points": len(curve), "begin": at_begin(curve)}
    return {**row, "average": statistics.fmean(scales), "last": scales[-1], "curve": curve}


def at_begin(curve: list[experiment.Row]) -> float:
    return float(curve[int(BEGIN * len(curve))]["noise_scale"])


def cifar10_curve() -> list[experiment.Row]:
    points = results.read(results.curves_of("adascale_cifar10"))
    return [point for point in points if point["run"] == "AdaScale-8" and point["noise_scale"] != ""]


def judge(options: argparse.Namespace, rows: dict[str, experiment.Row]) -> list[results.Claim]:
    num_steps = SMALL_STEPS if options.small else NUM_STEPS
    claims = [results.Claim.near(row["run"], "updates", num_steps, row["updates"], within=0) for row in rows.values()]
    claims += [results.Claim.near(row["run"], "points", NUM_POINTS, row["points"], within=0) for row in rows.values()]
    if options.small:
        return claims
    rises = {"MNIST": statistics.fmean(row["last"] / row["begin"] for row in rows.values())}
    curve = cifar10_curve()
    if curve:
        rises["CIFAR-10"] = curve[-1]["noise_scale"] / at_begin(curve)
    for name, rise in rises.items():
        claims.append(
            results.Claim(name, "noise scale, at the end / after a fifth", "rises", rise, LEAST_RISE, math.inf)
        )
    average = statistics.fmean(row["average"] for row in rows.values())
    low, high = AVERAGE / OFF_AVERAGE, AVERAGE * OFF_AVERAGE
    claims.append(results.Claim("MNIST", "noise scale, average, samples", str(AVERAGE), average, low, high))
    return claims


def draw(rows: dict[str, experiment.Row], curves: list[experiment.Row], path: Path) -> None:
    """The noise scale over samples."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 3.6))
    for name in rows:
        points = [point for point in curves if point["run"] == name]
        panels[0].semilogy([p["samples"] for p in points], [p["noise_scale"] for p in points], color="C0", linewidth=1)
    panels[0].set(title="MNIST", xlabel="samples", ylabel="noise scale, samples")
    points = cifar10_curve()
    panels[1].semilogy([p["progress"] for p in points], [p["noise_scale"] for p in points], color="C3")
    panels[1].set(title="CIFAR-10, ResNet-18, AdaScale at S = 8", xlabel="progress, steps at the batch size 128")
    for axes in panels:
        axes.grid(alpha=0.2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


EXPERIMENT = experiment.Experiment("noise_rises", __doc__, runs, judge, draw)

if __name__ == "__main__":
    parser = experiment.parser_of(EXPERIMENT)
    parser.add_argument("--datadir", type=Path, help="folder that contains torchvision's MNIST")
    sys.exit(experiment.main(EXPERIMENT, parser))
