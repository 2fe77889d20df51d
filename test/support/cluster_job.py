"""A small job of a pool: synthetic data, an exact progress, weights and batch sizes at its end."""

import argparse
import itertools
import os
import time
from pathlib import Path

import torch
from held import Hold

import variable_batch_size as vbs
from variable_batch_size.cores.signals import is_stop_requested

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", required=True)
parser.add_argument("--progress", type=float, default=120.0)
parser.add_argument("--pause", type=float, default=0.0, help="seconds of each minibatch")
parser.add_argument("--trace")
parser.add_argument("--hold", type=Path, help="the folder of a hold, after some minibatches and until SIGTERM")

HELD_AFTER = 40  # minibatches of a session


def main(options):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Linear(6, 1).double()
    data = torch.utils.data.TensorDataset(torch.randn(512, 6).double(), torch.randn(512, 1).double())
    trace = vbs.Trace.read(options.trace) if options.trace else vbs.Autoscale(max_batch_size=64, every=6, lead=2)
    loader = vbs.DataLoader(data, trace, minibatch_size=4)
    inner = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    optimizer = vbs.AdaScaleOptimizer(inner, loader, ref_batchsize=8)
    optimizer.attach(vbs.Checkpoint(options.checkpoint, model=model, optimizer=optimizer, every_seconds=0.2))
    minibatches = itertools.count(1)
    for _ in optimizer.epochs(progress=None if options.trace else options.progress):
        for x, y in loader:
            if next(minibatches) == HELD_AFTER and options.hold:
                Hold(options.hold).here(until=is_stop_requested)
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            time.sleep(options.pause)
    if int(os.environ.get("RANK", 0)) == 0:
        torch.save(model.state_dict(), Path(options.checkpoint) / "weights.pt")


if __name__ == "__main__":
    vbs.launch(main, (parser.parse_args(),))
