"""The communicators of torch.distributed: a process group, or the hosts of XLA's SPMD mode."""

import math
from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist

from variable_batch_size.cores.communicator import Communicator, Group, each_element_once, is_running, ranks_of
from variable_batch_size.cores.dtensor import dimensions_of, to_local

_LARGE = 2**22  # elements from which on a second call costs less than it gains; equal at 1 M


@final
class ProcessGroups(Communicator):
    """The ranks of a process group, or of several that cross in this process, such as the rows and columns of a mesh.

    With several groups the ranks are those of the whole mesh.
    """

    def __init__(self, *groups: Group) -> None:
        self._groups = groups or (None,)
        sizes = [dist.get_world_size(group) for group in self._groups]
        ranks = [dist.get_rank(group) for group in self._groups]
        if min(ranks) < 0:
            raise ValueError("`process_group` must contain this process, got a group of other processes")
        self.rank = sum(rank * math.prod(sizes[:place]) for place, rank in enumerate(ranks))
        self.num_replicas = math.prod(sizes)

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        parts = [part for tensor in tensors for part in _parts_to_sum(tensor)]
        for group in self._groups:
            for work in [dist.all_reduce(part, group=group, async_op=True) for part in parts]:
                if work is not None:
                    work.wait()

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            for group in self._groups_with_copies(tensor):
                local = each_element_once(to_local(tensor.detach()))
                sent = local.contiguous()
                if sent.numel():  # as bytes, which every backend supports
                    dist.broadcast(sent.view(-1).view(torch.uint8), src=ranks_of(group)[0], group=group)
                if sent.data_ptr() != local.data_ptr():
                    local.copy_(sent)

    def _groups_with_copies(self, tensor: torch.Tensor) -> Sequence[Group]:
        """The groups over which a tensor is replicated; all groups if it is not sharded over these ranks."""
        own = set().union(*map(ranks_of, self._groups))
        among_cores = [dimension for dimension in dimensions_of(tensor) if own.issuperset(dimension.ranks)]
        return [dimension.group for dimension in among_cores if dimension.is_copied] if among_cores else self._groups


def _parts_to_sum(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Large tensors on a CPU in two parts: gloo has two threads, and an all-reduce uses one of them."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.view(-1).chunk(2) if tensor.device.type == "cpu" and tensor.numel() >= _LARGE else [tensor]


@final
class SpmdHosts(Communicator):
    """The hosts of XLA's SPMD mode: one process each, all of which run the same graphs on the same samples.

    Their device tensors are the same, or shards of one tensor. This communicates, from host to host, what is not on the
    devices: clocks, signals and files.
    """

    is_one_program = True
    keeps_flat_gradients = False

    def __init__(self, devices: Communicator, number: int) -> None:
        if not is_running():
            raise RuntimeError(
                "XLA's SPMD mode on several hosts needs a process group: use vbs.launch(…, spmd=True), or "
                'torch.distributed.init_process_group("gloo", init_method="xla://")'
            )
        self._devices, self._processes = devices, ProcessGroups()
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

    def flush(self, *, is_extra: bool = False) -> None:
        self._devices.flush(is_extra=is_extra)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.detach().to("cpu", copy=True)
        self._processes.sum([total])
        return total
