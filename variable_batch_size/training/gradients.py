"""The gradients of a step: taken over minibatch by minibatch, measured, weighted and summed over all cores."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch.optim import Optimizer

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.rules.rule import Norms

Divisors = dict[torch.Tensor, torch.Tensor]


class Gradients(ABC):
    """Takes over the gradients of each minibatch, and hands those of the whole step to the inner optimizer.

    Until :meth:`take`, the gradient is the user's: ``p.grad`` as it stands then is that of the minibatch, whatever made
    it. Then it is the library's, and ``p.grad`` is empty, so that the next backward pass begins anew. After
    :meth:`reduce`, ``p.grad`` is the gradient of the step; None where no minibatch on any core had one, so that the
    inner optimizer leaves such a parameter alone as it always does.

    Args:
        inner: the inner optimizer, whose parameters they are.
        communicator: the way to the other cores.
        measures: whether the squared norm of each minibatch's gradient is summed up, for each parameter group.
        divisors: what gradients are divided by before that; those of a parameter without one do not count. None to
            divide none.
    """

    def __init__(
        self,
        inner: Optimizer,
        communicator: Communicator,
        *,
        measures: bool = False,
        divisors: Divisors | None = None,
    ) -> None:
        self._inner = inner
        self._communicator = communicator
        self._measures = measures
        self._divisors = divisors
        self.discard()

    @abstractmethod
    def take(self, *, is_last: bool, is_only: bool) -> None:
        """Take over the gradients of the latest minibatch.

        Args:
            is_last: whether it is the core's last one of the step.
            is_only: whether it is the only one of the step on any core.
        """

    @abstractmethod
    def reduce(self, weight: float) -> None:
        """Let ``p.grad`` be the sum over all minibatches of all cores, those of this core times `weight`.

        What weighs 0 leaves no mark, not even where it is NaN.
        """

    @abstractmethod
    def clear(self) -> None:
        """After the update: start the next step from nothing."""

    def drop(self) -> None:
        """Drop what is in ``p.grad``, which no minibatch has been made of yet."""
        for p in self.parameters():
            p.grad = None

    def discard(self) -> None:
        """Drop what an unfinished step has left, gradients that were never taken over included."""
        for p in self.parameters():
            p.grad = None

    def norms(self) -> tuple[list[Norms | None], bool]:
        """After :meth:`reduce`: for each group, the weighted sum of minibatches' squared norms, and that of the sum.

        None for a group of which nothing was measured. And whether all of it is finite, as the sum itself is. The one
        thing here that waits for the device.
        """
        groups = self._inner.param_groups
        numbers = [self._measured(), self._squares(self._with_gradients())]
        if self._divisors is not None:
            numbers.append(self._square([p.grad for p in self.parameters() if p.grad is not None]).view(1))
        values = self._read(torch.cat(numbers))
        is_known = [self._is_measurable(group["params"]) for group in groups]
        pairs = zip(values[: len(groups)], values[len(groups) : 2 * len(groups)], strict=True)
        found = [Norms(*pair) if known else None for known, pair in zip(is_known, pairs, strict=True)]
        return found, all(map(math.isfinite, values))

    def norm(self) -> torch.Tensor:
        """After :meth:`reduce`: the norm of the result over all parameters, on the device."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        return self._square(gradients).sqrt()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """All parameters of the inner optimizer."""
        return (p for group in self._inner.param_groups for p in group["params"])

    @abstractmethod
    def _measured(self) -> torch.Tensor:
        """The squared norms of the minibatches, an element for each group."""

    @abstractmethod
    def _read(self, numbers: torch.Tensor) -> list[float]:
        """Numbers on the host."""

    def _with_gradients(self) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """The parameters of each group that have a gradient, and that."""
        return [[(p, p.grad) for p in group["params"] if p.grad is not None] for group in self._inner.param_groups]

    def _is_measurable(self, parameters: Sequence[torch.Tensor]) -> bool:
        return self._divisors is None or any(p in self._divisors for p in parameters)

    def _squares(self, groups: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]) -> torch.Tensor:
        """The squared norm of the gradients of each group, divided by what they are to be divided by."""
        squares = []
        for pairs in groups:
            if self._divisors is None:
                gradients = [gradient for _, gradient in pairs]
            else:
                gradients = [g / divisor for p, g in pairs if (divisor := self._divisor_of(p)) is not None]
            squares.append(self._square(gradients))
        return torch.stack(squares)

    def _divisor_of(self, p: torch.Tensor) -> torch.Tensor | None:
        assert self._divisors is not None
        return self._divisors.get(p)

    @abstractmethod
    def _square(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The squared norm of several tensors together, in float32 at least; 0 of none."""
