"""Squared norms of tensors, local and sharded, and which numbers are finite."""

import math
from collections.abc import Collection, Sequence
from operator import attrgetter

import torch

from variable_batch_size.cores.communicator import Communicator, Ranks
from variable_batch_size.cores.dtensor import replication_factor, to_locals

_EXACT = (torch.float32, torch.float64)  # dtypes in which squared norms are summed
_FOREACH = {*_EXACT}
if "dtype" in str(torch.ops.aten._foreach_norm.Scalar._schema):  # older versions compute in the tensors' dtype only
    _FOREACH |= {torch.bfloat16, torch.float16}

# A CPU adds the squares of all elements up in 16 float32 numbers or fewer. Measured with normally distributed elements,
# torch 2.9, AVX-512: the squared norm is too small by 1e-6 at 2¹⁷ elements, 2e-5 at 2²⁰, 3e-3 at 25 million, and
# G² = T − V/B may be a hundredth of it. By rows: 1e-8, 3e-7 in bfloat16, in 1.05 times the time at 25 million. The
# operations for rows take 20 µs, so smaller tensors are measured at once. On a GPU, each thread adds up few elements.
_MOST_AT_ONCE = 2**17
_ROW = 2**11

_kind_of = attrgetter("dtype", "layout", "device")


def is_finite(values: torch.Tensor) -> torch.Tensor:
    """Like ``torch.isfinite``, which on XLA converts to float64 to compare with a Python number."""
    return values.abs() < torch.full_like(values, math.inf)


def squared_norm(tensors: list[torch.Tensor], *, like: torch.Tensor) -> torch.Tensor:
    """The squared norm of several tensors together, on the device of `like` and in float32 at least; 0 if none."""
    return _sum_of_squares(norms_of(tensors, like=like), like=like)


def squared_norms(lists: Sequence[list[torch.Tensor]], *, like: torch.Tensor) -> torch.Tensor:
    """The squared norm of each of several lists of tensors."""
    return sums_of_squares([norms_of(tensors, like=like) for tensors in lists], like=like)


def sums_of_squares(lists: Sequence[list[torch.Tensor]], *, like: torch.Tensor) -> torch.Tensor:
    """The sum of the squares of each of several lists of norms, which :func:`norms_of` has returned."""
    filled = list(filter(None, lists))
    if len(filled) != 1:
        return torch.stack([_sum_of_squares(norms, like=like) for norms in lists])
    (norms,) = filled  # the usual case, with fewer operations
    square = torch.stack(norms).square_().sum(0, keepdim=True)
    if len(lists) == 1:
        return square
    place = lists.index(norms)
    return torch.constant_pad_nd(square, (place, len(lists) - place - 1))


def _sum_of_squares(norms: list[torch.Tensor], *, like: torch.Tensor) -> torch.Tensor:
    if not norms:
        return torch.zeros((), dtype=like.dtype if like.dtype in _EXACT else torch.float32, device=like.device)
    return torch.stack(norms).square_().sum()


def norms_of(tensors: list[torch.Tensor], *, like: torch.Tensor) -> list[torch.Tensor]:
    """The norm of each of several tensors, on the device of `like` and in float32 at least."""
    kinds = set(map(_kind_of, tensors))
    dtype, layout, device = kinds.pop() if len(kinds) == 1 else (None, None, None)
    is_small = device is not None and (device.type != "cpu" or max(map(torch.numel, tensors)) <= _MOST_AT_ONCE)
    if dtype in _FOREACH and layout is torch.strided and is_small:  # one kernel, which is much faster on a GPU
        norms = torch._foreach_norm(tensors) if dtype in _EXACT else torch._foreach_norm(tensors, dtype=torch.float32)
    else:
        norms = tuple(_norm_of(tensor) for tensor in tensors)
    return list(norms) if device == like.device else [norm.to(like.device) for norm in norms]


def _norm_of(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.coalesce().values() if tensor.is_sparse else tensor
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    dtype = real.dtype if real.dtype in _EXACT else torch.float32
    norm: torch.Tensor
    if real.device.type == "cpu" and real.numel() > _MOST_AT_ONCE and dtype is torch.float32:
        norms = torch.cat([torch.linalg.vector_norm(rows, dim=1, dtype=dtype) for rows in _rows(real)])
        norm = torch.linalg.vector_norm(norms, dtype=torch.float64).to(dtype)
    else:
        norm = torch.linalg.vector_norm(real, dtype=dtype)
    return norm


def _rows(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The elements in rows, and those that are left in another; a copy only if they are not dense in memory."""
    if not tensor.is_contiguous():  # such as channels-last
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    flat = tensor.reshape(-1)
    rest = flat.numel() % _ROW
    rows = flat.unfold(0, _ROW, _ROW)
    return [rows, flat[-rest:].view(1, -1)] if rest else [rows]


def sharded_squared_norms(
    lists: Sequence[Sequence[torch.Tensor]], everyone: Communicator, groups: Collection[Ranks], *, like: torch.Tensor
) -> torch.Tensor:
    """The squared norm of each of several lists of DTensors.

    Every rank that has a shard must call it. There is no collective if all lists are empty.
    """
    of_all = squared_norms_of_shards(lists, groups, like=like)
    if any(map(len, lists)):
        everyone.sum([of_all])
    return of_all


def squared_norms_of_shards(
    lists: Sequence[Sequence[torch.Tensor]], groups: Collection[Ranks], *, like: torch.Tensor
) -> torch.Tensor:
    """This rank's part of the squared norms of lists of DTensors, to be summed over ranks: squares ÷ replicas.

    `groups` are those of the ranks that share the samples: a tensor that is not sharded over one is replicated there.
    """
    of_lists = []
    for tensors in lists:
        by_replicas: dict[int, list[torch.Tensor]] = {}
        for tensor, local in zip(tensors, to_locals(tensors), strict=True):
            by_replicas.setdefault(replication_factor(tensor, groups), []).append(local)
        squares = [squared_norm(locals_, like=like) / replicas for replicas, locals_ in by_replicas.items()]
        of_lists.append(torch.stack(squares).sum() if squares else squared_norm([], like=like))
    return torch.stack(of_lists)
