"""Gradients of models in `fully_shard` (FSDP2), which reduces them itself in every backward pass."""

from __future__ import annotations

import math
import weakref
from typing import Any, final

import torch

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.cores.groups import Ranks
from variable_batch_size.cores.meshes import dimensions_of, local_part, placed_like
from variable_batch_size.training.fully_sharded import outermost, sharding_modules, with_whole_parameters
from variable_batch_size.training.gradients import TINY, Gradients, Mean
from variable_batch_size.training.split_squares import SplitSquares
from variable_batch_size.training.weights import Weight


@final
class ShardedGradients(Gradients):
    """In each round of a step the model takes the mean over all cores; these means are summed here, shard by shard.

        gradient = Σ means · R · multiple / (n · loss_scale)        with weights: Σ w_i in place of n

    on R cores. So ``p.grad`` between ``backward()`` and ``step()`` is a shard of the mean over the round's
    minibatches. What a core has in it is seen before by a hook on each whole parameter, which leaves out a stand-in and
    measures a minibatch: a loss times 0 would not do, as NaN survives that.

    Args:
        cores: the ranks of the cores among all processes.
        everyone: all processes that have a shard.
        model: those that share this one's samples, because parameters are split over them, too.
        model_groups: the groups that these are made of.
    """

    def __init__(
        self,
        *args: Any,
        cores: Ranks,
        everyone: Communicator,
        model: Communicator,
        model_groups: list[Ranks],
        **options: Any,
    ) -> None:
        self._cores = set(cores)
        self._everyone, self._model, self._model_groups = everyone, model, model_groups
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._num_seen: dict[torch.nn.Parameter, int] = {}  # how often each gradient of this minibatch has arrived
        self._arrived: list[list[torch.Tensor]] = []  # this process's share of their squares, for each group
        self._step_squares: torch.Tensor | None = None
        self._weight: Weight = 0.0
        self._num_weighted: Weight = 0.0
        self._is_stand_in = False
        self._groups: dict[torch.nn.Parameter, int] = {}
        super().__init__(*args, **options)
        self._watch()

    # ------------------------------------------------------------------------------------------------------ a minibatch

    def _watch(self) -> None:
        """Have a hook on each whole parameter, instead of those that another optimizer has left there."""
        modules = sharding_modules(list(self.parameters()))
        self._let_reduce(modules)
        numbers = enumerate(self._inner.param_groups)
        self._groups = {p: number for number, group in numbers for p in group["params"]}
        device = None
        for p, whole in with_whole_parameters(modules):
            device = whole.device
            self._check_cores(p, whole)
            if p not in self._groups or not whole.requires_grad:
                continue
            hooks = whole._backward_hooks or {}
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Hook)]:
                del hooks[key]
            whole.register_hook(_Hook(self, p, whole))  # type: ignore[no-untyped-call]
        like = local_part(next(self.parameters()))
        self._like = torch.empty(0, dtype=like.dtype, device=device or like.device)

    def _let_reduce(self, modules: list[Any]) -> None:
        """See that the mean is taken in every round, whatever another way to accumulate has set."""
        for module in outermost(modules):
            _switch_on(module, ())
            module.register_forward_pre_hook(_switch_on)
        for module in modules:
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(float(self._communicator.num_replicas))

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

    def see(self, p: torch.nn.Parameter, whole: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """What is to be reduced of a gradient of this core that has arrived."""
        self._num_seen[p] = self._num_seen.get(p, 0) + 1
        if self._is_stand_in:
            return torch.zeros_like(gradient)
        gradient = placed_like(whole, gradient)
        if self._measures:
            self._arrived[self._groups[p]].append(self._squares_here().own([gradient.detach()]))
        return gradient

    def _squares_here(self) -> SplitSquares:
        return SplitSquares(self._model, self._model_groups, self._like)

    def fit(self) -> None:
        self._watch()
        self._forget_minibatch()

    def expect(self, *, is_stand_in: bool) -> None:
        self._is_stand_in = is_stand_in

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
        for p in found:
            assert p.grad is not None
            if p in self._sums:
                local_part(self._sums[p]).add_(local_part(p.grad))
            else:
                self._sums[p] = p.grad
        self._forget_minibatch()

    def _check_seen(self, found: list[torch.nn.Parameter]) -> None:
        for p in found:
            if p not in self._num_seen:
                raise RuntimeError(
                    f"the gradient of a parameter of the shape {tuple(p.shape)} was reduced unseen: make the optimizer "
                    "after the model is in fully_shard and on its device, and freeze and unfreeze before that"
                )
        if self._measures and any(number > 1 for number in self._num_seen.values()):
            raise RuntimeError(
                "gradients must be measured whole, but fully_shard has reduced one of them in several parts: run one "
                "backward pass in a minibatch, and no reentrant checkpointing of tied parameters"
            )

    def _measure(self, weight: Weight | None) -> None:
        zero = self._squares_here().own([])
        squares = torch.stack([torch.stack([zero, *arrived]).sum() for arrived in self._arrived])
        if weight is not None:
            of_one = torch.as_tensor(weight, device=squares.device)
            squares = torch.where(of_one > 0, squares / of_one, 0.0)
        if self._step_squares is not None:
            squares[: len(self._step_squares)] += self._step_squares  # a group may have been added since
        self._step_squares = squares

    def _forget_minibatch(self) -> None:
        self._num_seen = {}
        self._arrived = [[] for _ in self._inner.param_groups]
        for p in self.parameters():
            p.grad = None

    # ----------------------------------------------------------------------------------------------------------- a step

    def reduce(self, mean: Mean, *, is_idle: bool) -> None:
        self._mean = mean
        self._sum_numbers(mean)
        factor = mean.factor(is_weighted=self._is_weighted) * self._communicator.num_replicas
        self._scale(factor * self._share_of_weight())
        for p, gradient in self._sums.items():
            p.grad = gradient

    def _sum_numbers(self, mean: Mean) -> None:
        """Let what was measured and weighed be that of all minibatches of all cores."""
        if self._step_squares is not None:
            self._step_squares = self._step_squares / mean.loss_scale**2
            self._everyone.sum([self._step_squares])
        if self._is_weighted:
            both = torch.zeros(2, device=self._like.device)
            both[0], both[1] = self._weight, self._num_weighted
            self._communicator.sum([both])
            self._weight, self._num_weighted = both[0], both[1]

    def _share_of_weight(self) -> Weight:
        """1/W, or 1 where minibatches have no weights."""
        if not self._is_weighted:
            return 1.0
        weight = torch.as_tensor(self._weight)
        return torch.where(weight > 0, 1 / weight, 0.0)

    def _scale(self, factor: Weight) -> None:
        if isinstance(factor, torch.Tensor) or factor != 1:
            for gradient in self._sums.values():
                part = local_part(gradient)
                part.mul_(factor.to(part.device) if isinstance(factor, torch.Tensor) else factor)

    def clip(self, largest: float) -> None:
        self._scale((largest / (self.norm() * self._mean.multiple + TINY)).clamp(max=1.0))

    def clear(self) -> None:
        self._sums = {}
        self._step_squares = None
        self._weight = self._num_weighted = 0.0
        self._forget_minibatch()

    def drop(self) -> None:
        self._forget_minibatch()

    def discard(self) -> None:
        self.clear()

    def weight(self) -> Weight | None:
        return self._weight if self._is_weighted else None

    def _numbers(self) -> torch.Tensor:
        numbers = self._squares_here().own([]).repeat(len(self._inner.param_groups) + 2)
        if self._step_squares is not None:
            numbers[: len(self._step_squares)] = self._step_squares
        if self._is_weighted:
            numbers[-2], numbers[-1] = self._weight, self._num_weighted
        return numbers

    def _read(self, numbers: torch.Tensor) -> list[float]:
        return [float(number) for number in numbers.tolist()]

    def _square(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return self._square_each([gradients])[0]

    def _square_each(self, lists: list[list[torch.Tensor]]) -> torch.Tensor:
        return SplitSquares(self._everyone, self._model_groups, self._like).of_each(lists)


class _Hook:
    """Shows a gradient that has arrived to the gradients of an optimizer, as long as these are there."""

    def __init__(self, gradients: ShardedGradients, p: torch.nn.Parameter, whole: torch.nn.Parameter) -> None:
        self._gradients, self._p, self._whole = weakref.ref(gradients), weakref.ref(p), weakref.ref(whole)

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        gradients, p, whole = self._gradients(), self._p(), self._whole()
        if gradients is None or p is None or whole is None:
            return gradient
        return gradients.see(p, whole, gradient)


def _switch_on(module: Any, args: Any) -> None:
    """Loops that accumulate by themselves switch the reduction off for all but the last of some minibatches."""
    module.set_requires_gradient_sync(True)
