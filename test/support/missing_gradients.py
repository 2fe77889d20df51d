"""Runs in which cores leave out minibatches and layers, or steps weigh nothing, on any backend.

What is left out is chosen by the first sample of the minibatch, so that it is the same on any number of cores.
"""

import functools
import itertools

import torch
from torch import nn

import variable_batch_size as vbs

MINIBATCH = 2
SIZES = [MINIBATCH * n for n in (4, 1, 3, 6, 2, 1, 5, 8, 1, 2, 7, 3)]
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Layers(nn.Module):
    """A sum of layers, some of which are used; the last one never is."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(3, 2) for _ in range(4))
        for p in self.parameters():
            p.data = 0.5 * torch.randn(p.shape, generator=generator)

    def forward(self, x, used):
        return sum(torch.tanh(self.layers[layer](x)) for layer in used)


def samples():
    generator = torch.Generator().manual_seed(4)
    return torch.randn(sum(SIZES), 3, generator=generator)


def used_in(sample, missing):
    """The layers that the minibatch of a sample uses: "some", by chance; "one core", none in a few minibatches."""
    chosen = torch.Generator().manual_seed(int(sample))
    if missing in ("some", "some, weights"):
        return [layer for layer in range(3) if torch.rand((), generator=chosen) < 0.5]
    return [] if missing == "one core" and int(sample) in left_out() else [0, 1, 2]


def first_samples():
    """Of all minibatches, in the order of the run."""
    sampler = vbs.CustomSampler(
        dataset_size=sum(SIZES), trace=SIZES, minibatch_size=MINIBATCH, seed=5, rank=0, num_replicas=1
    )
    return [int(indices[0]) for indices in sampler]


@functools.cache
def left_out():
    """The first samples of the second minibatches of steps with three or more."""
    first = first_samples()
    starts = itertools.accumulate([0, *SIZES[:-1]])
    return {first[start // MINIBATCH + 1] for start, size in zip(starts, SIZES, strict=True) if size >= 3 * MINIBATCH}


def weight_of(sample, missing):
    """The weight of the minibatch of a sample: with "weights", 0 for all minibatches of every third step."""
    if missing == "some, weights":
        return 1.0
    if missing != "weights":
        return None
    return 0.0 if step_of()[int(sample)] % 3 == 1 else 1.0 + int(sample) % 3


@functools.cache
def step_of():
    """The step of each first sample of a minibatch."""
    steps = [step for step, size in enumerate(SIZES) for _ in range(size // MINIBATCH)]
    return dict(zip(first_samples(), steps, strict=True))


def loss_of(model, x, used):
    return model(x, used).pow(2).mean() + model(x, used).sum()


def train(device, inner, missing, options, **core):
    """The weights after an epoch on the cores of a backend, and the number of steps; an error as text."""
    model, x = Layers().to(device), samples()
    sampler = vbs.CustomSampler(dataset_size=len(x), trace=SIZES, minibatch_size=MINIBATCH, seed=5, **core)
    inner_optimizer, options = OPTIMIZERS[inner](model.parameters()), {"rule": "linear", **options}
    optimizer = vbs.Optimizer(inner_optimizer, sampler, ref_batchsize=4, **options)
    try:
        for indices in sampler:
            used, weight = used_in(indices[0], missing), weight_of(indices[0], missing)
            if used:
                (loss_of(model, x[indices].to(device), used) * (1 if weight is None else weight)).backward()
            optimizer.step(weight=None if weight is None else torch.tensor(weight).to(device))
    except RuntimeError as error:
        return str(error)
    return [p.detach().cpu() for p in model.parameters()], optimizer.steps_done


def train_all(backend, runs, **core):
    from scenarios import device_of

    return {name: train(device_of(backend), *run, **core) for name, run in runs.items()}


def expected(inner, missing):
    """The same by plain PyTorch, one step after the other in one process."""
    model, x = Layers(), samples()
    optimizer = OPTIMIZERS[inner](model.parameters())
    sampler = vbs.CustomSampler(dataset_size=len(x), trace=SIZES, minibatch_size=MINIBATCH, seed=5)
    minibatches = iter(sampler)
    for size in SIZES:
        optimizer.zero_grad()
        total = 0
        for _ in range(size // MINIBATCH):
            indices = next(minibatches)
            used, weight = used_in(indices[0], missing), weight_of(indices[0], missing)
            weight = 1 if weight is None else weight
            total += weight
            if used:
                (loss_of(model, x[indices], used) * weight).backward()
        if not total:
            continue
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= total
        for group in optimizer.param_groups:
            lr, group["lr"] = group["lr"], group["lr"] * size / 4
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = lr
    return [p.detach() for p in model.parameters()]
