"""Small workloads of different kinds for recommended.py: at most a few thousand updates of one thread each."""

from __future__ import annotations

import gzip
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from characters import text_of_python
from cifar10 import TEST, TRAIN, normalised, read, resnet18
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import TensorDataset

import variable_batch_size as vbs

DATADIR = "RECOMMENDED_DATADIR"  # environment variable: the directory with MNIST's four files and cifar-10-batches-py
NATS = {"metric_name": "loss", "unit": " nats", "is_higher_better": False}
CONTEXT, VOCABULARY = 16, 128


def decay(fraction: float) -> float:
    """The learning rate falls linearly to a tenth."""
    return 1 - 0.9 * fraction


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 100 * (outputs.argmax(1) == targets).float().mean()


def _classification(
    data: list[TensorDataset], model: Any, lr: float, momentum: float, size: int, updates: int
) -> vbs.Workload:
    return vbs.Workload(
        model=model,
        train=data[0],
        test=data[1],
        loss=cross_entropy,
        metric=accuracy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum),
        minibatch_size=size,
        ref_batchsize=size,
        num_samples=size * updates,
        schedule=decay,
    )


def _digits(shape: tuple[int, ...]) -> list[TensorDataset]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(labels))
    images = torch.tensor(pixels[order] / 16, dtype=torch.float32).reshape(-1, *shape)
    targets = torch.tensor(labels[order])
    return [TensorDataset(images[part], targets[part]) for part in (slice(1280), slice(1280, None))]


def digits() -> vbs.Workload:
    return _classification(
        _digits((64,)), lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), 0.01, 0.9, 16, 3200
    )


def digits_cnn() -> vbs.Workload:
    def model() -> nn.Module:
        first = (nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        return nn.Sequential(*first, nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10))

    return _classification(_digits((1, 8, 8)), model, 0.01, 0.9, 16, 2600)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class _GPT(nn.Module):
    """With matrices only, because torch's Muon takes nothing else."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.block, self.norm = _Block(width, 2), nn.LayerNorm(width, elementwise_affine=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.block(self.tokens(tokens) + self.positions.weight)))
        return logits


def _of_sequences(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def _gpt(optimizer: Any, updates: int) -> vbs.Workload:
    text = text_of_python()[:1_200_000].encode("ascii", errors="replace")
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT + 1).long()
    windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]
    train, test = windows[:-512], windows[-512:]
    return vbs.Workload(
        model=_GPT,
        train=TensorDataset(train[:, :-1].contiguous(), train[:, 1:].contiguous()),
        test=TensorDataset(test[:, :-1].contiguous(), test[:, 1:].contiguous()),
        loss=_of_sequences,
        metric=_of_sequences,
        optimizer=optimizer,
        minibatch_size=8,
        ref_batchsize=8,
        num_samples=8 * updates,
        schedule=decay,
        **NATS,
    )


def gpt_adamw() -> vbs.Workload:
    return _gpt(lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01), 2400)


def gpt_muon() -> vbs.Workload:
    return _gpt(lambda parameters: torch.optim.Muon(parameters, lr=5e-3, weight_decay=0.1, ns_steps=3), 2400)


def regression() -> vbs.Workload:
    generator = torch.Generator().manual_seed(0)
    teacher = [torch.randn(16, 32, generator=generator) / 4, torch.randn(32, 1, generator=generator) / math.sqrt(32)]

    def made(number: int) -> TensorDataset:
        inputs = torch.randn(number, 16, generator=generator)
        noise = 0.3 * torch.randn(number, 1, generator=generator)
        return TensorDataset(inputs, 3 * torch.tanh(2 * inputs @ teacher[0]) @ teacher[1] + noise)

    def half_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The negative log likelihood with a deviation of 1, without its constant, in nats."""
        return (outputs - targets).square().mean() / 2

    return vbs.Workload(
        model=lambda: nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)),
        train=made(16_384),
        test=made(1024),
        loss=half_square,
        metric=half_square,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02),
        minibatch_size=8,
        ref_batchsize=8,
        num_samples=8 * 3200,
        **NATS,
    )


class _Recurrent(nn.Module):
    def __init__(self, symbols: int = 8, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.cell = nn.Embedding(symbols, 16), nn.GRU(16, width, batch_first=True)
        self.head = nn.Linear(width, symbols)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.cell(self.tokens(tokens))[0])
        return outputs


def recurrent() -> vbs.Workload:
    """The next symbol of a Markov chain of second order."""
    random = np.random.RandomState(0)
    chain = random.dirichlet([0.3] * 8, size=(8, 8)).cumsum(-1)
    sequences = np.zeros((9216, 9), dtype=np.int64)
    sequences[:, :2] = random.randint(8, size=(9216, 2))
    for place in range(2, 9):
        row = chain[sequences[:, place - 2], sequences[:, place - 1]]
        sequences[:, place] = np.minimum((random.rand(9216, 1) > row).sum(1), 7)
    made = torch.tensor(sequences)
    parts = [TensorDataset(made[part, :-1], made[part, 1:]) for part in (slice(8704), slice(8704, None))]
    return vbs.Workload(
        model=_Recurrent,
        train=parts[0],
        test=parts[1],
        loss=_of_sequences,
        metric=_of_sequences,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
        minibatch_size=8,
        ref_batchsize=8,
        num_samples=8 * 2400,
        **NATS,
    )


