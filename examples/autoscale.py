"""Digits with a batch size decided by a policy, on cores that come and go.

    torchrun --standalone --nproc-per-node=2 examples/autoscale.py runs/digits --until 600
    torchrun --standalone --nproc-per-node=3 examples/autoscale.py runs/digits --until 1400
    torchrun --standalone --nproc-per-node=1 examples/autoscale.py runs/digits --until 2000
    vbs show runs/digits/executed.csv --plot autoscaled.png

Each command resumes the run of the previous one, on a different number of cores.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import variable_batch_size as vbs


def main(directory: str, until: int) -> None:
    """Train until `until` steps are complete, and save a checkpoint."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    policy = vbs.Autoscale(max_batch_size=1024)
    loader = vbs.DataLoader(dataset, trace=policy, minibatch_size=16)
    inner = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    optimizer = vbs.Optimizer(inner, loader, rule="adascale", ref_batchsize=32, model=model)
    checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer)
    optimizer.attach(checkpoint)
    for _ in optimizer.epochs(1000):
        for images, targets in loader:
            nn.functional.cross_entropy(model(images), targets).backward()
            optimizer.step()
            if optimizer.steps_done >= until:
                checkpoint.save()
                return


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="for the checkpoints and decisions")
    parser.add_argument("--until", type=int, required=True, help="steps of the entire run")
    options = parser.parse_args()
    vbs.launch(main, (options.directory, options.until), cores=1, backend="gloo")
