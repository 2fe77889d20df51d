"""Gradients on eager devices: fresh in every minibatch, summed in flat memory that one call reduces."""

from __future__ import annotations

from typing import Any, final

import torch

from variable_batch_size.training.flat_memory import FlatMemory, square_of
from variable_batch_size.training.gradients import Gradients


@final
class FlatGradients(Gradients):
    """Autograd hands over each minibatch's gradients as tensors of their own, which costs nothing.

    Where a core has a single minibatch in a step and no other core, they are used as they are. Else they are copied and
    added into flat memory (:class:`FlatMemory`).
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._memory: FlatMemory | None = None
        self._has_sums = False  # whether the memory holds minibatches of this step
        self._present: set[torch.Tensor] = set()  # parameters that had a gradient in this step, on this core
        self._known: set[torch.Tensor] = set()  # frozen ones that were given a gradient all the same
        self._step_squares: torch.Tensor | None = None
        super().__init__(*args, **options)

    def take(self, *, is_last: bool) -> None:
        if self._measures:
            self._measure()
        if is_last and not self._has_sums and self._communicator.num_replicas == 1:
            return
        self._add()

    def _measure(self) -> None:
        groups = self._inner.param_groups
        squares = self._squares([[(p, p.grad) for p in group["params"] if p.grad is not None] for group in groups])
        if self._step_squares is not None:
            squares[: len(self._step_squares)] += self._step_squares  # a group may have been added since
        self._step_squares = squares

    def _add(self) -> None:
        """Add the gradients of the minibatch to the sums, and leave none behind."""
        parameters = list(self.parameters())
        fresh = [(p, p.grad.detach()) for p in parameters if p.grad is not None]
        self._known.update(p for p, _ in fresh if not p.requires_grad)
        memory = self._memory_for([p for p in parameters if p.requires_grad or p in self._known or p in self._present])
        is_whole = len(fresh) == len(memory.parameters)
        if not self._has_sums and not is_whole:
            memory.zero()
        views = [memory.views[p] for p, _ in fresh]
        if any(gradient.layout != torch.strided for _, gradient in fresh):
            fresh = [(p, gradient.to_dense()) for p, gradient in fresh]
        if fresh:
            combine = torch._foreach_add_ if self._has_sums or not is_whole else torch._foreach_copy_
            combine(views, [gradient for _, gradient in fresh])
        self._present.update(p for p, _ in fresh)
        self._has_sums = True
        for p in parameters:
            p.grad = None

    def _memory_for(self, parameters: list[torch.nn.Parameter]) -> FlatMemory:
        """The memory that fits the parameters as they are now, with the sums so far."""
        num_squares = len(self._inner.param_groups)
        if self._memory is None or not self._memory.fits(parameters, num_squares):
            old = self._memory
            self._memory = FlatMemory(parameters, num_squares=num_squares)
            if old is not None and self._has_sums:
                self._memory.take_over(old)
        return self._memory

    def reduce(self, weight: float) -> None:
        if not self._has_sums:
            self._weigh(weight)
            return
        memory = self._memory
        assert memory is not None
        if weight == 0:
            memory.zero()
            self._present.clear()
            if self._step_squares is not None:
                self._step_squares.zero_()
        elif weight != 1:
            memory.multiply(weight)
            if self._step_squares is not None:
                self._step_squares.mul_(weight)
        if self._communicator.num_replicas > 1:
            self._sum_over_cores(memory)
        for p in memory.parameters:
            p.grad = memory.views[p] if p in self._present else None

    def _weigh(self, weight: float) -> None:
        """A single minibatch, used as it is; what the user may still hold is left alone."""
        if weight == 1:
            return
        for p in self.parameters():
            if p.grad is not None:
                p.grad = p.grad.detach() * weight
        if self._step_squares is not None:
            self._step_squares.mul_(weight)

    def _sum_over_cores(self, memory: FlatMemory) -> None:
        memory.note(self._present)
        if self._step_squares is not None:
            memory.squares.copy_(self._step_squares)
            self._step_squares = memory.squares
        self._communicator.sum(memory.flats)
        # who has all gradients here knows that none is missing on all cores, and need not wait for the device
        if len(self._present) < len(memory.parameters):
            self._present = memory.noted()

    def clear(self) -> None:
        self._has_sums = False
        self._present.clear()
        self._step_squares = None
        for p in self.parameters():
            p.grad = None
        if self._memory is not None and self._memory.is_held():
            self._memory = None

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
