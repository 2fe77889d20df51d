"""Gradients on eager devices: fresh in every minibatch, summed in flat memory that one call reduces."""

from __future__ import annotations

from typing import Any, final

import torch

from variable_batch_size.training.flat_memory import FlatMemory, square_of
from variable_batch_size.training.gradients import Gradients

_TINY = 1e-6
"""Beside a norm, as torch has it where it clips."""


@final
class FlatGradients(Gradients):
    """Autograd hands over each minibatch's gradients as tensors of their own, which costs nothing.

    Where a core has a single minibatch in a step and no other core, they are used as they are. Else they are copied and
    added into flat memory (:class:`FlatMemory`).
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._memory = FlatMemory([], num_squares=0)
        self._has_sums = False  # whether the memory holds minibatches of this step
        self._is_present: list[bool] = []  # which of its parameters had a gradient in this step, on this core
        self._frozen: set[torch.Tensor] = set()  # parameters that need no gradient and were given one all the same
        self._step_squares: torch.Tensor | None = None
        super().__init__(*args, **options)

    def take(self, *, is_last: bool, is_only: bool) -> None:
        if self._measures and not is_only:  # one minibatch tells nothing of the noise
            self._measure()
        if not is_last or self._has_sums or self._communicator.num_replicas > 1:
            self._add()

    def _measure(self) -> None:
        squares = self._squares(self._with_gradients())
        if self._step_squares is not None:
            squares[: len(self._step_squares)] += self._step_squares  # a group may have been added since
        self._step_squares = squares

    def _add(self) -> None:
        """Add the gradients of the minibatch to the sums, and leave none behind."""
        self._frozen.update(p for p in self.parameters() if not p.requires_grad and p.grad is not None)
        self._fit([p for p in self.parameters() if p.requires_grad or p in self._frozen])
        memory = self._memory
        gradients = [p.grad for p in memory.parameters]
        is_whole = not any(gradient is None for gradient in gradients)
        if is_whole and not self._has_sums:
            torch._foreach_copy_(memory.views, _dense(gradients))
        else:
            if not self._has_sums:
                memory.zero()
            found = [number for number, gradient in enumerate(gradients) if gradient is not None]
            if found:
                views = memory.views if is_whole else [memory.views[number] for number in found]
                torch._foreach_add_(views, _dense([gradients[number] for number in found]))
        before = self._is_present if self._has_sums else [False] * len(gradients)
        self._is_present = [was or gradient is not None for was, gradient in zip(before, gradients, strict=True)]
        self._has_sums = True
        for p in self.parameters():
            p.grad = None

    def _fit(self, parameters: list[torch.nn.Parameter]) -> None:
        """Have memory that fits the parameters as they are now, with the sums so far."""
        old = self._memory
        if self._has_sums:
            # one that was frozen since has its part in the step
            known = {id(p) for p in parameters}
            parameters = parameters + [
                p for p, has in zip(old.parameters, self._is_present, strict=True) if has and id(p) not in known
            ]
        num_squares = len(self._inner.param_groups)
        if old.fits(parameters, num_squares, is_thorough=not self._has_sums):
            return
        self._memory = FlatMemory(parameters, num_squares=num_squares)
        if self._has_sums:
            self._memory.take_over(old)
            was_present = {id(p) for p, has in zip(old.parameters, self._is_present, strict=True) if has}
            self._is_present = [id(p) in was_present for p in parameters]

    def reduce(self, weight: float, *, loss_scale: float = 1.0) -> None:
        if self._step_squares is not None:
            weight_of_squares = weight / loss_scale**2
            self._step_squares = self._step_squares * weight_of_squares if weight else self._step_squares.zero_()
        if not self._has_sums:
            self._multiply(weight / loss_scale)
            return
        if weight == 0:
            self._memory.zero()
            self._is_present = [False] * len(self._is_present)
        elif weight != loss_scale:
            self._memory.multiply(weight / loss_scale)
        if self._communicator.num_replicas > 1:
            self._sum_over_cores()
        for p, view, has in zip(self._memory.parameters, self._memory.views, self._is_present, strict=True):
            p.grad = view if has else None

    def clip(self, largest: float) -> None:
        if self._has_sums:
            super().clip(largest)
        else:
            self._multiply((largest / (self.norm() + _TINY)).clamp(max=1.0))

    def _multiply(self, factor: float | torch.Tensor) -> None:
        """A single minibatch, used as it is; what the user may still hold is left alone."""
        if isinstance(factor, torch.Tensor) or factor != 1:
            for p in self.parameters():
                if p.grad is not None:
                    p.grad = p.grad.detach() * factor

    def _sum_over_cores(self) -> None:
        memory = self._memory
        memory.note(self._is_present)
        if self._step_squares is not None:
            memory.squares.copy_(self._step_squares)
            self._step_squares = memory.squares
        self._communicator.sum(memory.flats)
        # who has all gradients here knows that none is missing on all cores, and need not wait for the device
        if not all(self._is_present):
            self._is_present = memory.noted()

    def clear(self) -> None:
        self._has_sums = False
        self._step_squares = None
        for p in self.parameters():
            p.grad = None
        if self._memory.is_held():
            self._memory = FlatMemory([], num_squares=0)

    def discard(self) -> None:
        self.clear()

    def _measured(self) -> torch.Tensor:
        if self._step_squares is not None:
            return self._step_squares
        return torch.zeros(len(self._inner.param_groups), device=next(self.parameters()).device)

    def _read(self, numbers: torch.Tensor) -> list[float]:
        return [float(number) for number in numbers.tolist()]

    def _square(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return square_of(gradients, like=next(self.parameters()))


def _dense(gradients: list[Any]) -> list[torch.Tensor]:
    return [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
