"""GradientAccumulator, which sums the gradients of a step over minibatches and ranks, and StepGradient, the result."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch.optim import Optimizer

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.optim.token_weights import Weight
from variable_batch_size.rules.rule import Norms

Divisors = dict[torch.Tensor, torch.Tensor]

UNWEIGHTED = -(2.0**20)
"""What a rank without weights sends as its number of weighted minibatches, so that a mix is detected in the sum."""

_EPS = 1e-6
"""Added to a norm before it divides, as in ``torch.nn.utils.clip_grad_norm_``."""


class Measured(NamedTuple):
    """What was measured of the gradients of a step.

    Args:
        norms: of each parameter group; None for a group of which nothing was measured.
        is_finite: whether all measured values are finite, and therefore the gradients.
        weight: W, the sum of the minibatches' weights; None without weights.
        num_weighted: the number of minibatches with a weight above 0; None without weights.
    """

    norms: list[Norms | None]
    is_finite: bool
    weight: float | None
    num_weighted: int | None


class StepGradient:
    """The gradient of a step. It is in ``p.grad`` of all parameters until the accumulator is reset.

    Attributes:
        weight: W, the sum of all minibatches' weights, a tensor if it is on the device; None without weights.
    """

    __slots__ = ("_accumulator", "_multiple", "_num_minibatches", "weight")

    def __init__(self, accumulator: GradientAccumulator, plan: StepPlan, weight: Weight | None) -> None:
        self._accumulator = accumulator
        self._num_minibatches = plan.num_minibatches
        self._multiple = plan.num_minibatches if accumulator.sums_gradients else 1
        self.weight = weight

    @property
    def weighs_nothing(self) -> bool:
        """Whether W is known to be 0. Does not wait for a weight that is on an accelerator."""
        weight = self.weight
        if weight is None or (isinstance(weight, torch.Tensor) and weight.device.type != "cpu"):
            return False
        return not weight

    def measure(self) -> Measured:
        """The norms of the minibatch gradients and of the mean gradient. Waits for the device, once."""
        own, n = self._accumulator, self._num_minibatches
        groups = own.inner.param_groups
        numbers = [own._numbers(), own._squared_norms_by_group(own._gradients_by_group())]
        if own.divisors is not None:  # what has no divisor must be finite, too
            numbers.append(own._squared_norm(own._gradients()).view(1))
        values = own._read(torch.cat([number.to(numbers[-1].dtype) for number in numbers]))
        *squares, weight, num_weighted = values[: len(groups) + 2]
        total = n if self.weight is None else weight
        pairs = zip(squares, values[len(groups) + 2 : 2 * len(groups) + 2], strict=True)
        norms = [
            Norms(of_each / total, of_mean / self._multiple**2) if total and own._is_measurable(group) else None
            for group, (of_each, of_mean) in zip(groups, pairs, strict=True)
        ]
        if n == 1:  # the minibatch need not have been measured by itself
            norms = [pair and Norms(pair.square_of_mean, pair.square_of_mean) for pair in norms]
        is_finite = all(map(math.isfinite, values))
        if self.weight is None or not is_finite:
            return Measured(norms, is_finite, None, None)
        return Measured(norms, is_finite, weight, round(num_weighted))

    def norm(self) -> torch.Tensor:
        """The norm of the mean gradient over all parameters, on the device."""
        own = self._accumulator
        return own._squared_norm(own._gradients()).sqrt() / own.communicator.traced_scalar(self._multiple)

    def clip_(self, max_norm: float) -> None:
        """Scale the gradient so that the norm of the mean over all parameters is at most `max_norm`."""
        limit = self._accumulator.communicator.traced_scalar(max_norm * self._multiple)
        self._accumulator._clip_(limit, self)

    def clip_factor(self, limit: float) -> torch.Tensor:
        return (limit / (self.norm() * self._multiple + _EPS)).clamp(max=1.0)


class Common(TypedDict, total=False):
    """The options of all accumulators."""

    measures: bool
    divisors: Divisors | None
    sums_gradients: bool


class GradientAccumulator(ABC):
    """Takes the gradient of each minibatch, and gives that of the whole step to the inner optimizer.

        gradient = Σ s_i / Σ w_i        over the minibatches of all ranks; w_i = 1 where no weight is passed

    Until :meth:`accumulate`, the gradient is the user's: ``p.grad`` at that time is the minibatch's gradient, whatever
    produced it. :meth:`accumulate` leaves ``p.grad`` None. After :meth:`reduce`, ``p.grad`` is the step's gradient;
    None where no minibatch on any rank had one, so that the inner optimizer skips the parameter as usual.

    A few numbers are reduced with the gradients: for each parameter group the sum of the minibatches' squared norms, if
    they are measured, then the sum of the weights and the number of weights above 0. A gradient that is not finite on
    one rank is not finite in the sum, so :meth:`StepGradient.measure` reports it on every rank.

    Args:
        inner: the inner optimizer, which has the parameters.
        communicator: the collectives of the ranks that have different samples.
        measures: whether to sum the squared norms of the minibatches' gradients, for each parameter group.
        divisors: what gradients are divided by before they are measured; parameters without a divisor do not count.
            None to divide none.
        sums_gradients: whether the gradient is n times the mean, for rules that sum gradients.
    """

    inverse_scale: torch.Tensor | None = None  # of the latest minibatch, where a GradScaler is in use
    _layout: int  # checksum of the parameters that have memory, where they are reduced in one piece

    def __init__(
        self,
        inner: Optimizer,
        communicator: Communicator,
        *,
        measures: bool = False,
        divisors: Divisors | None = None,
        sums_gradients: bool = False,
    ) -> None:
        self.inner = inner
        self.communicator = communicator
        self.divisors = divisors
        self.sums_gradients = sums_gradients
        self._measures = measures
        self._is_weighted = False  # whether the minibatches of this step have weights
        self._has_checked_weights = False
        self._checked: tuple[int, int] | None = None  # the layout and epoch that ranks last agreed on
        self._epoch = 0
        # numbers of the step so far, which are reduced with the gradients
        self._step_squares: torch.Tensor | None = None
        self._weight: Weight = 0.0
        self._num_weighted: Weight = 0.0

    @abstractmethod
    def accumulate(self, plan: StepPlan, weight: Weight | None = None) -> None:
        """Take the gradients of the latest minibatch; with a weight w_i, they are those of a sum over so many."""

    @abstractmethod
    def reduce(self, plan: StepPlan) -> StepGradient:
        """Set ``p.grad`` to the gradient of the step over all ranks. An idle rank does not count, not even NaN."""

    @abstractmethod
    def reset(self) -> None:
        """Drop the gradient of the step, after the update."""

    def zero_grad(self) -> None:
        """Drop gradients that were not accumulated yet."""
        for p in self._parameters():
            p.grad = None

    def begin_epoch(self, epoch: int) -> None:
        """Drop the gradients of an unfinished step, accumulated or not."""
        self._epoch = epoch
        self.reset()

    def begin_minibatch(self, *, is_padding: bool, is_last: bool) -> None:  # noqa: B027 (most can drop it later)
        """Before each minibatch of ranks in lockstep: whether it is padding, and whether it is the step's last."""

    def rebuild(self) -> None:  # noqa: B027 (most notice by themselves)
        """After a parameter group was added. Every rank must call it."""

    def state_dict(self) -> dict[str, Any]:
        """What the next step needs from the steps so far."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, on any number of ranks."""
        self._has_checked_weights = False  # a run that is reset to its start may begin to pass weights, or stop

    # ----------------------------------------------------------------------------------------------- mean and weights

    def _factor(self, plan: StepPlan) -> float:
        """What to multiply this rank's sum by before it is reduced: 1/n, as n is known on the host; W is not."""
        multiple = plan.num_minibatches if self.sums_gradients else 1
        return multiple / (1 if self._is_weighted else plan.num_minibatches)

    def _inverse_weight(self) -> Weight:
        """What to multiply the reduced sum by: 1/W, or 0 if W is 0; 1 without weights."""
        if not self._is_weighted:
            return 1.0
        if isinstance(self._weight, torch.Tensor):
            return torch.where(self._weight == 0, 0.0, 1 / self._weight)  # NaN stays NaN, and is detected
        return 1 / self._weight if self._weight else 0.0

    def _add_numbers(self, squares: torch.Tensor | None, weight: Weight | None) -> None:
        """Add the squared norms of a minibatch, per unit of its weight, and its weight."""
        if squares is not None:
            if weight is not None:
                squares = _per_weight(squares, weight)
            if self._step_squares is not None:
                squares[: len(self._step_squares)] += self._step_squares  # a group may have been added since
            self._step_squares = squares
        if weight is not None:
            self._weight = self._weight + weight
            self._num_weighted = self._num_weighted + (weight > 0)

    def _numbers(self) -> torch.Tensor:
        """The numbers of the step; 0 where nothing was measured or weighted."""
        numbers = self._squared_norm([]).repeat(len(self.inner.param_groups) + 2)
        self._write_numbers(numbers)
        return numbers

    def _write_numbers(self, numbers: torch.Tensor) -> None:
        if self._step_squares is not None:
            numbers[: len(self._step_squares)].copy_(self._step_squares)
        if self._is_weighted:
            for element, number in ((numbers[-2], self._weight), (numbers[-1], self._num_weighted)):
                # numbers[-2] = weight would wait for the device
                element.copy_(number) if isinstance(number, torch.Tensor) else element.fill_(number)

    def _read_numbers(self, numbers: torch.Tensor) -> None:
        if self._step_squares is not None:
            self._step_squares = numbers[:-2]
        if self._is_weighted:
            self._weight, self._num_weighted = numbers[-2], numbers[-1]

    def _reset_numbers(self) -> None:
        self._step_squares = None
        self._weight = self._num_weighted = 0.0

    def _read(self, numbers: torch.Tensor) -> list[float]:
        """Numbers on the host."""
        return numbers.tolist()

    # ------------------------------------------------------------------------------------------- parameters and norms

    def _parameters(self) -> list[torch.nn.Parameter]:
        parameters: list[torch.nn.Parameter] = []
        for group in self.inner.param_groups:
            parameters += group["params"]
        return parameters

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters() if p.grad is not None]

    def _gradients_by_group(self) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """For each group, the parameters that have a gradient, and the gradient."""
        return [[(p, p.grad) for p in group["params"] if p.grad is not None] for group in self.inner.param_groups]

    @abstractmethod
    def _squared_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The squared norm of several tensors together, in float32 at least; 0 of none."""

    def _squared_norms(self, lists: list[list[torch.Tensor]]) -> torch.Tensor:
        """The squared norm of each of several lists of tensors."""
        return torch.stack([self._squared_norm(gradients) for gradients in lists])

    def _squared_norms_by_group(self, groups: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]) -> torch.Tensor:
        """The squared norm of each group's gradients, divided by their divisors."""
        if self.divisors is None:
            return self._squared_norms([[gradient for _, gradient in pairs] for pairs in groups])
        divided = [[(gradient, self._divisor_of(p)) for p, gradient in pairs] for pairs in groups]
        return self._squared_norms([[g / divisor for g, divisor in pairs if divisor is not None] for pairs in divided])

    def _divisor_of(self, p: torch.Tensor) -> torch.Tensor | None:
        assert self.divisors is not None
        return self.divisors.get(p)

    def _is_measurable(self, group: Mapping[str, Any]) -> bool:
        return self.divisors is None or any(p in self.divisors for p in group["params"])

    def _clip_(self, limit: float, gradient: StepGradient) -> None:
        """Scale ``p.grad`` so that its norm over all parameters is at most `limit`."""
        torch.nn.utils.clip_grad_norm_([p for p in self._parameters() if p.grad is not None], limit)

    # -------------------------------------------------------------------------------------------- ranks that disagree

    def _check_weights(self, num_weighted: torch.Tensor) -> None:
        """Raise if some ranks pass weights and others do not. In the first step only, as it waits for the device."""
        if self._has_checked_weights:
            return
        self._has_checked_weights = True
        num_without, ranks = math.ceil(float(num_weighted) / UNWEIGHTED), self.communicator.num_replicas
        if num_without not in (0, ranks):
            raise ValueError(
                f"`weight` must be passed on all ranks or on none, but {num_without} of {ranks} passed none. An idle "
                "rank passes the weight of its padding minibatch, which does not count."
            )

    def _check_layout(self, reduced: torch.Tensor) -> None:
        """Raise if ranks have other parameters frozen, or are in another epoch. Waits, but only after a change."""
        before, self._checked = self._checked, (self._layout, self._epoch)
        if self._checked == before or float(reduced) == self._layout_and_epoch() * self.communicator.num_replicas:
            return
        if before is not None and before[0] == self._layout:
            raise RuntimeError(
                f"Ranks are in different epochs; this one is in epoch {self._epoch}. Call step() after every minibatch "
                "on every rank; to leave a minibatch out, call step() without backward()."
            )
        raise RuntimeError(
            "Ranks disagree on which parameters require gradients. If you freeze parameters at random, use the same "
            "seed on every rank."
        )

    def _layout_and_epoch(self) -> int:
        """One number for both, small enough for an exact sum over ranks; 1 in 4,096 mismatches goes unnoticed."""
        return (self._layout + self._epoch) % 2**12

    def _layout_of(self, parameters: list[torch.nn.Parameter]) -> int:
        """A checksum of the places of some parameters among all."""
        places = {id(p): place for place, p in enumerate(self._parameters())}
        return zlib.crc32(str([places[id(p)] for p in parameters]).encode()) % 2**12


def _per_weight(squares: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Squared norms of a minibatch, per unit of its weight; 0 if the weight is 0."""
    if isinstance(weight, torch.Tensor):
        weight = weight.to(squares.device)
        return torch.where(weight > 0, squares / weight, 0.0)
    return squares / weight if weight else torch.zeros_like(squares)
