"""Squared norms of tensors that are split over processes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.cores.groups import Ranks
from variable_batch_size.cores.meshes import local_parts, num_copies
from variable_batch_size.training.flat_memory import square_of


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
        for tensor, part in zip(tensors, local_parts(tensors), strict=True):
            by_copies.setdefault(num_copies(tensor, self._groups), []).append(part)
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
