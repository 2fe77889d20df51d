"""Runs of models whose forward pass changes state in training: buffers, numbers and generators."""

import hashlib
import logging
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import variable_batch_size as vbs
from variable_batch_size.cores.dtensor import to_local

TRACE = [24, 4, 16, 12, 4]  # in the first step, each of up to 3 cores has two minibatches of 4
_MINIBATCH = 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        return self.linear(x)


class RunningScale(Layer):
    """A buffer that is assigned."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().max()
        return super().forward(x / self.scale)


class PlainScale(Layer):
    """A tensor that is no buffer, and does not exist before the first minibatch."""

    def __init__(self):
        super().__init__()
        self.scale = None

    def forward(self, x):
        largest = x.detach().abs().max()
        self.scale = largest if self.scale is None else 0.9 * self.scale + 0.1 * largest
        return super().forward(x / self.scale)


class Codebook(Layer):
    """A buffer that is written through `data`, as many codebooks are, which leaves its version."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(7, 5))

    def forward(self, x):
        x = super().forward(x)
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        quantized = x + (self.codes[nearest] - x).detach()
        self.codes.data[nearest] = 0.8 * self.codes[nearest] + 0.2 * x.detach()
        return quantized


class CountingBuffer(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / (1 + 0.1 * self.calls)


class Counting(Layer):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / (1 + 0.1 * self.calls)


class OwnGenerator(Layer):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn(x.shape, generator=self.generator))


class NumpyGenerator(Layer):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(5)

    def forward(self, x):
        return super().forward(x + 0.1 * self.rng.normal())


class BoundedEmbedding(Layer):
    """A weight that the forward pass renormalizes, each core where it has tokens."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 5, max_norm=1.0)

    def forward(self, x):
        tokens = (x[:, 0].abs() * 4).long().clamp(0, 8)
        return super().forward(x + self.embedding(tokens))


def old_spectral_norm():
    return nn.utils.spectral_norm(nn.Linear(5, 5))


def new_spectral_norm():
    return nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5))


# the layer, and the name of what it changes
CHANGING = {
    "old spectral_norm": (old_spectral_norm, "1.weight_u"),
    "new spectral_norm": (new_spectral_norm, "1.parametrizations.weight.0._u"),
    "running scale": (RunningScale, "1.scale"),
    "plain tensor": (PlainScale, "1.scale"),
    "codebook": (Codebook, "1.codes"),
    "counter in a buffer": (CountingBuffer, "1.calls"),
    "counter": (Counting, "1.calls"),
    "generator": (OwnGenerator, "1.generator"),
    "numpy generator": (NumpyGenerator, "1.rng"),
    "parameter": (BoundedEmbedding, "1.embedding.weight"),
}


def network(layer):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), layer(), nn.Tanh(), nn.Linear(5, 1))


def train(layer, *, has_model=True, epochs=1, device="cpu", wrap=None, each=None, **options):
    """A short run.

    Args:
        layer: makes a layer of the model.
        has_model: whether the optimizer is given the model.
        epochs: their number.
        device: of the model.
        wrap: what the loop runs instead of the model, made from it.
        each: called with the model and what `step()` has returned, after each minibatch.
        options: of the optimizer.

    Returns:
        A digest of the weights, and the warnings.
    """
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    dataset = TensorDataset(torch.randn(64, 5, generator=generator), torch.randn(64, 1, generator=generator))
    model = network(layer).to(device)
    run = model if wrap is None else wrap(model)
    loader = vbs.DataLoader(dataset, TRACE, minibatch_size=_MINIBATCH, on_end="cycle")
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    with Warnings() as found:
        options |= {"model": model} if has_model else {}
        optimizer = vbs.Optimizer(inner, loader, rule="linear", ref_batchsize=8, **options)
        for _ in optimizer.epochs(epochs):
            for x, y in loader:
                mse_loss(run(x.to(device)), y.to(device)).backward()
                is_complete = optimizer.step()
                if each is not None:
                    each(model, is_complete)
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(to_local(p.detach()).cpu().numpy().tobytes())
    return digest.hexdigest(), found.messages


class Warnings(logging.Handler):
    """The warnings of the library in this context."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages, self._thread = [], threading.get_ident()

    def emit(self, record):
        if record.thread == self._thread:  # not of another core of XLA
            self.messages.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("variable_batch_size").addHandler(self)
        return self

    def __exit__(self, *error):
        logging.getLogger("variable_batch_size").removeHandler(self)


