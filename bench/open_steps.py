"""Open steps compared with steps that a trace defines: the same minibatches, in one process and in two gloo processes.

A step has 8 minibatches of an MLP with 0.8 or 9.4 million weights, 4 of them on each of two cores. Single steps of both
sides alternate, so that other load affects both. CPU time is less affected by it than wall time, but does not include
waits for the other core. A second run of the trace shows how much equal sides differ. Goal: at most 1.01.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count, islice

import numpy as np
import torch
from measure import Numbers, in_turn, print_comparison, print_machine
from torch import nn

import variable_batch_size as vbs

NUM_MINIBATCHES, SIZE, STEPS, WARMUP = 8, 64, 50, 10
NETWORKS = {"0.8 M weights": ((1024, 512), 100), "9.4 M weights": ((4096, 2048), 30)}  # layers, and repetitions
KNOWN, AGAIN, OPEN = "a trace", "the same trace", "open steps"


def main() -> None:
    print_machine()
    for name, (layers, repeats) in NETWORKS.items():
        print_times(f"{name}, one process", time_steps(layers, repeats))
        times = vbs.launch(time_steps, (layers, repeats), cores=2, backend="gloo")[0]
        print_times(f"{name}, two gloo processes", times)


def print_times(name: str, times: tuple[dict[str, Numbers], dict[str, Numbers]]) -> None:
    for kind, seconds in zip(("wall time", "CPU time"), times, strict=True):
        print(f"{name}, {kind}")
        print_comparison(seconds, peer=KNOWN)


def time_steps(layers: tuple[int, int], repeats: int) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
    """The wall and CPU seconds of single steps."""
    torch.set_num_threads(1)
    sides = {name: Side(layers, is_open=name == OPEN) for name in (KNOWN, OPEN, AGAIN)}
    clock = in_turn(sides, repeats=repeats, warmup=WARMUP)
    return clock, {name: np.array(side.of_processor[WARMUP:]) for name, side in sides.items()}


class Side:
    """Runs the next step when it is called, and returns its seconds."""

    def __init__(self, layers: tuple[int, int], *, is_open: bool) -> None:
        torch.manual_seed(0)
        wide, narrow = layers
        self.model = nn.Sequential(
            nn.Linear(256, wide), nn.ReLU(), nn.Linear(wide, narrow), nn.ReLU(), nn.Linear(narrow, 10)
        )
        batch_size = NUM_MINIBATCHES * SIZE
        trace = vbs.OpenSteps() if is_open else batch_size
        self.is_open, self.of_processor, self._steps = is_open, list[float](), self._run()
        self.sampler = vbs.CustomSampler(dataset_size=batch_size * STEPS, trace=trace, minibatch_size=SIZE)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.optimizer = vbs.Optimizer(inner, self.sampler, rule="linear", ref_batchsize=batch_size)
        self.data = torch.randn(SIZE, 256)

    def __call__(self) -> float:
        return next(self._steps)

    def _run(self) -> Iterator[float]:
        for epoch in count():
            self.optimizer.set_epoch(epoch)
            read = iter(self.sampler)
            for _ in range(STEPS):
                start, of_processor = time.perf_counter(), time.process_time()
                own = islice(read, NUM_MINIBATCHES // self.sampler.num_replicas)
                for _ in self.optimizer.minibatches(own) if self.is_open else own:
                    self.model(self.data).square().mean().backward()
                    self.optimizer.step()
                self.of_processor.append(time.process_time() - of_processor)
                yield time.perf_counter() - start


if __name__ == "__main__":
    main()
