"""Accelerators by what they can do, whatever their name: each kind of device has a module of torch's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

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
