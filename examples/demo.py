"""Replay a trace on four virtual cores: digits, a small convolutional network, and a table of the results.

python examples/demo.py
python examples/demo.py 2    # on two cores; the weights are the same
"""

import argparse
from importlib.util import find_spec

import torch
from torch import nn
from torch.utils.data import TensorDataset
from tqdm import tqdm

import variable_batch_size as vbs

TRACE = "traces/demo.csv"
MINIBATCH = 16
HAS_XLA = find_spec("torch_xla") is not None


def digits() -> tuple[TensorDataset, TensorDataset]:
    from sklearn.datasets import load_digits  # not on every core: importing it takes seconds

    x, y = load_digits(return_X_y=True)
    images = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], torch.tensor(y)[order]
    return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 16, 10),
    )


def num_programs() -> int:
    """The number of graphs that XLA has compiled."""
    if not HAS_XLA:
        return 0
    import torch_xla.debug.metrics as metrics

    return metrics.counter_value("UncachedCompile")


def train(model: nn.Module, train_data: TensorDataset, test_data: TensorDataset) -> dict[str, float]:
    """Train on one core."""
    device = vbs.device()
    model = model.to(device)
    loader = vbs.DataLoader(train_data, trace=TRACE, minibatch_size=MINIBATCH)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = vbs.Optimizer(inner, loader, rule="linear", ref_batchsize=128, model=model)

    idle = 0
    with tqdm(total=len(loader.sampler.schedule.trace), desc="steps", disable=loader.sampler.rank != 0) as bar:
        for _ in optimizer.epochs():
            for images, labels in loader:
                nn.functional.cross_entropy(model(images.to(device)), labels.to(device)).backward()
                if optimizer.step():
                    idle += optimizer.is_idle
                    bar.update()
                    bar.set_postfix(batch=optimizer.batch_size, lr=f"{optimizer.current_lr():.4f}")

    programs = num_programs()
    model = model.cpu().eval()
    images, labels = test_data.tensors
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    return {
        "steps": optimizer.steps_done,
        "samples": optimizer.samples_done,
        "idle": idle,
        "programs": programs,
        "accuracy": accuracy,
    }


def main(cores: int) -> None:
    trace, plural = vbs.Trace.read(TRACE), "s" if cores > 1 else ""
    if HAS_XLA:
        print(f"Replaying {TRACE} on {cores} virtual XLA core{plural}; starting takes about 10 seconds.")
    else:
        kind = "gloo processes" if plural else "gloo process"
        print(f"Replaying {TRACE} on {cores} {kind} (torch_xla is not installed); the weights are the same.")
    results = vbs.launch(train, (network(), *digits()), cores=cores, backend="xla" if HAS_XLA else "gloo")
    first = results[0]
    rows = [
        ("steps", f"{first['steps']}"),
        ("samples", f"{first['samples']:,}"),
        ("distinct batch sizes", f"{len(set(trace))}, from {min(trace)} to {max(trace)}"),
        ("idle share", f"{sum(result['idle'] for result in results) / (cores * first['steps']):.1%} of cores × steps"),
        ("test accuracy", f"{first['accuracy']:.1%}"),
    ]
    if HAS_XLA:
        rows.insert(3, ("XLA graphs compiled", f"{first['programs']}"))
    print()
    for name, value in rows:
        print(f"{name:22} {value}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cores", type=int, nargs="?", default=4)
    main(parser.parse_args().cores)
