"""Gradients of parameters that are split over processes which share the samples, as in tensor parallelism."""

from __future__ import annotations

from typing import Any, final

import torch

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.cores.groups import Ranks
from variable_batch_size.cores.meshes import is_split, local_part, placed_like, split_like
from variable_batch_size.training.flat_gradients import FlatGradients
from variable_batch_size.training.gradients import TINY, Mean
from variable_batch_size.training.split_squares import SplitSquares
from variable_batch_size.training.weights import Weight


@final
class SplitGradients(FlatGradients):
    """The part of each gradient that is here, summed over the cores that have the same part of other samples.

    Norms are those of the whole gradients: processes that share the samples add up what each has of them.

    Args:
        model: the processes that share this one's samples.
        model_groups: the groups that these are made of.
    """

    def __init__(self, *args: Any, model: Communicator, model_groups: list[Ranks], **options: Any) -> None:
        self._model, self._model_groups = model, model_groups
        super().__init__(*args, **options)

    def take(self, mean: Mean, *, is_last: bool, weight: Weight | None = None) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad = placed_like(p, p.grad)
        super().take(mean, is_last=is_last, weight=weight)

    def _put(self, gradients: list[torch.Tensor | None]) -> None:
        super()._put([None if gradient is None else local_part(gradient) for gradient in gradients])

    def _gradient_of(self, p: torch.nn.Parameter, view: torch.Tensor) -> torch.Tensor:
        return split_like(p, view) if is_split(p) else view

    def clip(self, largest: float) -> None:
        factor = (largest / (self.norm() * self._mean.multiple + TINY)).clamp(max=1.0)
        self._scale_single(factor)

    def _scale_single(self, factor: Weight) -> None:
        """A factor is a plain tensor, which must not meet one that is split."""
        for p in self.parameters():
            if p.grad is not None:
                part = local_part(p.grad.detach())
                p.grad = self._gradient_of(p, (part * factor).to(part.dtype))

    def _square(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return self._square_each([gradients])[0]

    def _square_each(self, lists: list[list[torch.Tensor]]) -> torch.Tensor:
        return SplitSquares(self._model, self._model_groups, self._like()).of_each(lists)

    def _like(self) -> torch.Tensor:
        return local_part(next(self.parameters()))
