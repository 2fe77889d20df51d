"""DTensors: their local shards, their full tensors, and how often each element is replicated."""

import math
import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from variable_batch_size.cores import xla
from variable_batch_size.cores.communicator import Group, Ranks, ranks_of

_found: tuple[type, ...] = ()


class Dimension(NamedTuple):
    """One dimension of a DTensor's mesh."""

    ranks: Ranks  # the global ranks along it
    group: Group  # their process group
    is_replicated: bool  # whether the tensor is replicated over them


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor; False on XLA, whose compiler shards what is one tensor to this process."""
    return isinstance(tensor, _types()) and tensor.device.type != "xla"


def _types() -> tuple[type, ...]:
    """DTensor if its module was imported; otherwise there is none. The second name is that of torch 2.4."""
    global _found
    if not _found:  # called for each gradient
        modules = [sys.modules.get(name) for name in ("torch.distributed.tensor", "torch.distributed._tensor")]
        _found = tuple(kind for module in modules if (kind := getattr(module, "DTensor", None)) is not None)
    return _found


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether reading a tensor is a collective of all ranks."""
    return is_dtensor(tensor) or (tensor.device.type == "xla" and xla.is_spmd() and xla.num_hosts() > 1)


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor; the tensor itself if it is not one."""
    return to_locals([tensor])[0] if is_dtensor(tensor) else tensor


def to_locals(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The local shards of several tensors, which is faster than one by one."""
    with torch.no_grad():
        return [t.to_local() if is_dtensor(t) else t for t in tensors]  # type: ignore[attr-defined]


def from_local_like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A DTensor with the placements of `tensor` and the local shard `part`; `part` itself if `tensor` is no DTensor."""
    if not is_dtensor(tensor):
        return part
    where: Any = tensor
    return type(where).from_local(  # type: ignore[no-any-return]
        part, where.device_mesh, where.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def redistribute_like(tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient with the placements of its parameter: partial sums are reduced, shards are exchanged."""
    if not is_dtensor(gradient) or gradient.placements == tensor.placements:  # type: ignore[attr-defined]
        return gradient
    return gradient.redistribute(placements=tensor.placements)  # type: ignore[attr-defined, no-any-return]


def dimensions_of(tensor: torch.Tensor) -> list[Dimension]:
    """The dimensions of a DTensor's mesh that have several ranks; none for other tensors."""
    where: Any = tensor
    return _dimensions_of(where.device_mesh, where.placements) if is_dtensor(tensor) else []


def _dimensions_of(mesh: Any, placements: Any) -> list[Dimension]:
    groups = [mesh.get_group(number) for number in range(mesh.ndim)]
    found = zip(groups, placements, strict=True)
    dimensions = [Dimension(ranks_of(group), group, placement.is_replicate()) for group, placement in found]
    return [dimension for dimension in dimensions if len(dimension.ranks) > 1]


def model_groups(tensors: Iterable[torch.Tensor], group: Group) -> dict[Ranks, Group]:
    """The groups that tensors are sharded over and that are not within `group`, whose ranks have different samples."""
    tensors = [tensor for tensor in tensors if is_dtensor(tensor)]
    replicas = set(ranks_of(group)) if tensors else set()
    return {
        dimension.ranks: dimension.group
        for tensor in tensors
        for dimension in dimensions_of(tensor)
        if not replicas.issuperset(dimension.ranks)
    }


def replication_factor(tensor: torch.Tensor, groups: Iterable[Ranks]) -> int:
    """How many ranks have the same shard of a tensor, over its own mesh and all of the groups."""
    where: Any = tensor
    return _num_copies((where.device_mesh, where.placements) if is_dtensor(tensor) else None, tuple(groups))


@lru_cache(maxsize=256)
def _num_copies(mesh_and_placements: tuple[Any, Any] | None, groups: tuple[Ranks, ...]) -> int:
    dimensions = [] if mesh_and_placements is None else _dimensions_of(*mesh_and_placements)
    own = [len(dimension.ranks) for dimension in dimensions if dimension.is_replicated]
    known = {dimension.ranks for dimension in dimensions}
    return math.prod(own) * math.prod(len(ranks) for ranks in groups if ranks not in known)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor. Every rank that has a shard must call it."""
    if is_dtensor(tensor):
        return tensor.full_tensor()  # type: ignore[attr-defined, no-any-return]
    return tensor.cpu() if is_distributed(tensor) else tensor


def shard_from_full(tensor: torch.Tensor, complete: torch.Tensor) -> torch.Tensor:
    """A full tensor, the same on all ranks, sharded like another one. Every rank must call it."""
    if not is_dtensor(tensor):
        return xla.to_device_like(tensor, complete) if xla.is_spmd() else complete
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    where: Any = tensor
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, where.device_mesh, where.placements)
    part = complete[tuple(slice(first, first + size) for size, first in zip(shape, offsets, strict=True))]
    result = from_local_like(tensor, part.to(to_local(tensor).device, copy=True).contiguous())
    # the shards of a dimension that is sharded twice may not be slices
    is_strided = any(hasattr(placement, "split_factor") for placement in where.placements)
    if is_strided and not torch.equal(full_tensor(result).cpu(), complete.cpu()):
        raise ValueError(f"Cannot shard a tensor of shape {tuple(tensor.shape)} over {where.device_mesh}.")
    return result
