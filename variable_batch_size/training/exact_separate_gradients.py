"""Gradients on XLA whose sums are the same to the last bit on any number of cores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from variable_batch_size.training.exact_units import Units
from variable_batch_size.training.gradients import Mean
from variable_batch_size.training.separate_gradients import SeparateGradients, on_device
from variable_batch_size.training.weights import Weight

_NUM_LIMBS = 3
_BITS = 16  # of a limb: so many that the sum over 2¹⁴ minibatches still fits 32 bits
_MOST_MINIBATCHES = 2**14
_LEAST_LIMIT = -78  # below, the unit of the last limb would be no normal number of float32
_MORE_HEADROOM = 12  # of squares, beyond that of gradients


@final
class ExactSeparateGradients(SeparateGradients):
    """Every minibatch's gradient is written as three whole numbers of 16 bits, and these are summed as integers.

    A TPU has no float64, and cannot sum what stands for it over cores; integers of 32 bits it can. The units follow
    from the step before, as on other devices (:class:`Units`), are known on the host and are data to the program. What
    is out of their range is seen in the sum, by all cores, and raises: which sum it goes into cannot depend on its size
    where every core must run the same program. A gradient that falls to less than 2^-24 of the one before is rounded
    coarsely in that step.

    How a compiler rounds may depend on all that is in a program. So work is started, first of all, when a minibatch has
    been run and when it has been added: what rounds in it is the same two programs for each minibatch, on any core.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._units = Units()
        self._number_units = Units()
        self._limbs: dict[torch.Tensor, list[torch.Tensor]] = {}
        self._number_limbs: list[torch.Tensor] = []
        self._flags: list[
            torch.Tensor
        ] = []  # for each parameter and number: where it was out of range, not finite, not 0
        super().__init__(*args, **options)
        if any(p.dtype == torch.float64 or p.is_complex() for p in self.parameters()):
            raise ValueError("`exact` must be False where parameters are of float64 or complex on an XLA device")

    def _fit(self) -> bool:
        """Have limbs for each parameter that may get a gradient, and for the numbers; True if some are new."""
        trainable = [p for p in self.parameters() if p.requires_grad or p.grad is not None or p in self._limbs]
        new = [p for p in trainable if p not in self._limbs]
        undivided = self._without_divisor(trainable)
        self._infinities |= {p: torch.full(p.shape, torch.inf).to(p.device) for p in undivided}
        num_numbers = len(self._inner.param_groups) + 2
        if not new and self._number_limbs and len(self._number_limbs[0]) == num_numbers:
            return False
        if not trainable:
            return False
        self._limbs |= {p: [_zeros(p.shape, p.device) for _ in range(_NUM_LIMBS)] for p in new}
        device = trainable[0].device
        self._number_limbs = [_zeros((num_numbers,), device) for _ in range(_NUM_LIMBS)]
        self._flags = [_zeros((len(self._limbs) + num_numbers,), device) for _ in range(3)]
        return True

    # ------------------------------------------------------------------------------------------------------ a minibatch

    def take(self, mean: Mean, *, is_last: bool, weight: Weight | None = None) -> None:
        if mean.num_minibatches > _MOST_MINIBATCHES:
            raise ValueError(f"`exact` sums {_MOST_MINIBATCHES} minibatches at most on XLA, got {mean.num_minibatches}")
        self._mean = mean
        self._is_weighted = weight is not None
        self._fit()
        self._communicator.flush()
        if not self._has_sums:
            self._begin(mean, weight)
        fresh = self._fresh(mean)
        self._add(fresh, self._numbers_of(fresh, weight))
        self._present.update(fresh)
        self._has_sums = True
        for p in self.parameters():
            p.grad = None

    def _fresh(self, mean: Mean) -> dict[torch.Tensor, torch.Tensor]:
        """The gradients of the latest minibatch, as if there were no loss scale."""
        # data, as a loss scale of exactly 1 would be part of the program
        divisor = on_device(mean.loss_scale, next(iter(self._limbs)).device)
        return {p: p.grad.detach().float() / divisor for p in self._limbs if p.grad is not None}

    def _numbers_of(self, fresh: Mapping[torch.Tensor, torch.Tensor], weight: Weight | None) -> torch.Tensor:
        groups = [[(p, fresh[p]) for p in group["params"] if p in fresh] for group in self._inner.param_groups]
        device = next(iter(self._limbs)).device
        of_one = on_device(0.0 if weight is None else weight, device)
        squares = self._squares(groups) if self._measures else torch.zeros(len(groups)).to(device)
        if weight is not None:
            squares = torch.where(of_one > 0, squares / of_one, torch.zeros_like(squares))
        return torch.cat([squares.float(), of_one, (of_one > 0).float()])

    def _begin(self, mean: Mean, weight: Weight | None) -> None:
        """Before the first minibatch of a step counts: let the units be known to the device."""
        if not self._units.has_asked:
            self._ask(mean, weight)
        num_numbers, device = len(self._number_limbs[0]), self._flags[0].device
        limits = [self._units.limit(p) for p in self._limbs]
        limits += [self._number_units.limit(number) + _MORE_HEADROOM for number in range(num_numbers)]
        limits = [min(max(limit, _LEAST_LIMIT), 127) for limit in limits]
        self._limits = torch.tensor([math.ldexp(1.0, limit) for limit in limits]).to(device)
        self._unit = torch.tensor([math.ldexp(1.0, limit - _BITS) for limit in limits]).to(device)
        self._inverse = torch.tensor([math.ldexp(1.0, _BITS - limit) for limit in limits]).to(device)

    def _ask(self, mean: Mean, weight: Weight | None) -> None:
        """Let core 0 tell all others how large its first minibatch is."""
        fresh = self._fresh(mean)
        told = torch.cat([self._largest_of(fresh), self._numbers_of(fresh, weight)])
        self._communicator.broadcast([told])
        self._learn(self._read(told))
        self._units.has_asked = True

    def _add(self, fresh: Mapping[torch.Tensor, torch.Tensor], numbers: torch.Tensor) -> None:
        sizes = torch.cat([self._largest_of(fresh), numbers])
        is_finite = torch.isfinite(sizes)
        self._flags[0].add_((is_finite & (sizes > self._limits)).int())
        self._flags[1].add_((~is_finite).int())
        self._flags[2].add_((sizes > 0).int())
        for place, (p, limbs) in enumerate(self._limbs.items()):
            if p in fresh:
                here = slice(place, place + 1)
                _add_limbs(limbs, fresh[p], self._inverse[here], self._unit[here])
        of_numbers = slice(len(self._limbs), None)
        _add_limbs(self._number_limbs, numbers, self._inverse[of_numbers], self._unit[of_numbers])

    def _largest_of(self, values: Mapping[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The largest element for each parameter, 0 where there is no gradient."""
        nothing = torch.zeros(1).to(next(iter(self._limbs)).device)
        return torch.cat([values[p].abs().max().view(1) if p in values else nothing for p in self._limbs])

    def _learn(self, sizes: Sequence[float]) -> None:
        self._units.learn(list(self._limbs), sizes[: len(self._limbs)])
        self._number_units.learn(range(len(sizes) - len(self._limbs)), sizes[len(self._limbs) :])

    # ----------------------------------------------------------------------------------------------------------- a step

    def reduce(self, mean: Mean, *, is_idle: bool) -> None:
        self._mean = mean
        if not self._limbs:
            return
        self._communicator.flush()
        sums = [*(limb for limbs in self._limbs.values() for limb in limbs), *self._number_limbs, *self._flags]
        counts = torch.tensor([0 if is_idle else 1], dtype=torch.int32).to(sums[0].device)
        for tensor in sums:
            tensor.copy_((tensor * counts).view_as(tensor))
        self._communicator.sum(sums)
        totals = {}
        for place, (p, limbs) in enumerate(self._limbs.items()):
            total = _joined(limbs, self._unit[place : place + 1])
            is_finite = self._flags[1][place : place + 1] == 0
            totals[p] = torch.where(is_finite, total, torch.full_like(total, math.nan)).view(p.shape)
        numbers = _joined(self._number_limbs, self._unit[len(self._limbs) :])
        numbers = torch.where(self._flags[1][len(self._limbs) :] == 0, numbers, torch.full_like(numbers, math.nan))
        self._step_squares = list(torch.split(numbers[:-2], 1))
        self._weights = list(torch.split(numbers[-2:], 1))
        self._hand_over(totals)
        self._look_at(torch.cat([self._largest_of(totals), numbers]))

    def _numbers(self) -> torch.Tensor:
        return super()._numbers() if self._limbs else torch.zeros(len(self._inner.param_groups) + 2)

    def _hand_over(self, totals: Mapping[torch.Tensor, torch.Tensor]) -> None:
        unscaled = self._mean._replace(loss_scale=1.0)  # the loss scale is divided out already
        factor = on_device(unscaled.factor(is_weighted=self._is_weighted), self._weights[0].device)
        if self._is_weighted:
            weight = self._weights[0]
            factor = torch.where(weight == 0, torch.zeros_like(weight), factor / weight)  # NaN stays NaN, and is seen
        for p in [p for p in self._limbs if p in self._present]:  # in the same order on all cores, which a set has not
            p.grad = (totals[p] * factor).view(p.shape).to(p.dtype)

    def _look_at(self, sizes: torch.Tensor) -> None:
        """Learn from the step for the next one, and refuse one that was out of range; waits for the device."""
        *values, is_out = self._read(torch.cat([sizes, self._flags[2].float(), self._flags[0].sum().float().view(1)]))
        if is_out:
            raise RuntimeError(
                "with `exact` a minibatch's gradient must be at most 4096 times the largest of the step before, which "
                "on XLA cannot be made good: go on from the latest checkpoint with `exact=False`, which it must accept"
            )
        sizes_of_means = [value / self._mean.num_minibatches for value in values[: len(values) // 2]]
        self._learn(sizes_of_means)
        for place, key in enumerate([*self._limbs, *range(len(self._number_limbs[0]))]):
            if not sizes_of_means[place] and values[len(values) // 2 + place]:  # all of it was rounded to 0
                (self._units if place < len(self._limbs) else self._number_units).lower(key)

    def clear(self) -> None:
        for tensor in (*(limb for limbs in self._limbs.values() for limb in limbs), *self._number_limbs, *self._flags):
            tensor.zero_()
        self._has_sums = False
        self._present.clear()
        for p in self.parameters():
            p.grad = None

    # ------------------------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        numbers = range(len(self._inner.param_groups) + 2)
        return {**self._units.state_dict(self.parameters()), "numbers": self._number_units.state_dict(numbers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._units, self._number_units = Units(), Units()
        if "numbers" in state:
            self._units.load_state_dict(state, self.parameters())
            self._number_units.load_state_dict(state["numbers"], range(len(self._inner.param_groups) + 2))


def _zeros(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Made on the host: zeros made on the device would be a program of their own."""
    return torch.zeros(tuple(shape), dtype=torch.int32).to(device)


def _add_limbs(limbs: list[torch.Tensor], values: torch.Tensor, inverse: torch.Tensor, unit: torch.Tensor) -> None:
    """Add numbers to sums of limbs: each takes what is whole in its unit and leaves the rest to the next."""
    rest = torch.where(torch.isfinite(values), values, torch.zeros_like(values))
    for number, limb in enumerate(limbs):
        whole = torch.round(rest * (inverse * 2.0 ** (_BITS * number)))
        limb.add_(whole.to(torch.int32).view_as(limb))
        rest = rest - whole * (unit * 2.0 ** (-_BITS * number))


def _joined(limbs: list[torch.Tensor], unit: torch.Tensor) -> torch.Tensor:
    """The numbers that sums of limbs make, the smallest first."""
    parts = [limb.float() * (unit * 2.0 ** (-_BITS * number)) for number, limb in enumerate(limbs)]
    return (parts[2] + parts[1]) + parts[0]
