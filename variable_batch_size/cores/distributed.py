"""The cores of torch.distributed: the processes of a group, or of all, whatever the backend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist

from variable_batch_size.cores.communicator import Communicator, each_element_once
from variable_batch_size.cores.groups import Group, ranks_of
from variable_batch_size.cores.meshes import dimensions_of, local_part

_LARGE = 2**22
"""Elements from which on a second call surely costs less than it gains: at 1 M these are equal."""


@final
class Distributed(Communicator):
    """The processes of a group of torch.distributed.

    Args:
        groups: one, or several that cross in this process, such as the rows and columns of a grid: the cores are then
            the processes of the whole grid.
        keeps_flat_gradients: whether gradients are summed in flat memory, or in a tensor each.
    """

    def __init__(self, *groups: Group, keeps_flat_gradients: bool = True) -> None:
        self.keeps_flat_gradients = keeps_flat_gradients
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
        for tensor in tensors:
            for group in self._groups_with_copies(tensor):
                _broadcast(each_element_once(local_part(tensor.detach())), group)

    def _groups_with_copies(self, tensor: torch.Tensor) -> Sequence[Group]:
        """Those whose processes are to have the same of a tensor: of one that is split over the cores, its copies."""
        own = set().union(*map(ranks_of, self._groups))
        among_cores = [dimension for dimension in dimensions_of(tensor) if own.issuperset(dimension.ranks)]
        return [dimension.group for dimension in among_cores if dimension.is_copied] if among_cores else self._groups


def _broadcast(tensor: torch.Tensor, group: Group) -> None:
    # as bytes, which every backend knows how to send, whatever the kind of number
    sent = tensor.contiguous()
    if sent.numel():
        dist.broadcast(sent.view(-1).view(torch.uint8), src=ranks_of(group)[0], group=group)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.copy_(sent)


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _halves_if_large(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Large tensors on a CPU in two parts: gloo has two threads, and the sum of one tensor keeps one of them busy."""
    return tensor.view(-1).chunk(2) if tensor.device.type == "cpu" and tensor.numel() >= _LARGE else [tensor]
