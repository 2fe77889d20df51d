"""Replay a trace on XLA: graphs, compilation, executions, transfers, compared with accumulation in one graph."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from measure import print_comparison, print_machine, print_row
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


def replay(sides: list[str], sizes: list[int], passes: int, name: str = SMALL) -> dict[str, list[dict[str, float]]]:
    """Replay the sizes several times on this core, alternating the sides; seconds and XLA's counters of each pass."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    device = torch_xla.device()
    data = [(torch.randn(MINIBATCH, 1, 28, 28), torch.randint(0, 10, (MINIBATCH,))) for _ in range(8)]
    minibatches = [(x.to(device), y.to(device)) for x, y in data]
    steps = {side: step_of(side, name, sizes, device) for side in sides}
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for _ in range(passes):
        for side, step in steps.items():
            before = counted()
            start = time.perf_counter()
            for size in sizes:
                step([minibatches[i % len(minibatches)] for i in range(size // MINIBATCH)])
            xm.wait_device_ops()
            seconds = time.perf_counter() - start
            counts = {counter: value - before[counter] for counter, value in counted().items()}
            found[side].append(counts | {"seconds": seconds})
    return found


def step_of(side: str, name: str, sizes: list[int], device: torch.device) -> Callable[[list[Any]], None]:
    torch.manual_seed(0)
    model = network(name).to(device)
    if side in (BY_HAND, BY_HAND_SYNCED):
        return by_hand(model, syncs=side == BY_HAND_SYNCED)
    return ours(side, model, sizes)


def by_hand(model: nn.Module, *, syncs: bool = False) -> Callable[[list[Any]], None]:
    """A naive loop: accumulate, then `xm.optimizer_step`.

    Each number of minibatches is a new graph, unless it syncs after every minibatch, as a loop over torch_xla's own
    loader does.
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
    parser.add_argument("--repeats", type=int, default=15, help="of 20 steps of the same size")
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
            (results,) = vbs.launch(replay, ([side], sizes, passes), cores=1, backend="xla")
            found = results[side]
            peer_seconds = found[0]["seconds"] if side == BY_HAND else peer_seconds
            print_side(side, found, sizes, peer_seconds)
        print()
    for name in HIDDEN:
        print(f"{name}, always {CONSTANT} minibatches, 20 steps at a time, alternating sides; traced operations a step")
        sides = [BY_HAND_SYNCED, BY_HAND, "linear", "adascale"]
        sizes = [CONSTANT * MINIBATCH] * 20
        (found,) = vbs.launch(replay, (sides, sizes, options.repeats + 1, name), cores=1, backend="xla")
        later = {side: passes[1:] for side, passes in found.items()}  # the first one compiles
        seconds = {side: np.array([one["seconds"] / 20 for one in passes]) for side, passes in later.items()}
        print_comparison(seconds, peer=BY_HAND_SYNCED)
        print(*(f"{side}: {passes[-1]['operations'] / 20:.0f} operations" for side, passes in later.items()), sep=", ")
        print()


if __name__ == "__main__":
    main()
