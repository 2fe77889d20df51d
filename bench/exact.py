"""Overhead of exact mode, and of seeding per minibatch alone, compared with the same loop in plain mode.

One process is measured in CPU time of one thread, 2 gloo processes in wall time. With ``--device cuda``, one GPU is
measured in wall time, including the synchronization.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from measure import Numbers, in_turn, print_comparison, print_machine
from resnet import resnet50
from torch import nn
from torch.nn.functional import cross_entropy

import variable_batch_size as vbs

CORES = 2
NUM_MINIBATCHES = 4

PLAIN = "plain"
SIDES: dict[str, tuple[Any, dict[str, Any]]] = {
    PLAIN: (vbs.LinearRuleOptimizer, {}),
    "plain again": (vbs.LinearRuleOptimizer, {}),
    "seeded": (vbs.LinearRuleOptimizer, {"seed_minibatches": True}),
    "exact": (vbs.LinearRuleOptimizer, {"exact": True}),
    "AdaScale": (vbs.AdaScaleOptimizer, {}),
    "AdaScale, exact": (vbs.AdaScaleOptimizer, {"exact": True}),
}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def wide_mlp() -> nn.Module:
    """As many parameters as ResNet-50 with hardly any computation: gradient handling dominates a step."""
    return nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000))


# model, shape of a minibatch on a CPU and on a GPU, updates at a time and repeats on a CPU
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...], int, int]] = {
    "MLP": (mlp, (32, 256), (256, 256), 10, 60),
    "wide MLP": (wide_mlp, (32, 512), (512, 512), 1, 10),
    "ResNet-50": (resnet50, (8, 3, 64, 64), (64, 3, 224, 224), 1, 8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--repeats", type=int, help="repeats of each side (default: depends on the model)")
    flags = parser.parse_args()
    print_machine()
    for name in flags.models:
        tensors = list(MODELS[name][0]().parameters())
        size = f"{sum(p.numel() for p in tensors):_} parameters in {len(tensors)} tensors"
        print(f"{name}, {size}, {NUM_MINIBATCHES} minibatches of a step, one process on {flags.device}")
        print_comparison(time_sides(name, flags.device, flags.repeats), peer=PLAIN)
        if flags.device == "cpu":
            print(f"{name}, {CORES} gloo processes")
            args = (name, "cpu", flags.repeats)
            print_comparison(vbs.launch(time_sides, args, cores=CORES, backend="gloo")[0], peer=PLAIN)


def time_sides(name: str, device: str, repeats: int | None) -> dict[str, Numbers]:
    torch.set_num_threads(1)
    make, shape, shape_on_gpu, updates, default_repeats = MODELS[name]
    if device == "cuda":
        shape, updates, default_repeats = shape_on_gpu, 10, 20
    model, x = make().to(device), torch.randn(shape, device=device)
    target = torch.zeros(shape[0], dtype=torch.int64, device=device)
    sides = {}
    for side, (kind, options) in SIDES.items():
        copy = deepcopy(model)
        sides[side] = timed(step_of(kind, copy, partial(loss_of, copy, x, target), options), device, updates)
    return in_turn(sides, repeats=repeats or default_repeats, warmup=2)


def loss_of(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(x), target)


def step_of(
    kind: Any, model: nn.Module, loss: Callable[[], torch.Tensor], options: dict[str, Any]
) -> Callable[[], None]:
    sampler = vbs.CustomSampler(dataset_size=10**9, trace=NUM_MINIBATCHES, minibatch_size=1)
    sampler.must_be_read = False  # the loop reads no loader
    inner = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    optimizer = kind(inner, sampler, ref_batchsize=NUM_MINIBATCHES, model=model, **options)

    def step() -> None:
        before = optimizer.steps_done
        while optimizer.steps_done == before:
            loss().backward()
            optimizer.step()

    return step


def timed(step: Callable[[], None], device: str, updates: int) -> Callable[[], float]:
    """Seconds of some updates: wall time on a GPU and with several processes, otherwise CPU time."""

    def run() -> float:
        if dist.is_initialized():
            dist.barrier()
        clock = time.perf_counter if device == "cuda" or dist.is_initialized() else time.process_time
        start = clock()
        for _ in range(updates):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
        return (clock() - start) / updates

    return run


if __name__ == "__main__":
    main()
