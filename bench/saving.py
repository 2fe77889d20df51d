"""How long a checkpoint of 1 GB blocks training if written asynchronously, compared with synchronously.

python bench/saving.py
"""

import tempfile
import time

import measure
import numpy as np
import torch
from torch import nn

import variable_batch_size as vbs

PARAMETERS = 2**27  # 512 MB, and the same for momentum
REPEATS = 5


class Run:
    """A run with checkpoints of 1 GB."""

    def __init__(self, *, asynchronous: bool) -> None:
        self.directory = tempfile.TemporaryDirectory(dir=".")
        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros(PARAMETERS // 32, 32))
        sampler = vbs.CustomSampler(dataset_size=32, trace=32, minibatch_size=32)
        sampler.must_be_read = False  # the loop reads no loader
        inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self.optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=32)
        how = {"asynchronous": asynchronous, "keep": 1}
        self.checkpoint = vbs.Checkpoint(self.directory.name, model=model, optimizer=self.optimizer, **how)
        model.weight.grad = torch.ones_like(model.weight)
        self.optimizer.step()
        model.weight.grad = None
        self.checkpoint.step()
        self.checkpoint.wait()

    def standstill(self) -> float:
        """The seconds for which training is blocked."""
        start = time.perf_counter()
        self.checkpoint.save()
        seconds = time.perf_counter() - start
        self.checkpoint.wait()
        return seconds


def main() -> None:
    measure.print_machine()
    runs = {"synchronous": Run(asynchronous=False), "asynchronous": Run(asynchronous=True)}
    first = {name: run.standstill() for name, run in runs.items()}
    found = measure.in_turn({name: run.standstill for name, run in runs.items()}, repeats=REPEATS, warmup=0)
    print("seconds for which a checkpoint of 1 GB blocks training: median (quartiles), and the first one")
    for name, seconds in found.items():
        print(f"  {name:13} {measure.spread(seconds)}   first {first[name]:.2f}")
    share = float(np.median(found["asynchronous"]) / np.median(found["synchronous"]))
    print(f"asynchronous / synchronous: {share:.3f} (goal: below 0.1)")


if __name__ == "__main__":
    main()
