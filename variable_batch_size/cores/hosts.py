"""The hosts of XLA's SPMD mode, which are one core together, and agree on what each of them sees alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.cores.distributed import Distributed
from variable_batch_size.cores.groups import is_running


@final
class Hosts(Communicator):
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
        self._processes = Distributed()
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
