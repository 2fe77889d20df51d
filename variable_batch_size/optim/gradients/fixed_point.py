"""Fixed-point accumulators: sums that are the same to the last bit on any number of cores.

float64 holds whole multiples of a unit u exactly up to 2⁵³·u, and sums of such numbers do not depend on their order. So
every gradient is rounded to a unit that is small against it, and that does not depend on the cores: it follows from the
gradient of the step before, which is the same on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, final

import torch

from variable_batch_size.optim.gradients.accumulator import UNWEIGHTED, Mean
from variable_batch_size.optim.gradients.buckets import BucketAccumulator, GradientBuckets, dense
from variable_batch_size.optim.gradients.traced import TracedAccumulator, on_device
from variable_batch_size.optim.token_weights import Weight

HEADROOM = 12
"""By how many powers of two a minibatch's gradient may exceed the step's mean gradient before, in the same unit, and by
how many it may be smaller."""

MOST_RUNGS = 180
"""In each direction, at 12 powers of two a rung: more than float64 has."""

MOST_MINIBATCHES = 2**13
"""In a step."""

_BITS = 51
"""How many powers of two the sum may be larger than the unit, for adding 1.5 · 2⁵² units to round to whole ones."""


class FixedPointScale:
    """The unit of each parameter's gradient in each step.

    With |mean gradient of the step before| < 2^e and at most 2^k minibatches, a gradient up to 2^(e + 12) is rounded to
    multiples of u = 2^(e + 12 + k − 51): 39 − k bits below the mean gradient, where float32 has 24. One that is larger,
    or smaller than 2^(e − 12), is on another *rung*, whose sum is kept apart and whose unit is 2^12, 2^24 … times as
    large or as small; so at least 27 − k bits of its largest element remain. On which rung it is depends on itself
    only, so every sum is exact.
    """

    def __init__(self) -> None:
        self._exponents: dict[Hashable, int] = {}
        self.has_asked = False  # whether core 0 has told the first ones

    def learn(self, parameters: Sequence[Hashable], largest: Iterable[float]) -> None:
        """Take in the largest element of each mean gradient; what is 0 or not finite tells nothing."""
        for p, value in zip(parameters, largest, strict=True):
            if 0 < value < math.inf:
                self._exponents[p] = math.frexp(value)[1]

    def lower(self, p: Hashable) -> None:
        """Let the unit be much smaller, after all of a gradient was too small for it."""
        self._exponents[p] = self.limit(p) - 3 * HEADROOM

    def limit(self, p: Hashable) -> int:
        """The exponent up to which gradients are on rung 0."""
        exponent = self._exponents.get(p)
        if exponent is None:  # had no gradient yet
            exponent = max(self._exponents.values(), default=0)
        return exponent + HEADROOM

    def rung(self, p: Hashable, largest: float) -> int:
        """On which rung a gradient is, by its largest element; one that is not finite stays so on any."""
        if not 0 < largest < math.inf:
            return 0
        above = math.frexp(largest)[1] - self.limit(p)
        return -(-above // HEADROOM) if above > 0 else min(0, (above - 1) // HEADROOM + 2)

    def rounder(self, p: Hashable, rung: int, num_minibatches: int) -> float:
        """What rounds a number in float64 to a whole multiple of the unit, if it is added and subtracted again."""
        num_bits = (num_minibatches - 1).bit_length()
        return math.ldexp(1.5, 52 + self.limit(p) + rung * HEADROOM + num_bits - _BITS)

    def state_dict(self, parameters: Iterable[Hashable]) -> dict[str, Any]:
        return {"exponents": [self._exponents.get(p) for p in parameters], "has_asked": self.has_asked}

    def load_state_dict(self, state: Mapping[str, Any], parameters: Iterable[Hashable]) -> None:
        pairs = zip(parameters, state["exponents"], strict=False)
        self._exponents = {p: exponent for p, exponent in pairs if exponent is not None}
        self.has_asked = state["has_asked"]


_RUNGS_OF_NUMBERS = tuple(range(88, -153, -40))
"""Exponents of the units of a number's parts: all of float32's range, so that no number is out of it."""

NUM_PARTS = len(_RUNGS_OF_NUMBERS)

_LARGEST = 2.0**128
"""From which on a number counts as infinite."""


def parts_of(numbers: torch.Tensor) -> torch.Tensor:
    """Split each number, at least 0, into parts that add up exactly over up to 2¹³ minibatches; a row for each part.

    What is not finite stays so.
    """
    rest = torch.where(numbers < _LARGEST, numbers.double(), math.inf)
    parts = []
    for exponent in _RUNGS_OF_NUMBERS:
        rounder = math.ldexp(1.5, 52 + exponent)
        part = (rest + rounder) - rounder
        parts.append(part)
        rest = rest - part
    return torch.stack(parts)


def joined(parts: torch.Tensor) -> torch.Tensor:
    """The numbers that sums of parts make."""
    total = parts[-1]
    for part in reversed(parts[:-1].unbind()):
        total = total + part
    return total


_ELEMENTS_AT_ONCE = 2**16
"""Of a large gradient on a CPU, so that what is between stays in its cache."""


@final
class FixedPointAccumulator(BucketAccumulator):
    """Every minibatch's gradient is rounded to whole units (:class:`FixedPointScale`), and these are summed in float64.

    Such sums are exact: they do not depend on which core had which minibatch. The step's gradient is made of them when
    all are there. What is measured and weighed is summed exactly, too, in parts of fixed units.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._units = FixedPointScale()
        self._rungs: dict[int, GradientBuckets] = {}  # what is out of the range of the memory, by its rung
        self._parts: torch.Tensor | None = None  # of the numbers, summed over this core's minibatches
        self._latest: tuple[list[torch.nn.Parameter], torch.Tensor] | None = None  # the step before: largest elements
        super().__init__(*args, **options)
        if any(p.is_complex() for p in self.parameters()):
            raise ValueError("`exact` must be False where parameters are complex")

    def _new_memory(self, parameters: list[torch.nn.Parameter], num_numbers: int) -> GradientBuckets:
        return GradientBuckets(parameters, num_numbers=num_numbers, dtype=torch.float64)

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

    def _rung(self, rung: int) -> GradientBuckets:
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
        self._units = FixedPointScale()
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


