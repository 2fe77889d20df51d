"""Overhead of minibatch weights and measured noise: an update of 4 accumulated minibatches, with and without.

In CPU time of one thread, which excludes the time of other programs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from measure import in_turn, print_comparison, print_machine
from torch import nn
from torch.nn.functional import cross_entropy

import variable_batch_size as vbs

NUM_MINIBATCHES = 4
MINIBATCH = 16
WIDTH, LAYERS, VOCABULARY = 1024, 23, 512


def network() -> nn.Module:
    """25 million parameters in 49 tensors with little computation, so that the overhead becomes visible."""
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY))


def side(
    model: nn.Module, tokens: torch.Tensor, *, weight: Callable[[torch.Tensor], Any] | None = None, **options: Any
) -> Callable[[], float]:
    """The seconds of an update, with the mean of the losses, or with their sum and its weight."""
    size = NUM_MINIBATCHES * MINIBATCH
    sampler = vbs.CustomSampler(dataset_size=10**9, trace=size, minibatch_size=MINIBATCH)
    sampler.must_be_read = False  # the loop reads no loader
    inner = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=size, **options)
    reduction = "mean" if weight is None else "sum"

    def update() -> float:
        start = time.process_time()
        for row in tokens:
            cross_entropy(model(row[:-1]), row[1:], reduction=reduction).backward()
            optimizer.step(weight=None if weight is None else weight(row[1:]))
        return time.process_time() - start

    return update


def count(targets: torch.Tensor) -> torch.Tensor:
    """The number of tokens as a tensor, as from a mask."""
    return (targets >= 0).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=31)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print_machine()
    torch.manual_seed(0)
    model = network()
    tensors = list(model.parameters())
    print(f"{sum(p.numel() for p in tensors):_} parameters in {len(tensors)} tensors, ", end="")
    print(f"{NUM_MINIBATCHES} minibatches of {MINIBATCH} tokens")
    tokens = torch.randint(0, VOCABULARY, (NUM_MINIBATCHES, MINIBATCH + 1))
    make = partial(side, tokens=tokens)
    sides = {
        "without weights": make(deepcopy(model)),
        "without weights again": make(deepcopy(model)),
        "weights, numbers": make(deepcopy(model), weight=len),
        "weights, tensors": make(deepcopy(model), weight=count),
        "noise measured": make(deepcopy(model), measure_noise=True),
        "weights, noise measured": make(deepcopy(model), weight=count, measure_noise=True),
    }
    print_comparison(in_turn(sides, repeats=options.repeats, warmup=3), peer="without weights")


if __name__ == "__main__":
    main()
