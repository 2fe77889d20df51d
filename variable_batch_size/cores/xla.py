"""Everything that uses torch_xla, imported on first use: TPU cores, or virtual cores on a CPU."""

import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

from variable_batch_size.cores.communicator import Communicator, Formula, Operation, check_same_core
from variable_batch_size.cores.xla_operations import as_operation, scaled, squared_norms, where

NUM_THREADS = 64  # of up to 32 virtual cores: the order in which XLA's CPU sums depends on the size of its thread pool
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"  # also the vendor of network cards and disks on Google Cloud
_TPUS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x007c", "0x0083")
_ALMOST_ONE = math.nextafter(1.0, 0.0)


@final
class ThreadRendezvous:
    """``xm.rendezvous`` for threads, without a collective; `rank` returns the rank of the calling thread."""

    def __init__(self, num_cores: int, rank: Callable[[], int]) -> None:
        self._num_cores, self._rank = num_cores, rank
        self._payloads = [b""] * num_cores
        self._barrier = threading.Barrier(num_cores)

    def rendezvous(self, tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
        """Wait for all cores, and return their payloads in the order of their ranks."""
        if replicas and sorted(replicas) != list(range(self._num_cores)):
            raise ValueError(f"`replicas` must be empty or all {self._num_cores} cores, got {list(replicas)} ({tag!r})")
        self._payloads[self._rank()] = payload
        self._barrier.wait()
        found = list(self._payloads)
        self._barrier.wait()  # no core overwrites its payload before all have read it
        return found


def has_fixed_threads() -> bool:
    """Whether a sum on this device has the same bits on any number of cores: on a CPU with the threads of a launch."""
    return _module("runtime").device_type() != "CPU" or os.environ.get("PJRT_NPROC") == str(NUM_THREADS)


def is_installed() -> bool:
    """Whether torch_xla can be imported."""
    return find_spec("torch_xla") is not None


def is_default() -> bool:
    """Whether cores are XLA's unless asked otherwise: with a TPU or PJRT_DEVICE, as in a launch on XLA."""
    return is_installed() and (bool(os.environ.get("PJRT_DEVICE")) or has_tpu())


def has_tpu(pci_devices: Path = _PCI_DEVICES) -> bool:
    """Whether this machine has a TPU; found without torch_xla, whose import takes seconds."""
    vendors = (file for file in pci_devices.glob("*/vendor") if file.read_text().strip() == _GOOGLE)
    return any(file.with_name("device").read_text().strip() in _TPUS for file in vendors)


def is_running() -> bool:
    """Whether this process has imported torch_xla."""
    return "torch_xla" in sys.modules


def device() -> torch.device:
    return torch.device(_torch_xla().device())


def cores() -> tuple[int, int]:
    """The rank of this core and the number of cores."""
    return _module("runtime").global_ordinal(), _module("runtime").world_size()


def is_spmd() -> bool:
    """Whether this process drives all its devices as one, with sharded tensors: XLA's SPMD mode."""
    return is_running() and bool(_module("runtime").is_spmd())


def num_hosts() -> int:
    """Number of processes that share the devices."""
    return int(_module("runtime").process_count())


def num_programs() -> int:
    """Number of graphs compiled in this process."""
    return int(_module("debug.metrics").counter_value("UncachedCompile") or 0)


@final
class XlaDevices(Communicator):
    """The cores of torch_xla.

    Operations are traced until :meth:`flush` compiles and starts them. Flushing after every minibatch keeps the set of
    graphs closed; tracing several would give a graph for every number of them.

    Virtual cores are threads of one process and need two precautions. Graphs are started by one thread at a time: two
    threads that compile the same graph at once get two, whose collectives deadlock. And a thread waits for its own
    previous graph *before* it takes the lock: starting the next one blocks until that has ended, which may wait in a
    collective for a thread that waits for the lock.

    In SPMD mode all devices are one core. The compiler partitions graphs by the shardings of tensors, and adds
    shardings to its results. So all tensors that outlive a graph must be sharded from the start: another sharding is
    another graph.
    """

    is_one_program = True
    keeps_flat_gradients = False

    _turn = threading.Lock()

    def __init__(self) -> None:
        self.rank, self.num_replicas = cores()
        self._is_spmd = is_spmd()
        self._is_virtual = _module("runtime").device_type() == "CPU" and self.num_replicas > 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        check_same_core(self, *cores())

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._is_spmd or self.num_replicas == 1:  # in SPMD mode the compiler has summed
            return
        model = _module("core.xla_model")
        wide = [tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor for tensor in tensors]
        model.all_reduce(model.REDUCE_SUM, wide)  # XLA's CPU has none for the narrow ones
        for tensor, total in zip(tensors, wide, strict=True):
            if total is not tensor:
                tensor.copy_(total)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        if self.num_replicas == 1 or not tensors:
            return
        # every core runs the same graph: its rank must be data
        is_first = torch.tensor([self.rank == 0]).to(tensors[0].device)
        with torch.no_grad():
            copies = [
                torch.where(is_first, summable, torch.zeros_like(summable)).view_as(tensor)
                for tensor in tensors
                for summable in [tensor.int() if tensor.dtype == torch.bool else tensor]
            ]
            self.sum(copies)
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)

    def flush(self, *, is_extra: bool = False) -> None:
        seed = random_seed(device()) if is_extra else None  # each graph has the next one
        if self._is_virtual:
            model = _module("core.xla_model")
            model.wait_device_ops(model.xla_real_devices([_torch_xla().device()]))
        with self._turn if self._is_virtual else nullcontext():
            _torch_xla().sync()
        if seed is not None:
            set_random_seed(seed, device())

    def shard_like(self, tensors: Iterable[torch.Tensor]) -> None:
        if self._is_spmd:
            on_all_devices = _torch_xla()._XLAC.OpSharding([], [], [], 0)
            for tensor in tensors:
                _lay_out(tensor, _layout_of(tensor) or on_all_devices)

    def traced_scalar(self, number: float) -> float:
        # XLA compiles exactly 0, 1 and -1 into the graph; the next double is the same float32
        return math.nextafter(number, math.inf) if number in (0.0, 1.0, -1.0) else number

    def traced_beta(self, number: float) -> float:
        return max(self.traced_scalar(number), 1 - _ALMOST_ONE)

    # in SPMD mode the compiler needs to see the operations
    def as_operation(self, formula: Formula) -> Operation:
        return super().as_operation(formula) if self._is_spmd else as_operation(formula)

    def where(
        self, condition: torch.Tensor, ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        return super().where(condition, ones, others) if self._is_spmd else where(condition, ones, others)

    def scaled(self, tensors: Sequence[torch.Tensor], factors: torch.Tensor) -> Sequence[torch.Tensor]:
        return super().scaled(tensors, factors) if self._is_spmd else scaled(tensors, factors)

    def squared_norms(self, lists: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        return super().squared_norms(lists) if self._is_spmd else squared_norms(lists)


def to_device_like(other: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor from the host on the device of another of its shape; in SPMD mode sharded like it."""
    tensor = tensor.to(other.device)
    if is_spmd() and other.device.type == "xla":
        _lay_out(tensor, _layout_of(other))
    return tensor


def _layout_of(tensor: torch.Tensor) -> Any:
    """The sharding of a tensor; None if it has none."""
    return _torch_xla()._XLAC._get_xla_op_sharding(tensor)


def _lay_out(tensor: torch.Tensor, layout: Any) -> None:
    if layout is not None and _layout_of(tensor) is None:
        _torch_xla()._XLAC._xla_mark_sharding(tensor, layout)


def random_seed(device: torch.device) -> int:
    """The state of the device's generator."""
    return int(_module("core.xla_model").get_rng_state(str(device)))


def set_random_seed(seed: int, device: torch.device) -> None:
    _module("core.xla_model").set_rng_state(seed, str(device))


def run_on_devices(local_rank: int, num_processes: int, run: Callable[[int], None]) -> None:
    """Call ``run(rank)`` in a thread for each XLA device of this process.

    ``torch_xla.launch`` does the same in the processes it starts, but does not report at once when one of them fails.
    """
    if is_spmd():
        raise ValueError("XLA_USE_SPMD must not be set if each device is a core: launch with `spmd=True`")
    pjrt = _module("_internal.pjrt")
    pjrt._run_thread_per_device(local_rank, num_processes, lambda: run(cores()[0]), pjrt.initialize_multiprocess)


def patch_rendezvous(num_cores: int) -> None:
    """Replace ``xm.rendezvous``, which ``xm.mesh_reduce`` also calls, in a process whose threads are the cores.

    All threads would start its collective at once, and each might get its own graph: the process would abort.
    """
    _module("core.xla_model").rendezvous = ThreadRendezvous(num_cores, lambda: cores()[0]).rendezvous


def use_spmd() -> None:
    """Enable SPMD mode, before any tensor is on a device; on several hosts, initialize torch.distributed, too."""
    if not is_spmd():
        _module("runtime").use_spmd()
    if num_hosts() > 1:
        _module("distributed.xla_backend")  # registers xla://
        dist.init_process_group("gloo", init_method="xla://")


def stand_for(num_cores: int) -> None:
    """Make the only core of this process run the programs of the first of `num_cores` cores; the others are idle."""
    _module("runtime").world_size = lambda: num_cores


def num_tpu_processes() -> int:
    return int(_module("_internal.tpu").num_local_processes())


def num_tpu_cores() -> int:
    return int(_module("_internal.tpu").num_available_devices())


def _torch_xla() -> Any:
    return import_module("torch_xla")


def _module(name: str) -> Any:
    return import_module(f"torch_xla.{name}")
