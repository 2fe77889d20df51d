"""A job for `vbs cluster run`: handwritten digits or MNIST, with a batch size that Autoscale chooses.

It ends at a given progress, so that any number of cores and any batch sizes give the same amount of training. With
`--trace`, it repeats the executed trace of a job that has run in a pool.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import variable_batch_size as vbs

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "--checkpoint", required=True, help="the directory of the checkpoints, the executed trace and the weights"
)
parser.add_argument(
    "--mnist", metavar="DIR", help="train on 10,000 images of MNIST in this directory (default: digits)"
)
parser.add_argument("--progress", type=float, default=2000.0, help="where the run ends, in steps of the reference")
parser.add_argument("--ref-batchsize", type=int, default=32)
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--every-seconds", type=float, default=5.0, help="time between checkpoints")
parser.add_argument("--max-batch-size", type=int, default=512)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--exact", action="store_true", help="the same bits on any number of cores")
parser.add_argument("--trace", help="batch sizes to repeat (default: those of Autoscale)")


def read_data(mnist: str | None) -> torch.utils.data.TensorDataset:
    if mnist is None:
        images, labels = load_digits(return_X_y=True)
        return torch.utils.data.TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    from torchvision.datasets import MNIST

    found = MNIST(mnist, train=True)
    return torch.utils.data.TensorDataset(found.data[:10_000].flatten(1) / 255, found.targets[:10_000])


def main(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    data = read_data(options.mnist)
    trace = vbs.Trace.read(options.trace) if options.trace else vbs.Autoscale(max_batch_size=options.max_batch_size)
    loader = vbs.DataLoader(data, trace, minibatch_size=16, seed=options.seed)
    hidden = options.hidden
    model = nn.Sequential(
        nn.Linear(data.tensors[0].shape[1], hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )
    inner = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    optimizer = vbs.AdaScaleOptimizer(inner, loader, ref_batchsize=options.ref_batchsize, exact=options.exact)
    every = {"every_seconds": options.every_seconds}
    optimizer.attach(vbs.Checkpoint(options.checkpoint, model=model, optimizer=optimizer, **every))
    # a trace ends by itself
    for _ in optimizer.epochs(progress=None if options.trace else options.progress):
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    if loader.batch_sampler.rank == 0:
        torch.save(model.state_dict(), Path(options.checkpoint) / "weights.pt")


if __name__ == "__main__":
    vbs.launch(main, (parser.parse_args(),))
