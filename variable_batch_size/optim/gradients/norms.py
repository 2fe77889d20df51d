"""Squared norms of tensors, local and sharded."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from variable_batch_size.cores.communicator import Communicator, Ranks
from variable_batch_size.cores.dtensor import replication_factor, to_locals

EXACT = (torch.float32, torch.float64)
"""In which squared norms can be summed."""

# the first versions of torch measure many tensors at once in their own precision only
_ALL_AT_ONCE = (
    {*EXACT, torch.bfloat16, torch.float16} if "dtype" in str(torch.ops.aten._foreach_norm.Scalar._schema) else {*EXACT}
)


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


class SplitSquares:
    """The square of what each process has, divided by how many have the same, summed over all of them.

    Args:
        communicator: of all processes that have a part.
        model_groups: those groups of them that share the parameters and not the samples: what is not split over one of
            these is the same there.
        like: a tensor on the device, and of the precision, in which is summed.
    """

    def __init__(self, communicator: Communicator, model_groups: Collection[Ranks], like: torch.Tensor) -> None:
        self._communicator = communicator
        self._groups = list(model_groups)
        self._like = like

    def own(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """This process's share of the squared norm of several tensors together."""
        by_copies: dict[int, list[torch.Tensor]] = {}
        for tensor, part in zip(tensors, to_locals(tensors), strict=True):
            by_copies.setdefault(replication_factor(tensor, self._groups), []).append(part)
        squares = [square_of(parts, like=self._like) / copies for copies, parts in by_copies.items()]
        return torch.stack(squares).sum() if squares else square_of([], like=self._like)

    def total(self, squares: torch.Tensor) -> torch.Tensor:
        """The sum of such shares over all processes; every one of them must call it."""
        self._communicator.sum([squares])
        return squares

    def of_each(self, lists: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """The squared norm of each of several lists of tensors; 0 without a word to the others where all are empty."""
        squares = torch.stack([self.own(tensors) for tensors in lists])
        return self.total(squares) if any(map(len, lists)) else squares