_NUM_LIMBS = 3
_LIMB_BITS = 16  # of a limb: so many that the sum over 2¹⁴ minibatches still fits 32 bits
_MOST_MINIBATCHES = 2**14
_LEAST_LIMIT = -78  # below, the unit of the last limb would be no normal number of float32
_MORE_HEADROOM = 12  # of squares, beyond that of gradients


@final
class FixedPointTracedAccumulator(TracedAccumulator):
    """Every minibatch's gradient is written as three whole numbers of 16 bits, and these are summed as integers.

    A TPU has no float64, and cannot sum what stands for it over cores; integers of 32 bits it can. The units follow
    from the step before, as on other devices (:class:`FixedPointScale`), are known on the host and are data to the
    program. What is out of their range is seen in the sum, by all cores, and raises: which sum it goes into cannot
    depend on its size where every core must run the same program. A gradient that falls to less than 2^-24 of the one
    before is rounded coarsely in that step.

    How a compiler rounds may depend on all that is in a program. So work is started, first of all, when a minibatch has
    been run and when it has been added: what rounds in it is the same two programs for each minibatch, on any core.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._units = FixedPointScale()
        self._number_units = FixedPointScale()
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
        self._unit = torch.tensor([math.ldexp(1.0, limit - _LIMB_BITS) for limit in limits]).to(device)
        self._inverse = torch.tensor([math.ldexp(1.0, _LIMB_BITS - limit) for limit in limits]).to(device)

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
        self._units, self._number_units = FixedPointScale(), FixedPointScale()
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
        whole = torch.round(rest * (inverse * 2.0 ** (_LIMB_BITS * number)))
        limb.add_(whole.to(torch.int32).view_as(limb))
        rest = rest - whole * (unit * 2.0 ** (-_LIMB_BITS * number))


def _joined(limbs: list[torch.Tensor], unit: torch.Tensor) -> torch.Tensor:
    """The numbers that sums of limbs make, the smallest first."""
    parts = [limb.float() * (unit * 2.0 ** (-_LIMB_BITS * number)) for number, limb in enumerate(limbs)]
    return (parts[2] + parts[1]) + parts[0]
