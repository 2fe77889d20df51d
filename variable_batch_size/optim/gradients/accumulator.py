"""GradientAccumulator: accumulates the gradients of a step and reduces them over all cores."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.optim.token_weights import Weight
from variable_batch_size.rules.rule import Norms

Divisors = dict[torch.Tensor, torch.Tensor]

TINY = 1e-6
"""Beside a norm, as torch has it where it clips."""

UNWEIGHTED = -(2.0**20)
"""How many weighted minibatches a core without weights says it has in the first step; no step has as many."""


class Mean(NamedTuple):
    """How the gradient of a step follows from the sum over its minibatches.

        gradient = Σ g_i · multiple / (n · loss_scale)        with weights: Σ g_i · multiple / (Σ w_i · loss_scale)

    Args:
        num_minibatches: n, on all cores.
        loss_scale: what the user has multiplied the loss by.
        multiple: how many times the mean the gradient is to be; n for rules that sum gradients.
    """

    num_minibatches: int
    loss_scale: float = 1.0
    multiple: float = 1.0

    def factor(self, *, is_weighted: bool) -> float:
        """What each core multiplies its sum by; with weights, their sum over all cores is still to be divided by."""
        return self.multiple / self.loss_scale / (1 if is_weighted else self.num_minibatches)


class Measured(NamedTuple):
    """What was measured of the gradients of a step.

    Args:
        norms: for each parameter group; None for one of which nothing was measured.
        is_finite: whether all of it is, as then the gradients themselves are.
        weight: W, the sum of the minibatches' weights; None if they have none.
        num_weighted: how many minibatches have a weight above 0; None if they have none.
    """

    norms: list[Norms | None]
    is_finite: bool
    weight: float | None
    num_weighted: int | None


class GradientAccumulator(ABC):
    """Takes over the gradients of each minibatch, and hands those of the whole step to the inner optimizer.

    Until :meth:`take`, the gradient is the user's: ``p.grad`` as it stands then is that of the minibatch, whatever made
    it. Then it is the library's, and ``p.grad`` is empty, so that the next backward pass begins anew. After
    :meth:`reduce`, ``p.grad`` is the gradient of the step; None where no minibatch on any core had one, so that the
    inner optimizer leaves such a parameter alone as it always does.

    A few numbers travel with the gradients to the other cores: for each parameter group the sum of the minibatches'
    squared norms, if these are measured, then the sum of the weights and the number of those above 0, if there are any.

    Args:
        inner: the inner optimizer, whose parameters they are.
        communicator: the way to the other cores.
        measures: whether the squared norm of each minibatch's gradient is summed up, for each parameter group.
        divisors: what gradients are divided by before that; those of a parameter without one do not count. None to
            divide none.
    """

    _layout: int  # of what is summed, where that is in one piece

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
        self._is_weighted = False  # whether the minibatches of this step have weights
        self._has_compared = False  # whether cores have seen that all of them have weights, or none
        self._epoch = 0
        self._compared: tuple[int, int] | None = None  # layout and epoch, when cores last saw that they are the same
        self._mean = Mean(1)  # of the latest step
        self.discard()

    @abstractmethod
    def take(self, mean: Mean, *, is_last: bool, weight: Weight | None = None) -> None:
        """Take over the gradients of the latest minibatch.

        Args:
            mean: of the step.
            is_last: whether it is the core's last one of the step.
            weight: w_i; the gradients are then those of a sum over so many.
        """

    def begin(self, epoch: int) -> None:
        """At the start of an epoch: drop what an unfinished step has left, and note where this core is."""
        self._epoch = epoch
        self.discard()

    def fit(self) -> None:  # noqa: B027 (most kinds see that by themselves)
        """After a group of parameters was added: be ready for their gradients. Every core must call it."""

    def expect(self, *, is_padding_minibatch: bool, is_last: bool = True) -> None:  # noqa: B027 (most can leave it out later)
        """Before each minibatch of a core in lockstep with others: whether it is a stand-in, and the step's last."""

    def leave_out(self) -> None:
        """Before :meth:`take` of a stand-in in lockstep: let what this core has of it not count."""
        self.drop()

    @abstractmethod
    def reduce(self, mean: Mean, *, is_idle: bool) -> None:
        """Let ``p.grad`` be the gradient of the step, from all minibatches of all cores.

        What an idle core has leaves no mark, not even where it is NaN.
        """

    def clip(self, largest: float) -> None:
        """After :meth:`reduce`: let the norm of the result over all parameters be at most `largest`."""
        torch.nn.utils.clip_grad_norm_([p for p in self.parameters() if p.grad is not None], largest)

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

    def measured(self) -> Measured:
        """After :meth:`reduce`: the norms of the minibatches' and of the mean gradient, as if there were no loss scale.

        The one thing here that waits for the device.
        """
        groups = self._inner.param_groups
        numbers = [self._numbers(), self._squares(self._with_gradients())]
        if self._divisors is not None:
            numbers.append(self._square([p.grad for p in self.parameters() if p.grad is not None]).view(1))
        values = self._read(torch.cat([number.to(numbers[-1].dtype) for number in numbers]))
        *squares, weight, num_weighted = values[: len(groups) + 2]
        total = weight if self._is_weighted else self._mean.num_minibatches
        is_known = [self._is_measurable(group["params"]) for group in groups]
        pairs = zip(squares, values[len(groups) + 2 : 2 * len(groups) + 2], strict=True)
        norms = [
            Norms(of_each / total, of_all / self._mean.multiple**2) if known and total else None
            for known, (of_each, of_all) in zip(is_known, pairs, strict=True)
        ]
        if self._mean.num_minibatches == 1:  # whose squared norm need not have been measured twice
            norms = [pair and Norms(pair.square_of_mean, pair.square_of_mean) for pair in norms]
        is_finite = all(map(math.isfinite, values))
        if not self._is_weighted or not is_finite:
            return Measured(norms, is_finite, None, None)
        return Measured(norms, is_finite, weight, round(num_weighted))

    def norm(self) -> torch.Tensor:
        """After :meth:`reduce`: the norm of the mean gradient over all parameters, on the device."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        return self._square(gradients).sqrt() / self._communicator.traced_scalar(self._mean.multiple)

    @abstractmethod
    def weight(self) -> Weight | None:
        """After :meth:`reduce`: the sum of all minibatches' weights, a tensor if it is on the device; None if none."""

    def state_dict(self) -> dict[str, Any]:
        """What has to be remembered from one step to the next."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned, on any number of cores."""
        self._has_compared = False  # a run that goes back to its start may have weights from then on, or none

    def weighs_nothing(self) -> bool:
        """After :meth:`reduce`: whether the weights are known to be 0 in all; what is on a device is not waited for."""
        weight = self.weight()
        is_known = weight is not None and (not isinstance(weight, torch.Tensor) or weight.device.type == "cpu")
        return is_known and not weight

    def _compare(self, num_weighted: torch.Tensor) -> None:
        """Refuse weights on some cores only; looked at in the first step, as then no core may change its mind."""
        if self._has_compared:
            return
        self._has_compared = True
        num_without, cores = math.ceil(float(num_weighted) / UNWEIGHTED), self._communicator.num_replicas
        if num_without not in (0, cores):
            raise ValueError(
                f"`weight` must be given on all cores or on none, got none on {num_without} of {cores}; an idle core "
                "gives that of its stand-in, which does not count"
            )

    def _compare_layout(self, summed: torch.Tensor) -> None:
        """Refuse cores with other parameters frozen, or in another epoch; looked at when that changes, as it waits."""
        before, self._compared = self._compared, (self._layout, self._epoch)
        if self._compared == before or float(summed) == self._layout_and_epoch() * self._communicator.num_replicas:
            return
        if before is not None and before[0] == self._layout:
            raise RuntimeError(
                f"the cores must be in the same epoch, got one in epoch {self._epoch} and some in others: call step() "
                "after every minibatch on every core, without a backward pass for one that is to be left out"
            )
        raise RuntimeError(
            "the same parameters must be frozen on all cores, which sum the gradients of the others in one piece: "
            "draw which ones from a generator with the same seed on all cores"
        )

    def _layout_and_epoch(self) -> int:
        """One number for both, so small that sums over cores are exact."""
        return (self._layout + self._epoch) % 2**12

    def _layout_of(self, parameters: list[torch.nn.Parameter]) -> int:
        """A number that tells for which of all parameters there is memory."""
        places = {id(p): place for place, p in enumerate(self.parameters())}
        return zlib.crc32(str([places[id(p)] for p in parameters]).encode()) % 2**12

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """All parameters of the inner optimizer."""
        return (p for group in self._inner.param_groups for p in group["params"])

    @abstractmethod
    def _numbers(self) -> torch.Tensor:
        """The numbers that have travelled with the gradients, 0 where nothing was measured or weighted."""

    @abstractmethod
    def _read(self, numbers: torch.Tensor) -> list[float]:
        """Numbers on the host."""

    def _with_gradients(self) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """The parameters of each group that have a gradient, and that."""
        return [[(p, p.grad) for p in group["params"] if p.grad is not None] for group in self._inner.param_groups]

    def _per_weight(self, squares: torch.Tensor, weight: Weight | None) -> torch.Tensor:
        """Squared norms of a minibatch, per unit of its weight; 0 where it weighs nothing."""
        if weight is None:
            return squares
        if isinstance(weight, torch.Tensor):
            weight = weight.to(squares.device)
            return torch.where(weight > 0, squares / weight, 0.0)
        return squares / weight if weight else torch.zeros_like(squares)

    def _is_measurable(self, parameters: Sequence[torch.Tensor]) -> bool:
        return self._divisors is None or any(p in self._divisors for p in parameters)

    def _squares(self, groups: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]) -> torch.Tensor:
        """The squared norm of the gradients of each group, divided by what they are to be divided by."""
        lists: list[list[torch.Tensor]] = []
        for pairs in groups:
            if self._divisors is None:
                gradients = [gradient for _, gradient in pairs]
            else:
                gradients = [g / divisor for p, g in pairs if (divisor := self._divisor_of(p)) is not None]
            lists.append(gradients)
        return self._square_each(lists)

    def _square_each(self, lists: list[list[torch.Tensor]]) -> torch.Tensor:
        """The squared norm of each of several lists of tensors."""
        return torch.stack([self._square(gradients) for gradients in lists])

    def _divisor_of(self, p: torch.Tensor) -> torch.Tensor | None:
        assert self._divisors is not None
        return self._divisors.get(p)

    @abstractmethod
    def _square(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The squared norm of several tensors together, in float32 at least; 0 of none."""


def put(place: torch.Tensor, number: Weight) -> None:
    """Let a place in a tensor hold a number; ``tensor[0] = number`` would wait for the device."""
    if isinstance(number, torch.Tensor):
        place.copy_(number)
    else:
        place.fill_(number)
