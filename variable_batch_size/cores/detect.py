"""Which communicator a run uses: by the device of its parameters, the initialized backend, or a process group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from variable_batch_size.cores import devices, dtensor, xla
from variable_batch_size.cores.communicator import Communicator, SingleProcess, group_of, is_running
from variable_batch_size.cores.process_group import ProcessGroups, SpmdHosts


def communicator_for(tensors: Iterable[torch.Tensor], process_group: Any = None) -> Communicator:
    """The cores that share the samples of a run.

    Args:
        tensors: of the run: XLA if some are on an XLA device, torch.distributed if it is initialised, else alone.
        process_group: of torch.distributed, or a mesh of one dimension; all processes if None.
    """
    kinds = {tensor.device.type for tensor in tensors}
    if "xla" in kinds or xla.is_spmd():
        _refuse_group(process_group)
        return xla.XlaDevices() if "xla" in kinds else SingleProcess()
    group = group_of(process_group)
    if not is_running():
        return SingleProcess()
    return ProcessGroups(group, keeps_flat_gradients=kinds.isdisjoint(devices.COMPILING))


def everyone_for(tensors: Iterable[torch.Tensor], process_group: Any = None) -> Communicator:
    """The cores of a run that share its samples, and those that share its parameters: all who save it together."""
    tensors = list(tensors)
    if xla.is_spmd() and xla.num_hosts() > 1:
        return SpmdHosts(communicator_for(tensors, process_group), xla.num_hosts())
    if not dtensor.any_dtensor(tensors):
        return communicator_for(tensors, process_group)
    group = group_of(process_group)
    return ProcessGroups(group, *dtensor.model_groups(tensors, group).values())


def running_cores(process_group: Any = None) -> tuple[int, int]:
    """The rank of this core and the number of cores, as the running backend knows them."""
    if xla.is_spmd():  # also where its hosts have a process group
        _refuse_group(process_group)
        return 0, 1
    group = group_of(process_group)
    if is_running():
        communicator = ProcessGroups(group)
        return communicator.rank, communicator.num_replicas
    return xla.cores() if xla.is_running() else (0, 1)


def device_for_sums(device: torch.device) -> torch.device:
    """Where values on a device must go to be summed over all cores: nowhere else, unless these are cores of XLA."""
    is_xla = not is_running() and running_cores()[1] > 1
    return xla.device() if is_xla else device


def _refuse_group(process_group: Any) -> None:
    if process_group is not None:
        raise ValueError("`process_group` must be None on XLA, whose cores are all of its devices")
