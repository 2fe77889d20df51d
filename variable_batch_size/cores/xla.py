"""Everything that needs torch_xla, which is imported when first used: TPU cores, or virtual cores on a CPU."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, final

import torch
import torch.distributed as dist

from variable_batch_size.cores.communicator import Communicator


@final
class ThreadRendezvous:
    """What ``xm.rendezvous`` does, without a collective of the device.

    Args:
        num_cores: how many threads come.
        rank: tells which of them the calling thread is.
    """

    def __init__(self, num_cores: int, rank: Callable[[], int]) -> None:
        self._num_cores = num_cores
        self._rank = rank
        self._shown = [b""] * num_cores
        self._all_are_here = threading.Barrier(num_cores)

    def rendezvous(self, tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
        """Wait for all cores, and return what each has brought, in the order of their ranks.

        Args:
            tag: the name of the meeting.
            payload: what this core brings.
            replicas: those who come; all if empty, and nothing else.
        """
        if replicas and sorted(replicas) != list(range(self._num_cores)):
            raise ValueError(f"`replicas` must be empty or all {self._num_cores} cores, got {list(replicas)} ({tag!r})")
        self._shown[self._rank()] = payload
        self._all_are_here.wait()
        found = list(self._shown)
        self._all_are_here.wait()  # nobody shows something new before all have seen this
        return found


_ALMOST_ONE = math.nextafter(1.0, 0.0)


def is_installed() -> bool:
    """Whether torch_xla can be imported."""
    return find_spec("torch_xla") is not None


def is_running() -> bool:
    """Whether this process has begun to use torch_xla."""
    return "torch_xla" in sys.modules


def device() -> torch.device:
    """The XLA device of this core."""
    return torch.device(_torch_xla().device())


def cores() -> tuple[int, int]:
    """The rank of this core and the number of cores."""
    runtime = _runtime()
    return runtime.global_ordinal(), runtime.world_size()


def is_spmd() -> bool:
    """Whether this process drives all its devices as one, each tensor laid out over them: the SPMD mode of XLA."""
    return is_running() and bool(_runtime().is_spmd())


def use_spmd() -> None:
    """Begin to; before anything is on a device."""
    if not is_spmd():
        _runtime().use_spmd()


def num_hosts() -> int:
    """How many processes share the devices."""
    return int(_runtime().process_count())


def num_programs() -> int:
    """How many programs XLA has compiled in this process."""
    return int(_module("debug.metrics").counter_value("UncachedCompile") or 0)


@final
class XlaDevices(Communicator):
    """The cores of torch_xla.

    Tensor work is only noted down until :meth:`flush` compiles and starts it. Doing that after every minibatch keeps
    the set of compiled programs closed; noting down several would give a program for every number of them.

    Virtual cores are threads of one process, and two things hold there that TPUs do not need. Programs are started one
    thread at a time: two threads that compile the same program at once get two, whose collectives never meet. And a
    thread waits for its own previous program *before* it takes its turn: starting the next one blocks until that has
    ended, and it may be waiting in a collective for those who want the turn.

    In SPMD mode all devices are one core: the compiler splits what it does over them, as tensors are laid out, and adds
    the layout of what it returns. So all that lives on from program to program has one from the start; else what was
    returned would be the input of another program.
    """

    is_one_program = True
    keeps_flat_gradients = False

    _turn = threading.Lock()

    def __init__(self) -> None:
        self.rank, self.num_replicas = cores()
        self._is_spmd = is_spmd()
        self._is_virtual = _runtime().device_type() == "CPU" and self.num_replicas > 1

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._is_spmd or self.num_replicas == 1:  # in SPMD mode the compiler has summed
            return
        model = _module("core.xla_model")
        model.all_reduce(model.REDUCE_SUM, list(tensors))

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        if self.num_replicas == 1 or not tensors:
            return
        # every core runs the same program: which one it is must be data
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

    def flush(self) -> None:
        if not self._is_virtual:
            _torch_xla().sync()
            return
        model = _module("core.xla_model")
        model.wait_device_ops(model.xla_real_devices([_torch_xla().device()]))
        with self._turn:
            _torch_xla().sync()

    def shard_like(self, tensors: Iterable[torch.Tensor]) -> None:
        if self._is_spmd:
            on_all_devices = _torch_xla()._XLAC.OpSharding([], [], [], 0)
            for tensor in tensors:
                _lay_out(tensor, _layout_of(tensor) or on_all_devices)

    def placed_like(self, other: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return placed_like(other, tensor)

    def traced_scalar(self, number: float) -> float:
        # XLA puts exactly 0, 1 and -1 into the program; one step of double precision beside them is the same float32
        return math.nextafter(number, math.inf) if number in (0.0, 1.0, -1.0) else number

    def traced_beta(self, number: float) -> float:
        return max(self.traced_scalar(number), 1 - _ALMOST_ONE)


def placed_like(other: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor from the host on the device of another of its shape; in SPMD mode laid out over the devices as that."""
    tensor = tensor.to(other.device)
    if is_spmd() and other.device.type == "xla":
        _lay_out(tensor, _layout_of(other))
    return tensor


