"""Time of an update of 4 accumulated minibatches in one process, compared with a hand-written loop and other AdaScales.

In CPU time of one thread, which excludes the time of other programs. "Operations" are the tensor operations of an
update of this library, without its Python code.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import peers
import torch
from measure import in_turn, print_comparison, print_machine
from resnet import resnet50
from torch import nn
from torch.nn.functional import cross_entropy

import variable_batch_size as vbs

NUM_MINIBATCHES = 4

Losses = list[Callable[[nn.Module], torch.Tensor]]


def main() -> None:
    print_machine()
    os.environ["OMP_NUM_THREADS"] = "1"  # torch.set_num_threads() does not affect all matrix products
    for compare in (compare_mlp, compare_resnet):
        # a separate process each: AdaptDL initializes the process group, of which there can be only one
        process = multiprocessing.get_context("spawn").Process(target=compare)
        process.start()
        process.join()


def compare_mlp() -> None:
    mlp = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    compare("MLP", mlp, torch.randn(NUM_MINIBATCHES, 32, 256), updates=10, repeats=150)


def compare_resnet() -> None:
    compare("ResNet-50", resnet50(), torch.randn(NUM_MINIBATCHES, 8, 3, 64, 64), updates=1, repeats=8)


def compare(name: str, model: nn.Module, inputs: torch.Tensor, *, updates: int, repeats: int) -> None:
    """Train a separate model with each side, `updates` steps at a time."""
    torch.set_num_threads(1)
    tensors = list(model.parameters())
    print(f"{name}: {sum(p.numel() for p in tensors):_} parameters in {len(tensors)} tensors, ", end="")
    print(f"{NUM_MINIBATCHES} minibatches of {' x '.join(map(str, inputs.shape[1:]))}, {updates} updates at a time")
    losses: Losses = [partial(loss_of, x, torch.zeros(len(x), dtype=torch.int64)) for x in inputs]
    updaters = {
        "by hand": by_hand(deepcopy(model), losses),
        "by hand again": by_hand(deepcopy(model), losses),
        "linear rule's operations": operations(deepcopy(model), losses, measures=False),
        "vbs.LinearRuleOptimizer": with_vbs(vbs.LinearRuleOptimizer, deepcopy(model), losses, len(inputs[0])),
        "AdaScale's operations": operations(deepcopy(model), losses, measures=True),
        "vbs.AdaScaleOptimizer": with_vbs(vbs.AdaScaleOptimizer, deepcopy(model), losses, len(inputs[0])),
    }
    fairscale = peers.fairscale_adascale()
    if fairscale is not None:
        updaters["FairScale AdaScale"] = with_fairscale(fairscale, deepcopy(model), losses)
    if peers.has_adaptdl():  # last, because the other sides must not use its process group
        updaters["AdaptDL AdaScale"] = with_adaptdl(deepcopy(model), losses, len(inputs[0]))
    sides = {side: partial(seconds_of, update, updates) for side, update in updaters.items()}
    print_comparison(in_turn(sides, repeats=repeats, warmup=3), peer="by hand")
    for side in {"FairScale AdaScale", "AdaptDL AdaScale"} - set(sides):
        print(f"{side}: not installed")


def loss_of(x: torch.Tensor, target: torch.Tensor, model: nn.Module) -> torch.Tensor:
    return cross_entropy(model(x), target)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)


def seconds_of(update: Callable[[], None], updates: int) -> float:
    start = time.process_time()
    for _ in range(updates):
        update()
    return time.process_time() - start


def by_hand(model: nn.Module, losses: Losses) -> Callable[[], None]:
    optimizer = sgd(model)

    def update() -> None:
        for loss in losses:
            (loss(model) / NUM_MINIBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def operations(model: nn.Module, losses: Losses, *, measures: bool) -> Callable[[], None]:
    """Flat sums of the gradients, and with `measures` the squared norms of each minibatch's and of their mean."""
    optimizer, parameters = sgd(model), list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    sums = [part.view_as(p) for part, p in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True)]

    def update() -> None:
        norms: list[torch.Tensor] = []
        for number, loss in enumerate(losses):
            loss(model).backward()
            gradients = [p.grad for p in parameters]
            if measures:
                norms += torch._foreach_norm(gradients)
            (torch._foreach_add_ if number else torch._foreach_copy_)(sums, gradients)
            for p in parameters:
                p.grad = None
        flat.mul_(1 / NUM_MINIBATCHES)
        if measures:
            torch.stack([sum_of_squares(norms), sum_of_squares(torch._foreach_norm(sums))]).tolist()
        for p, gradient in zip(parameters, sums, strict=True):
            p.grad = gradient
        optimizer.step()
        optimizer.zero_grad()

    return update


def sum_of_squares(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(norms)).square_().sum()


def with_vbs(kind: Any, model: nn.Module, losses: Losses, minibatch_size: int) -> Callable[[], None]:
    batch_size = NUM_MINIBATCHES * minibatch_size
    sampler = vbs.CustomSampler(dataset_size=10**9, trace=batch_size, minibatch_size=minibatch_size)
    sampler.must_be_read = False  # the loop reads no loader
    optimizer = kind(sgd(model), sampler, ref_batchsize=batch_size)

    def update() -> None:
        for loss in losses:
            loss(model).backward()
            optimizer.step()

    return update


def with_fairscale(kind: Any, model: nn.Module, losses: Losses) -> Callable[[], None]:
    optimizer = kind(sgd(model), world_size=1, scale=1.0, num_gradients_to_accumulate=NUM_MINIBATCHES)

    def update() -> None:
        for loss in losses:
            loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def with_adaptdl(model: nn.Module, losses: Losses, minibatch_size: int) -> Callable[[], None]:
    logging.disable()
    warnings.simplefilter("ignore")  # it warns for every minibatch after the first of a step
    adaptdl = peers.AdaptDL(model, sgd(model), minibatch_size=minibatch_size, num_minibatches=NUM_MINIBATCHES)
    return partial(adaptdl.run, losses)


if __name__ == "__main__":
    main()