def _mnist() -> list[TensorDataset]:
    """From the files of the data set, which may be compressed and may be in MNIST/raw."""

    def read(name: str) -> np.ndarray:
        folder = Path(os.environ[DATADIR])
        found = [path for path in sorted(folder.rglob(f"{name}*")) if path.is_file()]
        if not found:
            raise SystemExit(f"{folder}, the --datadir, must contain {name} or {name}.gz")
        content = found[0].read_bytes()
        content = gzip.decompress(content) if found[0].suffix == ".gz" else content
        return np.frombuffer(content, np.uint8, offset=16 if "idx3" in name else 8)

    def part(name: str, number: int) -> TensorDataset:
        pixels = read(f"{name}-images-idx3-ubyte").reshape(-1, 1, 28, 28)[:number]
        images = torch.tensor(pixels / 255 - 0.13, dtype=torch.float32) / 0.31
        return TensorDataset(images, torch.tensor(read(f"{name}-labels-idx1-ubyte")[:number].astype(np.int64)))

    return [part("train", 12_000), part("t10k", 4000)]


def mnist_mlp() -> vbs.Workload:
    layers = (nn.Flatten, lambda: nn.Linear(784, 32), nn.ReLU, lambda: nn.Linear(32, 10))
    return _classification(_mnist(), lambda: nn.Sequential(*(layer() for layer in layers)), 0.02, 0.0, 16, 2800)


def mnist_cnn() -> vbs.Workload:
    def model() -> nn.Module:
        first = (nn.Conv2d(1, 6, 5, stride=2), nn.ReLU(), nn.Conv2d(6, 12, 5, stride=2), nn.ReLU())
        return nn.Sequential(*first, nn.Flatten(), nn.Linear(192, 10))

    return _classification(_mnist(), model, 0.005, 0.9, 16, 2600)


def cifar10_resnet() -> vbs.Workload:
    """A ResNet-18 on 10,000 images of CIFAR-10 without augmentation."""

    def part(name: str, number: int) -> TensorDataset:
        images = read(os.environ[DATADIR], (name,), torch.device("cpu"))
        return TensorDataset(normalised(images.pixels[:number]), images.classes[:number].long())

    return _classification([part(TRAIN[0], 10_000), part(TEST[0], 4000)], resnet18, 0.02, 0.9, 32, 2300)


class _Lion(torch.optim.Optimizer):
    """The sign of an average of gradients (Chen et al. 2023, "Symbolic discovery")."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.sub_(group["lr"] * average.lerp(p.grad, 1 - first).sign())
                    average.lerp_(p.grad, 1 - second)


def gpt_lion() -> vbs.Workload:
    return _gpt(lambda parameters: _Lion(parameters, lr=4e-4), 2400)


def _in_nats(data: list[TensorDataset], model: Any, optimizer: Any, updates: int) -> vbs.Workload:
    parts = {"model": model, "train": data[0], "test": data[1], "loss": cross_entropy, "metric": cross_entropy}
    sizes = {"minibatch_size": 8, "ref_batchsize": 8, "num_samples": 8 * updates}
    return vbs.Workload(**parts, **sizes, optimizer=optimizer, **NATS)


def noisy_labels() -> vbs.Workload:
    """Logistic regression, with 40 % of the labels drawn at random."""
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(32, 6, generator=generator)

    def made(number: int) -> TensorDataset:
        inputs = torch.randn(number, 32, generator=generator)
        drawn = torch.randint(6, (number,), generator=generator)
        is_noise = torch.rand(number, generator=generator) < 0.4
        return TensorDataset(inputs, torch.where(is_noise, drawn, (inputs @ teacher).argmax(1)))

    data = [made(16_384), made(4096)]
    return _in_nats(data, lambda: nn.Linear(32, 6), lambda parameters: torch.optim.SGD(parameters, lr=0.01), 2400)


class _Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.head = nn.Embedding(1000, 16), nn.Linear(16, 100)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.items(items).mean(1))
        return logits


def rare_classes() -> vbs.Workload:
    """The class of a bag of items, both with Zipf-distributed frequencies, so that most classes are rare."""
    random = np.random.RandomState(0)
    classes = random.choice(100, size=20_480, p=1 / np.arange(1, 101) / (1 / np.arange(1, 101)).sum())
    popular = random.choice(1000, size=(20_480, 8), p=1 / np.arange(1, 1001) / (1 / np.arange(1, 1001)).sum())
    own = (classes[:, None] * 10 + random.randint(10, size=(20_480, 8))) % 1000
    items = torch.tensor(np.where(random.rand(20_480, 8) < 0.4, own, popular))
    made = torch.tensor(classes)
    data = [TensorDataset(items[part], made[part]) for part in (slice(16_384), slice(16_384, None))]
    return _in_nats(data, _Bag, lambda parameters: torch.optim.Adam(parameters, lr=2e-3), 2400)


def steep() -> vbs.Workload:
    """Least squares with a learning rate near the largest that converges, so that no larger one does."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -1.5, 16)
    teacher = torch.randn(16, 1, generator=generator)

    def made(number: int) -> TensorDataset:
        inputs = scales * torch.randn(number, 16, generator=generator)
        return TensorDataset(inputs, inputs @ teacher + 0.3 * torch.randn(number, 1, generator=generator))

    def half_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().mean() / 2

    data, optimizer = [made(16_384), made(4096)], lambda parameters: torch.optim.SGD(parameters, lr=0.5)
    return replace(_in_nats(data, lambda: nn.Linear(16, 1), optimizer, 2400), loss=half_square, metric=half_square)


NAMES = ("digits", "regression", "digits_cnn", "recurrent", "gpt_adamw", "gpt_muon")
WITH_MNIST = ("mnist_mlp", "mnist_cnn")
WITH_CIFAR10 = ("cifar10_resnet",)  # on a GPU
OTHERS = ("gpt_lion", "noisy_labels", "rare_classes", "steep")  # which were added last
