"""Open steps compared with steps that a trace defines: the same minibatches, in one process and in two gloo processes.

A step has 8 minibatches of an MLP with 0.8 million weights, 4 of them on each of two cores. Goal: at most 1.01.
"""

from __future__ import annotations

import time
from itertools import islice

import torch
from measure import Numbers, in_turn, print_comparison, print_machine
from torch import nn

import variable_batch_size as vbs

NUM_MINIBATCHES, SIZE, STEPS, REPEATS = 8, 64, 20, 12
KNOWN, OPEN = "a trace", "open steps"


def main() -> None:
    print_machine()
    print("one process")
    print_comparison(time_epochs(), peer=KNOWN)
    print("two gloo processes")
    print_comparison(vbs.launch(time_epochs, cores=2, backend="gloo")[0], peer=KNOWN)


def time_epochs() -> dict[str, Numbers]:
    torch.set_num_threads(1)
    return in_turn({KNOWN: Epochs(is_open=False), OPEN: Epochs(is_open=True)}, repeats=REPEATS, warmup=2)


class Epochs:
    """Runs the next epoch when it is called."""

    def __init__(self, *, is_open: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))
        batch_size = NUM_MINIBATCHES * SIZE
        trace = vbs.OpenSteps() if is_open else batch_size
        self.is_open, self.epoch = is_open, -1
        self.sampler = vbs.CustomSampler(dataset_size=batch_size * STEPS, trace=trace, minibatch_size=SIZE)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.optimizer = vbs.Optimizer(inner, self.sampler, rule="linear", ref_batchsize=batch_size)
        self.data = torch.randn(SIZE, 256)

    def __call__(self) -> float:
        self.epoch += 1
        self.optimizer.set_epoch(self.epoch)
        start, read = time.perf_counter(), iter(self.sampler)
        for _ in range(STEPS):
            own = islice(read, NUM_MINIBATCHES // self.sampler.num_replicas)
            for _ in self.optimizer.minibatches(own) if self.is_open else own:
                self.model(self.data).square().mean().backward()
                self.optimizer.step()
        return time.perf_counter() - start


if __name__ == "__main__":
    main()
