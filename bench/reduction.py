"""Gradient reduction between 2 processes: one flat all-reduce compared with one per tensor, and full steps with DDP.

DDP overlaps the reduction with the backward pass, in buckets. It needs the same number of minibatches on every core: if
a step has 3 minibatches, or 1, it runs 4, or 2. One thread per process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from measure import Numbers, in_turn, print_comparison, print_machine
from resnet import resnet50
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs

CORES = 2


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def wide_mlp() -> nn.Module:
    """As many parameters as ResNet-50 with hardly any computation: communication dominates a step."""
    return nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000))


# model, shape of a minibatch, minibatches of a step over both cores, updates at a time, repeats
STEPS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int, int]] = {
    "MLP, 1 minibatch each": (mlp, (32, 256), 2, 10, 60),
    "MLP, 4 minibatches each": (mlp, (32, 256), 8, 10, 40),
    "MLP, 2 and 1 minibatches": (mlp, (32, 256), 3, 10, 40),
    "MLP, 1 and none": (mlp, (32, 256), 1, 10, 40),
    "wide MLP, 1 minibatch each": (wide_mlp, (32, 512), 2, 1, 20),
    "ResNet-50, 1 minibatch each": (resnet50, (8, 3, 32, 32), 2, 1, 12),
    "ResNet-50, 4 minibatches each": (resnet50, (8, 3, 32, 32), 8, 1, 6),
    "ResNet-50, 2 and 1 minibatches": (resnet50, (8, 3, 32, 32), 3, 1, 8),
    "ResNet-50, 1 and none": (resnet50, (8, 3, 32, 32), 1, 1, 12),
}


def main() -> None:
    print_machine()
    tensors = list(resnet50().parameters())
    print(f"{CORES} gloo processes, {sum(p.numel() for p in tensors):_} floats in {len(tensors)} tensors")
    print_comparison(vbs.launch(time_reductions, cores=CORES, backend="gloo")[0], peer="a call for each tensor")
    for name in STEPS:
        print(f"a step, {name}")
        print_comparison(vbs.launch(time_steps, (name,), cores=CORES, backend="gloo")[0], peer="DDP, no_sync")


def time_reductions() -> dict[str, Numbers]:
    torch.set_num_threads(1)
    tensors = [torch.zeros(p.shape) for p in resnet50().parameters()]
    flat = torch.zeros(sum(tensor.numel() for tensor in tensors))
    copy = torch.empty_like(flat)

    def reduce_each() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    def reduce_parts(num_parts: int) -> None:
        for work in [dist.all_reduce(part, async_op=True) for part in flat.chunk(num_parts)]:
            work.wait()

    sides = {
        "a call for each tensor": together(reduce_each),
        "one flat call": together(partial(reduce_parts, 1)),
        "2 calls at once (vbs)": together(partial(reduce_parts, 2)),
        "8 calls at once": together(partial(reduce_parts, 8)),
        "floor: one copy in memory": together(lambda: copy.copy_(flat)),
    }
    return in_turn(sides, repeats=15, warmup=2)


def time_steps(name: str) -> dict[str, Numbers]:
    torch.set_num_threads(1)
    make, shape, num_minibatches, updates, repeats = STEPS[name]
    model, x, target = make(), torch.randn(shape), torch.zeros(shape[0], dtype=torch.int64)

    def loss_of(module: nn.Module) -> torch.Tensor:
        return cross_entropy(module(x), target)

    share = -(-num_minibatches // CORES)
    steps = {
        "DDP, no_sync": step_with_ddp(deepcopy(model), loss_of, share, is_view=False),
        "DDP, no_sync, bucket views": step_with_ddp(deepcopy(model), loss_of, share, is_view=True),
        "vbs.LinearRuleOptimizer": step_with_vbs(vbs.LinearRuleOptimizer, deepcopy(model), loss_of, num_minibatches),
        "vbs.AdaScaleOptimizer": step_with_vbs(vbs.AdaScaleOptimizer, deepcopy(model), loss_of, num_minibatches),
    }
    return in_turn({side: together(step, updates) for side, step in steps.items()}, repeats=repeats, warmup=2)


def together(run: Callable[[], object], updates: int = 1) -> Callable[[], float]:
    def timed() -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(updates):
            run()
        return (time.perf_counter() - start) / updates

    return timed


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)


def step_with_ddp(
    module: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor], num_minibatches: int, *, is_view: bool
) -> Callable[[], None]:
    # without the broadcast of BatchNorm's buffers, which the other side does not do
    model = DistributedDataParallel(module, broadcast_buffers=False, gradient_as_bucket_view=is_view)
    optimizer = sgd(model)

    def run() -> None:
        for number in range(1, num_minibatches + 1):
            with nullcontext() if number == num_minibatches else model.no_sync():
                (loss_of(model) / num_minibatches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def step_with_vbs(
    kind: Any, model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor], num_minibatches: int
) -> Callable[[], None]:
    sampler = vbs.CustomSampler(dataset_size=10**9, trace=num_minibatches, minibatch_size=1)
    sampler.must_be_read = False  # the loop reads no loader
    optimizer = kind(sgd(model), sampler, ref_batchsize=num_minibatches)

    def run() -> None:
        before = optimizer.steps_done
        while optimizer.steps_done == before:
            loss_of(model).backward()
            optimizer.step()

    return run


if __name__ == "__main__":
    main()
