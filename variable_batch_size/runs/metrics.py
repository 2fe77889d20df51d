"""Metrics: named sums over all cores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from variable_batch_size.cores.running import communicator_for, device_for_sums


class Metrics:
    """Sums of named quantities, kept on each core's device and added up over all cores when they are read.

        metrics = vbs.Metrics("correct", "seen", device=device)
        for data, target in test_loader:
            metrics.add(correct=(model(data).argmax(1) == target).sum(), seen=len(target))
        sums = metrics.read()
        accuracy = sums["correct"] / sums["seen"]

    Cores may add different numbers of times, or never. Sums are in double precision, so that counts are exact. On XLA
    :meth:`add` ends the minibatch, as ``optimizer.step()`` does: a loop that evaluates needs nothing else to do so.
    In a training loop add after ``optimizer.step()``, or let :class:`Log` take the loss.

    Args:
        names: of the quantities, in the same order on all cores.
        device: on which the values to be added are; also the CPU where the cores are others.
        process_group: the cores, as :class:`CustomSampler` takes it.
    """

    def __init__(self, *names: str, device: torch.device | str, process_group: Any = None) -> None:
        if not names or len(set(names)) < len(names):
            raise ValueError(f"`names` must be one name or more, each of them once, got {names!r}")
        self._names = names
        self._device = torch.device(device)
        # double precision is not to be had on Apple's GPUs
        self._dtype = torch.float32 if self._device.type == "mps" else torch.float64
        self._device_for_sums = device_for_sums(self._device)
        self._communicator = communicator_for([torch.zeros(1).to(self._device_for_sums)], process_group)
        self.reset()

    def reset(self) -> None:
        """Start again from 0."""
        # made on the host: zeros made on an XLA device would be a program of their own
        self._sums = {name: torch.zeros(1, dtype=self._dtype).to(self._device) for name in self._names}
        self._host_sums = dict.fromkeys(self._names, 0.0)

    @torch.no_grad()
    def add(self, **values: torch.Tensor | float) -> None:
        """Add to some of the sums: a tensor of one element, which is not waited for, or a number."""
        for name, value in values.items():
            if name not in self._sums:
                raise ValueError(f"{name!r} must be one of {', '.join(map(repr, self._names))}")
            if not isinstance(value, torch.Tensor):
                self._host_sums[name] += float(value)
            elif value.numel() != 1:
                raise ValueError(f"{name!r} must be one number, got a tensor of the shape {tuple(value.shape)}")
            else:
                self._sums[name] = self._sums[name] + value.detach().to(self._device, self._dtype).view(1)
        self._communicator.flush()

    def read(self) -> dict[str, float]:
        """The sums over all cores since the start, by one reduction. Every core must call it."""
        host = torch.tensor(list(self._host_sums.values()), dtype=self._dtype).to(self._device)
        own = torch.cat(list(self._sums.values())) + host
        total = self._communicator.total(own.to(self._device_for_sums))
        return dict(zip(self._names, total.tolist(), strict=True))

    def restore(self, sums: Mapping[str, float]) -> None:
        """Go on from sums that :meth:`read` gave, on any number of cores. Every core must call it."""
        if set(sums) != set(self._names):
            raise ValueError(f"the sums must be of {', '.join(self._names)}, got {', '.join(sums)}")
        self.reset()
        if self._communicator.rank == 0:
            self._host_sums = {name: float(sums[name]) for name in self._names}
