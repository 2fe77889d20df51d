"""Two gloo processes that share steps: by round robin, as they are free, and by speed.

A minibatch sleeps for 50 ms, on a slow core for 150 ms, so that other load on this machine counts less. A step has 32
minibatches. The ideal split between a core and one that is three times slower is 24 and 8, in half of the time of
round robin. Prints the seconds of an epoch and their ratio to the ideal split, after a first epoch in which speeds are
measured.
"""

from __future__ import annotations

import time

import torch
from measure import Numbers, in_turn, print_machine, print_row, spread

import variable_batch_size as vbs
from variable_batch_size.data.shares import ASSIGN, Assign

SECONDS, MINIBATCHES, STEPS, REPEATS = 0.05, 32, 8, 2
WIDTHS = (26, 16, 30, 26)


def main() -> None:
    print_machine()
    print_row("cores", "assigned", "seconds, median (quartiles)", "of the ideal split", widths=WIDTHS)
    for name, slowness in (("equal", 1), ("one three times slower", 3)):
        ideal = STEPS * MINIBATCHES * SECONDS / (1 + 1 / slowness)
        found = vbs.launch(time_epochs, (slowness,), cores=2, backend="gloo")[0]
        for assign, seconds in found.items():
            print_row(name, assign, spread(seconds), spread(seconds / ideal, digits=3), widths=WIDTHS)


def time_epochs(slowness: int) -> dict[str, Numbers]:
    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    seconds = SECONDS * (slowness if rank else 1)
    epochs = {assign: Epochs(assign, seconds) for assign in ASSIGN}
    return in_turn(epochs, repeats=REPEATS)


class Epochs:
    """Runs the next epoch when it is called."""

    def __init__(self, assign: Assign, seconds: float) -> None:
        torch.manual_seed(0)
        self.model, self.seconds, self.epoch = torch.nn.Linear(16, 4), seconds, -1
        dataset = torch.utils.data.TensorDataset(torch.randn(MINIBATCHES * STEPS, 16))
        self.loader = vbs.DataLoader(dataset, MINIBATCHES, minibatch_size=1, assign=assign)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.optimizer = vbs.Optimizer(inner, self.loader, rule="linear", ref_batchsize=MINIBATCHES)

    def __call__(self) -> float:
        self.epoch += 1
        self.optimizer.set_epoch(self.epoch)
        torch.distributed.barrier()
        start = time.perf_counter()
        for (data,) in self.loader:
            end = time.perf_counter() + self.seconds
            self.model(data).sum().backward()
            time.sleep(max(0.0, end - time.perf_counter()))
            self.optimizer.step()
        return time.perf_counter() - start


if __name__ == "__main__":
    main()
