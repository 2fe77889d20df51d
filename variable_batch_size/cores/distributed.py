"""The cores of torch.distributed: the processes of a group, or of all, whatever the backend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist

from variable_batch_size.cores.communicator import Communicator, each_element_once

Group = Any
"""A process group of torch.distributed; None for the default one. (Its class is not there where torch lacks it.)"""

_LARGE = 2**22
"""Elements from which on a second call surely costs less than it gains: at 1 M these are equal."""


@final
class Distributed(Communicator):
    """The processes of a group of torch.distributed.

    Args:
        groups: one, or several that cross in this process, such as the rows and columns of a grid: the cores are then
            the processes of the whole grid.
    """

    def __init__(self, *groups: Group) -> None:
        self._groups = groups or (None,)
        sizes = [dist.get_world_size(group) for group in self._groups]
        ranks = [dist.get_rank(group) for group in self._groups]
        if min(ranks) < 0:
            raise ValueError("`process_group` must be one that this process belongs to, got one of others")
        self.rank = sum(rank * math.prod(sizes[:place]) for place, rank in enumerate(ranks))
        self.num_replicas = math.prod(sizes)

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        parts = [part for tensor in tensors for part in _halves_if_large(_as_real(tensor))]
        for group in self._groups:
            for work in [dist.all_reduce(part, group=group, async_op=True) for part in parts]:
                if work is not None:
                    work.wait()

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        for group in self._groups:
            first = dist.get_process_group_ranks(group)[0]
            for tensor in (each_element_once(tensor.detach()) for tensor in tensors if tensor.numel()):
                # as bytes, which every backend knows how to send, whatever the kind of number
                sent = tensor.contiguous()
                dist.broadcast(sent.view(-1).view(torch.uint8), src=first, group=group)
                if sent.data_ptr() != tensor.data_ptr():
                    tensor.copy_(sent)


def is_running() -> bool:
    """Whether a process group has been initialised."""
    return dist.is_available() and dist.is_initialized()


def group_of(process_group: Any) -> Group:
    """A process group, also from a mesh of devices with one dimension; anything else is refused."""
    if process_group is None:
        return None
    if not is_running():
        raise ValueError("`process_group` must be None where torch.distributed is not initialised")
    if isinstance(process_group, dist.ProcessGroup) or process_group is dist.GroupMember.NON_GROUP_MEMBER:
        return process_group
    if not hasattr(process_group, "mesh_dim_names"):
        kind = type(process_group).__name__
        raise ValueError(f"`process_group` must be a group of torch.distributed or a DeviceMesh, got {kind}")
    if process_group.ndim != 1:
        raise ValueError(
            "`process_group` must be the dimension of the mesh along which cores have different samples, as "
            f'mesh["data"], got a mesh with the dimensions {process_group.mesh_dim_names or process_group.ndim}'
        )
    return process_group.get_group()


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _halves_if_large(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Large tensors on a CPU in two parts: gloo has two threads, and the sum of one tensor keeps one of them busy."""
    return tensor.view(-1).chunk(2) if tensor.device.type == "cpu" and tensor.numel() >= _LARGE else [tensor]
