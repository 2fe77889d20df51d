"""Short exact runs on XLA cores, with dropout, uneven shares, idle cores and steps of many sizes."""

import hashlib

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import variable_batch_size as vbs
from variable_batch_size.cores import xla

MINIBATCH = 4
FIRST = [3, 1, 2, 5, 1, 4]  # minibatches of the first steps, which need all graphs
LATER = [7, 2, 8]
TRACE = [MINIBATCH * num for num in (*FIRST, *LATER)]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


# name of the run: optimizer, inner optimizer, whether minibatches have weights, options
RUNS = {
    "adascale": (vbs.AdaScaleOptimizer, sgd, False, {"clip_grad_norm": 0.5}),
    "adamw, weights": (vbs.AdamRuleOptimizer, adamw, True, {"clip_grad_norm": 0.5}),
    "adascale, weights": (vbs.AdaScaleOptimizer, sgd, True, {}),
}
LONG = {"adascale, weights"}  # both parts of it are in the other runs


def network(generator):
    """A network with weights from its own generator, because cores in threads share that of torch."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return model


def train(kind, inner, is_weighted, options):
    """A digest of the weights after every step, and the number of graphs so far."""
    generator = torch.Generator().manual_seed(1)
    device, model = xla.device(), network(generator)
    x = torch.randn(sum(TRACE), 6, generator=generator)
    y = torch.randint(0, 3, (len(x),), generator=generator)
    weights = torch.randint(0, 4, (len(x),), generator=generator)
    model.to(device)
    sampler = vbs.CustomSampler(dataset_size=len(x), trace=TRACE, minibatch_size=MINIBATCH)
    optimizer = kind(inner(model), sampler, ref_batchsize=8, model=model, exact=True, **options)
    digests, programs = [], []
    for indices in sampler:
        weight = weights[indices] if is_weighted else torch.full((MINIBATCH,), 1 / MINIBATCH)
        losses = cross_entropy(model(x[indices].to(device)), y[indices].to(device), reduction="none")
        (losses * weight.to(device)).sum().backward()
        before = optimizer.steps_done
        optimizer.step(weight=int(weight.sum()) if is_weighted else None)
        if optimizer.steps_done > before:
            digests.append(digest_of(model))
            programs.append(xla.num_programs())
    return {"digests": digests, "programs": programs, "factor": optimizer.factor()}


class Wide(nn.Module):
    """Contractions over many elements, a convolution and attention: their sums are split over threads."""

    def __init__(self, generator):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.linear = nn.Linear(20000, 4)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(0.05 * torch.randn(p.shape, generator=generator))

    def forward(self, x):
        features = self.convolution(x[:, :3072].view(-1, 3, 32, 32)).flatten(2).transpose(1, 2)[:, ::7]
        return self.linear(x) + self.attention(features, features, features)[0].sum((1, 2)).unsqueeze(1)


def train_wide():
    """The digests of the weights after every step of a network with wide contractions."""
    generator = torch.Generator().manual_seed(2)
    device, model = xla.device(), Wide(generator)
    trace = [2 * num for num in (4, 1, 3)]
    x = torch.randn(sum(trace), 20000, generator=generator)
    model.to(device)
    sampler = vbs.CustomSampler(dataset_size=len(x), trace=trace, minibatch_size=2)
    inner = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)  # small, as so many features add up
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=64, model=model, exact=True)
    digests = []
    for indices in sampler:
        model(x[indices].to(device)).square().mean().backward()
        before = optimizer.steps_done
        optimizer.step()
        if optimizer.steps_done > before:
            digests.append(digest_of(model))
    return digests


def digest_of(model):
    return hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest()


def run_all(names):
    """These runs and the wide one."""
    return {**{name: train(*RUNS[name]) for name in names}, "wide": train_wide()}
