"""Instead of nn.DataParallel: a process for each device, the plain model, and a batch size that may change.

    model = nn.DataParallel(model)                      # before: one process, the loader's batches are split over GPUs
    loader = DataLoader(dataset, batch_size=256)
    vbs.launch(main)                                    # here: main() runs on each GPU, or without GPUs on CPUs
    loader = vbs.DataLoader(dataset, trace=256, minibatch_size=64)

python examples/data_parallel.py
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import variable_batch_size as vbs


def train() -> float:
    """The loss over all samples at the end."""
    torch.manual_seed(0)
    dataset = torch.utils.data.TensorDataset(torch.randn(2048, 20), torch.randint(0, 5, (2048,)))
    device = vbs.device()
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)).to(device)
    # a step has 256 samples over all devices, whatever their number: in minibatches of 64, four devices run one each
    loader = vbs.DataLoader(dataset, trace=256, minibatch_size=64)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = vbs.Optimizer(inner, loader, rule="linear", ref_batchsize=256, model=model)
    for _ in optimizer.epochs(3):
        for data, target in loader:
            cross_entropy(model(data.to(device)), target.to(device)).backward()
            optimizer.step()
    return cross_entropy(model(dataset.tensors[0].to(device)), dataset.tensors[1].to(device)).item()


def main() -> None:
    parser = argparse.ArgumentParser(description="train on all devices of this machine")
    parser.add_argument("--cores", type=int, help="how many (default: all)")
    results = vbs.launch(train, cores=parser.parse_args().cores)
    print(f"{len(results)} devices, loss {results[0]:.4f}")


if __name__ == "__main__":
    main()
