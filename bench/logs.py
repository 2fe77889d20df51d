"""Overhead of logging and checkpointing: time of a step with a Log and a Checkpoint, compared with a step without.

python bench/logs.py
"""

import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import variable_batch_size as vbs

MINIBATCH = 32
MINIBATCHES = 4  # per step
STEPS = 200  # per round
ROUNDS = 5
LOG_STEPS = 20


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 10, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 20, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(320, 50),
        nn.ReLU(),
        nn.Linear(50, 10),
    )


class Run:
    """A run on random images that continues from round to round, with or without logs."""

    def __init__(self, directory: Path | None) -> None:
        self.model = network()
        size = MINIBATCH * MINIBATCHES
        self.sampler = vbs.CustomSampler(dataset_size=size * STEPS, trace=size, minibatch_size=MINIBATCH)
        self.sampler.must_be_read = False  # the loop reads no loader
        inner = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.5)
        self.optimizer = vbs.LinearRuleOptimizer(inner, self.sampler, ref_batchsize=128)
        self.images, self.labels = torch.randn(MINIBATCH, 1, 28, 28), torch.randint(0, 10, (MINIBATCH,))
        self.log = self.checkpoint = None
        self.seconds_in_logs = 0.0
        if directory is not None:
            sinks = [vbs.TensorBoard(directory), vbs.JsonLines(directory / "log.jsonl")]
            self.log = vbs.Log(self.optimizer, every=LOG_STEPS, to=sinks)
            self.checkpoint = vbs.Checkpoint(directory, model=self.model, optimizer=self.optimizer, every_seconds=600)

    def round(self, epoch: int) -> float:
        """The CPU seconds of an epoch."""
        self.sampler.set_epoch(epoch)
        self.optimizer.set_epoch(epoch)
        start = time.process_time()
        for _ in range(STEPS * MINIBATCHES):
            loss = nn.functional.cross_entropy(self.model(self.images), self.labels)
            loss.backward()
            self.optimizer.step()
            if self.log is not None:
                before = time.thread_time()
                self.log.step(loss)
                self.checkpoint.step()
                self.seconds_in_logs += time.thread_time() - before
        return time.process_time() - start


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        # alternating, and the minimum of each: other load on the machine must not affect only one of them
        pairs = [Run(None), Run(Path(directory))]
        seconds = [[run.round(epoch) for run in pairs] for epoch in range(ROUNDS)]
    plain, logged = (min(column) / STEPS for column in zip(*seconds, strict=True))
    print(f"a step of {MINIBATCHES} minibatches of {MINIBATCH} images, one core")
    print(f"without logs    {1e3 * plain:.3f} ms")
    print(f"with logs       {1e3 * logged:.3f} ms   a record every {LOG_STEPS} steps to TensorBoard and JSON lines")
    print(f"more            {100 * (logged / plain - 1):+.2f} %")
    in_logs = pairs[1].seconds_in_logs / (ROUNDS * STEPS)
    print(f"in their calls  {1e3 * in_logs:.3f} ms, {100 * in_logs / plain:.2f} %")


if __name__ == "__main__":
    main()
