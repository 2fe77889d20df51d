"""Gradients on eager devices whose sums are the same to the last bit on any number of cores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

import torch

from variable_batch_size.training.exact_units import MOST_MINIBATCHES, MOST_RUNGS, NUM_PARTS, Units, joined, parts_of
from variable_batch_size.training.flat_gradients import FlatGradients, dense
from variable_batch_size.training.flat_memory import FlatMemory
from variable_batch_size.training.gradients import UNWEIGHTED, Mean
from variable_batch_size.training.weights import Weight

_ELEMENTS_AT_ONCE = 2**16
"""Of a large gradient on a CPU, so that what is between stays in its cache."""


@final
class ExactGradients(FlatGradients):
    """Every minibatch's gradient is rounded to whole units (:class:`Units`), and these are summed in float64.

    Such sums are exact: they do not depend on which core had which minibatch. The step's gradient is made of them when
    all are there. What is measured and weighed is summed exactly, too, in parts of fixed units.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._units = Units()
        self._rungs: dict[int, FlatMemory] = {}  # what is out of the range of the memory, by its rung
        self._parts: torch.Tensor | None = None  # of the numbers, summed over this core's minibatches
        self._latest: tuple[list[torch.nn.Parameter], torch.Tensor] | None = None  # the step before: largest elements
        super().__init__(*args, **options)
        if any(p.is_complex() for p in self.parameters()):
            raise ValueError("`exact` must be False where parameters are complex")

    def _new_memory(self, parameters: list[torch.nn.Parameter], num_numbers: int) -> FlatMemory:
        return FlatMemory(parameters, num_numbers=num_numbers, dtype=torch.float64)

    def _num_numbers(self) -> int:
        return NUM_PARTS * super()._num_numbers() + 2 * MOST_RUNGS + 1

    # ------------------------------------------------------------------------------------------------------ a minibatch

    def take(self, mean: Mean, *, is_last: bool, weight: Weight | None = None) -> None:
        if mean.num_minibatches > MOST_MINIBATCHES:
            raise ValueError(
                f"with `exact` a step must have at most {MOST_MINIBATCHES} minibatches, got {mean.num_minibatches}"
            )
        self._mean = mean
        self._is_weighted = weight is not None
        if not self._has_sums:
            self._learn()
        self._count(weight)
        self._add()

    def _learn(self) -> None:
        """Before the first minibatch of a step: how large the gradients were, which is the same on all cores."""
        if self._latest is not None:
            parameters, largest = self._latest
            self._units.learn(parameters, largest.tolist())
            self._latest = None
        if not self._units.has_asked:
            self._ask_first()
            self._units.has_asked = True

    def _ask_first(self) -> None:
        """In the first step of a run, let core 0 tell of its first minibatch, which it has whatever the other cores."""
        parameters = list(self.parameters())
        largest = [0.0 if p.grad is None else float(_largest_of(p.grad)) for p in parameters]
        told = torch.tensor(largest).to(self._device()) / self._mean.loss_scale
        self._communicator.broadcast([told])
        self._units.learn(parameters, told.tolist())

    def _count(self, weight: Weight | None) -> None:
        measures = self._measures and self._mean.num_minibatches > 1
        squares = self._squares(self._with_gradients()) if measures else self._nothing(len(self._inner.param_groups))
        if weight is not None:
            of_one = torch.as_tensor(weight, device=squares.device).double()
            squares = torch.where(of_one > 0, squares / of_one, 0.0)
        else:
            of_one = squares.new_zeros((), dtype=torch.float64)
        squares = squares.double() / self._mean.loss_scale**2
        parts = parts_of(torch.cat([squares, torch.stack([of_one, (of_one > 0).double()])]))
        if self._parts is not None and self._parts.shape != parts.shape:
            raise RuntimeError("with `exact` no parameter group can be added within a step")
        self._parts = parts if self._parts is None else self._parts + parts

    def _nothing(self, count: int) -> torch.Tensor:
        return torch.zeros(count, device=self._device())

    def _put(self, gradients: list[torch.Tensor | None]) -> None:
        numbers = [number for number, gradient in enumerate(gradients) if gradient is not None]
        found = dense([gradients[number] for number in numbers])
        largest = _largest_of_each(found).tolist() if found else []
        is_first, written = not self._has_sums, set()
        views, rounders, are_new = [], [], []
        for number, gradient, value in zip(numbers, found, largest, strict=True):
            p = self._memory.parameters[number]
            if not math.isfinite(value):  # the elements that are must still add up exactly
                value = float(_largest_of(gradient.nan_to_num(0.0, 0.0, 0.0)))
            rung = self._units.rung(p, value / self._mean.loss_scale)
            views.append((self._rung(rung) if rung else self._memory).views[number])
            rounders.append(self._units.rounder(p, rung, self._mean.num_minibatches))
            are_new.append(is_first and not rung)
            if not rung:
                written.add(number)
        if is_first:
            self._memory.numbers.zero_()
            for number in set(range(len(gradients))) - written:
                self._memory.views[number].zero_()
        _add_rounded(views, found, rounders, are_new, divisor=self._mean.loss_scale)

    def _rung(self, rung: int) -> FlatMemory:
        if rung not in self._rungs:
            self._rungs[rung] = self._new_memory(self._memory.parameters, 0)
        return self._rungs[rung]

    def _fit(self, parameters: list[torch.nn.Parameter]) -> None:
        super()._fit(parameters)
        for rung, old in self._rungs.items():
            if old.parameters is not self._memory.parameters:
                self._rungs[rung] = self._new_memory(self._memory.parameters, 0)
                self._rungs[rung].take_over(old)

    # ----------------------------------------------------------------------------------------------------------- a step

    def reduce(self, mean: Mean, *, is_idle: bool) -> None:
        self._mean = mean
        if is_idle:
            self._drop_sums()
        if self._communicator.num_replicas > 1:
            self._sum_over_cores()
        assert self._parts is not None
        *squares, self._weight, self._num_weighted = joined(self._parts).unbind()
        self._step_squares = torch.stack(squares)
        unscaled = mean._replace(loss_scale=1.0)  # the loss scale is divided out already
        factor, totals = unscaled.factor(is_weighted=self._is_weighted) * self._share_of_weight(), []
        for number, (p, has) in enumerate(zip(self._memory.parameters, self._is_present, strict=True)):
            totals.append(self._total(number))
            p.grad = _multiplied(totals[-1], factor, p.dtype) if has else None
        if totals:
            self._latest = self._memory.parameters, _largest_of_each(totals) / mean.num_minibatches

    def _total(self, number: int) -> torch.Tensor:
        total = self._memory.views[number]
        for rung in sorted(self._rungs):
            total = total + self._rungs[rung].views[number]
        return total

    def _drop_sums(self) -> None:
        super()._drop_sums()
        self._rungs = {}
        if self._parts is not None:
            self._parts = torch.zeros_like(self._parts)

    def _sum_over_cores(self) -> None:
        memory, parts = self._memory, self._parts
        assert parts is not None
        memory.note(self._is_present)
        memory.numbers[: parts.numel()].copy_(parts.flatten())
        for rung in self._rungs:
            memory.numbers[parts.numel() + MOST_RUNGS + rung] = 1
        if not self._is_weighted:
            memory.numbers[parts.numel() - 1] = UNWEIGHTED  # the fraction of the number of weights, else 0
        memory.numbers[-1:].fill_(self._layout_and_epoch())
        self._communicator.sum(memory.flats)
        self._compare(memory.numbers[parts.numel() - 1])
        self._compare_layout(memory.numbers[-1:])
        self._parts = memory.numbers[: parts.numel()].view_as(parts).clone()
        used = memory.numbers[parts.numel() : -1].tolist()
        for rung in (rung for rung, count in enumerate(used, start=-MOST_RUNGS) if count):
            self._communicator.sum(self._rung(rung).flats)
        if not all(self._is_present):
            self._is_present = memory.noted()

    def clear(self) -> None:
        self._rungs = {}
        self._parts = None
        super().clear()

    # ------------------------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        if self._latest is not None and not self._has_sums:
            self._learn()
        return self._units.state_dict(self.parameters())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._latest = None
        self._units = Units()
        if state:
            self._units.load_state_dict(state, self.parameters())


