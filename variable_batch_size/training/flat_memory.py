"""Flat memory for gradients: one tensor for all of a device and dtype, and a view of it for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import is_
from sys import getrefcount
from typing import Any

import torch

from variable_batch_size.cores.meshes import local_part

EXACT = (torch.float32, torch.float64)
"""In which squared norms can be summed."""

_DOUBLE = {torch.float64, torch.complex128}

# the first versions of torch measure many tensors at once in their own precision only
_ALL_AT_ONCE = (
    {*EXACT, torch.bfloat16, torch.float16} if "dtype" in str(torch.ops.aten._foreach_norm.Scalar._schema) else {*EXACT}
)


class FlatMemory:
    """One flat tensor for all gradients of a device and dtype; a gradient is a view of it with the parameter's strides.

    Of a parameter that is split over processes it holds the gradient of the part that is here.

    Behind the gradients there is one more element for each parameter, in which a core notes that it had a gradient, and
    in one flat tensor of at least float32 some for numbers, such as squared norms; so all of these travel in the same
    reduction. (Beside narrower gradients only, the numbers travel in a tensor of their own.)

    Args:
        parameters: whose gradients are to be kept.
        num_numbers: how many numbers there may be.
        dtype: of the memory; the parameters' own if None.

    Attributes:
        flats: the flat tensors.
        views: the gradients, in the order of the parameters.
        numbers: the numbers.
    """

    def __init__(
        self, parameters: list[torch.nn.Parameter], *, num_numbers: int, dtype: torch.dtype | None = None
    ) -> None:
        self.parameters = parameters
        self._dtype = dtype
        self._dtypes = [p.dtype for p in parameters]
        self._kinds = [(p.shape, p.device) for p in parameters]
        self.flats: list[torch.Tensor] = []
        self._notes: list[tuple[torch.Tensor, list[int]]] = []  # and the numbers of their parameters
        views: dict[int, torch.Tensor] = {}
        of_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for number, p in enumerate(parameters):
            of_kind.setdefault((p.device, dtype or p.dtype), []).append(number)
        precision = torch.float64 if _DOUBLE & {dtype for _, dtype in of_kind} else torch.float32
        carrier = next((kind for kind in of_kind if kind[1] == precision), None)
        for kind, members in of_kind.items():
            *offsets, end = _aligned_offsets((local_part(parameters[number]).numel() for number in members), kind[1])
            num_extras = len(members) + (num_numbers if kind == carrier else 0)
            flat = torch.zeros(end + num_extras, dtype=kind[1], device=kind[0])
            self.flats.append(flat)
            self._notes.append((flat[end : end + len(members)], members))
            views |= {
                n: _view(flat, local_part(parameters[n]), offset) for n, offset in zip(members, offsets, strict=True)
            }
            if kind == carrier:
                self.numbers = flat[end + len(members) :]
        self.views = [views.pop(number) for number in range(len(parameters))]  # nobody else may hold them, see is_held
        if carrier is None:
            place = parameters[0].device if parameters else None
            self.numbers = torch.zeros(num_numbers, dtype=precision, device=place)
            self.flats.append(self.numbers)
        self._addresses = [view.data_ptr() for view in self.views]
        self._holders = self._count_holders()

    def fits(self, parameters: list[torch.nn.Parameter], num_numbers: int, *, is_thorough: bool = True) -> bool:
        """Whether these are the parameters, of the same dtype and as many groups; if thorough, shape and device."""
        return (
            num_numbers == len(self.numbers)
            and len(parameters) == len(self.parameters)
            and all(map(is_, parameters, self.parameters))
            and [p.dtype for p in parameters] == self._dtypes
            and not (is_thorough and [(p.shape, p.device) for p in parameters] != self._kinds)
        )

    def is_in_place(self) -> bool:
        """Whether the gradients still are views of this memory, which converting a module changes."""
        return [view.data_ptr() for view in self.views] == self._addresses

    def is_held(self) -> bool:
        """Whether someone has kept a gradient, as an optimizer may that needs the one before: it must stay as it is."""
        return self._count_holders() != self._holders

    def _count_holders(self) -> list[int]:
        of_storages = [torch._C._storage_Use_Count(flat.untyped_storage()._cdata) for flat in self.flats]
        return [*of_storages, sum(map(getrefcount, self.views))]

    def take_over(self, old: FlatMemory) -> None:
        """Take over the gradients of other memory, as far as the parameters are the same."""
        values = {id(p): view for p, view in zip(old.parameters, old.views, strict=True)}
        for p, view in zip(self.parameters, self.views, strict=True):
            if id(p) in values:
                view.copy_(values[id(p)])

    def __reduce__(self) -> Any:
        # a copy of the views would not be views of the copy
        values = [place.clone() for place in (*self.views, self.numbers)]
        return _restored, (self.parameters, len(self.numbers), self._dtype, values)

    def zero(self) -> None:
        for flat in self.flats:
            flat.zero_()

    def multiply(self, factor: float | torch.Tensor) -> None:
        """Multiply everything, the numbers included."""
        for flat in self.flats:
            flat.mul_(factor.to(flat.device) if isinstance(factor, torch.Tensor) else factor)

    def note(self, is_present: list[bool]) -> None:
        """Note which parameters had a gradient on this core."""
        is_whole = all(is_present)
        for notes, members in self._notes:
            if is_whole:
                notes.fill_(1)
            else:
                notes.copy_(torch.tensor([float(is_present[number]) for number in members]))

    def noted(self) -> list[bool]:
        """Which parameters had a gradient on any core, after the sum over all of them; waits for the device."""
        found: dict[int, bool] = {}
        for notes, members in self._notes:
            found.update(zip(members, notes.ne(0).tolist(), strict=True))
        return [found[number] for number in range(len(self.parameters))]


def _restored(
    parameters: list[torch.nn.Parameter], num_numbers: int, dtype: torch.dtype | None, values: list[torch.Tensor]
) -> FlatMemory:
    memory = FlatMemory(parameters, num_numbers=num_numbers, dtype=dtype)
    for place, value in zip((*memory.views, memory.numbers), values, strict=True):
        place.copy_(value)
    return memory


def square_of(tensors: list[torch.Tensor], *, like: torch.Tensor) -> torch.Tensor:
    """The squared norm of several tensors together, on the device of another one and in float32 at least."""
    if not tensors:
        dtype = like.dtype if like.dtype in EXACT else torch.float32
        return torch.zeros((), dtype=dtype, device=like.device)
    return torch.stack(norms_of(tensors, like=like)).square_().sum()


def norms_of(tensors: list[torch.Tensor], *, like: torch.Tensor) -> list[torch.Tensor]:
    """The norm of each of several tensors, on the device of another one and in float32 at least."""
    kinds = {(tensor.dtype, tensor.layout) for tensor in tensors}
    dtypes = {dtype for dtype, _ in kinds}
    # all at once where they are of one kind, which a GPU does much faster
    if len(kinds) == 1 and dtypes <= _ALL_AT_ONCE and all(layout is torch.strided for _, layout in kinds):
        is_exact = dtypes <= set(EXACT)
        norms = torch._foreach_norm(tensors) if is_exact else torch._foreach_norm(tensors, dtype=torch.float32)
    else:
        norms = tuple(_norm_of(tensor) for tensor in tensors)
    return [norm if norm.device == like.device else norm.to(like.device) for norm in norms]


def _norm_of(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.coalesce().values() if tensor.is_sparse else tensor
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    norm: torch.Tensor = torch.linalg.vector_norm(real, dtype=real.dtype if real.dtype in EXACT else torch.float32)
    return norm


def _aligned_offsets(sizes: Iterable[int], dtype: torch.dtype) -> Iterator[int]:
    """Where each gradient starts in a flat tensor, and the end; on 64 bytes, as vectorised kernels like it."""
    step = 64 // dtype.itemsize
    offset = 0
    for size in sizes:
        yield offset
        offset += -(-size // step) * step
    yield offset


def _view(flat: torch.Tensor, like: torch.Tensor, offset: int) -> torch.Tensor:
    """A part of a flat tensor in the shape and layout of another one: channels-last stays channels-last."""
    return flat.as_strided(like.size(), torch.empty_like(like, device="meta").stride(), offset)
