"""FSDPAccumulator: gradients of fully_shard (FSDP2) models, which FSDP itself reduces."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, final

import torch
from torch.optim import Optimizer
from typing_extensions import Unpack

from variable_batch_size.cores.communicator import Communicator, Ranks
from variable_batch_size.cores.dtensor import dimensions_of, redistribute_like, replication_factor, to_local, to_locals
from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.optim.gradients.accumulator import (
    UNWEIGHTED,
    Common,
    GradientAccumulator,
    StepGradient,
)
from variable_batch_size.optim.gradients.norms import norms_of, sharded_squared_norms, squared_norm
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

OnGrad = Callable[[torch.nn.Parameter, torch.Tensor, torch.Tensor], torch.Tensor]


class FSDPGradHooks:
    """Hooks on the unsharded parameters, which see a rank's gradient before the reduce-scatter and may change it.

    Args:
        ranks: those that have different samples.
        on_grad: called with a parameter, its unsharded parameter and the gradient of that; returns what to reduce.
        wrappers: with the modules of fully_shard.

    Attributes:
        reduces: whether the backward pass of the next forward pass reduces.
    """

    def __init__(self, ranks: Ranks, on_grad: OnGrad, wrappers: Wrappers) -> None:
        self._ranks = set(ranks)
        self._wrappers = wrappers
        self._on_grad = weakref.WeakMethod(on_grad)
        self._modules: list[Any] = []
        self.reduces = True

    def register(self, parameters: list[torch.nn.Parameter]) -> torch.device | None:
        """Register hooks in place of those of another optimizer; returns the device of the unsharded parameters.

        Every rank must call it.
        """
        self._modules = self._wrappers.fsdp
        for module in outermost(self._modules):
            module.register_forward_pre_hook(partial(_set_grad_sync, weakref.ref(self)))
        for module in self._modules:
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(None)  # the mean; a number may multiply, which gloo cannot
        own, device = set(parameters), None
        for p, unsharded in with_whole_parameters(self._modules):
            device = unsharded.device
            self._check_mesh(p, unsharded)
            if p in own:
                self._hook(p, unsharded)
                own.remove(p)
        refuse_left_out(own)
        return device

    def _hook(self, p: torch.nn.Parameter, unsharded: torch.nn.Parameter) -> None:
        hooks = unsharded._backward_hooks or {}
        for key in [key for key, hook in hooks.items() if isinstance(hook, _GradHook)]:
            del hooks[key]
        requires_grad = unsharded.requires_grad
        unsharded.requires_grad_(True)  # a frozen parameter, too, as it may be unfrozen
        unsharded.register_hook(_GradHook(self._on_grad, p, unsharded))  # type: ignore[no-untyped-call]
        unsharded.requires_grad_(requires_grad)

    def reshard(self) -> None:
        """Before an update: modules that have kept unsharded parameters must all-gather new ones."""
        for module in self._modules:
            module.reshard()

    def drop_unreduced(self) -> None:
        """Drop gradients that were not reduced yet."""
        forget_unreduced(self._modules)

    def check_can_drop_unreduced(self) -> None:
        if not can_keep_unreduced(self._modules):
            raise ValueError(f"`reduce_scatter_once` does not support fully_shard of torch {torch.__version__}")

    def check_has_reduced(self) -> None:
        if has_unreduced(self._modules):
            raise RuntimeError(
                "fully_shard has not reduced the gradients. Don't call set_requires_gradient_sync() between forward "
                "and backward; pass `reduce_scatter_once=True` to reduce once a step."
            )

    def _check_mesh(self, p: torch.nn.Parameter, unsharded: torch.nn.Parameter) -> None:
        sizes, sizes_unsharded = (
            [len(dimension.ranks) for dimension in dimensions_of(tensor) if self._ranks.issuperset(dimension.ranks)]
            for tensor in (p, unsharded)
        )
        if math.prod(sizes) != len(self._ranks) or sizes_unsharded:
            raise ValueError(
                f"fully_shard must be over the {len(self._ranks)} ranks that the sampler assigns different samples to. "
                'Use the same mesh for both: fully_shard(model, mesh=mesh["data"]) and process_group=mesh["data"].'
            )


class _GradHook:
    """Passes a gradient to the accumulator, as long as that exists."""

    def __init__(
        self, on_grad: weakref.WeakMethod[OnGrad], p: torch.nn.Parameter, unsharded: torch.nn.Parameter
    ) -> None:
        self._on_grad, self._p, self._unsharded = on_grad, weakref.ref(p), weakref.ref(unsharded)

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        on_grad, p, unsharded = self._on_grad(), self._p(), self._unsharded()
        return gradient if on_grad is None or p is None or unsharded is None else on_grad(p, unsharded, gradient)


def _set_grad_sync(hooks: weakref.ref[FSDPGradHooks], module: Any, args: Any) -> None:
    """Before a forward pass: loops that accumulate by themselves disable the reduction of most minibatches."""
    own = hooks()
    if own is not None:
        module.set_is_last_backward(True)
        module.set_requires_gradient_sync(own.reduces)


_MAX_HELD = 2**23
"""Elements of gradients, 32 MB, that may be kept a moment longer to be measured together."""


@final
class FSDPAccumulator(GradientAccumulator):
    """Sums, shard by shard, what FSDP reduces: in each round of a step, the mean over all ranks.

        gradient = Σ means · R / n        on R ranks; with weights Σ w_i in place of n

    So ``p.grad`` between ``backward()`` and ``step()`` is a shard of the mean over the round's minibatches. A hook on
    each unsharded parameter sees a rank's own gradient before that: it zeroes a padding minibatch, which a loss times 0
    would not do for NaN, and measures the others. FSDP reduces gradients before they are unscaled, so a loss scale must
    be the same on all ranks in a round.

    Args:
        ranks: those that have different samples.
        everyone: all ranks that have a shard.
        model_parallel: the ranks that have this rank's samples, as parameters are sharded over them, too.
        model_groups: the process groups that `model_parallel` consists of.
        wrappers: with the modules of fully_shard.
        reduce_scatter_once: whether FSDP sums unsharded gradients until the last round of a step and then reduces them.
    """

    # of the latest minibatch:
    _num_seen: dict[torch.nn.Parameter, int]  # how many gradients its hook has seen
    _held: list[tuple[torch.nn.Parameter, torch.Tensor]]  # local gradients that are not measured yet
    _num_held: int  # elements of these
    _norms: list[dict[int, list[torch.Tensor]]]  # of local gradients, by group and by how many ranks have the same

    def __init__(
        self,
        inner: Optimizer,
        communicator: Communicator,
        *,
        ranks: Ranks,
        everyone: Communicator,
        model_parallel: Communicator,
        model_groups: list[Ranks],
        wrappers: Wrappers,
        reduce_scatter_once: bool = False,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(inner, communicator, **common)
        self._hooks = FSDPGradHooks(ranks, self._on_unsharded_grad, wrappers)
        self._everyone, self._model_parallel, self._model_groups = everyone, model_parallel, model_groups
        self._reduces_once = reduce_scatter_once
        self._num_unreduced = 0  # minibatches of the step that FSDP has not reduced yet
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._is_padding = False
        self._replicas: dict[torch.nn.Parameter, int] = {}  # how many ranks have the same local gradient
        self.rebuild()
        self.begin_epoch(0)
        if reduce_scatter_once:
            self._hooks.check_can_drop_unreduced()

    def rebuild(self) -> None:
        self._groups = {p: number for number, group in enumerate(self.inner.param_groups) for p in group["params"]}
        parameters = self._parameters()
        device = self._hooks.register(parameters)
        like = to_local(parameters[0])
        self._like = torch.empty(0, dtype=like.dtype, device=device or like.device)
        self._reset_minibatch()

    def begin_epoch(self, epoch: int) -> None:
        self._hooks.drop_unreduced()
        super().begin_epoch(epoch)

    def begin_minibatch(self, *, is_padding: bool, is_last: bool) -> None:
        self._is_padding = is_padding
        self._hooks.reduces = is_last or not self._reduces_once

    def _on_unsharded_grad(self, p: torch.nn.Parameter, unsharded: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """What to reduce of this rank's gradient."""
        self._num_seen[p] = self._num_seen.get(p, 0) + 1
        if self._is_padding:
            return torch.zeros_like(grad)
        grad = redistribute_like(unsharded, grad)
        if self._measures:
            if p not in self._replicas:
                self._replicas[p] = replication_factor(grad, self._model_groups)
            local = to_local(grad.detach())  # another reference to the gradient itself would make autograd copy it
            self._held.append((p, local))
            self._num_held += local.numel()
            if self._num_held >= _MAX_HELD:
                self._measure_held()
        return grad

    def _measure_held(self) -> None:
        """Measure several gradients together, as each alone takes longer on the host than on the device."""
        norms = norms_of([local for _, local in self._held], like=self._like)
        for (p, _), norm in zip(self._held, norms, strict=True):
            self._norms[self._groups[p]].setdefault(self._replicas[p], []).append(norm)
        self._held, self._num_held = [], 0

    def accumulate(self, plan: StepPlan, weight: Weight | None = None) -> None:
        self._is_weighted = weight is not None
        gradients = {p: p.grad for p in self._parameters() if p.grad is not None}
        self._check_seen(gradients)
        squares = self._measure() if self._measures else None
        self._add_numbers(squares, 0.0 if plan.is_padding and weight is not None else weight)
        known = [p for p in gradients if p in self._sums]
        if known:
            torch._foreach_add_(to_locals(self._sums[p] for p in known), to_locals(gradients[p] for p in known))
        self._sums |= {p: gradient for p, gradient in gradients.items() if p not in self._sums}
        self._num_unreduced = 0 if self._hooks.reduces else self._num_unreduced + 1
        self._reset_minibatch()

    def _check_seen(self, found: Iterable[torch.nn.Parameter]) -> None:
        for p in found:
            if p not in self._num_seen and not self._num_unreduced:
                raise RuntimeError(
                    f"fully_shard reduced the gradient of a parameter of shape {tuple(p.shape)} without calling its "
                    "hook. Construct the optimizer after fully_shard(model) and after moving the model to its device."
                )
        if self._hooks.reduces and any(p.grad is None for p in self._num_seen):
            self._hooks.check_has_reduced()
        if self._measures and any(number > 1 for number in self._num_seen.values()):
            raise RuntimeError(
                "Cannot measure a gradient that fully_shard reduced in several parts. Run one backward pass per "
                "minibatch, and no reentrant checkpointing of tied parameters."
            )

    def _measure(self) -> torch.Tensor:
        """This rank's share of the squared norm of the minibatch, for each group."""
        self._measure_held()
        zero, squares = self._squared_norm([]), []
        for by_replicas in self._norms:
            parts = [torch.stack(norms).to(zero).square().sum() / num for num, norms in by_replicas.items()]
            squares.append(torch.stack(parts).sum() if parts else zero)
        of_groups = torch.stack(squares)
        if self.inverse_scale is None:
            return of_groups
        return of_groups * self.inverse_scale.to(zero.device).square()  # the hooks have measured scaled gradients

    def _reset_minibatch(self) -> None:
        self._num_seen, self._held, self._num_held = {}, [], 0
        self._norms = [{} for _ in self.inner.param_groups]
        self.inverse_scale = None
        super().zero_grad()

    def reduce(self, plan: StepPlan) -> StepGradient:
        self._hooks.reshard()
        if self._measures or self._is_weighted or not self._has_checked_weights:  # the same on all ranks
            self._all_reduce_numbers()
        factor = self._factor(plan) * self.communicator.num_replicas
        self._scale_(factor * self._inverse_weight())
        for p, gradient in self._sums.items():
            p.grad = gradient
        return StepGradient(self, plan, self._weight if self._is_weighted else None)

    def _all_reduce_numbers(self) -> None:
        """Sum the numbers over all ranks. Ranks that share samples have the same weights."""
        numbers = self._numbers()
        if not self._is_weighted:
            numbers[-1:].fill_(UNWEIGHTED)
        if self._model_parallel.num_replicas > 1:
            numbers[-2:].div_(self._model_parallel.num_replicas)
        self._everyone.sum([numbers])
        self._check_weights(numbers[-1])
        self._read_numbers(numbers)

    def _scale_(self, factor: Weight) -> None:
        shards = to_locals(self._sums.values())
        if shards and (isinstance(factor, torch.Tensor) or factor != 1):
            torch._foreach_mul_(shards, factor.to(shards[0].device) if isinstance(factor, torch.Tensor) else factor)

    def _clip_(self, limit: float, gradient: StepGradient) -> None:
        self._scale_(gradient.clip_factor(limit))

    def reset(self) -> None:
        self._sums = {}
        self._num_unreduced = 0
        self._reset_numbers()
        self._reset_minibatch()

    def zero_grad(self) -> None:
        if self._num_seen and self._reduces_once:
            if self._num_unreduced:
                raise RuntimeError(
                    "With `reduce_scatter_once`, zero_grad() cannot drop the gradient of a minibatch that is not the "
                    "first of its step: fully_shard has added it to the others."
                )
            self._hooks.drop_unreduced()
        self._reset_minibatch()

    def _squared_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return self._squared_norms([gradients])[0] if gradients else squared_norm([], like=self._like)

    def _squared_norms(self, lists: list[list[torch.Tensor]]) -> torch.Tensor:
        return sharded_squared_norms(lists, self._everyone, self._model_groups, like=self._like)
