"""What many tests begin with: plain SGD, a network, random samples, a pass over minibatches, its weights."""

import itertools

import torch
from torch import nn
from torch.utils.data import TensorDataset


def sgd(model, lr=0.1, **options):
    """Plain SGD over all parameters of a model."""
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def network(*widths, seed=0):
    """Linear layers of these widths in double precision, with tanh in between; sets torch's seed."""
    torch.manual_seed(seed)
    first, *others = (nn.Linear(*sizes) for sizes in itertools.pairwise(widths))
    return nn.Sequential(first, *(part for layer in others for part in (nn.Tanh(), layer))).double()


def classified(num_samples, *shape, num_classes, seed=1, dtype=torch.float64):
    """Random inputs of a shape, each of a random class; indices give a minibatch, ``.tensors`` all of them."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, *shape, generator=generator, dtype=dtype)
    return TensorDataset(inputs, torch.randint(num_classes, (num_samples,), generator=generator))


def cross_entropy(model, minibatch):
    """The loss of a minibatch of classified samples."""
    inputs, classes = minibatch
    return nn.functional.cross_entropy(model(inputs), classes)


def train(model, optimizer, minibatches, loss_of=cross_entropy):
    """A backward pass and ``step()`` for each minibatch; returns what each ``step()`` has returned."""
    completed = []
    for minibatch in minibatches:
        loss_of(model, minibatch).backward()
        completed.append(optimizer.step())
    return completed


def weights_of(*models):
    """A copy of all weights, in one tensor."""
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()])
