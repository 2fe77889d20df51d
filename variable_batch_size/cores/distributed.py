"""The cores of torch.distributed: the processes of the default group, whatever its backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist

from variable_batch_size.cores.communicator import Communicator, each_element_once

_LARGE = 2**22
"""Elements from which on a second call surely costs less than it gains: at 1 M these are equal."""


@final
class Distributed(Communicator):
    """The default process group of torch.distributed."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.num_replicas = dist.get_world_size()

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        parts = [part for tensor in tensors for part in _halves_if_large(_as_real(tensor))]
        for work in [dist.all_reduce(part, async_op=True) for part in parts]:
            if work is not None:
                work.wait()

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in (each_element_once(tensor.detach()) for tensor in tensors if tensor.numel()):
            # as bytes, which every backend knows how to send, whatever the kind of number
            sent = tensor.contiguous()
            dist.broadcast(sent.view(-1).view(torch.uint8), src=0)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)


def is_running() -> bool:
    """Whether a process group has been initialised."""
    return dist.is_available() and dist.is_initialized()


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _halves_if_large(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Large tensors on a CPU in two parts: gloo has two threads, and the sum of one tensor keeps one of them busy."""
    return tensor.view(-1).chunk(2) if tensor.device.type == "cpu" and tensor.numel() >= _LARGE else [tensor]
