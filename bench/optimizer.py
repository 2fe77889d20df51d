"""What an update of 4 accumulated minibatches costs with LinearRuleOptimizer, against the loop one writes by hand.

In CPU time of one thread, of which the time that other programs take from this one is no part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy

import torch
from measure import in_turn, print_comparison, print_machine
from resnet import resnet50
from torch import nn
from torch.nn.functional import cross_entropy

import variable_batch_size as vbs

NUM_MINIBATCHES = 4


def main() -> None:
    print_machine()
    torch.set_num_threads(1)
    mlp = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    compare("MLP", mlp, torch.randn(NUM_MINIBATCHES, 32, 256), updates=2, repeats=1500)
    compare("ResNet-50", resnet50(), torch.randn(NUM_MINIBATCHES, 8, 3, 64, 64), updates=1, repeats=15)


def compare(name: str, model: nn.Module, inputs: torch.Tensor, *, updates: int, repeats: int) -> None:
    """Let each side train a model of its own, `updates` steps at a time."""
    tensors = list(model.parameters())
    print(f"{name}: {sum(p.numel() for p in tensors):_} parameters in {len(tensors)} tensors, ", end="")
    print(f"{NUM_MINIBATCHES} minibatches of {' x '.join(map(str, inputs.shape[1:]))}, {updates} updates at a time")
    targets = torch.zeros(inputs.shape[:2], dtype=torch.int64)
    sides = {
        "by hand": by_hand(model, inputs, targets, updates),
        "vbs.LinearRuleOptimizer": with_vbs(deepcopy(model), inputs, targets, updates),
    }
    print_comparison(in_turn(sides, repeats=repeats, warmup=3), peer="by hand")


def by_hand(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, updates: int) -> Callable[[], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

    def run() -> float:
        start = time.process_time()
        for _ in range(updates):
            for x, target in zip(inputs, targets, strict=True):
                (cross_entropy(model(x), target) / NUM_MINIBATCHES).backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.process_time() - start

    return run


def with_vbs(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, updates: int) -> Callable[[], float]:
    minibatch = inputs.shape[1]
    batch = NUM_MINIBATCHES * minibatch
    sampler = vbs.CustomSampler(dataset_size=updates * batch, trace=batch, minibatch_size=minibatch)
    inner = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=batch)

    def run() -> float:
        optimizer.set_epoch(0)
        start = time.process_time()
        for _ in range(updates):
            for x, target in zip(inputs, targets, strict=True):
                cross_entropy(model(x), target).backward()
                optimizer.step()
        return time.process_time() - start

    return run


if __name__ == "__main__":
    main()
