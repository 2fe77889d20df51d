"""FixedPoint64, FixedPoint32: number formats whose sums are the same to the last bit on any number of ranks.

Sums of whole multiples of a unit u do not depend on their order, as long as they are exact: float64 holds them up to
2⁵³·u. So every gradient is rounded to a small unit that follows from the previous step, the same on all ranks.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, final

import torch
from torch.optim import Optimizer

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.optim.gradients.gradient_buckets import GradientBuckets
from variable_batch_size.optim.gradients.norms import is_finite
from variable_batch_size.optim.proxy import parameters_of
from variable_batch_size.optim.token_weights import Weight

HEADROOM = 12  # powers of two by which a gradient may differ from the previous step's mean in the same unit
MAX_RUNGS = 180  # in each direction, at 12 powers of two a rung: more than the range of float64
_BITS = 51  # powers of two by which the sum may exceed the unit, so that adding 1.5 · 2⁵² units rounds to whole ones
_CHUNK = 2**16  # elements of a large gradient on a CPU, so that intermediate results stay in its cache

# of FixedPoint32
_LIMB_BITS = 16  # of each of three limbs: few enough for the sum over 2¹⁴ minibatches to fit 32 bits
_MIN_LIMIT = -78  # below, the unit of the last limb would not be a normal float32 number
_NUMBERS_HEADROOM = 12  # of squares and weights, beyond that of gradients

Tensors = list[torch.Tensor]
Gradients = Mapping[torch.Tensor, torch.Tensor]
# of the units of a number's parts: all of float32's range, so that no number is out of range
_EXPONENTS_OF_PARTS = tuple(range(88, -153, -40))
NUM_PARTS = len(_EXPONENTS_OF_PARTS)


class FixedPointScale:
    """The unit of each parameter's gradient in each step.

    With |mean gradient of the previous step| < 2^e and at most 2^k minibatches, a gradient up to 2^(e + 12) is rounded
    to multiples of u = 2^(e + 12 + k − 51): 39 − k bits below the mean gradient, where float32 has 24. A larger one, or
    one below 2^(e − 12), is on another *rung*, with a sum of its own and a unit 2^12, 2^24 … times as large or small;
    so at least 27 − k bits of its largest element remain. The rung depends on the gradient alone, so sums are exact.
    """

    def __init__(self) -> None:
        self._exponents: dict[Hashable, int] = {}
        self.has_asked = False  # whether the ranks have the first units

    def update(self, parameters: Sequence[Hashable], largest: Iterable[float]) -> None:
        """Set the unit by the largest element of each mean gradient, unless that is 0 or not finite."""
        for p, value in zip(parameters, largest, strict=True):
            if 0 < value < math.inf:
                self._exponents[p] = math.frexp(value)[1]

    def decrease(self, p: Hashable) -> None:
        """Make the unit much smaller, after all of a gradient was rounded to 0."""
        self._exponents[p] = self.limit(p) - 3 * HEADROOM

    def limit(self, p: Hashable) -> int:
        """The exponent up to which gradients are on rung 0."""
        exponent = self._exponents.get(p)
        if exponent is None:  # had no gradient yet
            exponent = max(self._exponents.values(), default=0)
        return exponent + HEADROOM

    def rung(self, p: Hashable, largest: float) -> int:
        """The rung of a gradient by its largest element; one that is not finite stays so on any."""
        if not 0 < largest < math.inf:
            return 0
        above = math.frexp(largest)[1] - self.limit(p)
        return -(-above // HEADROOM) if above > 0 else min(0, (above - 1) // HEADROOM + 2)

    def rounding_constant(self, p: Hashable, rung: int, num_minibatches: int) -> float:
        """Rounds a float64 to a whole multiple of the unit when it is added and subtracted again."""
        return math.ldexp(1.5, 52 + self.limit(p) + rung * HEADROOM + (num_minibatches - 1).bit_length() - _BITS)

    def state_dict(self, parameters: Iterable[Hashable]) -> dict[str, Any]:
        return {"exponents": [self._exponents.get(p) for p in parameters], "has_asked": self.has_asked}

    def load_state_dict(self, state: Mapping[str, Any], parameters: Iterable[Hashable]) -> None:
        pairs = zip(parameters, state["exponents"], strict=False)
        self._exponents = {p: exponent for p, exponent in pairs if exponent is not None}
        self.has_asked = state["has_asked"]


class _FixedPoint:
    """What both formats share."""

    _max_minibatches: int  # of a step, so that sums do not overflow

    def __init__(self, inner: Optimizer) -> None:
        self._inner, self.scale = inner, FixedPointScale()

    def _parameters(self) -> list[torch.nn.Parameter]:
        return parameters_of(self._inner)

    def check_num_minibatches(self, number: int) -> None:
        if number > (limit := self._max_minibatches):
            raise ValueError(f"With `exact`, a step can have at most {limit} minibatches, got {number}.")


def split_into_parts(numbers: torch.Tensor) -> torch.Tensor:
    """Split each number ≥ 0 into parts that add up exactly over 2¹³ minibatches, a row each; 2¹²⁸ is infinite."""
    rest, parts = torch.where(numbers < 2.0**128, numbers.double(), math.inf), []
    for exponent in _EXPONENTS_OF_PARTS:
        constant = math.ldexp(1.5, 52 + exponent)
        parts.append((rest + constant) - constant)
        rest = rest - parts[-1]
    return torch.stack(parts)


def join_parts(parts: torch.Tensor) -> torch.Tensor:
    """The numbers, from sums of their parts."""
    return reduce(torch.add, reversed(parts.unbind()))


@final
class FixedPoint64(_FixedPoint):
    """Sums in float64 of gradients that are rounded to whole units (:class:`FixedPointScale`).

    The sums of rung 0 are in the accumulator's buckets, those of other rungs in buckets of their own, which are rarely
    needed. Squared norms and weights are summed exactly, too, in parts of fixed units.
    """

    _max_minibatches = 2**13

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner)
        self._rungs: dict[int, GradientBuckets] = {}
        self._parts: torch.Tensor | None = None  # of the numbers, summed over this rank's minibatches of the step
        self._previous: tuple[list[torch.nn.Parameter], torch.Tensor] | None = None  # largest elements, on the device

    def num_numbers(self) -> int:
        """Elements besides the gradients: the parts of the numbers, and a flag for each rung."""
        return NUM_PARTS * (len(self._inner.param_groups) + 2) + 2 * MAX_RUNGS + 1

    def update_scale(self, communicator: Communicator, *, has_first: bool) -> None:
        """Before the first minibatch of a step: set the units by the previous step, in the same way on all ranks."""
        self._read_previous()
        if self.scale.has_asked:
            return
        # in the first step of a run by its first minibatch, which is the same on any number of ranks
        parameters = self._parameters()
        largest = [0.0 if p.grad is None else float(_largest_of(p.grad)) for p in parameters]
        sent = torch.tensor(largest if has_first else [0.0] * len(largest)).to(parameters[0].device)
        communicator.sum([sent])
        self.scale.update(parameters, sent.tolist())
        self.scale.has_asked = True

    def agree_on_scale(self, minibatches: Sequence[Gradients], communicator: Communicator) -> None:
        """Set the first units by the largest elements in all minibatches of the first step, on all ranks."""
        parameters = self._parameters()
        largest = torch.zeros(communicator.num_replicas, len(parameters), dtype=torch.float64)
        for gradients in minibatches:
            found = [float(_largest_of(gradients[p])) if p in gradients else 0.0 for p in parameters]
            own = largest[communicator.rank]
            own.copy_(torch.maximum(own, torch.tensor(found, dtype=torch.float64).nan_to_num(0.0, 0.0)))
        total = communicator.total(largest.to(parameters[0].device))
        self.scale.update(parameters, total.amax(0).tolist())
        self.scale.has_asked = True

    def _read_previous(self) -> None:
        if self._previous is not None:
            (parameters, largest), self._previous = self._previous, None
            self.scale.update(parameters, largest.tolist())

    def add_numbers(self, squares: torch.Tensor | None, weight: Weight | None) -> None:
        """Add the squared norms of a minibatch, per unit of its weight, and its weight."""
        if squares is None:
            squares = torch.zeros(len(self._inner.param_groups), device=self._parameters()[0].device)
        of_one = squares.new_zeros((), dtype=torch.float64)
        if weight is not None:
            of_one = torch.as_tensor(weight, device=squares.device).double()
            squares = torch.where(of_one > 0, squares / of_one, 0.0)
        parts = split_into_parts(torch.cat([squares.double(), torch.stack([of_one, (of_one > 0).double()])]))
        if self._parts is not None and self._parts.shape != parts.shape:
            raise RuntimeError("With `exact`, no parameter group can be added within a step.")
        self._parts = parts if self._parts is None else self._parts + parts

    def add_(
        self, buckets: GradientBuckets, indices: Sequence[int], gradients: Tensors, n: int, *, is_first: bool
    ) -> None:
        """Add the gradients of some of the buckets' parameters; those of a step's first minibatch are written."""
        largest = _largest_of_each(gradients).tolist() if gradients else []
        views, constants, are_new, written = [], [], [], set()
        for index, gradient, value in zip(indices, gradients, largest, strict=True):
            p = buckets.parameters[index]
            if not math.isfinite(value):  # the elements that are finite must still add up exactly
                value = float(_largest_of(gradient.nan_to_num(0.0, 0.0, 0.0)))
            rung = self.scale.rung(p, value)
            views.append((self._rung(rung, buckets) if rung else buckets).views[index])
            constants.append(self.scale.rounding_constant(p, rung, n))
            are_new.append(is_first and not rung)
            if not rung:
                written.add(index)
        if is_first:
            buckets.numbers.zero_()
            for index in set(range(len(buckets.parameters))) - written:
                buckets.views[index].zero_()
        _add_rounded(views, gradients, constants, are_new)

    def _rung(self, rung: int, buckets: GradientBuckets) -> GradientBuckets:
        if rung not in self._rungs:
            self._rungs[rung] = buckets.new_like()
        return self._rungs[rung]

    def resize(self, buckets: GradientBuckets) -> None:
        """After the accumulator's buckets were rebuilt within a step."""
        for rung, old in self._rungs.items():
            self._rungs[rung] = buckets.new_like()
            self._rungs[rung].copy_from(old)

    def write(self, numbers: torch.Tensor) -> torch.Tensor:
        """Write the parts, and which rungs this rank has; returns the fraction of the number of weights, which is 0."""
        assert self._parts is not None
        size = self._parts.numel()
        numbers[:size].copy_(self._parts.flatten())
        for rung in self._rungs:
            numbers[size + MAX_RUNGS + rung] = 1
        return numbers[size - 1 : size]

    def read(self, numbers: torch.Tensor, buckets: GradientBuckets, communicator: Communicator) -> None:
        """Read the reduced parts, and reduce the rungs that any rank has."""
        assert self._parts is not None
        size = self._parts.numel()
        self._parts = numbers[:size].view_as(self._parts).clone()
        for rung, count in enumerate(numbers[size:].tolist(), start=-MAX_RUNGS):
            if count:
                communicator.sum(self._rung(rung, buckets).flats)

    def numbers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Squares of each group, the weight, and the number of weights above 0."""
        assert self._parts is not None
        *squares, weight, num_weighted = join_parts(self._parts).unbind()
        return torch.stack(squares), weight, num_weighted

    def decode(self, buckets: GradientBuckets, is_present: list[bool], factor: Weight, n: int) -> None:
        """Set ``p.grad`` to the sums times a factor, rounded once to the parameter's dtype; None if not present."""
        totals = []
        for index, p in enumerate(buckets.parameters):
            total = buckets.views[index]
            for rung in sorted(self._rungs):
                total = total + self._rungs[rung].views[index]
            totals.append(total)
            p.grad = torch.empty_like(total, dtype=p.dtype) if is_present[index] else None
            if p.grad is not None:
                for target, chunk in _in_chunks(p.grad, total):
                    target.copy_(chunk * factor)
        if totals:
            self._previous = buckets.parameters, _largest_of_each(totals) / n

    def kept_sums(self) -> Any:
        """A copy of this rank's sums of the step, except those in the accumulator's buckets."""
        return {rung: [flat.clone() for flat in buckets.flats] for rung, buckets in self._rungs.items()}, self._parts

    def restore_sums(self, kept: Any, buckets: GradientBuckets) -> None:
        """Continue from what :meth:`kept_sums` has returned, with new buckets."""
        rungs, self._parts = kept
        self._rungs = {}
        for rung, copies in rungs.items():
            for flat, copy in zip(self._rung(rung, buckets).flats, copies, strict=True):
                flat.copy_(copy)

    def drop_sums(self) -> None:
        """Leave this rank's minibatches out of the step. The accumulator zeroes its buckets."""
        self._rungs, self._parts = {}, None if self._parts is None else torch.zeros_like(self._parts)

    def reset(self) -> None:
        self._rungs, self._parts = {}, None

    def state_dict(self) -> dict[str, Any]:
        if self._parts is None:  # between steps
            self._read_previous()
        return self.scale.state_dict(self._parameters())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._previous, self.scale = None, FixedPointScale()
        if state:
            self.scale.load_state_dict(state, self._parameters())


