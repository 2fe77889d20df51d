"""The state of the random generators that a core draws from, as tensors of bytes."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from variable_batch_size.cores import accelerators, xla

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
    elif (state := accelerators.random_state(device)) is not None:
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
        accelerators.set_random_state(states[device.type], device)
    else:
        (seed,) = _SEED.unpack(_bytes(states["xla"]))
        xla.set_random_seed(seed, device)


def undisturbed(device: torch.device) -> AbstractContextManager[None]:
    """Within, what all cores do together does not change which random numbers come next, as it does on XLA."""
    return xla.undisturbed(device) if device.type == "xla" else nullcontext()


def _tensor(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _split(state: torch.Tensor, rest: struct.Struct) -> tuple[Any, tuple[Any, ...]]:
    """The 32-bit words that a state begins with, and the values that it ends with."""
    content = _bytes(state)
    return np.frombuffer(content[: -rest.size], dtype="<u4"), rest.unpack(content[-rest.size :])
