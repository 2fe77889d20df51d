"""What reducing gradients between 2 processes costs: one flat call against one a tensor, a whole step against DDP."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy

import torch
import torch.distributed as dist
from measure import Numbers, in_turn, print_comparison, print_machine
from resnet import resnet50
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs

CORES = 2
NUM_MINIBATCHES = 4
MINIBATCH = (8, 3, 32, 32)


def main() -> None:
    print_machine()
    tensors = list(resnet50().parameters())
    print(f"ResNet-50, {CORES} gloo processes: {sum(p.numel() for p in tensors):_} floats in {len(tensors)} tensors\n")
    print("all-reduce of as many floats")
    print_comparison(vbs.launch(time_reductions, cores=CORES, backend="gloo")[0], peer="a call for each tensor")
    print(f"a step of {NUM_MINIBATCHES} minibatches of {' x '.join(map(str, MINIBATCH))} a process")
    print_comparison(vbs.launch(time_steps, cores=CORES, backend="gloo")[0], peer="DDP, no_sync")


def time_reductions() -> dict[str, Numbers]:
    tensors = [torch.zeros(p.shape) for p in resnet50().parameters()]
    flat = torch.zeros(sum(tensor.numel() for tensor in tensors))
    copy = torch.empty_like(flat)

    def reduce_each() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    sides = {
        "a call for each tensor": together(reduce_each),
        "one flat call": together(lambda: dist.all_reduce(flat)),
        "floor: one copy in memory": together(lambda: copy.copy_(flat)),
    }
    return in_turn(sides, repeats=20, warmup=2)


def time_steps() -> dict[str, Numbers]:
    inputs = torch.randn(NUM_MINIBATCHES, *MINIBATCH)
    targets = torch.zeros(inputs.shape[:2], dtype=torch.int64)
    model = resnet50()
    sides = {
        "DDP, no_sync": together(step_with_ddp(deepcopy(model), inputs, targets, is_view=False)),
        "DDP, no_sync, bucket views": together(step_with_ddp(deepcopy(model), inputs, targets, is_view=True)),
        "vbs.LinearRuleOptimizer": together(step_with_vbs(model, inputs, targets)),
    }
    return in_turn(sides, repeats=12, warmup=2)


def together(run: Callable[[], object]) -> Callable[[], float]:
    def timed() -> float:
        dist.barrier()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return timed


def step_with_ddp(
    module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, is_view: bool
) -> Callable[[], None]:
    # without the broadcast of BatchNorm's buffers, which is no part of the other side
    model = DistributedDataParallel(module, broadcast_buffers=False, gradient_as_bucket_view=is_view)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

    def run() -> None:
        for number, (x, target) in enumerate(zip(inputs, targets, strict=True), start=1):
            with nullcontext() if number == NUM_MINIBATCHES else model.no_sync():
                (cross_entropy(model(x), target) / NUM_MINIBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def step_with_vbs(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Callable[[], None]:
    minibatch = inputs.shape[1]
    batch = CORES * NUM_MINIBATCHES * minibatch
    sampler = vbs.CustomSampler(dataset_size=batch, trace=batch, minibatch_size=minibatch)
    inner = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=batch)

    def run() -> None:
        optimizer.set_epoch(0)
        for x, target in zip(inputs, targets, strict=True):
            cross_entropy(model(x), target).backward()
            optimizer.step()

    return run


if __name__ == "__main__":
    main()