def _largest_of_each(gradients: Tensors) -> torch.Tensor:
    if all(gradient.device.type != "cpu" and gradient.numel() for gradient in gradients):
        # one kernel, which is much faster on a GPU
        return torch.stack([norm.double() for norm in torch._foreach_norm(gradients, math.inf)])
    return torch.stack([_largest_of(gradient) for gradient in gradients])


def _largest_of(gradient: torch.Tensor) -> torch.Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    if not values.numel():
        return torch.zeros((), dtype=torch.float64, device=gradient.device)
    smallest, largest = torch.aminmax(values)  # several times as fast as the norm
    return torch.maximum(-smallest, largest).double()


def _add_rounded(views: Tensors, gradients: Tensors, constants: list[float], are_new: list[bool]) -> None:
    """Add gradients, rounded to whole units, to views of the buckets; or write those that are new."""
    if all(gradient.device.type == "cpu" for gradient in gradients):
        for view, gradient, constant, is_new in zip(views, gradients, constants, are_new, strict=True):
            for target, chunk in _in_chunks(view, gradient.detach()):
                exact = target.copy_(chunk) if is_new else chunk.to(torch.float64, copy=True)
                exact.add_(constant).sub_(constant)
                if not is_new:
                    target.add_(exact)
        return
    # all tensors in one kernel, which is much faster on a GPU
    exact_of_all = [view if is_new else torch.empty_like(view) for view, is_new in zip(views, are_new, strict=True)]
    torch._foreach_copy_(exact_of_all, gradients)
    torch._foreach_add_(exact_of_all, constants)
    torch._foreach_sub_(exact_of_all, constants)
    added = [(view, exact) for view, exact, is_new in zip(views, exact_of_all, are_new, strict=True) if not is_new]
    if added:
        torch._foreach_add_([view for view, _ in added], [exact for _, exact in added])


