"""ResNet-50 (He et al. 2015), so that the benchmarks need only torch: 161 tensors."""

from __future__ import annotations

import torch
from torch import nn


class Bottleneck(nn.Module):
    def __init__(self, num_in: int, num_inner: int, *, stride: int) -> None:
        super().__init__()
        num_out = 4 * num_inner
        self.body = nn.Sequential(
            *(nn.Conv2d(num_in, num_inner, 1, bias=False), nn.BatchNorm2d(num_inner), nn.ReLU()),
            nn.Conv2d(num_inner, num_inner, 3, stride, padding=1, bias=False),
            *(nn.BatchNorm2d(num_inner), nn.ReLU()),
            *(nn.Conv2d(num_inner, num_out, 1, bias=False), nn.BatchNorm2d(num_out)),
        )
        self.shortcut = nn.Sequential()
        if num_in != num_out:
            self.shortcut = nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet50() -> nn.Sequential:
    stem = [nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    blocks = []
    num_in = 64
    for num_blocks, num_inner, stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
        for block in range(num_blocks):
            blocks.append(Bottleneck(num_in, num_inner, stride=stride if block == 0 else 1))
            num_in = 4 * num_inner
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, 1000))
