"""Models in fully_shard and DistributedDataParallel: the library compared with plain loops with the same accumulation.

Wall time, between gloo processes on a CPU, or in a world of one process on a GPU (``--device cuda``), where it also
prints the memory beyond that of the plain loop. Then how long a save blocks training, synchronously and asynchronously.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import gpt
import numpy as np
import torch
import torch.distributed as dist
from measure import Numbers, in_turn, print_comparison, print_machine, print_row, spread
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
MINIBATCH = {"cpu": 32, "cuda": 8}  # with 8 texts of 1,024 tokens fully_shard keeps a fast GPU waiting for the host
WIDTH, LAYERS = 512, 8
WARM = 24  # updates: of the first 20, AdaScale reads the gain at once
SIDES = ["plain", "plain again", "plain that waits", "linear", "AdaScale"]
WAYS = ["sharded", "sharded, reduced once a step", "wrapped"]
RULES = {"linear": vbs.LinearRuleOptimizer, "AdaScale": vbs.AdaScaleOptimizer}

Update = Callable[[], None]


class Many(nn.Module):
    """As many parameters as GPT-2 small with hardly any computation: host time dominates."""

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Sequential(nn.LayerNorm(32), *(nn.Linear(32, 32) for _ in range(5))) for _ in range(12)]
        self.blocks = nn.Sequential(*parts)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Blocks with little computation for their 2 million parameters: gradient handling dominates."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))  # type: ignore[no-any-return]


def workload(
    device: str, is_tiny: bool = False, size: int | None = None
) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """A model, and its loss on a fixed minibatch: GPT-2 small on a GPU."""
    torch.manual_seed(0)
    size = size or MINIBATCH[device]
    if is_tiny:
        inputs = torch.randn(1, 32, device=device)
        return Many().to(device), lambda model: model(inputs).square().mean()
    if device == "cuda":
        tokens = torch.randint(0, gpt.VOCABULARY, (size, gpt.CONTEXT + 1), device=device)
        return gpt.GPT().to(device), lambda model: gpt.loss(model, tokens)
    x, y = torch.randn(size, WIDTH), torch.randint(0, 10, (size,))
    return Stack(), lambda model: cross_entropy(model(x), y)


def spread_over_cores(model: nn.Module, way: str) -> nn.Module:
    model = deepcopy(model)
    if way == "wrapped":
        return DistributedDataParallel(model)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(model)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-6)


# ------------------------------------------------------------------------------------------------------------ updates


def plain_update(side: str, model: Any, loss: Callable[[nn.Module], torch.Tensor], way: str, depth: int) -> Update:
    """A hand-written loop in which the wrapper reduces gradients.

    The side that waits reads its gradient's norm before it updates, as AdaScale must.
    """
    optimizer = adamw(model)

    def update() -> None:
        for number in range(depth):
            is_last = number == depth - 1
            if way == "wrapped":
                model.require_backward_grad_sync = is_last
            else:
                model.set_requires_gradient_sync(is_last or way == "sharded")
            (loss(model) / depth).backward()
        if side != "plain that waits" or norm_of(model) < torch.inf:
            optimizer.step()
        optimizer.zero_grad()

    return update


def norm_of(model: nn.Module) -> float:
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), torch.inf)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def update_of(rule: str, model: nn.Module, loss: Callable[[nn.Module], torch.Tensor], way: str, depth: int) -> Update:
    size = depth * dist.get_world_size()
    sampler = vbs.CustomSampler(dataset_size=10**9, trace=size, minibatch_size=1)
    sampler.must_be_read = False  # the loop reads no loader
    options = {"reduce_scatter_once": True} if "once" in way else {}
    optimizer = RULES[rule](adamw(model), sampler, ref_batchsize=size, model=model, **options)

    def update() -> None:
        for _ in range(depth):
            loss(model).backward()
            optimizer.step()

    return update


def updates_of(way: str, device: str, depth: int, is_tiny: bool, size: int | None) -> tuple[dict[str, Update], int]:
    """An update of each side, and the bytes of the gradients of one core."""
    model, loss = workload(device, is_tiny, size)
    updates = {}
    for side in SIDES:
        own = spread_over_cores(model, way)
        make = update_of if side in RULES else plain_update
        updates[side] = make(side, own, loss, way, depth)
    return updates, sum(p.numel() * p.element_size() for p in model.parameters()) // dist.get_world_size()


# ----------------------------------------------------------------------------------------------------------- measuring


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def time_sides(
    way: str, device: str, depth: int, repeats: int, is_tiny: bool, size: int | None
) -> tuple[dict[str, Numbers], dict[str, float]]:
    """Seconds of an update, and peak GPU memory over that of the plain loop, in gradients."""
    torch.set_num_threads(1)
    updates, gradient = updates_of(way, device, depth, is_tiny, size)
    at_once = max(1, 8 // depth)

    def timed(update: Update) -> float:
        wait(device)
        start = time.perf_counter()
        for _ in range(at_once):
            update()
        wait(device)
        return (time.perf_counter() - start) / at_once

    sides = {side: partial(timed, update) for side, update in updates.items()}
    seconds = in_turn(sides, repeats=repeats, warmup=-(-WARM // at_once))
    peaks = {side: peak_of(update) for side, update in updates.items()} if device == "cuda" else {}
    return seconds, {side: (peak - peaks["plain"]) / gradient for side, peak in peaks.items()}


def peak_of(update: Update) -> int:
    """Bytes of GPU memory that an update allocates temporarily."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    update()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def time_saves(device: str, directory: str, repeats: int) -> dict[str, Numbers]:
    """Seconds for which a save blocks training; for the asynchronous one, also the seconds until it is written."""
    torch.set_num_threads(1)
    model, loss = workload(device)
    seconds: dict[str, list[float]] = {}
    for name, asynchronous in (("at once", False), ("asynchronously", True)):
        own = spread_over_cores(model, "sharded")
        sampler = vbs.CustomSampler(dataset_size=10**9, trace=dist.get_world_size(), minibatch_size=1)
        sampler.must_be_read = False  # the loop reads no loader
        optimizer = vbs.LinearRuleOptimizer(adamw(own), sampler, ref_batchsize=dist.get_world_size(), model=own)
        where = Path(directory) / name.replace(" ", "-")
        checkpoint = vbs.Checkpoint(
            where, model=own, optimizer=optimizer, keep=1, format="sharded", asynchronous=asynchronous
        )
        for repeat in range(-1, repeats):
            loss(own).backward()
            optimizer.step()
            wait(device)
            start = time.perf_counter()
            checkpoint.save()
            if device == "cuda":
                torch.cuda.synchronize()
            stopped = time.perf_counter() - start
            checkpoint.wait()
            wait(device)
            if repeat >= 0:
                seconds.setdefault(name, []).append(stopped)
                if asynchronous:
                    seconds.setdefault("until it is written", []).append(time.perf_counter() - start)
    return {name: np.array(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=list(BACKENDS), default="cpu")
    parser.add_argument("--cores", type=int, help="processes (default: 2 on a CPU, 1 on a GPU)")
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--minibatch", type=int, help="samples (default: 32 on a CPU, 8 on a GPU)")
    parser.add_argument("--tiny", action="store_true", help="many small parameters, to measure host time")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--saves", type=int, default=5, help="number of saves; 0 for none")
    flags = parser.parse_args()
    cores = flags.cores or (2 if flags.device == "cpu" else 1)
    launched: Any = partial(vbs.launch, cores=cores, backend=BACKENDS[flags.device])
    print_machine()
    for way in flags.ways:
        for depth in flags.accumulate:
            print(f"{way}, {depth} minibatches of a core in a step, {cores} processes on {flags.device}")
            what = (way, flags.device, depth, flags.repeats, flags.tiny, flags.minibatch)
            seconds, memory = launched(time_sides, what)[0]
            print_comparison(seconds, peer="plain")
            for side, more in memory.items():
                print_row(side, f"{more:+.2f} gradients of memory", widths=(28, 40))
    if flags.saves:
        with tempfile.TemporaryDirectory() as directory:
            found = launched(time_saves, (flags.device, directory, flags.saves))[0]
        for name, values in found.items():
            print_row(f"saved {name}", f"{spread(values, scale=1e3)} ms", widths=(28, 40))


if __name__ == "__main__":
    main()