def _layout_of(tensor: torch.Tensor) -> Any:
    """How a tensor is laid out over the devices, None if nobody has said it."""
    return _torch_xla()._XLAC._get_xla_op_sharding(tensor)


def _lay_out(tensor: torch.Tensor, layout: Any) -> None:
    if layout is not None and _layout_of(tensor) is None:
        _torch_xla()._XLAC._xla_mark_sharding(tensor, layout)


# ------------------------------------------------------------------------------------------------------ random numbers


def random_seed(device: torch.device) -> int:
    """The state of the device's random generator."""
    return int(_module("core.xla_model").get_rng_state(str(device)))


def set_random_seed(seed: int, device: torch.device) -> None:
    """Set that state."""
    _module("core.xla_model").set_rng_state(seed, str(device))


@contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Within, flushing does not change which random numbers come next on the device, as it otherwise does."""
    seed = random_seed(device)
    try:
        yield
    finally:
        set_random_seed(seed, device)


# ------------------------------------------------------------------------------------------------------------ launching


def run_on_devices(local_rank: int, num_processes: int, run: Callable[[int], None]) -> None:
    """Call ``run(rank)`` in a thread for each XLA device of this process.

    It is what ``torch_xla.launch`` does in the processes it starts; starting these ourselves tells us at once when one
    fails.
    """
    if is_spmd():
        raise ValueError("XLA_USE_SPMD must not be set where each device is a core: launch with `spmd=True`")
    pjrt = _module("_internal.pjrt")
    pjrt._run_thread_per_device(local_rank, num_processes, lambda: run(cores()[0]), pjrt.initialize_multiprocess)


def patch_rendezvous(num_cores: int) -> None:
    """Replace ``xm.rendezvous`` in this process, whose threads are the cores, and so what ``xm.mesh_reduce`` calls.

    Its collective would be started by all threads at once, of which each may get a program of its own: they never meet,
    and the process is aborted.
    """
    _module("core.xla_model").rendezvous = ThreadRendezvous(num_cores, lambda: cores()[0]).rendezvous


def init_hosts_process_group() -> None:
    """In SPMD mode on several hosts: let torch.distributed reach from each to all others."""
    if num_hosts() > 1:
        _module("distributed.xla_backend")  # which knows how they find each other
        dist.init_process_group("gloo", init_method="xla://")


def num_tpu_processes() -> int:
    """How many processes this host's TPU cores are driven by."""
    return int(_module("_internal.tpu").num_local_processes())


def num_tpu_cores() -> int:
    """How many TPU cores this host has."""
    return int(_module("_internal.tpu").num_available_devices())


def _torch_xla() -> Any:
    return import_module("torch_xla")


def _runtime() -> Any:
    return _module("runtime")


def _module(name: str) -> Any:
    return import_module(f"torch_xla.{name}")
