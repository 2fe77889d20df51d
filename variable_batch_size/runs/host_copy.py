"""HostCopy: a copy of a state on the host, in the memory of the copy before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch

Need = tuple[str, torch.Size, torch.dtype]
"""Where a tensor is in a state, and what it is."""


def needs_of(value: Any, place: str = "") -> Iterator[Need]:
    """What a copy of a state needs memory for."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided:
            yield place, value.shape, value.dtype
        return
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in parts:
        yield from needs_of(part, f"{place}[{key!r}]")


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
        copied: dict[str, Any] = self._copied(state, "", before, seen)
        return copied

    def reserve(self, needs: Iterable[Need]) -> None:
        """Have memory for a copy, touched so that the system has really given it."""
        self._copies = {place: torch.zeros(shape, dtype=dtype).fill_(1) for place, shape, dtype in needs}

    def _copied(
        self, value: Any, place: str, before: dict[str, torch.Tensor], seen: dict[tuple[Any, ...], torch.Tensor]
    ) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copy_of(value.detach(), place, before, seen)
        if isinstance(value, list | tuple):
            parts = [self._copied(part, f"{place}[{i}]", before, seen) for i, part in enumerate(value)]
            return parts if isinstance(value, list) else tuple(parts)  # also of a named tuple, as a file has it
        if not isinstance(value, dict):
            return value
        items = [(key, self._copied(part, f"{place}[{key!r}]", before, seen)) for key, part in value.items()]
        if not isinstance(value, OrderedDict):
            return dict(items)
        ordered = OrderedDict(items)
        if hasattr(value, "_metadata"):  # the versions of a model's modules, which load_state_dict goes by
            ordered._metadata = value._metadata  # type: ignore[attr-defined]
        return ordered

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