def _largest_of_each(gradients: list[torch.Tensor]) -> torch.Tensor:
    if all(gradient.device.type != "cpu" and gradient.numel() for gradient in gradients):
        # all at once, which a GPU does much faster
        return torch.stack([norm.double() for norm in torch._foreach_norm(gradients, math.inf)])
    return torch.stack([_largest_of(gradient) for gradient in gradients])


def _largest_of(gradient: torch.Tensor) -> torch.Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    if not values.numel():
        return torch.zeros((), dtype=torch.float64, device=gradient.device)
    smallest, largest = torch.aminmax(values)  # several times as fast as the norm
    return torch.maximum(-smallest, largest).double()


def _add_rounded(
    views: list[torch.Tensor],
    gradients: list[torch.Tensor],
    rounders: list[float],
    are_new: list[bool],
    *,
    divisor: float,
) -> None:
    """Add gradients, divided and rounded to whole units, to views of the memory; or write those that are new there."""
    if all(gradient.device.type == "cpu" for gradient in gradients):
        for view, gradient, rounder, is_new in zip(views, gradients, rounders, are_new, strict=True):
            for place, piece in _in_pieces(view, gradient.detach()):
                exact = place.copy_(piece) if is_new else piece.to(torch.float64, copy=True)
                exact = exact if divisor == 1 else exact.div_(divisor)
                exact.add_(rounder).sub_(rounder)
                if not is_new:
                    place.add_(exact)
        return
    # all at once, which a GPU does much faster
    exact_of_all = [view if is_new else torch.empty_like(view) for view, is_new in zip(views, are_new, strict=True)]
    torch._foreach_copy_(exact_of_all, gradients)
    if divisor != 1:
        torch._foreach_div_(exact_of_all, divisor)
    torch._foreach_add_(exact_of_all, rounders)
    torch._foreach_sub_(exact_of_all, rounders)
    added = [(view, exact) for view, exact, is_new in zip(views, exact_of_all, are_new, strict=True) if not is_new]
    if added:
        torch._foreach_add_([view for view, _ in added], [exact for _, exact in added])


def _multiplied(total: torch.Tensor, factor: Weight, dtype: torch.dtype) -> torch.Tensor:
    """A sum times a factor, rounded once, to another dtype."""
    result = torch.empty_like(total, dtype=dtype)
    for place, piece in _in_pieces(result, total):
        place.copy_(piece * factor)
    return result


def _in_pieces(one: torch.Tensor, other: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two tensors of the same shape in pairs of parts; on other devices than a CPU, or where it cannot be, whole."""
    if one.device.type != "cpu" or not (one.is_contiguous() and other.is_contiguous()):
        return [(one, other)]
    pieces = [torch.split(tensor.view(-1), _ELEMENTS_AT_ONCE) for tensor in (one, other)]
    return list(zip(*pieces, strict=True))
