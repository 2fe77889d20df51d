"""FSDPAccumulator: gradients of fully_shard (FSDP2) models, which FSDP itself reduces."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, final

import torch

from variable_batch_size.cores.communicator import Communicator, Ranks
from variable_batch_size.cores.dtensor import dimensions_of, placed_like, replication_factor, to_local, to_locals
from variable_batch_size.optim.gradients.accumulator import TINY, UNWEIGHTED, GradientAccumulator, Mean, put
from variable_batch_size.optim.gradients.norms import SplitSquares, norms_of
from variable_batch_size.optim.token_weights import Weight
from variable_batch_size.optim.wrappers import (
    Wrappers,
    can_keep_unreduced,
    forget_unreduced,
    has_unreduced,
    outermost,
    refuse_left_out,
    with_whole_parameters,
)

See = Callable[[torch.nn.Parameter, torch.Tensor, torch.Tensor], torch.Tensor]


class FSDPGradHooks:
    """Has a hook on each whole parameter, which may change a core's gradient, and says when a model reduces.

    Args:
        cores: the ranks of the cores among all processes.
        see: called with a parameter, its whole one and the gradient of that; returns what is to be reduced.
        wrappers: with the modules of fully_shard.

    Attributes:
        is_reducing: whether the backward pass of the next forward pass reduces.
    """

    def __init__(self, cores: Ranks, see: See, wrappers: Wrappers) -> None:
        self._cores = set(cores)
        self._wrappers = wrappers
        self._see = weakref.WeakMethod(see)
        self._modules: list[Any] = []
        self.is_reducing = True

    def watch(self, parameters: list[torch.nn.Parameter]) -> torch.device | None:
        """Have hooks instead of those of another optimizer; the device that whole parameters are on.

        Every core must call it.
        """
        self._modules = self._wrappers.fsdp
        self._let_reduce()
        own, device = set(parameters), None
        for p, whole in with_whole_parameters(self._modules):
            device = whole.device
            self._check_cores(p, whole)
            if p in own:
                self._hook(p, whole)
                own.remove(p)
        refuse_left_out(own)
        return device

    def _hook(self, p: torch.nn.Parameter, whole: torch.nn.Parameter) -> None:
        hooks = whole._backward_hooks or {}
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Hook)]:
            del hooks[key]
        needs_gradient = whole.requires_grad
        whole.requires_grad_(True)  # also of what is frozen, which may not be so for ever
        whole.register_hook(_Hook(self._see, p, whole))  # type: ignore[no-untyped-call]
        whole.requires_grad_(needs_gradient)

    def _let_reduce(self) -> None:
        """See that the mean over all cores is taken, whatever another way to accumulate has set."""
        for module in outermost(self._modules):
            module.register_forward_pre_hook(_Switch(self))
        for module in self._modules:
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(None)  # its own; any number may make it multiply: not on gloo

    def switch(self, module: Any) -> None:
        """Before a forward pass."""
        module.set_is_last_backward(True)
        module.set_requires_gradient_sync(self.is_reducing)

    def reshard(self) -> None:
        """Before an update: let modules gather their parameters anew, if they have kept whole ones."""
        for module in self._modules:
            module.reshard()

    def forget(self) -> None:
        """Drop what was not reduced yet."""
        forget_unreduced(self._modules)

    def check_that_it_can_keep(self) -> None:
        """Raise if what is not reduced yet could not be dropped."""
        if not can_keep_unreduced(self._modules):
            raise ValueError(
                f"`reduce_once` must be False with torch {torch.__version__}, whose fully_shard is another"
            )

    def check_that_it_has_reduced(self) -> None:
        """Raise if something is left that should have been reduced."""
        if has_unreduced(self._modules):
            raise RuntimeError(
                "fully_shard has not reduced the gradients: leave set_requires_gradient_sync alone between forward and "
                "backward pass, and pass `reduce_once=True` to reduce once a step"
            )

    def _check_cores(self, p: torch.nn.Parameter, whole: torch.nn.Parameter) -> None:
        over_cores, of_whole = (
            [len(dimension.ranks) for dimension in dimensions_of(tensor) if self._cores.issuperset(dimension.ranks)]
            for tensor in (p, whole)
        )
        if math.prod(over_cores) != len(self._cores) or of_whole:
            raise ValueError(
                f"fully_shard must be over the {len(self._cores)} cores that the sampler deals different samples: make "
                'both with the same mesh, as fully_shard(model, mesh=mesh["data"]) and process_group=mesh["data"]'
            )


class _Hook:
    """Shows a gradient that has arrived to the gradients of an optimizer, as long as these are there."""

    def __init__(self, see: weakref.WeakMethod[See], p: torch.nn.Parameter, whole: torch.nn.Parameter) -> None:
        self._see, self._p, self._whole = see, weakref.ref(p), weakref.ref(whole)

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        see, p, whole = self._see(), self._p(), self._whole()
        return gradient if see is None or p is None or whole is None else see(p, whole, gradient)


class _Switch:
    """Loops that accumulate by themselves switch the reduction off for all but the last of some minibatches."""

    def __init__(self, arrivals: FSDPGradHooks) -> None:
        self._arrivals = weakref.ref(arrivals)

    def __call__(self, module: Any, args: Any) -> None:
        arrivals = self._arrivals()
        if arrivals is not None:
            arrivals.switch(module)


_MOST_HELD = 2**23
"""Elements of gradients, 32 MB, that may be kept a moment longer to be measured together."""

_SAME = 1e-4
"""By how much of itself a number may differ between cores in single precision, and yet be the same."""


@final
class FSDPAccumulator(GradientAccumulator):
    """In each round of a step the model takes the mean over all cores; these means are summed here, shard by shard.

        gradient = Σ means · R · multiple / (n · loss_scale)        with weights: Σ w_i in place of n

    on R cores. So ``p.grad`` between ``backward()`` and ``step()`` is a shard of the mean over the round's
    minibatches. What a core has in it is seen before by a hook on each whole parameter, which leaves out a stand-in and
    measures a minibatch: a loss times 0 would not do, as NaN survives that.

    Some numbers travel at the update, if any of them is wanted, and in the first step of an epoch: squares of each
    group, Σ w_i, how many w_i are above 0, and the loss scale and its square, which tell whether it is the same on all
    cores. A loss scale is wanted from the first such step on that has another than 1.

    Args:
        cores: the ranks of the cores among all processes.
        everyone: all processes that have a shard.
        model: those that share this one's samples, because parameters are split over them, too.
        model_groups: the groups that these are made of.
        wrappers: with the modules of fully_shard.
        reduces_once: whether the model is to sum whole gradients until the last round of a step, and reduce these.
    """

    def __init__(
        self,
        *args: Any,
        cores: Ranks,
        everyone: Communicator,
        model: Communicator,
        model_groups: list[Ranks],
        wrappers: Wrappers,
        reduces_once: bool = False,
        **options: Any,
    ) -> None:
        self._arrivals = FSDPGradHooks(cores, self.see, wrappers)
        self._reduces_once = reduces_once
        self._num_kept = 0  # minibatches of the step that the model has not reduced yet
        self._everyone, self._model, self._model_groups = everyone, model, model_groups
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._num_seen: dict[torch.nn.Parameter, int] = {}  # how often each gradient of this minibatch has arrived
        self._held: list[tuple[torch.nn.Parameter, torch.Tensor]] = []  # what has arrived and is to be measured
        self._num_held = 0  # elements of these
        # for each group the norms of what this process has of them, by the number of processes that have the same
        self._arrived: list[dict[int, list[torch.Tensor]]] = []
        self._copies: dict[torch.nn.Parameter, int] = {}  # that number for each parameter
        self._step_squares: torch.Tensor | None = None
        self._weight: Weight = 0.0
        self._num_weighted: Weight = 0.0
        # mean and mean square of the cores' loss scales, where they have travelled
        self._scales: torch.Tensor | None = None
        self._is_first = True  # whether the step is the first of an epoch
        self._is_scaled = False  # whether one of these has had a loss scale
        self._is_stand_in = False
        self._groups: dict[torch.nn.Parameter, int] = {}
        super().__init__(*args, **options)
        self._watch()
        if reduces_once:
            self._arrivals.check_that_it_can_keep()

    # ------------------------------------------------------------------------------------------------------ a minibatch

    def _watch(self) -> None:
        numbers = enumerate(self._inner.param_groups)
        self._groups = {p: number for number, group in numbers for p in group["params"]}
        device = self._arrivals.watch(list(self.parameters()))
        like = to_local(next(self.parameters()))
        self._like = torch.empty(0, dtype=like.dtype, device=device or like.device)

    def see(self, p: torch.nn.Parameter, whole: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """What is to be reduced of a gradient of this core that has arrived."""
        self._num_seen[p] = self._num_seen.get(p, 0) + 1
        if self._is_stand_in:
            return torch.zeros_like(gradient)
        gradient = placed_like(whole, gradient)
        if self._measures:
            if p not in self._copies:
                self._copies[p] = replication_factor(gradient, self._model_groups)
            # not the gradient itself, which autograd would then copy
            part = to_local(gradient.detach())
            self._held.append((p, part))
            self._num_held += part.numel()
            if self._num_held >= _MOST_HELD:
                self._measure_held()
        return gradient

    def _measure_held(self) -> None:
        """Measure some gradients at once, as each alone takes the host longer than the device; and let go of them."""
        norms = norms_of([part for _, part in self._held], like=self._like)
        for (p, _), norm in zip(self._held, norms, strict=True):
            self._arrived[self._groups[p]].setdefault(self._copies[p], []).append(norm)
        self._held, self._num_held = [], 0

    def _squares_here(self) -> SplitSquares:
        return SplitSquares(self._model, self._model_groups, self._like)

    def begin(self, epoch: int) -> None:
        super().begin(epoch)
        self._is_first = True

    def fit(self) -> None:
        self._watch()
        self._forget_minibatch()

    def expect(self, *, is_padding_minibatch: bool, is_last: bool = True) -> None:
        self._is_stand_in = is_padding_minibatch
        self._arrivals.is_reducing = is_last or not self._reduces_once

    def leave_out(self) -> None:
        pass  # the hooks have done so; what is there is the others'

    def take(self, mean: Mean, *, is_last: bool, weight: Weight | None = None) -> None:
        self._mean = mean
        self._is_weighted = weight is not None
        found = [p for p in self.parameters() if p.grad is not None]
        self._check_seen(found)
        if self._measures:
            self._measure(weight)
        if weight is not None:
            self._weight = self._weight + weight
            self._num_weighted = self._num_weighted + (weight > 0)
        self._add(found)
        self._num_kept = 0 if self._arrivals.is_reducing else self._num_kept + 1
        self._forget_minibatch()

    def _add(self, parameters: list[torch.nn.Parameter]) -> None:
        """Add what the model has reduced to the sums, all at once."""
        gradients = {p: p.grad for p in parameters if p.grad is not None}
        known = [p for p in gradients if p in self._sums]
        if known:
            torch._foreach_add_(to_locals(self._sums[p] for p in known), to_locals(gradients[p] for p in known))
        self._sums |= {p: g for p, g in gradients.items() if p not in self._sums}

    def _check_seen(self, found: list[torch.nn.Parameter]) -> None:
        for p in found:
            if p not in self._num_seen and not self._num_kept:
                raise RuntimeError(
                    f"the gradient of a parameter of the shape {tuple(p.shape)} was reduced unseen: make the optimizer "
                    "after the model is in fully_shard and on its device"
                )
        if self._arrivals.is_reducing and any(p.grad is None for p in self._num_seen):
            self._arrivals.check_that_it_has_reduced()
        if self._measures and any(number > 1 for number in self._num_seen.values()):
            raise RuntimeError(
                "gradients must be measured whole, but fully_shard has reduced one of them in several parts: run one "
                "backward pass in a minibatch, and no reentrant checkpointing of tied parameters"
            )

    def _measure(self, weight: Weight | None) -> None:
        self._measure_held()
        squares = torch.stack([self._total(norms) for norms in self._arrived])
        squares = self._per_weight(squares, weight)
        if self._step_squares is not None:
            squares[: len(self._step_squares)] += self._step_squares  # a group may have been added since
        self._step_squares = squares

    def _total(self, by_copies: dict[int, list[torch.Tensor]]) -> torch.Tensor:
        """This process's share of the square of several norms."""
        zero = self._squares_here().own([])
        squares = [torch.stack(norms).to(zero).square().sum() / copies for copies, norms in by_copies.items()]
        return torch.stack(squares).sum() if squares else zero

    def _forget_minibatch(self) -> None:
        self._num_seen, self._held, self._num_held = {}, [], 0
        self._arrived = [{} for _ in self._inner.param_groups]
        for p in self.parameters():
            p.grad = None

    # ----------------------------------------------------------------------------------------------------------- a step

    def reduce(self, mean: Mean, *, is_idle: bool) -> None:
        self._mean = mean
        self._arrivals.reshard()
        self._scales = None
        if self._measures or self._is_weighted or self._is_scaled or self._is_first:  # so on all cores, or on none
            self._sum_numbers(mean)
        elif mean.loss_scale != 1:
            raise ValueError(
                "`loss_scale` must be set before an epoch where a model is in fully_shard, as its cores then begin to "
                f"compare it, got {mean.loss_scale!r} in the middle of the first that has one"
            )
        factor = mean.factor(is_weighted=self._is_weighted) * self._communicator.num_replicas
        self._scale(factor * self._share_of_weight())
        for p, gradient in self._sums.items():
            p.grad = gradient

    def _sum_numbers(self, mean: Mean) -> None:
        """Let what was measured and weighed be that of all minibatches of all cores."""
        num_groups = len(self._inner.param_groups)
        numbers = self._squares_here().own([]).repeat(num_groups + 4)
        if self._step_squares is not None:
            numbers[: len(self._step_squares)] = self._step_squares / mean.loss_scale**2
        own = (
            self._weight,
            self._num_weighted if self._is_weighted else UNWEIGHTED,
            mean.loss_scale,
            mean.loss_scale**2,
        )
        for place, number in enumerate(own):
            put(numbers[num_groups + place], number / self._model.num_replicas)  # who shares samples has the same
        self._everyone.sum([numbers])
        self._compare(numbers[num_groups + 1])
        if self._step_squares is not None:
            self._step_squares = numbers[:num_groups]
        if self._is_weighted:
            self._weight, self._num_weighted = numbers[num_groups], numbers[num_groups + 1]
        self._scales = numbers[-2:] / self._communicator.num_replicas
        if self._is_first or self._scales.device.type == "cpu":  # else where measured numbers are waited for
            self._refuse_different_scales(*self._scales.tolist())
        self._is_scaled |= mean.loss_scale != 1
        self._is_first = False

    def _refuse_different_scales(self, mean: float, of_squares: float) -> None:
        if abs(of_squares - mean**2) > _SAME * mean**2:
            raise ValueError(
                "`loss_scale` must be the same on all cores where a model is in fully_shard, which adds up gradients "
                f"before it is divided out, got {self._mean.loss_scale!r} here and {mean:g} on average"
            )

    def _share_of_weight(self) -> Weight:
        """1/W, or 1 where minibatches have no weights."""
        if not self._is_weighted:
            return 1.0
        weight = torch.as_tensor(self._weight)
        return torch.where(weight == 0, 0.0, 1 / weight)  # NaN stays NaN, and is seen

    def _scale(self, factor: Weight) -> None:
        parts = to_locals(self._sums.values())
        if parts and (isinstance(factor, torch.Tensor) or factor != 1):
            torch._foreach_mul_(parts, factor.to(parts[0].device) if isinstance(factor, torch.Tensor) else factor)

    def clip(self, largest: float) -> None:
        self._scale((largest / (self.norm() * self._mean.multiple + TINY)).clamp(max=1.0))

    def clear(self) -> None:
        self._sums = {}
        self._num_kept = 0
        self._step_squares = None
        self._weight = self._num_weighted = 0.0
        self._forget_minibatch()

    def drop(self) -> None:
        if self._num_seen and self._reduces_once:
            if self._num_kept:
                raise RuntimeError(
                    "a minibatch's gradient cannot be dropped with `reduce_once` when the step has others before it, "
                    "which the model has added to it"
                )
            self._arrivals.forget()
        self._forget_minibatch()

    def discard(self) -> None:
        self._arrivals.forget()
        self.clear()

    def weight(self) -> Weight | None:
        return self._weight if self._is_weighted else None

    def _numbers(self) -> torch.Tensor:
        numbers = self._squares_here().own([]).repeat(len(self._inner.param_groups) + 2)
        if self._step_squares is not None:
            numbers[: len(self._step_squares)] = self._step_squares
        if self._is_weighted:
            put(numbers[-2], self._weight)
            put(numbers[-1], self._num_weighted)
        return numbers

    def _read(self, numbers: torch.Tensor) -> list[float]:
        if self._scales is None:
            return [float(number) for number in numbers.tolist()]
        *values, mean, of_squares = torch.cat([numbers, self._scales.to(numbers.dtype)]).tolist()
        self._refuse_different_scales(mean, of_squares)
        return values

    def _square(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return self._square_each([gradients])[0]

    def _square_each(self, lists: list[list[torch.Tensor]]) -> torch.Tensor:
        return SplitSquares(self._everyone, self._model_groups, self._like).of_each(lists)
