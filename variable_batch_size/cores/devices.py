"""Accelerators by capability, and the state of the random number generators of host and devices."""

import json
import os
import random
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from variable_batch_size.checks import check_one_of
from variable_batch_size.cores import xla
from variable_batch_size.cores.communicator import is_running

_ON_THE_HOST = ("gloo", "mpi", "ucc")
_OF_TORCH_TPU = ("tpu_dist", "tpu")
_PORTS = "TORCH_TPU_SLICEBUILDER_ADDRESSES"  # an address for each process

_GAUSS = struct.Struct("<?d")  # whether there is a normal number left from the pair drawn last, and which
_NUMPY = struct.Struct("<H?d")  # the position in the state, and the same
_SEED = struct.Struct("<Q")


def device() -> torch.device:
    """The device of this core, for the model and its minibatches.

    The XLA device if the cores are XLA's: in a launch with ``backend="xla"``, or if torch_xla is installed and there is
    a TPU or the environment has ``PJRT_DEVICE``. Else the accelerator of this process: that of ``LOCAL_RANK``, which
    ``torchrun`` sets, or the current one, which :func:`launch` sets. Else the CPU, also in a process group of a backend
    for CPUs such as gloo.

    >>> model = torch.nn.Linear(4, 2).to(device())
    """
    backend = dist.get_backend() if is_running() else None
    if xla.is_spmd() or (backend in (None, "xla") and xla.is_default()):
        return xla.device()
    accelerator = current()
    if accelerator is None or backend in _ON_THE_HOST:
        return torch.device("cpu")
    if "LOCAL_RANK" in os.environ and accelerator.type != "tpu":  # TorchTPU selects the device of a process
        return torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]) % _device_count())
    return torch.empty(0, device=accelerator.type).device


def module_of(device: torch.device) -> Any:
    """The module of a device type, such as ``torch.cuda``; None for the host, or if torch has none."""
    return None if device.type == "cpu" else getattr(torch, device.type, None)


def compiles_for_shapes(device: torch.device) -> bool:
    """Whether a device compiles another program for each new shape of an operation, as TorchTPU and MPS do."""
    return device.type not in ("cpu", "cuda")


