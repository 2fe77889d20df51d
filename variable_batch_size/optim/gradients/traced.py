"""TracedAccumulator: gradients on XLA, one tensor for each parameter, and the same graph on every core."""

from __future__ import annotations

import math
from typing import Any

import torch

from variable_batch_size.optim.gradients.accumulator import GradientAccumulator, Mean
from variable_batch_size.optim.token_weights import Weight


class TracedAccumulator(GradientAccumulator):
    """For devices whose compiler merges what it can.

    Every minibatch adds its gradients to sums that stay where they are, also where a core has a single one: all cores
    run the same program, so whether a core is idle is data, in a tensor, and no branch. As their programs are the same,
    the same parameters have a gradient on all of them. What sums over cores is a program of its own, as in that of a
    minibatch the user's loop has a share.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._infinities: dict[torch.Tensor, torch.Tensor] = {}  # in place of divisors that there are not yet
        self._step_squares: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []  # their sum and how many are above 0
        self._present: set[torch.Tensor] = set()
        self._has_sums = False
        super().__init__(*args, **options)

    def take(self, mean: Mean, *, is_last: bool, weight: Weight | None = None) -> None:
        self._mean = mean
        self._is_weighted = weight is not None
        if self._fit():
            self._communicator.flush()
        of_one = None if weight is None else on_device(weight, next(self.parameters()).device)
        for number, group in enumerate(self._inner.param_groups):
            fresh = [(p, p.grad.detach()) for p in group["params"] if p.grad is not None]
            if self._measures:
                squares = self._squares([fresh])
                if of_one is not None:
                    squares = torch.where(of_one > 0, squares / of_one, torch.zeros_like(squares))
                self._step_squares[number].add_(squares)
            for p, gradient in fresh:
                self._sums[p].add_(gradient)
                self._present.add(p)
                p.grad = None
        if of_one is not None:
            self._weights[0].add_(of_one)
            self._weights[1].add_((of_one > 0).float())
        self._has_sums = True

    def _fit(self) -> bool:
        """Have a sum for each parameter that may get a gradient, and the numbers; True if some are new.

        They must be on the device before they are used, as a scalar of exactly 0 would be made part of the program, and
        that of a core which has accumulated would be another one.
        """
        trainable = [p for p in self.parameters() if p.requires_grad or p.grad is not None or p in self._sums]
        converted = [p for p, tensor in self._sums.items() if tensor.dtype != p.dtype]
        self._sums |= {p: self._sums[p].to(p.dtype) for p in converted}
        new = [p for p in trainable if p not in self._sums]
        # made on the host: zeros made on the device would be a program of their own
        placed = self._communicator.placed_like
        self._sums |= {p: placed(p, torch.zeros(p.shape, dtype=p.dtype)) for p in new}
        undivided = self._without_divisor(trainable)
        self._infinities |= {p: placed(p, torch.full(p.shape, torch.inf)) for p in undivided}
        num_squares = len(self._inner.param_groups) - len(self._step_squares)
        num_weights = 2 - len(self._weights)  # always, as they must not come later on some cores
        device = next(self.parameters()).device
        self._step_squares += [torch.zeros(1).to(device) for _ in range(num_squares)]
        self._weights += [torch.zeros(1).to(device) for _ in range(num_weights)]
        self._communicator.shard_like([*self._step_squares, *self._weights])
        return bool(converted or new or undivided or num_squares or num_weights)

    def _without_divisor(self, parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Those that have neither a divisor nor what stands for it: new ones, and all where a run begins again."""
        known = self._divisors
        return [] if known is None else [p for p in parameters if p not in known and p not in self._infinities]

    def reduce(self, mean: Mean, *, is_idle: bool) -> None:
        self._mean = mean
        self._communicator.flush()  # what the loop has noted down may differ between cores, as a sum of losses does
        sums = list(self._sums.values())
        values = [mean.factor(is_weighted=self._is_weighted), 1 / mean.loss_scale**2, 1.0]
        factors = torch.tensor([*(0.0 if is_idle else value for value in values), 0.0]).to(self._weights[0].device)
        nothing = factors[-1:]
        for place, tensors in enumerate((sums, self._step_squares, self._weights)):
            factor = factors[place : place + 1]
            counts = factor != 0
            for tensor in tensors:
                weighted = torch.where(counts, tensor * factor, nothing)
                tensor.copy_(weighted.view_as(tensor))
        self._communicator.sum([*sums, *self._step_squares, *self._weights])
        if self._is_weighted:
            weight = self._weights[0]
            # where all weigh 0, the sums are divided by infinity
            divisors = torch.where(weight == 0, torch.full_like(weight, math.inf), weight)
            for tensor in sums:
                tensor.copy_((tensor / divisors).view_as(tensor))
        for p in self._present:
            p.grad = self._sums[p]

    def clear(self) -> None:
        for tensor in (*self._sums.values(), *self._step_squares, *self._weights):
            tensor.zero_()
        self._has_sums = False
        self._present.clear()
        for p in self.parameters():
            p.grad = None

    def discard(self) -> None:
        super().discard()
        if self._has_sums:
            self.clear()
        self._fit()

    def _divisor_of(self, p: torch.Tensor) -> torch.Tensor | None:
        divisor = super()._divisor_of(p)
        if divisor is None:
            return self._infinities[p]  # which leaves nothing to count, by the same program
        self._infinities.pop(p, None)
        return divisor

    def weight(self) -> Weight | None:
        return self._weights[0] * 1 if self._is_weighted else None

    def _numbers(self) -> torch.Tensor:
        return torch.cat([*self._step_squares, *self._weights])

    def _read(self, numbers: torch.Tensor) -> list[float]:
        self._communicator.flush()
        return [float(number) for number in numbers.cpu().tolist()]

    def _square(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        if not gradients:
            # made on the host, as above
            return torch.zeros(()).to(next(self.parameters()).device)
        sizes = [gradient.abs() if gradient.is_complex() else gradient for gradient in gradients]
        squares = [size.float().pow(2).sum() for size in sizes]
        return torch.stack(squares).sum() if len(squares) > 1 else squares[0]


def on_device(weight: Weight, device: torch.device) -> torch.Tensor:
    """A weight as one element, which is data on all cores; what is made of a scalar may become part of the program."""
    if isinstance(weight, torch.Tensor):
        return weight.detach().to(device).float().view(1)
    return torch.tensor([float(weight)]).to(device)
