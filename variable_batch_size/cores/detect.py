"""Which communicator a run uses: by the device of its parameters, the initialized backend, or a process group."""

from collections.abc import Iterable
from typing import Any

import torch

from variable_batch_size.cores import dtensor, xla
from variable_batch_size.cores.communicator import Communicator, SingleProcess, group_of, is_running
from variable_batch_size.cores.process_group import ProcessGroups, SpmdHosts


def communicator_for(tensors: Iterable[torch.Tensor], process_group: Any = None) -> Communicator:
    """The ranks that have different samples: XLA's if a tensor is on XLA, those of torch.distributed, or one alone.

    `process_group` is a process group, or a mesh of one dimension; all processes if None.
    """
    types = {tensor.device.type for tensor in tensors}
    if "xla" in types or xla.is_spmd():
        _check_no_group(process_group)
        return xla.XlaDevices() if "xla" in types else SingleProcess()
    group = group_of(process_group)
    if not is_running():
        return SingleProcess()
    return ProcessGroups(group)


def everyone_for(tensors: Iterable[torch.Tensor], process_group: Any = None) -> Communicator:
    """All ranks of a run: those with different samples, and those with other shards of the parameters."""
    tensors = list(tensors)
    if xla.is_spmd() and xla.num_hosts() > 1:
        return SpmdHosts(communicator_for(tensors, process_group), xla.num_hosts())
    if not dtensor.any_dtensor(tensors):
        return communicator_for(tensors, process_group)
    group = group_of(process_group)
    return ProcessGroups(group, *dtensor.model_groups(tensors, group).values())


def running_cores(process_group: Any = None) -> tuple[int, int]:
    """The rank of this core and the number of cores of the initialized backend."""
    if xla.is_spmd():  # even if its hosts have a process group
        _check_no_group(process_group)
        return 0, 1
    group = group_of(process_group)
    if is_running():
        communicator = ProcessGroups(group)
        return communicator.rank, communicator.num_replicas
    return xla.cores() if xla.is_running() else (0, 1)


def device_for_sums(device: torch.device) -> torch.device:
    """The device on which values of a device are summed over all cores: an XLA device if the cores are XLA's."""
    return xla.device() if not is_running() and running_cores()[1] > 1 else device


def _check_no_group(process_group: Any) -> None:
    if process_group is not None:
        raise ValueError("`process_group` must be None on XLA, where all devices are cores")