class Pace:
    """Keeps the host at most one minibatch ahead of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._make_event = getattr(module_of(device), "Event", None)
        self._event: Any = None  # at the end of the latest minibatch

    def wait(self) -> None:
        """Call it after the work of a minibatch was queued: waits for the one before."""
        if self._make_event is not None:
            before, self._event = self._event, self._make_event()
            self._event.record()
            if before is not None:
                before.synchronize()


def set_random_seed(seed: int, device: torch.device) -> None:
    """Seed the generators of torch on the host and on all devices of a type; on XLA only that of the device."""
    if device.type == "xla":
        xla.set_random_seed(seed, device)
        return
    # torch.manual_seed would also queue a call for every type of device that is not initialized
    torch.default_generator.manual_seed(seed)
    module = module_of(device)
    seed_all = getattr(module, "manual_seed_all", getattr(module, "manual_seed", None))
    if seed_all is not None:
        seed_all(seed)


def current() -> torch.device | None:
    """The type of the available accelerator, if any."""
    if hasattr(torch, "accelerator"):  # from torch 2.6 on
        return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cuda") if torch.cuda.is_available() else None


def num_devices(backend: str) -> int:
    """Number of devices for a backend of torch.distributed; 0 if it runs on the host."""
    if current() is None or backend in _ON_THE_HOST:
        return 0
    return _device_count()


def check_backend(backend: str, num_devices: int) -> None:
    """Raise for an unknown backend of torch.distributed, and for nccl without a GPU."""
    if ":" not in backend:  # otherwise one for each type of device
        known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
        check_one_of([*known, *_OF_TORCH_TPU, "xla"], backend=backend)
    if backend == "nccl" and not num_devices:
        raise ValueError('backend="nccl" needs a GPU: launch with backend="gloo" for processes on the CPU')


def _device_count() -> int:
    # torch.tpu.device_count() raises unless torch itself calls it
    return torch.accelerator.device_count() if hasattr(torch, "accelerator") else torch.cuda.device_count()


def use_device(number: int, backend: str) -> None:
    """Make a device the current one of this process, unless the backend runs on the host or selects it (TorchTPU)."""
    module = module_of(current() or torch.device("cpu"))
    if num_devices(backend) and backend not in _OF_TORCH_TPU and hasattr(module, "set_device"):
        module.set_device(number)


def process_environments(backend: str, number: int) -> list[dict[str, str]]:
    """What each process of a launch must have in its environment when it starts: nothing, except on TorchTPU."""
    if backend not in _OF_TORCH_TPU:
        return [{} for _ in range(number)]
    found = _environment_of_tpus(backend, number)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        found |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(number)}
    return [found | {"RANK": str(n), "LOCAL_RANK": str(n)} for n in range(number)]


@contextmanager
def completed_environment(backend: str) -> Iterator[None]:
    """Under torchrun: set what TorchTPU reads when a process group starts, the same in all processes."""
    if backend not in _OF_TORCH_TPU or _PORTS in os.environ:
        yield
        return
    number, num_on_host = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if number != num_on_host:
        raise RuntimeError(
            f"{_PORTS} must be set before torchrun starts {number} processes on several hosts, as their addresses must "
            "be in the order of their ranks: call torch.tpu.distributed.set_tpu_launch_env(nnodes=…, nproc_per_node=…) "
            "on each host, and start torchrun with the environment and the --node_rank that it sets"
        )
    store, rank, _ = next(rendezvous("env://"))
    if rank == 0:
        store.set(_PORTS, json.dumps(_environment_of_tpus(backend, number)))
    os.environ.update(json.loads(store.get(_PORTS)))
    yield  # with the store, which rank 0 may serve: others read it until the process group has started


def _environment_of_tpus(backend: str, number: int) -> dict[str, str]:
    """The variables of TorchTPU for all processes on this host: a port for each, and the mesh of its TPUs."""
    module = getattr(torch, "tpu", None)
    if module is None:
        raise ValueError(f'backend="{backend}" needs a TPU and TorchTPU: pip install torch_tpu')
    before = dict(os.environ)
    try:
        module.distributed.set_tpu_launch_env(nproc_per_node=number)
        found = {name: os.environ[name] for name in os.environ if os.environ[name] != before.get(name)}
        num_ports = len(os.environ[_PORTS].split(","))
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
    if num_ports != number:
        raise RuntimeError(
            f"TorchTPU has ports for {num_ports} processes, of an earlier launch or of other hosts, but `cores` is "
            f"{number}. Launch another number of cores from a new process, and start several hosts with torchrun."
        )
    return found


def default_backend() -> str:
    """The backend of torch.distributed for the accelerator; gloo if there is none."""
    device = current()
    if device is None:
        return "gloo"
    if hasattr(dist, "get_default_backend_for_device"):  # from torch 2.6 on
        return str(dist.get_default_backend_for_device(device))
    return "nccl" if device.type == "cuda" else "gloo"


def capture(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of the generators of torch, Python, numpy and the device; each has a fixed length."""
    _, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state()
    _, keys, position, has_gauss, cached = numpy_state
    states = {
        "torch": torch.get_rng_state(),
        "python": _tensor(np.array(words, dtype="<u4").tobytes() + _GAUSS.pack(gauss is not None, gauss or 0.0)),
        "numpy": _tensor(keys.astype("<u4").tobytes() + _NUMPY.pack(position, bool(has_gauss), cached)),
    }
    if device.type == "xla":
        states["xla"] = _tensor(_SEED.pack(xla.random_seed(device)))
    elif device.type == "tpu":
        states["tpu"] = _generator_of_tpu(device).get_state()
    elif (read := getattr(module_of(device), "get_rng_state", None)) is not None:
        states[device.type] = read() if device.type == "mps" else read(device)
    return states


def restore(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Restore captured states; the generator of another device type is left unchanged."""
    torch.set_rng_state(states["torch"])
    words, (has_gauss, gauss) = _split(states["python"], _GAUSS)
    random.setstate((3, tuple(words.tolist()), gauss if has_gauss else None))
    keys, rest = _split(states["numpy"], _NUMPY)
    np.random.set_state(("MT19937", keys, *rest))
    if device.type not in states:
        return
    if device.type == "tpu":
        _generator_of_tpu(device).set_state(states["tpu"])
    elif device.type != "xla":
        write = module_of(device).set_rng_state
        write(states[device.type], *([] if device.type == "mps" else [device]))
    else:
        (seed,) = _SEED.unpack(states["xla"].numpy().tobytes())
        xla.set_random_seed(seed, device)


@contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """In this context, collectives do not advance the random generator, as flushing otherwise does on XLA."""
    seed = xla.random_seed(device) if device.type == "xla" else None
    try:
        yield
    finally:
        if seed is not None:
            xla.set_random_seed(seed, device)


def _generator_of_tpu(device: torch.device) -> torch.Generator:
    """The default generator of TorchTPU, whose get_rng_state() raises unless torch itself calls it."""
    generator: torch.Generator = module_of(device).default_generators[device.index or 0]
    return generator


def _tensor(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())


def _split(state: torch.Tensor, rest: struct.Struct) -> tuple[Any, tuple[Any, ...]]:
    """The 32-bit words at the start of a state, and the values at its end."""
    content = state.numpy().tobytes()
    return np.frombuffer(content[: -rest.size], dtype="<u4"), rest.unpack(content[-rest.size :])
