"""Gradients that stay where they are: zeroed in place after each step, with autograd adding to them."""

from __future__ import annotations

from typing import Any, final

import torch

from variable_batch_size.training.flat_memory import FlatMemory, square_of
from variable_batch_size.training.gradients import Gradients


@final
class KeptGradients(Gradients):
    """For CUDA graphs, which need static addresses, and where there is no memory for one more gradient.

    ``p.grad`` is a view of flat memory for the whole run, and autograd accumulates there. So it is the sum over the
    step's minibatches so far, and must not be replaced: :meth:`take` refuses that. Every trainable parameter has a
    gradient in each update, 0 where none arrived. Where norms are measured each minibatch has the memory to itself, and
    a second set holds the sum of those before.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._memory = FlatMemory([], num_squares=0)
        self._sums: list[torch.Tensor] = []
        self._has_sums = False
        super().__init__(*args, **options)

    def take(self, *, is_last: bool, is_only: bool) -> None:
        self._fit()
        if not self._measures:
            return
        squares = self._squares(self._with_gradients())
        if self._has_sums:
            for flat, held in zip(self._memory.flats, self._sums, strict=True):
                flat.add_(held)  # the squared norms so far among them
        self._memory.squares.add_(squares)
        self._has_sums = not is_last
        if not is_last:
            self._hold()

    def _hold(self) -> None:
        """Put the sums aside and clear the memory for the next minibatch."""
        if len(self._sums) != len(self._memory.flats):
            self._sums = [torch.empty_like(flat) for flat in self._memory.flats]
        for flat, held in zip(self._memory.flats, self._sums, strict=True):
            held.copy_(flat)
            flat.zero_()

    def _fit(self) -> None:
        """See that every trainable parameter's gradient is its view, and make room for parameters that are new."""
        trainable = [p for p in self.parameters() if p.requires_grad]
        if not self._memory.fits(trainable):
            if self._has_sums:
                raise RuntimeError("with `keep_gradients` the trainable parameters must stay the same within a step")
            memory = FlatMemory(trainable, num_squares=len(self._inner.param_groups))
            for p, view in zip(trainable, memory.views, strict=True):
                if p.grad is not None:
                    view.copy_(p.grad)
                p.grad = view
            self._memory, self._sums = memory, []
        for number, (p, view) in enumerate(zip(self._memory.parameters, self._memory.views, strict=True)):
            if p.grad is not view:
                raise RuntimeError(
                    f"with `keep_gradients` a gradient must stay in its place, but that of parameter {number}, of the "
                    f"shape {tuple(p.shape)}, was replaced between backward() and step()"
                )

    def reduce(self, weight: float) -> None:
        if weight == 0:
            self._memory.zero()
        elif weight != 1:
            self._memory.multiply(weight)
        if self._communicator.num_replicas > 1:
            self._communicator.sum(self._memory.flats)

    def clear(self) -> None:
        self._has_sums = False
        self._memory.zero()

    def discard(self) -> None:
        super().discard()
        for p, view in zip(self._memory.parameters, self._memory.views, strict=True):
            p.grad = view
        self.clear()
        self._fit()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for p, view in zip(self._memory.parameters, self._memory.views, strict=True):
            p.grad = view

    def _measured(self) -> torch.Tensor:
        return self._memory.squares

    def _read(self, numbers: torch.Tensor) -> list[float]:
        return [float(number) for number in numbers.tolist()]

    def _square(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return square_of(gradients, like=next(self.parameters()))
