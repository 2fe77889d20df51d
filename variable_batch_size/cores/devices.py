"""Accelerators by capability, and the state of the random number generators of host and devices."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from variable_batch_size.cores import xla

COMPILING = frozenset({"tpu"})
"""Kinds of devices under torch.distributed on which numbers are part of what is compiled, and strided views are slow.

There gradients are summed in a tensor each and weighted by tensors on the device, as on XLA.
"""

_ON_THE_HOST = ("gloo", "mpi", "ucc")


def module_of(device: torch.device) -> Any:
    """What torch has for a kind of device, such as ``torch.cuda``; None for the host, and where it has nothing."""
    return None if device.type == "cpu" else getattr(torch, device.type, None)


def random_state(device: torch.device) -> torch.Tensor | None:
    """The state of the device's generator, in bytes; None if it has none that can be read."""
    read = getattr(module_of(device), "get_rng_state", None)
    if read is None:
        return None
    state: torch.Tensor = read() if device.type == "mps" else read(device)
    return state


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Put the device's generator into a state that was read."""
    write = module_of(device).set_rng_state
    write(state) if device.type == "mps" else write(state, device)


def set_random_seed(seed: int, device: torch.device) -> None:
    """Set the generators of all devices of a kind, on the host none."""
    module = module_of(device)
    for name in ("manual_seed_all", "manual_seed"):
        if hasattr(module, name):
            getattr(module, name)(seed)
            return


def current() -> torch.device | None:
    """The kind of accelerator that there is, if any."""
    if hasattr(torch, "accelerator"):  # from torch 2.6 on
        return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cuda") if torch.cuda.is_available() else None


def num_devices(backend: str) -> int:
    """How many devices a backend of torch.distributed is for; 0 for one that is for the host."""
    device = current()
    if device is None or backend in _ON_THE_HOST:
        return 0
    return int(module_of(device).device_count())


def use_device(number: int, backend: str) -> None:
    """Let one of several devices be this process's, if the backend is not one for the host."""
    device = current()
    if num_devices(backend) and hasattr(module_of(device or torch.device("cpu")), "set_device"):
        module_of(device).set_device(number)  # type: ignore[arg-type]


def default_backend() -> str:
    """The backend of torch.distributed that suits the accelerator; gloo where there is none."""
    device = current()
    if device is None:
        return "gloo"
    if hasattr(dist, "get_default_backend_for_device"):  # from torch 2.6 on
        return str(dist.get_default_backend_for_device(device))
    return "nccl" if device.type == "cuda" else "gloo"


_GAUSS = struct.Struct("<?d")  # whether there is a normal number left from the pair drawn last, and which
_NUMPY = struct.Struct("<H?d")  # the position in the state, and the same
_SEED = struct.Struct("<Q")


def capture(device: torch.device) -> dict[str, torch.Tensor]:
    """The generators of torch, Python and numpy in this process, and the device's; each state has a fixed length."""
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
    elif (state := random_state(device)) is not None:
        states[device.type] = state
    return states


def restore(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Put the generators back into captured states; a generator of another kind of device is left as it is."""
    torch.set_rng_state(states["torch"])
    words, rest = _split(states["python"], _GAUSS)
    has_gauss, gauss = rest
    random.setstate((3, tuple(words.tolist()), gauss if has_gauss else None))
    keys, rest = _split(states["numpy"], _NUMPY)
    np.random.set_state(("MT19937", keys, *rest))
    if device.type not in states:
        return
    if device.type != "xla":
        set_random_state(states[device.type], device)
    else:
        (seed,) = _SEED.unpack(_bytes(states["xla"]))
        xla.set_random_seed(seed, device)


def preserve_rng(device: torch.device) -> AbstractContextManager[None]:
    """Within, what all cores do together does not change which random numbers come next, as it does on XLA."""
    return xla.preserve_rng(device) if device.type == "xla" else nullcontext()


def _tensor(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _split(state: torch.Tensor, rest: struct.Struct) -> tuple[Any, tuple[Any, ...]]:
    """The 32-bit words that a state begins with, and the values that it ends with."""
    content = _bytes(state)
    return np.frombuffer(content[: -rest.size], dtype="<u4"), rest.unpack(content[-rest.size :])
