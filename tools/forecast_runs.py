"""Record the runs with which forecasts are tested: digits, trained to the end, with simulated times.

python tools/forecast_runs.py --out test/lab/planning/forecast_runs

The gradients, the noise and the decisions are real. The clock is not, so that it does not depend on the machine: a
minibatch takes 20 ms and an update 15 ms more, both with lognormal noise of 10 %, and each 100th step half a second, as
for a checkpoint.
"""

import argparse
import random
import shutil
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import variable_batch_size as vbs
from variable_batch_size.files import LOG, RUN
from variable_batch_size.runs import log as log_module

MINIBATCH, REF_BATCHSIZE = 16, 32
TRACE = "0:32 150:64 300:128 450:256"
RUNS = {  # the trace, the rule, and the number of epochs
    "constant": (64, "linear", 20),
    "stages": (TRACE, "adascale", 30),
    "autoscale": (vbs.Autoscale(max_batch_size=512, every=10, lead=4), "adascale", 40),
}


class Clock:
    """Seconds that pass with minibatches and steps."""

    def __init__(self) -> None:
        self.now, self._random = 0.0, random.Random(0)

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds * self._random.lognormvariate(0.0, 0.1)


def record(name: str, directory: Path) -> None:
    trace, rule, epochs = RUNS[name]
    shutil.rmtree(directory, ignore_errors=True)
    torch.manual_seed(0)
    digits = load_digits()
    data = torch.tensor(digits.data, dtype=torch.float32) / 16
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    dataset = TensorDataset(data, torch.tensor(digits.target))
    loader = vbs.DataLoader(dataset, trace=trace, minibatch_size=MINIBATCH, seed=0)
    inner = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    optimizer = vbs.Optimizer(inner, loader, rule=rule, ref_batchsize=REF_BATCHSIZE, model=model)
    clock = Clock()
    log_module.time.monotonic = clock  # of this process, which does nothing else
    if optimizer._driver is not None:
        optimizer._driver.clock = clock
    with vbs.Log(optimizer, every=10, to=[vbs.JsonLines(directory / "log.jsonl")]) as log:
        optimizer.attach(log)
        checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer)
        is_first = True
        for _ in checkpoint.epochs(epochs):
            for inputs, target in loader:
                clock.wait(0.020 + 0.015 * is_first)
                if is_first and optimizer.steps_done % 100 == 99:
                    clock.wait(0.5)
                loss = nn.functional.cross_entropy(model(inputs), target)
                loss.backward()
                is_first = optimizer.step(loss=loss)
                checkpoint.step()
    for path in directory.iterdir():
        if path.name not in (LOG, RUN):
            path.unlink()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the directory of the runs")
    options = parser.parse_args()
    for run in RUNS:
        record(run, options.out / run)
