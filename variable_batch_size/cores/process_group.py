"""The communicators of torch.distributed: a process group, or the hosts of XLA's SPMD mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist

from variable_batch_size.cores.communicator import Communicator, Group, each_element_once, is_running, ranks_of
from variable_batch_size.cores.dtensor import dimensions_of, to_local

_LARGE = 2**22
"""Elements from which on a second call surely costs less than it gains: at 1 M these are equal."""


@final
class ProcessGroups(Communicator):
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
                _broadcast(each_element_once(to_local(tensor.detach())), group)

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


@final
class SpmdHosts(Communicator):
    """A process on each host, which all run the same programs on the same samples.

    What they have on the devices is the same, or parts of one tensor. This is for the rest: clocks and signals, which
    reach one of them first, and files, which one of them writes. It goes from host to host, past the devices.

    Args:
        devices: the core that they are.
        number: how many there are.
    """

    is_one_program = True
    keeps_flat_gradients = False

    def __init__(self, devices: Communicator, number: int) -> None:
        if not is_running():
            raise RuntimeError(
                "in XLA's SPMD mode on several hosts these must reach each other: use vbs.launch(…, spmd=True), or "
                'torch.distributed.init_process_group("gloo", init_method="xla://")'
            )
        self._devices = devices
        self._processes = ProcessGroups()
        self.rank, self.num_replicas = self._processes.rank, self._processes.num_replicas
        if self.num_replicas != number:
            raise ValueError(
                f"torch.distributed must have a process on each of the {number} hosts of XLA's SPMD mode, got "
                f"{self.num_replicas}"
            )

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(self.total(tensor))

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            sent = tensor.detach().cpu()
            self._processes.broadcast([sent])
            with torch.no_grad():
                tensor.copy_(sent)

    def flush(self) -> None:
        self._devices.flush()

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.detach().to("cpu", copy=True)
        self._processes.sum([total])
        return total
