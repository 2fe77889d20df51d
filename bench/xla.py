"""Replay a trace on XLA: graphs, compilation, executions, transfers, compared with accumulation in one graph."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from measure import print_machine, print_row
from torch import nn
from torch.nn.functional import cross_entropy

import variable_batch_size as vbs

MINIBATCH = 32
CONSTANT = 4
WIDTHS = (26, 9, 12, 14, 14, 14, 12, 10)
RULES = [
    name for name, rule in vbs.rules.RULES.items() if not rule.needs and name != "muon"
]  # Muon supports matrices only
HIDDEN = {"23 k parameters": [], "1.2 M parameters": [512]}  # widths of the layers before the last one
SMALL, LARGE = HIDDEN
BY_HAND = "by hand, one graph a size"
BY_HAND_SYNCED = "by hand, sync a minibatch"


def trace_of(num_sizes: int) -> list[int]:
    """A trace of `num_sizes` sizes, from 1 minibatch on, in mixed order."""
    return [MINIBATCH * int(n) for n in np.random.RandomState(0).permutation(np.arange(1, num_sizes + 1))]


def network(name: str) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    widths = [2304, *HIDDEN[name]]
    for num_in, num_out in pairwise(widths):
        layers += [nn.Linear(num_in, num_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


def replay(side: str, sizes: list[int], passes: int, name: str = SMALL) -> list[dict[str, float]]:
    """Replay the sizes several times on this core; returns the seconds and XLA's counters of each pass."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    device = torch_xla.device()
    torch.manual_seed(0)
    model = network(name).to(device)
    data = [(torch.randn(MINIBATCH, 1, 28, 28), torch.randint(0, 10, (MINIBATCH,))) for _ in range(8)]
    minibatches = [(x.to(device), y.to(device)) for x, y in data]
    hands = {BY_HAND: by_hand(model), BY_HAND_SYNCED: by_hand(model, syncs=True)}
    step = hands.get(side) or ours(side, model, sizes)
    found = []
    for _ in range(passes):
        before = counted()
        start = time.perf_counter()
        for size in sizes:
            step([minibatches[i % len(minibatches)] for i in range(size // MINIBATCH)])
        xm.wait_device_ops()
        seconds = time.perf_counter() - start
        found.append({name: value - before[name] for name, value in counted().items()} | {"seconds": seconds})
    return found


def by_hand(model: nn.Module, *, syncs: bool = False) -> Callable[[list[Any]], None]:
    """A naive loop: accumulate, then `xm.optimizer_step`. Each number of minibatches is a new graph.

    Unless it syncs after every minibatch, as a loop over torch_xla's own loader does.
    """
    import torch_xla
    import torch_xla.core.xla_model as xm

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)

    def step(minibatches: list[Any]) -> None:
        optimizer.zero_grad()
        for x, y in minibatches:
            (cross_entropy(model(x), y) / len(minibatches)).backward()
            if syncs:
                torch_xla.sync()
        optimizer.param_groups[0]["lr"] = 0.01 * len(minibatches) / CONSTANT + 1e-9
        xm.optimizer_step(optimizer)
        torch_xla.sync()

    return step


def ours(rule: str, model: nn.Module, sizes: list[int]) -> Callable[[list[Any]], None]:
    sampler = vbs.CustomSampler(dataset_size=10**9, trace=sizes, minibatch_size=MINIBATCH, on_end="cycle")
    sampler.must_be_read = False  # the loop reads no loader
    is_adam = rule.startswith("adam")
    parameters = model.parameters()
    inner = torch.optim.AdamW(parameters) if is_adam else torch.optim.SGD(parameters, lr=0.01, momentum=0.5)
    optimizer = vbs.CustomOptimizer(inner, sampler, rule=vbs.rules.make_rule(rule), ref_batchsize=CONSTANT * MINIBATCH)

    def step(minibatches: list[Any]) -> None:
        for x, y in minibatches:
            cross_entropy(model(x), y).backward()
            optimizer.step()

    return step


def counted() -> dict[str, float]:
    """XLA's counters so far in this process."""
    import torch_xla.debug.metrics as metrics

    def of(name: str) -> tuple[int, float]:
        found = metrics.metric_data(name)
        return (found[0], found[1] / 1e9) if found else (0, 0.0)

    return {
        "graphs": metrics.counter_value("UncachedCompile") or 0,
        "compile": of("CompileTime")[1],
        "executions": of("ExecuteTime")[0],
        "transfers": of("TransferFromDeviceTime")[0],
        "operations": sum(metrics.counter_value(name) for name in metrics.counter_names() if name.startswith("xla::")),
    }


def print_side(side: str, passes: list[dict[str, float]], sizes: list[int], peer_seconds: float | None) -> None:
    first, last = passes[0], passes[-1]
    print_row(
        side,
        f"{sum(found['graphs'] for found in passes):.0f}",
        f"{first['compile']:.1f}",
        f"{last['executions'] / len(sizes):.2f}",
        f"{last['transfers'] / len(sizes):.2f}",
        f"{first['seconds']:.2f}",
        "–" if peer_seconds is None else f"{first['seconds'] / peer_seconds:.3f}",
        f"{last['seconds'] / len(sizes) * 1e3:.1f}",
        widths=WIDTHS,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[12, 48])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument(
        "--by-hand", type=int, default=12, help="maximum number of sizes for the hand-written loop: 48 take 10 minutes"
    )
    options = parser.parse_args()
    print_machine()
    for num_sizes in options.sizes:
        sizes = trace_of(num_sizes)
        print(f"{num_sizes} sizes, {sum(sizes) // MINIBATCH} minibatches, one virtual core\n")
        print_row(
            "side",
            "graphs",
            "compile s",
            "executions",
            "transfers",
            "first replay",
            "ratio",
            "ms a step",
            widths=WIDTHS,
        )
        print_row("", "", "", "an update", "an update", "s", "", "later", widths=WIDTHS)
        peer_seconds = None
        for side in [*([BY_HAND] if num_sizes <= options.by_hand else []), *options.rules]:
            passes = 3 if num_sizes <= options.by_hand else 2  # the hand-written loop still compiles in the second pass
            (found,) = vbs.launch(replay, (side, sizes, passes), cores=1, backend="xla")
            peer_seconds = found[0]["seconds"] if side == BY_HAND else peer_seconds
            print_side(side, found, sizes, peer_seconds)
        print()
    for name in HIDDEN:
        print(f"{name}, always {CONSTANT} minibatches: ms a step, best of 5 times 20 steps; traced operations a step")
        best = {}
        for side in (BY_HAND_SYNCED, BY_HAND, "linear", "adascale"):
            (found,) = vbs.launch(replay, (side, [CONSTANT * MINIBATCH] * 20, 6, name), cores=1, backend="xla")
            best[side] = min(one["seconds"] for one in found[1:]) / 20 * 1e3
            operations = found[-1]["operations"] / 20
            print(f"{side:26}{best[side]:8.1f}   {best[side] / best[BY_HAND_SYNCED]:.3f}{operations:8.0f}", flush=True)


if __name__ == "__main__":
    main()