def _in_chunks(one: torch.Tensor, other: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two tensors of the same shape in pairs of chunks; in one piece if they are not contiguous or not on a CPU."""
    if one.device.type != "cpu" or not (one.is_contiguous() and other.is_contiguous()):
        return [(one, other)]
    return list(zip(*(torch.split(tensor.view(-1), _CHUNK) for tensor in (one, other)), strict=True))


@final
class FixedPoint32(_FixedPoint):
    """Sums of gradients as integers: each is written as three limbs of 16 bits in int32.

    A TPU has no float64 and cannot all-reduce its emulation, but it can all-reduce int32. The units follow from the
    previous step (:class:`FixedPointScale`) and are data to the graph. A gradient that is out of range is detected in
    the sum, on all ranks, and raises: the sum that it goes into cannot depend on its size where every rank must run the
    same graph. A gradient that falls below 2^-24 of the previous one is rounded coarsely in that step.
    """

    _max_minibatches = 2**14

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner)
        self._number_scale = FixedPointScale()
        self.limbs: dict[torch.Tensor, Tensors] = {}
        self._number_limbs: Tensors = []
        # for each parameter and number, how often it was out of range, not finite, and not 0
        self._flags: Tensors = []

    def _num_numbers(self) -> int:
        return len(self._inner.param_groups) + 2

    def ensure(self, trainable: list[torch.nn.Parameter]) -> None:
        """Make limbs for each parameter that may get a gradient, and for the numbers, if necessary."""
        new, num_numbers = [p for p in trainable if p not in self.limbs], self._num_numbers()
        is_complete = not new and self._number_limbs and len(self._number_limbs[0]) == num_numbers
        if is_complete or not trainable:
            return
        self.limbs |= {p: [_zeros(p.shape, p.device) for _ in range(3)] for p in new}
        device = trainable[0].device
        self._number_limbs = [_zeros((num_numbers,), device) for _ in range(3)]
        self._flags = [_zeros((len(self.limbs) + num_numbers,), device) for _ in range(3)]

    def update_scale(self, sizes: Sequence[float]) -> None:
        self.scale.update(list(self.limbs), sizes[: len(self.limbs)])
        self._number_scale.update(range(len(sizes) - len(self.limbs)), sizes[len(self.limbs) :])
        self.scale.has_asked = True

    def begin_step(self) -> None:
        """Before the first minibatch of a step: send the units to the device."""
        num_numbers, device = len(self._number_limbs[0]), self._flags[0].device
        limits = [self.scale.limit(p) for p in self.limbs]
        limits += [self._number_scale.limit(number) + _NUMBERS_HEADROOM for number in range(num_numbers)]
        limits = [min(max(limit, _MIN_LIMIT), 127) for limit in limits]
        self._limits = torch.tensor([2.0**limit for limit in limits]).to(device)
        self._unit = torch.tensor([2.0 ** (limit - _LIMB_BITS) for limit in limits]).to(device)
        self._inverse = torch.tensor([2.0 ** (_LIMB_BITS - limit) for limit in limits]).to(device)

    def add_(self, gradients: Gradients, numbers: torch.Tensor) -> None:
        sizes = torch.cat([self.largest_of(gradients), numbers])
        are_finite = is_finite(sizes)
        self._flags[0].add_((are_finite & (sizes > self._limits)).int())
        self._flags[1].add_((~are_finite).int())
        self._flags[2].add_((sizes > 0).int())
        for index, (p, limbs) in enumerate(self.limbs.items()):
            if p in gradients:
                self._add_limbs(limbs, gradients[p], slice(index, index + 1))
            else:
                for limb in limbs:
                    limb.add_(0)  # keeps the order of results
        self._add_limbs(self._number_limbs, numbers, slice(len(self.limbs), None))

    def _add_limbs(self, limbs: Tensors, values: torch.Tensor, here: slice) -> None:
        """Each limb takes the whole multiples of its unit and leaves the rest to the next."""
        inverse, unit = self._inverse[here], self._unit[here]
        rest = torch.where(is_finite(values), values, torch.zeros_like(values))
        for number, limb in enumerate(limbs):
            whole = torch.round(rest * (inverse * 2.0 ** (_LIMB_BITS * number)))
            limb.add_(whole.to(torch.int32).view_as(limb))
            rest = rest - whole * (unit * 2.0 ** (-_LIMB_BITS * number))

    def largest_of(self, values: Gradients) -> torch.Tensor:
        """The largest element for each parameter, 0 where there is no gradient."""
        nothing = torch.zeros(1).to(self._flags[0].device)
        return torch.cat([values[p].abs().max().view(1) if p in values else nothing for p in self.limbs])

    def tensors(self) -> Tensors:
        """All that is summed over ranks."""
        return [*(limb for limbs in self.limbs.values() for limb in limbs), *self._number_limbs, *self._flags]

    def decode(self) -> tuple[dict[torch.Tensor, torch.Tensor], torch.Tensor]:
        """The sums of gradients and numbers; NaN where one was not finite."""
        totals = {}
        for index, (p, limbs) in enumerate(self.limbs.items()):
            totals[p] = self._join(limbs, slice(index, index + 1)).view(p.shape)
        return totals, self._join(self._number_limbs, slice(len(self.limbs), None))

    def _join(self, limbs: Tensors, here: slice) -> torch.Tensor:
        """The numbers, from sums of their limbs, the smallest first."""
        unit = self._unit[here]
        parts = [limb.float() * (unit * 2.0 ** (-_LIMB_BITS * number)) for number, limb in enumerate(limbs)]
        total = (parts[2] + parts[1]) + parts[0]
        return torch.where(self._flags[1][here] == 0, total, torch.full_like(total, math.nan))

    def to_check(self, totals: Gradients, numbers: torch.Tensor) -> torch.Tensor:
        sizes = torch.cat([self.largest_of(totals), numbers])
        return torch.cat([sizes, self._flags[2].float(), self._flags[0].sum().float().view(1)])

    def check(self, values: Sequence[float], num_minibatches: int) -> None:
        """Set the units of the next step; raise if a minibatch of this one was out of range."""
        *values, num_out = values
        if num_out:
            grown = "the gradient of a minibatch is more than 4096 times as large as in the previous step"
            advice = 'Resume from the last checkpoint with `exact=False` and `allow_changes=["exact"]`.'
            raise RuntimeError(f"Gradient overflow in exact mode on XLA: {grown}. {advice}")
        num_sizes = len(values) // 2
        means = [value / num_minibatches for value in values[:num_sizes]]
        self.update_scale(means)
        for index, key in enumerate([*self.limbs, *range(len(self._number_limbs[0]))]):
            if not means[index] and values[num_sizes + index]:  # all of it was rounded to 0
                (self.scale if index < len(self.limbs) else self._number_scale).decrease(key)

    def state_dict(self) -> dict[str, Any]:
        numbers = self._number_scale.state_dict(range(self._num_numbers()))
        return {**self.scale.state_dict(self._parameters()), "numbers": numbers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale, self._number_scale = FixedPointScale(), FixedPointScale()
        if "numbers" in state:
            self.scale.load_state_dict(state, self._parameters())
            self._number_scale.load_state_dict(state["numbers"], range(self._num_numbers()))


def _zeros(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Made on the host: zeros made on the device would be a graph of their own."""
    return torch.zeros(tuple(shape), dtype=torch.int32).to(device)
