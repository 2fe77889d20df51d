"""Digits with a batch size that grows from 16 to 256, next to a constant one of 16: the figure of the front page.

    python examples/growing_batch.py --plot docs/growing

It takes about a minute on a CPU, and writes docs/growing.svg, docs/growing-dark.svg and docs/growing.csv, with a row
for each seed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import nn

import variable_batch_size as vbs

TRAIN_SIZE = 1280  # of 1797 images; all batch sizes divide it
NUM_EPOCHS = 24
TRACES = {"constant": 16, "growing": "0:16 160:32 240:64 280:128 300:256"}  # two epochs each, then the rest
COLOURS = {"constant": "#d9822b", "growing": "#3f7fd6"}  # readable on white and on black


class Epoch(NamedTuple):
    """The end of an epoch."""

    samples: int
    updates: int
    batch_size: int
    lr: float
    accuracy: float  # on the test images, in percent


def train(trace: int | str, seed: int) -> list[Epoch]:
    """Train a small network; both traces start from the same weights and end after the same samples."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    data, target = torch.tensor(pixels / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    dataset = torch.utils.data.TensorDataset(data[:TRAIN_SIZE], target[:TRAIN_SIZE])
    loader = vbs.DataLoader(dataset, trace=trace, minibatch_size=16, seed=seed)
    inner = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)  # tuned for batches of 16
    optimizer = vbs.Optimizer(inner, loader, rule="linear", ref_batchsize=16, model=model)

    epochs = []
    for _ in optimizer.epochs(NUM_EPOCHS):
        for images, labels in loader:
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        with torch.no_grad():
            is_right = model(data[TRAIN_SIZE:]).argmax(1) == target[TRAIN_SIZE:]
        accuracy = 100 * is_right.float().mean().item()
        done = optimizer.samples_done, optimizer.steps_done
        epochs.append(Epoch(*done, optimizer.batch_size, optimizer.current_lr(), accuracy))
    return epochs


def plot(runs: dict[str, list[list[Epoch]]], path: str, *, is_dark: bool) -> None:
    """Batch size, learning rate and the mean accuracy of all seeds, over samples."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ink = "#dddddd" if is_dark else "#333333"
    inks = {f"{part}.{name}": ink for part in ("xtick", "ytick") for name in ("color", "labelcolor")}
    pyplot.rcParams.update({**inks, "text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": ink})
    pyplot.rcParams.update({"font.size": 11, "axes.titlelocation": "left"})
    pyplot.rcParams.update(
        {"svg.hashsalt": "growing", "svg.fonttype": "none"}
    )  # the same file each time, with text as text
    figure, (sizes, rates, accuracies) = pyplot.subplots(3, figsize=(4.6, 5.2), sharex=True, layout="constrained")
    for name, seeds in runs.items():
        samples = [epoch.samples / 1000 for epoch in seeds[0]]
        options = {"color": COLOURS[name], "linewidth": 2.5}
        sizes.step(samples, [epoch.batch_size for epoch in seeds[0]], **options)
        rates.step(samples, [epoch.lr for epoch in seeds[0]], **options)
        means = [mean(epoch.accuracy for epoch in epochs) for epochs in zip(*seeds, strict=True)]
        accuracies.plot(samples, means, label=f"{name}: {seeds[0][-1].updates:,} updates, {means[-1]:.1f} %", **options)
    sizes.set(title="batch size", yscale="log", yticks=[16, 64, 256], yticklabels=[16, 64, 256])
    rates.set(title="learning rate, by the linear rule", yscale="log", yticks=[0.02, 0.08, 0.32])
    rates.set_yticklabels(["0.02", "0.08", "0.32"])
    title = f"test accuracy in %, mean of {len(seeds)} seeds"
    accuracies.set(title=title, ylim=(80, 100), xlabel="thousand samples")
    accuracies.legend(loc="lower right", frameon=False)
    for axes in (sizes, rates, accuracies):
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    background = "none" if is_dark else "white"
    figure.savefig(path, facecolor=background, transparent=is_dark, metadata={"Date": None})
    pyplot.close(figure)


def write(runs: dict[str, list[list[Epoch]]], path: str) -> None:
    """The end of each run."""
    lines = ["trace,seed,updates,accuracy"]
    for name, seeds in runs.items():
        lines += [f"{name},{seed},{run[-1].updates},{run[-1].accuracy:.2f}" for seed, run in enumerate(seeds)]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(num_seeds: int, path: str | None) -> None:
    """Train with both traces and print a line for each."""
    torch.set_num_threads(1)
    runs = {name: [train(trace, seed) for seed in range(num_seeds)] for name, trace in TRACES.items()}
    for name, seeds in runs.items():
        finals = [epochs[-1].accuracy for epochs in seeds]
        spread = f" ± {stdev(finals):.1f}" if num_seeds > 1 else ""
        last = seeds[0][-1]
        print(f"{name:8}  {last.updates:5,} updates  {last.samples:,} samples  accuracy {mean(finals):.1f}{spread} %")
    if path is not None:
        plot(runs, f"{path}.svg", is_dark=False)
        plot(runs, f"{path}-dark.svg", is_dark=True)
        write(runs, f"{path}.csv")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="number of runs with each trace")
    parser.add_argument("--plot", metavar="PATH", help="write PATH.svg, PATH-dark.svg and PATH.csv; needs matplotlib")
    options = parser.parse_args()
    main(options.seeds, options.plot)
