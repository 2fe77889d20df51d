"""TracedAccumulator: gradients on XLA, one tensor for each parameter, and the same graph on every core."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from torch.optim import Optimizer
from typing_extensions import Unpack

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.optim.gradients.accumulator import Common, GradientAccumulator, StepGradient
from variable_batch_size.optim.gradients.fixed_point import FixedPoint32
from variable_batch_size.optim.token_weights import Weight


@final
class TracedAccumulator(GradientAccumulator):
    """For devices that trace operations into a graph and compile it.

    Every minibatch adds its gradients to sums that keep their memory, also if it is the only one of the core: all cores
    run the same graph, so whether a core is idle is data in a tensor and not a branch. As the graphs are the same, the
    same parameters have a gradient on all cores. The reduction is a graph of its own, as the user's loop has a share in
    that of a minibatch.

    With `exact`, gradients are summed as integers (:class:`FixedPoint32`). A compiler may round differently in another
    graph. So the graph is cut after a minibatch was run and after it was added: what rounds is in the same two graphs
    for every minibatch, on every core.
    """

    def __init__(
        self, inner: Optimizer, communicator: Communicator, *, exact: bool = False, **common: Unpack[Common]
    ) -> None:
        super().__init__(inner, communicator, **common)
        self._fixed_point = FixedPoint32() if exact else None
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._infinities: dict[torch.Tensor, torch.Tensor] = {}  # in place of divisors that do not exist yet
        self._squares: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []  # their sum, and the number above 0
        self._present: set[torch.Tensor] = set()
        self._has_sums = False
        if exact and any(p.dtype == torch.float64 or p.is_complex() for p in self._parameters()):
            raise ValueError("`exact` must be False for float64 or complex parameters on an XLA device")
        self.begin_epoch(0)

    def begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if self._has_sums:
            self.reset()
        else:
            self.zero_grad()
        self._ensure_sums()

    def _ensure_sums(self) -> bool:
        """Have a sum for each parameter that may get a gradient, and the numbers; True if some are new.

        They must be on the device before they are used: a scalar of exactly 0 would become a constant of the graph, and
        a core that has accumulated would have another graph.
        """
        known = self._sums if self._fixed_point is None else self._fixed_point.limbs
        trainable = [p for p in self._parameters() if p.requires_grad or p.grad is not None or p in known]
        if self._fixed_point is not None:
            self._ensure_infinities(trainable)
            self._fixed_point.ensure(trainable, len(self.inner.param_groups) + 2)
            return False
        converted = [p for p, tensor in self._sums.items() if tensor.dtype != p.dtype]
        self._sums |= {p: self._sums[p].to(p.dtype) for p in converted}
        new = [p for p in trainable if p not in self._sums]
        # made on the host: zeros made on the device would be a graph of their own
        place = self.communicator.placed_like
        self._sums |= {p: place(p, torch.zeros(p.shape, dtype=p.dtype)) for p in new}
        has_new_infinities = self._ensure_infinities(trainable)
        num_squares = len(self.inner.param_groups) - len(self._squares)
        num_weights = 2 - len(self._weights)  # always, as they must not be added later on some cores
        device = self._parameters()[0].device
        self._squares += [torch.zeros(1).to(device) for _ in range(num_squares)]
        self._weights += [torch.zeros(1).to(device) for _ in range(num_weights)]
        self.communicator.shard_like([*self._squares, *self._weights])
        return bool(converted or new or has_new_infinities or num_squares or num_weights)

    def _ensure_infinities(self, parameters: list[torch.nn.Parameter]) -> bool:
        """Of parameters without a divisor: new ones, and all when a run starts over. True if some are new."""
        known = self.divisors
        new = [] if known is None else [p for p in parameters if p not in known and p not in self._infinities]
        place = self.communicator.placed_like
        self._infinities |= {p: place(p, torch.full(p.shape, torch.inf)) for p in new}
        return bool(new)

    def accumulate(self, plan: StepPlan, weight: Weight | None = None) -> None:
        self._is_weighted = weight is not None
        if self._fixed_point is not None:
            self._accumulate_fixed_point(self._fixed_point, plan, weight)
            return
        if self._ensure_sums():
            self.communicator.flush()
        of_one = None if weight is None else _on_device(weight, self._parameters()[0].device)
        for index, group in enumerate(self.inner.param_groups):
            fresh = [(p, p.grad.detach()) for p in group["params"] if p.grad is not None]
            if self._measures:
                self._squares[index].add_(_per_weight(self._squared_norms_by_group([fresh]), of_one))
            for p, gradient in fresh:
                self._sums[p].add_(gradient)
                self._present.add(p)
                p.grad = None
        if of_one is not None:
            self._weights[0].add_(of_one)
            self._weights[1].add_((of_one > 0).float())
        self._has_sums = True

    def _accumulate_fixed_point(self, fixed_point: FixedPoint32, plan: StepPlan, weight: Weight | None) -> None:
        fixed_point.check_num_minibatches(plan.num_minibatches)
        self._ensure_sums()
        self.communicator.flush()
        if not self._has_sums:
            if not fixed_point.has_asked:  # rank 0 has the first minibatch, on any number of ranks
                fresh = self._fresh(fixed_point)
                sizes = torch.cat([fixed_point.largest_of(fresh), self._numbers_of(fresh, weight)])
                self.communicator.broadcast([sizes])
                fixed_point.set_first_scale(self._read(sizes))
            fixed_point.begin_step()
        fresh = self._fresh(fixed_point)
        fixed_point.add_(fresh, self._numbers_of(fresh, weight))
        self._present.update(fresh)
        self._has_sums = True
        self.zero_grad()

    def _fresh(self, fixed_point: FixedPoint32) -> dict[torch.Tensor, torch.Tensor]:
        return {p: p.grad.detach().float() for p in fixed_point.limbs if p.grad is not None}

    def _numbers_of(self, fresh: Mapping[torch.Tensor, torch.Tensor], weight: Weight | None) -> torch.Tensor:
        """The squared norms and the weight of a minibatch."""
        groups = [[(p, fresh[p]) for p in group["params"] if p in fresh] for group in self.inner.param_groups]
        device = self._parameters()[0].device
        of_one = _on_device(0.0 if weight is None else weight, device)
        squares = self._squared_norms_by_group(groups) if self._measures else torch.zeros(len(groups)).to(device)
        squares = _per_weight(squares, None if weight is None else of_one)
        return torch.cat([squares.float(), of_one, (of_one > 0).float()])

    def reduce(self, plan: StepPlan) -> StepGradient:
        if self._fixed_point is None:
            self._reduce(plan)
        elif self._fixed_point.limbs:
            self._reduce_fixed_point(self._fixed_point, plan)
        weight = self._weights[0] * 1 if self._is_weighted and self._weights else None
        return StepGradient(self, plan, weight)

    def _reduce(self, plan: StepPlan) -> None:
        self.communicator.flush()  # what the loop has traced may differ between cores, as a sum of losses does
        sums, numbers = list(self._sums.values()), [*self._squares, *self._weights]
        values = [0.0, 0.0] if plan.is_idle else [self._factor(plan), 1.0]
        factors = torch.tensor([*values, 0.0]).to(self._weights[0].device)
        zero = factors[-1:]
        for index, tensors in enumerate((sums, numbers)):
            factor = factors[index : index + 1]
            counts = factor != 0
            for tensor in tensors:
                weighted = torch.where(counts, tensor * factor, zero)
                tensor.copy_(weighted.view_as(tensor))
        self.communicator.sum([*sums, *numbers])
        if self._is_weighted:
            weight = self._weights[0]
            # if W is 0, the sums are divided by infinity
            divisor = torch.where(weight == 0, torch.full_like(weight, math.inf), weight)
            for tensor in sums:
                tensor.copy_((tensor / divisor).view_as(tensor))
        for p in self._present:
            p.grad = self._sums[p]

    def _reduce_fixed_point(self, fixed_point: FixedPoint32, plan: StepPlan) -> None:
        self.communicator.flush()
        sums = fixed_point.tensors()
        counts = torch.tensor([0 if plan.is_idle else 1], dtype=torch.int32).to(sums[0].device)
        for tensor in sums:
            tensor.copy_((tensor * counts).view_as(tensor))
        self.communicator.sum(sums)
        totals, numbers = fixed_point.decode()
        self._squares = list(torch.split(numbers[:-2], 1))
        self._weights = list(torch.split(numbers[-2:], 1))
        factor = _on_device(self._factor(plan), self._weights[0].device)
        if self._is_weighted:
            weight = self._weights[0]
            factor = torch.where(weight == 0, torch.zeros_like(weight), factor / weight)  # NaN stays NaN
        for p in [p for p in fixed_point.limbs if p in self._present]:  # in the same order on all cores, unlike the set
            p.grad = (totals[p] * factor).view(p.shape).to(p.dtype)
        fixed_point.check(self._read(fixed_point.to_check(totals, numbers)), plan.num_minibatches)

    def reset(self) -> None:
        sums = [*self._sums.values(), *self._squares, *self._weights]
        for tensor in sums if self._fixed_point is None else self._fixed_point.tensors():
            tensor.zero_()
        self._has_sums = False
        self._present.clear()
        self.zero_grad()

    def _numbers(self) -> torch.Tensor:
        if not self._weights:  # in fixed point, if no parameter can have a gradient
            return torch.zeros(len(self.inner.param_groups) + 2)
        return torch.cat([*self._squares, *self._weights])

    def _read(self, numbers: torch.Tensor) -> list[float]:
        self.communicator.flush()
        return super()._read(numbers.cpu())

    def _divisor_of(self, p: torch.Tensor) -> torch.Tensor | None:
        divisor = super()._divisor_of(p)
        if divisor is None:
            return self._infinities[p]  # leaves nothing to count, by the same graph
        self._infinities.pop(p, None)
        return divisor

    def _squared_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        if not gradients:
            return torch.zeros(()).to(self._parameters()[0].device)  # made on the host, as above
        sizes = [gradient.abs() if gradient.is_complex() else gradient for gradient in gradients]
        squares = [size.float().pow(2).sum() for size in sizes]
        return torch.stack(squares).sum() if len(squares) > 1 else squares[0]

    def state_dict(self) -> dict[str, Any]:
        if self._fixed_point is None:
            return {}
        return self._fixed_point.state_dict(self._parameters(), len(self.inner.param_groups) + 2)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._fixed_point is not None:
            self._fixed_point.load_state_dict(state, self._parameters(), len(self.inner.param_groups) + 2)


def _on_device(weight: Weight, device: torch.device) -> torch.Tensor:
    """A weight as one element, which is data on all cores; a Python scalar may become a constant of the graph."""
    if isinstance(weight, torch.Tensor):
        return weight.detach().to(device).float().view(1)
    return torch.tensor([float(weight)]).to(device)


def _per_weight(squares: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Squared norms of a minibatch, per unit of its weight; 0 if the weight is 0."""
    return squares if weight is None else torch.where(weight > 0, squares / weight, torch.zeros_like(squares))
