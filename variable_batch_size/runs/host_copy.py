"""HostCopy: a copy of a state on the host, in the memory of the copy before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from variable_batch_size.runs.nested import mapped

Need = tuple[str, torch.Size, torch.dtype]
"""Where a tensor is in a state, and what it is."""


def needs_of(state: Any) -> list[Need]:
    """What a copy of a state needs memory for."""
    found: list[Need] = []

    def note(part: Any, place: str) -> Any:
        if isinstance(part, torch.Tensor) and part.layout == torch.strided:
            found.append((place, part.shape, part.dtype))
        return part

    mapped(state, note)
    return found


class HostCopy:
    """Copies a state between two steps, so that it can be written while training changes the original.

    New memory is what takes most of the time, so that of the copy before is used again: it must have been written by
    then. For the first copy, :meth:`reserve` gets it ready.
    """

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    def of(self, state: dict[str, Any]) -> dict[str, Any]:
        """Nested containers with all tensors copied; tensors that are one remain one."""
        before, self._copies = self._copies, {}
        seen: dict[tuple[Any, ...], torch.Tensor] = {}

        def copy_of(part: Any, place: str) -> Any:
            return self._copy_of(part.detach(), place, before, seen) if isinstance(part, torch.Tensor) else part

        copied: dict[str, Any] = mapped(state, copy_of)
        return copied

    def reserve(self, needs: Iterable[Need]) -> None:
        """Have memory for a copy, touched so that the system has really given it."""
        self._copies = {place: torch.zeros(shape, dtype=dtype).fill_(1) for place, shape, dtype in needs}

    def _copy_of(
        self,
        tensor: torch.Tensor,
        place: str,
        before: dict[str, torch.Tensor],
        seen: dict[tuple[Any, ...], torch.Tensor],
    ) -> torch.Tensor:
        signs = (tensor.is_conj(), tensor.is_neg())  # of a view that says how to read what is there
        layout = (tensor.shape, tensor.stride(), tensor.dtype, signs) if _is_there(tensor) else ()
        one = (tensor.device, tensor.data_ptr(), *layout) if layout else ()
        if one and one in seen:
            return seen[one]
        copy = before.get(place)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype or tensor.layout != torch.strided:
            copy = tensor.to("cpu", copy=True)
        else:
            copy.copy_(tensor)
        self._copies[place] = copy
        if one:
            seen[one] = copy
        return copy


def _is_there(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own that its address tells."""
    return tensor.device.type in ("cpu", "cuda") and tensor.layout == torch.strided and tensor.numel() > 0
