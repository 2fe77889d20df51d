"""CIFAR-10 on the device: images with random crops and flips as tensors, a ResNet-18, and its test accuracy."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

PADDING = 4
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = ("test_batch",)


@dataclass(frozen=True)
class Images:
    """Images as bytes on a device, and their classes.

    Attributes:
        pixels: images, colours, rows, columns.
        classes: the class of each.
    """

    pixels: torch.Tensor
    classes: torch.Tensor

    def __len__(self) -> int:
        return len(self.classes)


def read(datadir: str | Path, files: tuple[str, ...], device: torch.device) -> Images:
    """The images in `files` of torchvision's folder ``cifar-10-batches-py``."""
    pixels, classes = [], []
    for name in files:
        with open(Path(datadir) / "cifar-10-batches-py" / name, "rb") as file:
            content = pickle.load(file, encoding="bytes")
        pixels.append(np.asarray(content[b"data"], np.uint8).reshape(-1, 3, 32, 32))
        classes += content[b"labels"]
    return Images(torch.from_numpy(np.concatenate(pixels)).to(device), torch.tensor(classes).to(device))


def made_up(num_images: int, device: torch.device, *, seed: int) -> Images:
    """Synthetic images, noise around one image per class, for trying a program without the data set."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, 10, (num_images,), generator=generator)
    of_class = torch.randint(40, 216, (10, 3, 4, 4), generator=torch.Generator().manual_seed(0)).float()
    of_class = nn.functional.interpolate(of_class, size=(32, 32))
    noise = 60 * torch.randn(num_images, 3, 32, 32, generator=generator)
    return Images((of_class[classes] + noise).clamp(0, 255).byte().to(device), classes.to(device))


class Crops:
    """Minibatches of images on the device, each shifted by up to 4 pixels and half of them mirrored."""

    def __init__(self, images: Images) -> None:
        self._classes = images.classes
        padded = nn.functional.pad(images.pixels, [PADDING] * 4)
        # a view: every crop of every image, by image, colour, row and column of its corner
        self._crops = padded.unfold(2, 32, 1).unfold(3, 32, 1)

    def __call__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalized images of these indices and their classes, without synchronizing with the device."""
        device = self._classes.device
        numbers = torch.tensor(indices)
        if device.type == "cuda":
            numbers = numbers.pin_memory().to(device, non_blocking=True)
        row, column = torch.randint(0, 2 * PADDING + 1, (2, len(indices)), device=device)
        x = self._crops[numbers, :, row, column]
        is_mirrored = torch.rand(len(indices), 1, 1, 1, device=device) < 0.5
        return normalised(torch.where(is_mirrored, x.flip(3), x)), self._classes[numbers]


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    mean, std = (_of_colours(values, pixels.device) for values in (MEAN, STD))
    return ((pixels / 255 - mean) / std).to(memory_format=torch.channels_last)


_colours: dict[tuple[tuple[float, ...], torch.device], torch.Tensor] = {}


def _of_colours(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    if (values, device) not in _colours:
        _colours[values, device] = torch.tensor(values, device=device).view(1, 3, 1, 1)
    return _colours[values, device]


class Block(nn.Module):
    """Two convolutions, each after its BatchNorm and ReLU (He et al. 2016, "Identity mappings")."""

    def __init__(self, num_in: int, num_out: int, *, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(num_in), nn.BatchNorm2d(num_out)
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        is_same = stride == 1 and num_in == num_out
        self.shortcut = None if is_same else nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norm1(x))
        straight = x if self.shortcut is None else self.shortcut(inner)
        return straight + self.conv2(torch.relu(self.norm2(self.conv1(inner))))


class FirstBlock(nn.Module):
    """Two convolutions, each before its BatchNorm, and ReLU after the sum (He et al. 2015, the original block)."""

    def __init__(self, num_in: int, num_out: int, *, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(num_out), nn.BatchNorm2d(num_out)
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.shortcut = nn.Sequential()
        if stride != 1 or num_in != num_out:
            self.shortcut.extend([nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.shortcut(x) + self.norm2(self.conv2(inner)))


def resnet18(version: str = "v1", *, width: int = 64) -> nn.Sequential:
    """ResNet-18 for images of 32 × 32 pixels: 11.2 million parameters at the width 64."""
    block = {"v1": FirstBlock, "v2": Block}[version]
    blocks: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False)]
    if version == "v1":
        blocks += [nn.BatchNorm2d(width), nn.ReLU()]
    num_in = width
    for stage in range(4):
        num_out = width * 2**stage
        blocks += [block(num_in, num_out, stride=1 if stage == 0 else 2), block(num_out, num_out, stride=1)]
        num_in = num_out
    if version == "v2":
        blocks += [nn.BatchNorm2d(num_in), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, 10))


def tiny() -> nn.Sequential:
    """One convolution, for trying a program."""
    convolution = [nn.Conv2d(3, 8, 4, 4, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*convolution, nn.Flatten(), nn.Linear(8 * 8 * 8, 10))


@torch.no_grad()
def accuracy(model: nn.Module, images: Images, *, at_once: int = 1000) -> float:
    """The percentage of correctly classified images."""
    was_training = model.training
    model.eval()
    correct = torch.zeros((), device=images.classes.device)
    for pixels, classes in zip(images.pixels.split(at_once), images.classes.split(at_once), strict=True):
        with autocast(pixels.device):
            correct += (model(normalised(pixels)).argmax(1) == classes).sum()
    model.train(was_training)
    return 100 * correct.item() / len(images)


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 on a GPU, float32 elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
