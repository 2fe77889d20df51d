"""The one seam to other cores: a single process, torch.distributed with any backend, or torch_xla."""

from __future__ import annotations

import math
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist

_LARGE = 2**22
"""Elements from which on a second call surely costs less than it gains: at 1 M these are equal."""


class Communicator(ABC):
    """What a core can do together with all other cores."""

    rank: int
    num_replicas: int

    @abstractmethod
    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor, in place, by its sum over all cores. Every core must call it with the same shapes."""

    @abstractmethod
    def end_minibatch(self) -> None:
        """Called once after every minibatch, when all of its work has been said."""

    @abstractmethod
    def as_data(self, number: float) -> float:
        """A number that changes from step to step, in a form that is no reason to compile anew."""

    @abstractmethod
    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor, in place, by that of core 0."""

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all cores, on the host, after a wait for the device. Every core must call it."""
        total = tensor.detach().clone()
        self.sum([total])
        self.end_minibatch()
        return total.cpu()


@final
class Alone(Communicator):
    """One process that is the only core."""

    rank = 0
    num_replicas = 1

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def end_minibatch(self) -> None:
        pass

    def as_data(self, number: float) -> float:
        return number


@final
class Distributed(Communicator):
    """The default process group of torch.distributed, whatever its backend."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.num_replicas = dist.get_world_size()

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        parts = [part for tensor in tensors for part in _halves_if_large(tensor)]
        for work in [dist.all_reduce(part, async_op=True) for part in parts]:
            if work is not None:
                work.wait()

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)

    def end_minibatch(self) -> None:
        pass

    def as_data(self, number: float) -> float:
        return number


@final
class Xla(Communicator):
    """The cores of torch_xla: TPU cores, or virtual cores on a CPU.

    Tensor work is only noted down until :meth:`end_minibatch` compiles and starts it. Doing that after every minibatch
    keeps the set of compiled programs closed; noting down several would give a program for every number of them.

    Virtual cores are threads of one process, and two things hold there that TPUs do not need. Programs are started one
    thread at a time: two threads that compile the same program at once get two, whose collectives never meet. And a
    thread waits for its own previous program *before* it takes its turn: starting the next one blocks until that has
    ended, and it may be waiting in a collective for those who want the turn.
    """

    _turn = threading.Lock()

    def __init__(self) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.runtime as xr

        self._torch_xla: Any = torch_xla
        self._xm: Any = xm
        self._is_virtual = xr.device_type() == "CPU" and xr.world_size() > 1
        self.rank = xr.global_ordinal()
        self.num_replicas = xr.world_size()

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        self._xm.all_reduce(self._xm.REDUCE_SUM, list(tensors))

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        if self.num_replicas == 1 or not tensors:
            return
        # every core runs the same program: which one it is must be data
        is_first = torch.tensor([self.rank == 0]).to(tensors[0].device)
        with torch.no_grad():
            copies = [torch.where(is_first, tensor, torch.zeros_like(tensor)).view_as(tensor) for tensor in tensors]
            self.sum(copies)
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)

    def end_minibatch(self) -> None:
        if not self._is_virtual:
            self._torch_xla.sync()
            return
        self._xm.wait_device_ops(self._xm.xla_real_devices([self._torch_xla.device()]))
        with self._turn:
            self._torch_xla.sync()

    def as_data(self, number: float) -> float:
        # XLA puts exactly 0, 1 and -1 into the program; one step of double precision beside them is the same float32
        return math.nextafter(number, math.inf) if number in (0.0, 1.0, -1.0) else number


def communicator_for(parameters: Iterable[torch.Tensor]) -> Communicator:
    """XLA if the parameters are on an XLA device, torch.distributed if it is initialised, else alone."""
    if any(parameter.device.type == "xla" for parameter in parameters):
        return Xla()
    return Distributed() if _is_distributed() else Alone()


def running_cores() -> tuple[int, int]:
    """The rank of this core and the number of cores, as the running backend knows them."""
    if _is_distributed():
        return dist.get_rank(), dist.get_world_size()
    if "torch_xla" in sys.modules:
        import torch_xla.runtime as xr

        return xr.global_ordinal(), xr.world_size()
    return 0, 1


def _halves_if_large(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Large tensors on a CPU in two parts: gloo has two threads, and the sum of one tensor keeps one of them busy."""
    return tensor.chunk(2) if tensor.device.type == "cpu" and tensor.numel() >= _LARGE else [tensor]


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
