"""The workloads that come with the library: scikit-learn's digits, MNIST and CIFAR-10."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from variable_batch_size.checks import install


def digits(datadir: Path | None) -> dict[str, Any]:
    """1,797 digits of 8 × 8 pixels, which come with scikit-learn, and a network of one hidden layer."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ImportError(f"the digits need scikit-learn: {install('compare')}") from None

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(labels))
    images, targets = torch.tensor(pixels[order] / 16, dtype=torch.float32), torch.tensor(labels[order])
    return {
        "model": _digits_network,
        "train": TensorDataset(images[:1440], targets[:1440]),
        "test": TensorDataset(images[1440:], targets[1440:]),
        "loss": cross_entropy,
        "metric": accuracy,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        "minibatch_size": 16,
        "ref_batchsize": 16,
        "num_samples": 10 * 1440,
    }


def _digits_network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def mnist(datadir: Path | None) -> dict[str, Any]:
    """MNIST and a small convolutional network."""
    train, test = _images("mnist", datadir)
    return {
        "model": _MnistNetwork,
        "train": train,
        "test": test,
        "loss": cross_entropy,
        "metric": accuracy,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.0075, momentum=0.5),
        "minibatch_size": 32,
        "ref_batchsize": 128,
        "num_samples": 5 * 60_000,
    }


class _MnistNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution1 = nn.Sequential(nn.Conv2d(1, 10, kernel_size=5), nn.MaxPool2d(2), nn.BatchNorm2d(10))
        self.convolution2 = nn.Sequential(nn.Conv2d(10, 20, kernel_size=5), nn.MaxPool2d(2), nn.BatchNorm2d(20))
        self.linear1 = nn.Linear(320, 50)
        self.linear2 = nn.Linear(50, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.convolution1((images.float() / 255 - 0.1307) / 0.3081))
        x = torch.relu(self.convolution2(x))
        outputs: torch.Tensor = self.linear2(torch.relu(self.linear1(x.flatten(1))))
        return outputs


def cifar10(datadir: Path | None) -> dict[str, Any]:
    """CIFAR-10 without augmentation, and a ResNet of 9 layers whose learning rate falls along a cosine."""
    train, test = _images("cifar10", datadir)
    return {
        "model": _CifarNetwork,
        "train": train,
        "test": test,
        "loss": cross_entropy,
        "metric": accuracy,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4),
        "minibatch_size": 64,
        "ref_batchsize": 128,
        "num_samples": 15 * 50_000,
        "schedule": lambda fraction: (1 + math.cos(math.pi * fraction)) / 2,
    }


class _CifarNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Sequential(_convolution(3, 64), _convolution(64, 128), nn.MaxPool2d(2))
        self.residual1 = nn.Sequential(_convolution(128, 128), _convolution(128, 128))
        self.middle = nn.Sequential(_convolution(128, 256), nn.MaxPool2d(2), _convolution(256, 256), nn.MaxPool2d(2))
        self.residual2 = nn.Sequential(_convolution(256, 256), _convolution(256, 256))
        self.linear = nn.Linear(256, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.start((images.float() / 255 - 0.47) / 0.25)
        x = self.middle(x + self.residual1(x))
        x = x + self.residual2(x)
        outputs: torch.Tensor = self.linear(x.amax(dim=(2, 3)))
        return outputs


def _convolution(num_in: int, num_out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(num_in, num_out, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU()
    )


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The share of the samples whose class has the largest output, in per cent."""
    return 100 * (outputs.argmax(1) == targets).float().mean()


# ------------------------------------------------------------------------------------------------- images from a folder


def _images(name: str, datadir: Path | None) -> list[TensorDataset]:
    """Training and test images, channels first and from 0 to 255, from an npz file or torchvision's files."""
    if datadir is None:
        raise ValueError(f"{name} needs --datadir, where its files are")
    arrays = datadir if datadir.suffix == ".npz" else datadir / f"{name}.npz"
    if arrays.exists():
        with np.load(arrays) as file:
            _refuse_missing(arrays, file.files)
            return [_dataset(file[f"x_{part}"], file[f"y_{part}"]) for part in ("train", "test")]
    try:
        from torchvision import datasets
    except ImportError:
        raise ImportError(f"{name} needs torchvision, or a file {arrays}") from None
    kind = {"mnist": datasets.MNIST, "cifar10": datasets.CIFAR10}[name]
    try:
        parts = [kind(datadir, train=is_train) for is_train in (True, False)]
    except RuntimeError:
        raise ValueError(f"{datadir} holds neither torchvision's files of {name} nor {arrays.name}") from None
    return [_dataset(np.asarray(part.data), np.asarray(part.targets)) for part in parts]


def _refuse_missing(path: Path, found: list[str]) -> None:
    for array in ("x_train", "y_train", "x_test", "y_test"):
        if array not in found:
            raise ValueError(f"{path} must hold x_train, y_train, x_test and y_test, got {', '.join(found)}")


def _dataset(images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> TensorDataset:
    tensor = torch.from_numpy(np.ascontiguousarray(images))
    if tensor.dim() == 3:
        tensor = tensor.unsqueeze(1)
    elif tensor.shape[-1] in (1, 3):
        tensor = tensor.permute(0, 3, 1, 2).contiguous()
    return TensorDataset(tensor, torch.from_numpy(np.asarray(labels).reshape(-1)).long())