def warnings_of_all():
    return {name: train(layer)[1] for name, (layer, _) in CHANGING.items()}


def error_of(layer, **options):
    """The error of a run in exact mode."""
    with pytest.raises(ValueError) as raised:
        train(layer, exact=True, **options)
    return str(raised.value)


def errors_of_all(has_model=True):
    return {name: error_of(layer, has_model=has_model) for name, (layer, _) in CHANGING.items()}


def on_an_xla_core():
    """The error in exact mode and the warnings, for each kind of state that a device has."""
    names = ["new spectral_norm", "running scale", "counter in a buffer", "counter"]
    how = {"device": vbs.device()}
    return {n: (error_of(CHANGING[n][0], **how), train(CHANGING[n][0], **how)[1]) for n in names}


def sharded():
    """The warnings of a model in fully_shard."""
    return train(Counting, wrap=fully_shard)[1]


# -------------------------------------------------------------------------------- what is allowed in exact mode


class Harmless(Layer):
    """What belongs to one minibatch, and random numbers that exact mode seeds."""

    def __init__(self):
        super().__init__()
        self.norms = nn.Sequential(
            nn.BatchNorm1d(5),
            nn.BatchNorm1d(5, momentum=None),
            nn.Unflatten(1, (1, 5)),
            nn.InstanceNorm1d(1, track_running_stats=True),
            nn.Flatten(),
        )
        self.generator, self.of_each = torch.default_generator, None
        self.register_buffer("cache", None)
        self.penalty, self.places, self.size, self.missing = 0.0, None, None, float("nan")

    def forward(self, x):
        if self.cache is None:
            self.cache = torch.ones(5)
        self.places = torch.arange(len(x))
        self.size, self.of_each = 1000 * len(x), torch.Generator().manual_seed(3)
        noise = torch.randn(x.shape, generator=self.of_each) + torch.randn(x.shape, generator=self.generator)
        x = super().forward(self.norms(x) + 0.1 * noise) * self.cache
        self.penalty = x.square().mean()
        return x


class SetByTheLoop(Layer):
    """A temperature and a mask, set by the loop before each minibatch; evaluations are counted."""

    def __init__(self):
        super().__init__()
        self.temperature, self.evaluations = 1.0, 0
        self.register_buffer("mask", torch.ones(5))

    def forward(self, x):
        if not self.training:
            self.evaluations += 1
        return super().forward(x * self.mask) / self.temperature


def set_and_evaluate(model):
    """A loop that sets both, and evaluates before each minibatch."""

    def run(x):
        model.eval()
        model(x)
        model.train()
        model[1].temperature = 1 + random.random()
        model[1].mask = torch.rand(5)
        return model(x)

    return run


def iterate_once_a_step(model, is_complete):
    """Let spectral_norm make an iteration after each step, and none in a forward pass."""
    norm = model[1].parametrizations.weight
    norm.train(is_complete)
    model[1].weight  # noqa: B018 (it is computed when it is read)
    norm.eval()


def new_spectral_norm_outside():
    layer = new_spectral_norm()
    layer.parametrizations.weight.eval()
    return layer


def digests_of_allowed():
    """The digest of each run that exact mode allows."""
    return {
        "harmless": train(Harmless, exact=True),
        "set by the loop": train(SetByTheLoop, exact=True, epochs=2, wrap=set_and_evaluate),
        "once a step": train(new_spectral_norm_outside, exact=True, each=iterate_once_a_step),
    }
