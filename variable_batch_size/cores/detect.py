"""The communicators of torch.distributed, and which one a run uses: by device, initialized backend or process group."""

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist

from variable_batch_size.cores import dtensor, live, xla
from variable_batch_size.cores.communicator import (
    Communicator,
    Group,
    SharedGroup,
    SingleProcess,
    check_same_core,
    each_element_once,
    group_of,
    is_running,
    parts_to_sum,
    ranks_of,
)


@final
class ProcessGroups(Communicator):
    """The ranks of a process group; or of a whole mesh, from the groups that cross in this process."""

    def __init__(self, *process_groups: Any) -> None:
        self._given = [SharedGroup(one) for one in process_groups or (None,)]
        self._groups = [group_of(one.given) for one in self._given]
        self.rank, self.num_replicas = self._place()

    def _place(self) -> tuple[int, int]:
        """This process's rank in all groups together, and the number of ranks."""
        sizes = [dist.get_world_size(group) for group in self._groups]
        ranks = [dist.get_rank(group) for group in self._groups]
        if min(ranks) < 0:
            raise ValueError("`process_group` must contain this process, got a group of other processes")
        return sum(rank * math.prod(sizes[:place]) for place, rank in enumerate(ranks)), math.prod(sizes)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_groups"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not is_running():
            check_same_core(self, 0, 1)
        self._groups = [group_of(one.given) for one in self._given]
        check_same_core(self, *self._place())

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        parts = [part for tensor in tensors for part in parts_to_sum(tensor)]
        for group in self._groups:
            for work in [dist.all_reduce(part, group=group, async_op=True) for part in parts]:
                if work is not None:
                    work.wait() if self.timeout is None else work.wait(self.timeout)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            for group in self._groups_with_copies(tensor):
                local = each_element_once(dtensor.to_local(tensor.detach()))
                sent = local.contiguous()
                if sent.numel():  # as bytes, which every backend supports
                    dist.broadcast(sent.view(-1).view(torch.uint8), src=ranks_of(group)[0], group=group)
                if sent.data_ptr() != local.data_ptr():
                    local.copy_(sent)

    def _groups_with_copies(self, tensor: torch.Tensor) -> Sequence[Group]:
        """The groups over which a tensor is replicated; all groups if it is not sharded over these ranks."""
        own = set().union(*map(ranks_of, self._groups))
        among_cores = [dimension for dimension in dtensor.dimensions_of(tensor) if own.issuperset(dimension.ranks)]
        return (
            [dimension.group for dimension in among_cores if dimension.is_replicated] if among_cores else self._groups
        )


@final
class SpmdHosts(Communicator):
    """The hosts of XLA's SPMD mode, which run the same graphs, for what is on no device: clocks, signals and files."""

    is_one_program = True
    keeps_flat_gradients = False

    def __init__(self, devices: Communicator, number: int) -> None:
        if not is_running():
            needs = "XLA's SPMD mode on several hosts needs a process group: use vbs.launch(…, spmd=True)"
            raise RuntimeError(f'{needs}, or torch.distributed.init_process_group("gloo", init_method="xla://")')
        self._devices, self._processes = devices, ProcessGroups()
        self.rank, self.num_replicas = self._processes.rank, self._processes.num_replicas
        if self.num_replicas != number:
            rule = f"torch.distributed must have a process on each of the {number} hosts of XLA's SPMD mode"
            raise ValueError(f"{rule}, got {self.num_replicas}")

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

    def total(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self._processes.total(*(tensor.detach().cpu() for tensor in tensors))


def communicator_for(tensors: Iterable[torch.Tensor], process_group: Any = None) -> Communicator:
    """The ranks with different samples: XLA's if a tensor is there, those of a group, a mesh or all, or one alone."""
    types = {tensor.device.type for tensor in tensors}
    if "xla" in types or xla.is_spmd():
        _check_no_group(process_group)
        return xla.XlaDevices() if "xla" in types else SingleProcess()
    if (membership := live.current()) is not None:
        _check_no_group(process_group, "with `elastic`, where all processes that take part")
        return live.LiveCores(membership)
    group_of(process_group)  # it must be None without torch.distributed
    return ProcessGroups(process_group) if is_running() else SingleProcess()


def everyone_for(tensors: Iterable[torch.Tensor], process_group: Any = None) -> Communicator:
    """All ranks of a run: those with different samples, and those with other shards of the parameters."""
    tensors = list(tensors)
    if live.current() is not None:
        return communicator_for(tensors, process_group)
    if xla.is_spmd() and xla.num_hosts() > 1:
        return SpmdHosts(communicator_for(tensors, process_group), xla.num_hosts())
    if not any(map(dtensor.is_dtensor, tensors)):
        return communicator_for(tensors, process_group)
    return ProcessGroups(process_group, *dtensor.model_groups(tensors, group_of(process_group)).values())


def running_cores(process_group: Any = None) -> tuple[int, int]:
    """The rank of this core and the number of cores of the initialized backend."""
    if xla.is_spmd():  # even if its hosts have a process group
        _check_no_group(process_group)
        return 0, 1
    if (membership := live.current()) is not None:
        return membership.rank, len(membership.members)
    group = group_of(process_group)
    if is_running():
        communicator = ProcessGroups(group)
        return communicator.rank, communicator.num_replicas
    return xla.cores() if xla.is_running() else (0, 1)


def check_joined_torchrun(communicator: Communicator) -> None:
    """Raise if torchrun has started several processes, but they have not joined each other."""
    number = int(os.environ.get("WORLD_SIZE", 1)) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    if number > 1 and isinstance(communicator, SingleProcess):
        raise RuntimeError(
            f"torchrun has started {number} processes, but torch.distributed is not initialized: each would train "
            "alone. Pass the loop to vbs.launch(train), or call torch.distributed.init_process_group() before the "
            "loader is made. To train alone in each process, pass num_replicas=1 and rank=0 to the loader."
        )


def shared_store() -> Any:
    """The key-value store that all processes of torch.distributed share."""
    return dist.distributed_c10d._get_default_store()


def is_elastic() -> bool:
    """Whether cores may join and leave during the run."""
    return live.current() is not None


def device_for_sums(device: torch.device) -> torch.device:
    """The device on which values of a device are summed over all cores: an XLA device if the cores are XLA's."""
    return xla.device() if not is_running() and running_cores()[1] > 1 else device


def _check_no_group(process_group: Any, where: str = "on XLA, where all devices") -> None:
    if process_group is not None:
        raise ValueError(f"`process_group` must be None {where} are cores")
