"""Cost of gains that are one step late: updates of AdaScale up to the same progress, on MNIST, over seeds.

The CPU is treated as an accelerator whose norms arrive one step late, from the first step on or after some estimates.
"""

from __future__ import annotations

import argparse
import math
import statistics

import torch
from measure import print_machine
from torch import nn
from torchvision.datasets import MNIST

import variable_batch_size as vbs
from variable_batch_size.optim import flow

REF_BATCHSIZE, PROGRESS = 8, 800
NUM_IMAGES = {"training": 12_000, "test": 4_000}
WAYS = {"at once": math.inf, "late": 0, "late after 5": 5, "late after 20": 20}  # estimates that are read at once
SETTINGS = [(16, 0.1), (32, 0.05)]  # scale, learning rate

Images = tuple[torch.Tensor, torch.Tensor]


def images(datadir: str, part: str) -> Images:
    """Images of 14 × 14 pixels and their classes."""
    content = MNIST(datadir, train=part == "training")
    x = nn.functional.avg_pool2d(content.data[: NUM_IMAGES[part], None].float(), 2)
    return (x - x.mean()) / x.std(), content.targets[: NUM_IMAGES[part]]


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for num_in, num_out in ((1, 8), (8, 16)):
        layers += [nn.Conv2d(num_in, num_out, 3, 2, 1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))


def train(training: Images, test: Images, *, scale: int, lr: float, seed: int) -> tuple[int, float]:
    """The number of updates up to the progress, and the accuracy in percent."""
    torch.manual_seed(seed)
    model, (x, y) = network(), training
    sampler = vbs.CustomSampler(y, trace=scale * REF_BATCHSIZE, minibatch_size=REF_BATCHSIZE, seed=seed)
    inner = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=5e-4)
    optimizer = vbs.AdaScaleOptimizer(inner, sampler, ref_batchsize=REF_BATCHSIZE, model=model, skip_nonfinite=False)
    for _ in optimizer.epochs(1000):
        for indices in sampler:
            nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
            if optimizer.step() and optimizer.progress >= PROGRESS:
                model.eval()
                is_right = model(test[0]).argmax(1) == test[1]
                return optimizer.steps_done, 100 * is_right.float().mean().item()
    raise RuntimeError("the progress was not reached")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--datadir", required=True, help="folder of torchvision's MNIST")
    parser.add_argument("--seeds", type=int, default=16)
    options = parser.parse_args()
    print_machine()
    torch.set_num_threads(1)
    training, test = (images(options.datadir, part) for part in NUM_IMAGES)
    flow._HOSTS = ()
    print(f"{'scale':8}{'lr':8}{'gain':16}{'updates':>18}{'accuracy, %':>20}")
    for scale, lr in SETTINGS:
        for way, num_at_once in WAYS.items():
            flow._NUM_AT_ONCE = num_at_once
            runs = [train(training, test, scale=scale, lr=lr, seed=seed) for seed in range(options.seeds)]
            print(
                f"{scale:<8}{lr:<8}{way:16}",
                *(f"{shown(values):>18}" for values in zip(*runs, strict=True)),
                flush=True,
            )


def shown(values: tuple[float, ...]) -> str:
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values) / math.sqrt(len(values)):.1f}"


if __name__ == "__main__":
    main()
