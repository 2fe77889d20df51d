"""GradientBuckets: flat tensors that hold the gradients of a model, so that one all-reduce sums them."""

from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter, is_
from sys import getrefcount
from typing import Any

import torch

from variable_batch_size.cores.dtensor import to_local
from variable_batch_size.optim.token_weights import Weight

Parameters = list[torch.nn.Parameter]

_COUNTS_REFERENCES = hasattr(torch._C, "_storage_Use_Count")  # from torch 2.6 on

_dtype_of = attrgetter("dtype")
_shape_and_device_of = attrgetter("shape", "device")


class GradientBuckets:
    """One flat tensor for all gradients of a device and dtype; each gradient is a view with the parameter's strides.

    For a DTensor it holds the local shard. After the gradients, a bucket has an element for each parameter, which marks
    that this rank had a gradient. The numbers, such as squared norms, are at the end of a bucket of at least float32,
    or in a tensor of their own. `views` are the gradients in the order of the parameters.
    """

    def __init__(self, parameters: Parameters, *, num_numbers: int, dtype: torch.dtype | None = None) -> None:
        self.parameters = parameters
        self._num_numbers, self._dtype = num_numbers, dtype
        self._dtypes = list(map(_dtype_of, parameters))
        self._shapes_and_devices = list(map(_shape_and_device_of, parameters))
        self.is_narrow = any(dtype.itemsize < torch.float32.itemsize for dtype in self._dtypes)
        self.flats: list[torch.Tensor] = []
        self._marks: list[tuple[torch.Tensor, list[int]]] = []  # with the indices of their parameters
        views: dict[int, torch.Tensor] = {}
        by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, p in enumerate(parameters):
            wide = p.dtype if dtype is None else torch.promote_types(p.dtype, dtype)
            by_kind.setdefault((p.device, wide), []).append(index)
        has_double = not {torch.float64, torch.complex128}.isdisjoint(kind[1] for kind in by_kind)
        precision = torch.float64 if has_double else torch.float32
        carrier = next((kind for kind in by_kind if kind[1] == precision), None)
        for kind, members in by_kind.items():
            locals_ = [to_local(parameters[index]) for index in members]
            alignment = 64 // kind[1].itemsize  # 64 bytes, for vectorized kernels
            sizes = [-(-local.numel() // alignment) * alignment for local in locals_]
            *offsets, end = accumulate(sizes, initial=0)
            num_extras = len(members) + (num_numbers if kind == carrier else 0)
            flat = torch.zeros(end + num_extras, dtype=kind[1], device=kind[0])
            self.flats.append(flat)
            self._marks.append((flat[end : end + len(members)], members))
            for index, local, offset in zip(members, locals_, offsets, strict=True):
                strides = torch.empty_like(local, device="meta").stride()  # channels-last stays channels-last
                views[index] = flat.as_strided(local.size(), strides, offset)
            if kind == carrier:
                self.numbers = flat[end + len(members) :]
        self.views = [views.pop(index) for index in range(len(parameters))]  # the only references, see is_held()
        if carrier is None:
            device = parameters[0].device if parameters else None
            self.numbers = torch.zeros(num_numbers, dtype=precision, device=device)
            self.flats.append(self.numbers)
        self._addresses = [view.data_ptr() for view in self.views]
        self._storages = [flat.untyped_storage()._cdata for flat in self.flats]
        self._references = self._count_references()

    def matches(self, parameters: Parameters, num_numbers: int, *, checks_shapes: bool = True) -> bool:
        """Whether these are the parameters, with the same dtypes, and if requested the same shapes and devices."""
        return (
            num_numbers == self._num_numbers
            and self.are_for(parameters)
            and not (checks_shapes and list(map(_shape_and_device_of, parameters)) != self._shapes_and_devices)
        )

    def are_for(self, parameters: Parameters) -> bool:
        """Whether these are the parameters, with the same dtypes."""
        return (
            len(parameters) == len(self.parameters)
            and all(map(is_, parameters, self.parameters))
            and list(map(_dtype_of, parameters)) == self._dtypes
        )

    def is_in_place(self) -> bool:
        """Whether the gradients are still views of the buckets, which converting a module changes."""
        return [view.data_ptr() for view in self.views] == self._addresses

    def is_held(self) -> bool:
        """Whether a gradient is or may be referenced elsewhere, as by an optimizer that keeps the previous one."""
        return not _COUNTS_REFERENCES or self._count_references() != self._references

    def _count_references(self) -> list[int]:
        if not _COUNTS_REFERENCES:
            return []
        return [*map(torch._C._storage_Use_Count, self._storages), sum(map(getrefcount, self.views))]

    def copy_from(self, old: "GradientBuckets") -> None:
        """Copy the gradients of the parameters that other buckets have, too."""
        values = {id(p): view for p, view in zip(old.parameters, old.views, strict=True)}
        for p, view in zip(self.parameters, self.views, strict=True):
            if id(p) in values:
                view.copy_(values[id(p)])

    def new_like(self) -> "GradientBuckets":
        """Buckets of zeros for the same parameters, without numbers."""
        return GradientBuckets(self.parameters, num_numbers=0, dtype=self._dtype)

    def __reduce__(self) -> Any:
        # copies of the views would not be views of a copy
        values = [tensor.clone() for tensor in (*self.views, self.numbers)]
        return _restored, (self.parameters, self._num_numbers, self._dtype, values)

    def zero_(self) -> None:
        for flat in self.flats:
            flat.zero_()

    def mul_(self, factor: Weight) -> None:
        """Multiply everything, the numbers included."""
        for flat in self.flats:
            flat.mul_(factor.to(flat.device) if isinstance(factor, torch.Tensor) else factor)

    def versions(self) -> list[int]:
        """A number for each bucket, which changes with every write to it."""
        return [flat._version for flat in self.flats]

    def add_(self, indices: Sequence[int], gradients: list[torch.Tensor], *, is_first: bool) -> None:
        """Add the gradients of some parameters; those of a step's first minibatch are copied."""
        is_complete = len(indices) == len(self.parameters)
        if is_first and is_complete and gradients:
            torch._foreach_copy_(self.views, gradients)
            return
        if is_first:
            self.zero_()
        if gradients:
            torch._foreach_add_(self.views if is_complete else [self.views[index] for index in indices], gradients)

    def mark_present(self, is_present: list[bool]) -> None:
        for marks, members in self._marks:
            if all(is_present):
                marks.fill_(1)
            else:
                marks.copy_(torch.tensor([float(is_present[index]) for index in members]))

    def present_on_any_rank(self) -> list[bool]:
        """Which parameters had a gradient on any rank, after the all-reduce. Waits for the device."""
        found = {i: mark for marks, members in self._marks for i, mark in zip(members, marks.tolist(), strict=True)}
        return [found[index] != 0 for index in range(len(self.parameters))]


def _restored(parameters: Parameters, number: int, dtype: torch.dtype | None, values: list[torch.Tensor]) -> Any:
    buckets = GradientBuckets(parameters, num_numbers=number, dtype=dtype)
    for tensor, value in zip((*buckets.views, buckets.numbers), values, strict=True):
        tensor.copy_(value)
    return buckets
