"""Which cores are running: by the device of the parameters, and by the backend that was started."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from variable_batch_size.cores import distributed, xla
from variable_batch_size.cores.communicator import Alone, Communicator


def communicator_for(tensors: Iterable[torch.Tensor]) -> Communicator:
    """XLA if the tensors are on an XLA device, torch.distributed if it is initialised, else alone."""
    if any(tensor.device.type == "xla" for tensor in tensors):
        return xla.Xla()
    return distributed.Distributed() if distributed.is_running() else Alone()


def running_cores() -> tuple[int, int]:
    """The rank of this core and the number of cores, as the running backend knows them."""
    if distributed.is_running():
        communicator = distributed.Distributed()
        return communicator.rank, communicator.num_replicas
    return xla.cores() if xla.is_running() else (0, 1)


def device_for_sums(device: torch.device) -> torch.device:
    """Where values on a device must go to be summed over all cores: nowhere else, unless these are cores of XLA."""
    is_xla = not distributed.is_running() and running_cores()[1] > 1
    return xla.device() if is_xla else device
