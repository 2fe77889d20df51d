"""Gradients that stay where they are: zeroed in place after each step, with autograd adding to them."""

from __future__ import annotations

from typing import Any, final

import torch

from variable_batch_size.training.flat_memory import FlatMemory, square_of
from variable_batch_size.training.gradients import UNWEIGHTED, Gradients, Mean, put
from variable_batch_size.training.weights import Weight


@final
class KeptGradients(Gradients):
    """For CUDA graphs, which need static addresses, and where there is no memory for one more gradient.

    ``p.grad`` is a view of flat memory for the whole run, and autograd accumulates there. So it is the sum over the
    step's minibatches so far, and must not be replaced: :meth:`take` refuses that. Every trainable parameter has a
    gradient in each update, 0 where none arrived. Where norms are measured each minibatch has the memory to itself, and
    a second set holds the sum of those before.
    """

    _sums: list[torch.Tensor]
    _has_taken: bool  # minibatches of this step
    _versions: list[int]

    def __init__(self, *args: Any, **options: Any) -> None:
        self._memory = FlatMemory([], num_numbers=0)
        super().__init__(*args, **options)

    def take(self, mean: Mean, *, is_last: bool, weight: Weight | None = None) -> None:
        self._fit()
        self._is_weighted = weight is not None
        is_first, self._has_taken = not self._has_taken, not is_last
        if self._measures:
            self._measure(weight, is_first=is_first)
        if weight is not None:
            self._numbers()[-2].add_(weight)
            self._numbers()[-1].add_(weight > 0)
        if self._measures and not is_last:
            self._hold()
        self._note_versions()

    def _measure(self, weight: Weight | None, *, is_first: bool) -> None:
        squares = self._per_weight(self._squares(self._with_gradients()), weight)
        if not is_first:
            for flat, held in zip(self._memory.flats, self._sums, strict=True):
                flat.add_(held)  # the numbers so far among them
        self._numbers()[:-2].add_(squares)

    def _hold(self) -> None:
        """Put the sums aside and clear the memory for the next minibatch."""
        if len(self._sums) != len(self._memory.flats):
            self._sums = [torch.empty_like(flat) for flat in self._memory.flats]
        for flat, held in zip(self._memory.flats, self._sums, strict=True):
            held.copy_(flat)
            flat.zero_()

    def _fit(self) -> None:
        """See that every trainable parameter's gradient is its view, and make room for parameters that are new."""
        for number, (p, view) in enumerate(zip(self._memory.parameters, self._memory.views, strict=True)):
            is_frozen_and_empty = p.grad is None and not p.requires_grad
            if p.grad is not view and not is_frozen_and_empty:
                raise RuntimeError(
                    f"with `keep_gradients` a gradient must stay in its place, but that of parameter {number}, of the "
                    f"shape {tuple(p.shape)}, was replaced between backward() and step()"
                )
        trainable = [p for p in self.parameters() if p.requires_grad]
        num_numbers = len(self._inner.param_groups) + 3  # the last one for the layout
        if self._memory.fits(trainable, num_numbers) and self._memory.is_in_place():
            return
        if self._has_taken:
            raise RuntimeError(
                "with `keep_gradients` the trainable parameters must stay the same within a step, and where they are"
            )
        memory = FlatMemory(trainable, num_numbers=num_numbers)
        self._layout = self._layout_of(trainable)
        for p, view in zip(trainable, memory.views, strict=True):
            if p.grad is not None:
                view.copy_(p.grad)
        for p in self._memory.parameters:
            p.grad = None  # of those that are frozen now
        for p, view in zip(trainable, memory.views, strict=True):
            p.grad = view
        self._memory, self._sums = memory, []

    def drop(self) -> None:
        is_untouched = self._versions == self._versions_now()
        if not self._has_taken:
            if not is_untouched or self._are_elsewhere():
                self.discard()
            return
        if is_untouched:
            return
        if not self._measures:
            raise RuntimeError(
                "with `keep_gradients` zero_grad() cannot drop the gradient of a backward pass without step(), as it "
                "was added to those of the minibatches before"
            )
        self._memory.zero()
        self._note_versions()

    def _are_elsewhere(self) -> bool:
        """Whether there are gradients beside the memory, of parameters that were unfrozen since."""
        own = set(self._memory.parameters)
        return any(p.grad is not None for p in self.parameters() if p not in own)

    def _note_versions(self) -> None:
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        """Another one for each change of the memory."""
        return [flat._version for flat in self._memory.flats]

    def reduce(self, mean: Mean, *, is_idle: bool) -> None:
        self._mean = mean
        if is_idle:
            self._memory.zero()
        else:
            self._scale(mean.factor(is_weighted=self._is_weighted))
            self._numbers()[:-2].div_(mean.loss_scale**2)
        if self._communicator.num_replicas > 1:
            if not self._is_weighted:
                put(self._numbers()[-1], UNWEIGHTED)
            layout = self._memory.numbers[-1:]
            put(layout, self._layout_and_epoch())
            self._communicator.sum(self._memory.flats)
            self._compare(self._numbers()[-1])
            self._compare_layout(layout)
        if self._is_weighted:
            weight = self._numbers()[-2]
            self._scale(torch.where(weight == 0, 0.0, 1 / weight))

    def _scale(self, factor: Weight) -> None:
        """Multiply the gradients, and leave the numbers behind them as they are."""
        if isinstance(factor, torch.Tensor) or factor != 1:
            numbers = self._memory.numbers.clone()
            self._memory.multiply(factor)
            self._memory.numbers.copy_(numbers)

    def clear(self) -> None:
        self._has_taken = False
        self._memory.zero()
        self._note_versions()

    def discard(self) -> None:
        super().discard()
        for p, view in zip(self._memory.parameters, self._memory.views, strict=True):
            p.grad = view
        self._has_taken = False
        self._fit()
        self.clear()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for p, view in zip(self._memory.parameters, self._memory.views, strict=True):
            p.grad = view
        if not self._has_taken:
            self._sums = []  # a module that was converted since has its memory made anew
        self._note_versions()

    def weight(self) -> Weight | None:
        return self._numbers()[-2].clone() if self._is_weighted else None

    def _numbers(self) -> torch.Tensor:
        return self._memory.numbers[:-1]

    def _read(self, numbers: torch.Tensor) -> list[float]:
        return [float(number) for number in numbers.tolist()]

    def _square(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return square_of(gradients, like=next(self.parameters()))
