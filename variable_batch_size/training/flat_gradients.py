"""Gradients on eager devices: fresh in every minibatch, summed in flat memory that one call reduces."""

from __future__ import annotations

from typing import Any

import torch

from variable_batch_size.training.flat_memory import FlatMemory, square_of
from variable_batch_size.training.gradients import TINY, UNWEIGHTED, Gradients, Mean, put
from variable_batch_size.training.weights import Weight


class FlatGradients(Gradients):
    """Autograd hands over each minibatch's gradients as tensors of their own, which costs nothing.

    Where a core has a single minibatch in a step and no other core, they are used as they are. Else, and where some are
    sparse, they are copied and added into flat memory (:class:`FlatMemory`).
    """

    _has_sums: bool  # whether the memory holds minibatches of this step
    _is_present: list[bool]  # which of its parameters had a gradient in this step, on this core
    _step_squares: torch.Tensor | None
    _weight: Weight
    _num_weighted: Weight

    def __init__(self, *args: Any, **options: Any) -> None:
        self._memory = self._new_memory([], 0)
        self._frozen: set[torch.Tensor] = set()  # parameters that need no gradient and were given one all the same
        super().__init__(*args, **options)

    def _new_memory(self, parameters: list[torch.nn.Parameter], num_numbers: int) -> FlatMemory:
        return FlatMemory(parameters, num_numbers=num_numbers)

    def take(self, mean: Mean, *, is_last: bool, weight: Weight | None = None) -> None:
        self._is_weighted = weight is not None
        if self._measures and mean.num_minibatches > 1:  # one minibatch tells nothing of the noise
            self._measure(weight)
        if weight is not None:
            self._weight = self._weight + weight
            self._num_weighted = self._num_weighted + (weight > 0)
        if not is_last or self._has_sums or self._communicator.num_replicas > 1 or self._has_sparse():
            self._add()

    def _has_sparse(self) -> bool:
        """Sums are dense, and the inner optimizer must not get both kinds, which its state would not bear."""
        return any(p.grad is not None and p.grad.is_sparse for p in self.parameters())

    def _measure(self, weight: Weight | None) -> None:
        squares = self._per_weight(self._squares(self._with_gradients()), weight)
        if self._step_squares is not None:
            squares[: len(self._step_squares)] += self._step_squares  # a group may have been added since
        self._step_squares = squares

    def _add(self) -> None:
        """Add the gradients of the minibatch to the sums, and leave none behind."""
        self._frozen.update(p for p in self.parameters() if not p.requires_grad and p.grad is not None)
        self._fit([p for p in self.parameters() if p.requires_grad or p in self._frozen])
        gradients = [p.grad for p in self._memory.parameters]
        self._put(gradients)
        before = self._is_present if self._has_sums else [False] * len(gradients)
        self._is_present = [was or gradient is not None for was, gradient in zip(before, gradients, strict=True)]
        self._has_sums = True
        for p in self.parameters():
            p.grad = None

    def _put(self, gradients: list[torch.Tensor | None]) -> None:
        """Copy gradients to the memory, or add them to what is there."""
        memory = self._memory
        is_whole = not any(gradient is None for gradient in gradients)
        if gradients and is_whole and not self._has_sums:
            torch._foreach_copy_(memory.views, dense(gradients))
            return
        if not self._has_sums:
            memory.zero()
        found = [number for number, gradient in enumerate(gradients) if gradient is not None]
        if found:
            views = memory.views if is_whole else [memory.views[number] for number in found]
            torch._foreach_add_(views, dense([gradients[number] for number in found]))

    def _fit(self, parameters: list[torch.nn.Parameter]) -> None:
        """Have memory that fits the parameters as they are now, with the sums so far."""
        old = self._memory
        if self._has_sums:
            # one that was frozen since has its part in the step, and its place, which other cores may still have it at
            kept = {id(p) for p in (*parameters, *old.parameters)}
            parameters = [p for p in self.parameters() if id(p) in kept]
        num_numbers = self._num_numbers() + 1  # behind them, the layout
        if old.fits(parameters, num_numbers, is_thorough=not self._has_sums):
            return
        self._memory = self._new_memory(parameters, num_numbers)
        self._layout = self._layout_of(parameters)
        if self._has_sums:
            self._memory.take_over(old)
            was_present = {id(p) for p, has in zip(old.parameters, self._is_present, strict=True) if has}
            self._is_present = [id(p) in was_present for p in parameters]

    def _num_numbers(self) -> int:
        return len(self._inner.param_groups) + 2

    def reduce(self, mean: Mean, *, is_idle: bool) -> None:
        self._mean = mean
        if self._step_squares is not None:
            self._step_squares = self._step_squares / mean.loss_scale**2
        if not self._has_sums:
            self._scale_single(mean.factor(is_weighted=self._is_weighted) * self._share_of_weight())
            return
        if is_idle:
            self._drop_sums()
        else:
            self._scale_sums(mean.factor(is_weighted=self._is_weighted))
        if self._communicator.num_replicas > 1:
            self._sum_over_cores()
        self._scale_sums(self._share_of_weight())
        for p, view, has in zip(self._memory.parameters, self._memory.views, self._is_present, strict=True):
            p.grad = self._gradient_of(p, view) if has else None

    def _gradient_of(self, p: torch.nn.Parameter, view: torch.Tensor) -> torch.Tensor:
        return view

    def _share_of_weight(self) -> Weight:
        """What the sum over all cores is to be multiplied by: 1/W, or 1 where minibatches have no weights."""
        if not self._is_weighted:
            return 1.0
        if isinstance(self._weight, torch.Tensor):
            return torch.where(self._weight == 0, 0.0, 1 / self._weight)  # NaN stays NaN, and is seen
        return 1 / self._weight if self._weight else 0.0

    def _drop_sums(self) -> None:
        """Let what this core has not count."""
        self._memory.zero()
        self._is_present = [False] * len(self._is_present)
        self._weight = self._num_weighted = 0.0
        if self._step_squares is not None:
            self._step_squares = torch.zeros_like(self._step_squares)

    def _scale_sums(self, factor: Weight) -> None:
        if isinstance(factor, torch.Tensor) or factor != 1:
            self._memory.multiply(factor)

    def clip(self, largest: float) -> None:
        if self._has_sums:
            super().clip(largest)
        else:
            self._scale_single((largest / (self.norm() * self._mean.multiple + TINY)).clamp(max=1.0))

    def _scale_single(self, factor: Weight) -> None:
        """A single minibatch, used as it is; what the user may still hold is left alone."""
        owners = [p for p in self.parameters() if p.grad is not None]
        if owners and (isinstance(factor, torch.Tensor) or factor != 1):
            gradients: list[Any] = [p.grad.detach() for p in owners]  # type: ignore[union-attr]
            kinds = {(gradient.device, gradient.dtype) for gradient in gradients}
            if not isinstance(factor, torch.Tensor):
                scaled = list(torch._foreach_mul(gradients, factor))
            elif len(kinds) == 1:  # all at once, if the factor is of their kind
                scaled = list(torch._foreach_mul(gradients, factor.to(*kinds.pop())))
            else:
                # a factor is wider than a narrow gradient of one element without a shape
                scaled = [(gradient * factor.to(gradient.device)).to(gradient.dtype) for gradient in gradients]
            for p, gradient in zip(owners, scaled, strict=True):
                p.grad = gradient

    def _sum_over_cores(self) -> None:
        memory = self._memory
        memory.note(self._is_present)
        numbers, layout = memory.numbers[:-1], memory.numbers[-1:]
        self._write_numbers(numbers)
        if not self._is_weighted:
            put(numbers[-1:], UNWEIGHTED)
        layout.fill_(self._layout_and_epoch())
        self._communicator.sum(memory.flats)
        self._compare(numbers[-1])
        self._compare_layout(layout)
        self._read_numbers(numbers.clone())
        # who has all gradients here knows that none is missing on all cores, and need not wait for the device
        if not all(self._is_present):
            self._is_present = memory.noted()

    def _write_numbers(self, numbers: torch.Tensor) -> None:
        if self._step_squares is not None:
            numbers[:-2].copy_(self._step_squares)
        if self._is_weighted:
            put(numbers[-2], self._weight)
            put(numbers[-1], self._num_weighted)

    def _read_numbers(self, numbers: torch.Tensor) -> None:
        if self._step_squares is not None:
            self._step_squares = numbers[:-2]
        if self._is_weighted:
            self._weight, self._num_weighted = numbers[-2], numbers[-1]

    def clear(self) -> None:
        self._has_sums = False
        self._step_squares = None
        self._weight = self._num_weighted = 0.0
        for p in self.parameters():
            p.grad = None
        if self._memory.is_held():
            self._memory = self._new_memory([], 0)

    def discard(self) -> None:
        self.clear()

    def weight(self) -> Weight | None:
        return self._weight if self._is_weighted else None

    def _numbers(self) -> torch.Tensor:
        numbers = self._square([]).repeat(len(self._inner.param_groups) + 2)
        self._write_numbers(numbers)
        return numbers

    def _device(self) -> torch.device:
        return next(self.parameters()).device

    def _read(self, numbers: torch.Tensor) -> list[float]:
        return [float(number) for number in numbers.tolist()]

    def _square(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return square_of(gradients, like=next(self.parameters()))


def dense(gradients: list[Any]) -> list[torch.Tensor]:
    """Gradients of embeddings may be sparse."""
    return [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
