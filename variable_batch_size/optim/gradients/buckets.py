"""BucketAccumulator: gradients on eager devices, accumulated in flat buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch.optim import Optimizer
from typing_extensions import Unpack

from variable_batch_size.cores.communicator import Communicator, Ranks
from variable_batch_size.cores.dtensor import from_local_like, redistribute_like, to_local
from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.optim.gradients.accumulator import (
    UNWEIGHTED,
    Common,
    GradientAccumulator,
    StepGradient,
)
from variable_batch_size.optim.gradients.fixed_point import FixedPoint64
from variable_batch_size.optim.gradients.gradient_buckets import GradientBuckets
from variable_batch_size.optim.gradients.norms import sharded_squared_norms, squared_norm
from variable_batch_size.optim.token_weights import Weight


@final
class BucketAccumulator(GradientAccumulator):
    """Copies and adds the gradients of minibatches into buckets (:class:`GradientBuckets`).

    Autograd returns the gradients of a minibatch as new tensors, which costs nothing. If a rank has a single minibatch
    in a step, there is no other rank and no gradient is sparse, they are used as they are, without a copy.

    With `gradient_as_bucket_view`, ``p.grad`` is a view of a bucket for the whole run and autograd accumulates there:
    for CUDA graphs, which need static addresses, and to save the memory of one gradient. Then ``p.grad`` is the sum of
    the step's minibatches so far and must not be replaced, and every trainable parameter has a gradient in each update,
    0 where none arrived. If norms are measured, each minibatch has the buckets to itself, and a second set of tensors
    holds the sum of the minibatches before.

    With `exact`, gradients are rounded to whole units of fixed point and summed in float64 (:class:`FixedPoint64`), so
    that the sum does not depend on which rank had which minibatch. With tensor parallelism, the buckets hold local
    shards, and norms are completed over `model_parallel`.

    Args:
        model_parallel: the ranks that have this rank's samples and other shards; None if parameters are not sharded.
        model_groups: the process groups that `model_parallel` consists of.
    """

    def __init__(
        self,
        inner: Optimizer,
        communicator: Communicator,
        *,
        gradient_as_bucket_view: bool = False,
        exact: bool = False,
        model_parallel: Communicator | None = None,
        model_groups: Iterable[Ranks] = (),
        **common: Unpack[Common],
    ) -> None:
        super().__init__(inner, communicator, **common)
        self._is_view = gradient_as_bucket_view
        self._model_parallel, self._model_groups = model_parallel, list(model_groups)
        self._fixed_point = FixedPoint64() if exact else None
        self._buckets = GradientBuckets([], num_numbers=0)
        self._has_sums = False  # whether the buckets hold minibatches of this step
        self._is_present: list[bool] = []  # which of their parameters had a gradient in this step, on this rank
        self._frozen: set[torch.Tensor] = set()  # parameters that require no gradient and were assigned one anyway
        self._held: list[torch.Tensor] = []  # with views: the buckets of the minibatches before, if norms are measured
        self._versions: list[int] = []  # with views: of the buckets, when they were last accumulated or zeroed
        if exact and any(p.is_complex() for p in self._parameters()):
            raise ValueError("`exact` must be False for complex parameters")
        self.begin_epoch(0)

    def accumulate(self, plan: StepPlan, weight: Weight | None = None) -> None:
        if plan.is_padding and not plan.is_idle:  # in lockstep; an idle rank drops all of the step in reduce()
            self.zero_grad()
            weight = None if weight is None else 0.0
        parameters, fixed_point = self._parameters(), self._fixed_point
        if self._is_view:
            self._ensure_views(parameters)
        elif self._model_parallel is not None:
            for p in parameters:
                p.grad = None if p.grad is None else redistribute_like(p, p.grad)
        if fixed_point is not None:
            fixed_point.check_num_minibatches(plan.num_minibatches)
            if not self._has_sums:
                fixed_point.update_scale(parameters, self.communicator)
        self._is_weighted = weight is not None
        measures = self._measures and plan.num_minibatches > 1  # one minibatch says nothing about the noise
        squares = self._squared_norms_by_group(self._gradients_by_group()) if measures else None
        if fixed_point is not None:
            fixed_point.add_numbers(squares, weight, len(self.inner.param_groups), parameters[0].device)
        elif squares is not None or weight is not None:
            self._add_numbers(squares, weight)
        if self._is_view:
            self._accumulate_views(is_last=plan.is_last)
        elif (
            not plan.is_last
            or self._has_sums
            or self.communicator.num_replicas > 1
            or fixed_point is not None
            or _any_sparse(parameters)  # sums are dense, and the state of the inner optimizer cannot take both
        ):
            self._add(parameters, plan)

    def _add(self, parameters: list[torch.nn.Parameter], plan: StepPlan) -> None:
        """Add the gradients of the minibatch to the buckets, and leave ``p.grad`` None."""
        used = []
        for p in parameters:
            if not p.requires_grad and p.grad is not None:
                self._frozen.add(p)
            if p.requires_grad or p in self._frozen:
                used.append(p)
        self._ensure_buckets(used)
        buckets, is_first = self._buckets, not self._has_sums
        gradients, indices = [], []
        for index, p in enumerate(buckets.parameters):
            gradient = p.grad
            if gradient is not None:
                indices.append(index)
                gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
        if self._model_parallel is not None:
            gradients = [to_local(gradient) for gradient in gradients]
        if self._fixed_point is not None:
            self._fixed_point.add_(buckets, indices, gradients, plan.num_minibatches, is_first=is_first)
        else:
            buckets.add_(indices, gradients, is_first=is_first)
        if is_first:
            self._is_present = [False] * len(buckets.parameters)
        for index in indices:
            self._is_present[index] = True
        self._has_sums = True
        for p in parameters:
            p.grad = None

    def _ensure_buckets(self, parameters: list[torch.nn.Parameter]) -> None:
        """Have buckets for the parameters as they are now, with the sums so far."""
        old, fixed_point, num_groups = self._buckets, self._fixed_point, len(self.inner.param_groups)
        num_numbers = (num_groups + 2 if fixed_point is None else fixed_point.num_numbers(num_groups)) + 1
        if old.matches(parameters, num_numbers, checks_shapes=not self._has_sums):
            return
        if self._has_sums:
            # one that was frozen since keeps its sum, and its place, which other ranks may still have it at
            kept = {id(p) for p in (*parameters, *old.parameters)}
            parameters = [p for p in self._parameters() if id(p) in kept]
            if old.matches(parameters, num_numbers, checks_shapes=False):
                return
        dtype = None if fixed_point is None else torch.float64
        self._buckets = GradientBuckets(parameters, num_numbers=num_numbers, dtype=dtype)
        self._layout = self._layout_of(parameters)
        if self._has_sums:
            self._buckets.copy_from(old)
            present = {id(p) for p, is_present in zip(old.parameters, self._is_present, strict=True) if is_present}
            self._is_present = [id(p) in present for p in parameters]
            if fixed_point is not None:
                fixed_point.resize(self._buckets)

    def reduce(self, plan: StepPlan) -> StepGradient:
        factor, fixed_point = self._factor(plan), self._fixed_point
        if not self._has_sums:
            self._scale_single(factor * self._inverse_weight())
        else:
            if plan.is_idle:
                self._drop_sums()
            elif factor != 1 and fixed_point is None:
                self._buckets.mul_(factor)
            if self.communicator.num_replicas > 1:
                self._all_reduce()
            if fixed_point is None:
                self._finish_buckets()
            else:
                self._step_squares, self._weight, self._num_weighted = fixed_point.numbers()
                factor_and_weight = factor * self._inverse_weight()
                fixed_point.decode(self._buckets, self._is_present, factor_and_weight, plan.num_minibatches)
        return StepGradient(self, plan, self._weight if self._is_weighted else None)

    def _drop_sums(self) -> None:
        self._buckets.zero_()
        self._is_present = [False] * len(self._is_present)
        self._weight = self._num_weighted = 0.0
        if self._step_squares is not None:
            self._step_squares = torch.zeros_like(self._step_squares)
        if self._fixed_point is not None:
            self._fixed_point.drop_sums()

    def _all_reduce(self) -> None:
        buckets, fixed_point = self._buckets, self._fixed_point
        numbers, layout = buckets.numbers[:-1], buckets.numbers[-1:]
        if not self._is_view:
            buckets.mark_present(self._is_present)
        if fixed_point is None:
            self._write_numbers(numbers)
            num_weighted = numbers[-1:]
        else:
            num_weighted = fixed_point.write(numbers)
        if not self._is_weighted:
            num_weighted.fill_(UNWEIGHTED)
        layout.fill_(self._layout_and_epoch())
        self.communicator.sum(buckets.flats)
        self._check_weights(num_weighted)
        self._check_layout(layout)
        if fixed_point is None:
            self._read_numbers(numbers.clone())
        else:
            fixed_point.read(numbers, buckets, self.communicator)
        # a rank that has all gradients knows that none is missing on all ranks, without waiting for the device
        if not self._is_view and not all(self._is_present):
            self._is_present = buckets.present_on_any_rank()

    def _finish_buckets(self) -> None:
        """Divide by the weight, and let ``p.grad`` be views of the buckets."""
        buckets, inverse, is_sharded = self._buckets, self._inverse_weight(), self._model_parallel is not None
        if isinstance(inverse, torch.Tensor) or inverse != 1:
            buckets.mul_(inverse)
        if not self._is_view:
            for p, view, is_present in zip(buckets.parameters, buckets.views, self._is_present, strict=True):
                p.grad = None if not is_present else from_local_like(p, view) if is_sharded else view

    def _clip_(self, limit: float, gradient: StepGradient) -> None:
        if self._has_sums and self._model_parallel is None:
            super()._clip_(limit, gradient)
        else:
            self._scale_single(gradient.clip_factor(limit))

    def _scale_single(self, factor: Weight) -> None:
        """Scale ``p.grad`` out of place, as the user may hold the tensors of a single minibatch."""
        if not isinstance(factor, torch.Tensor) and factor == 1:
            return
        owners = [p for p in self._parameters() if p.grad is not None]
        gradients: list[Any] = [p.grad.detach() for p in owners]  # type: ignore[union-attr]
        kinds = {(gradient.device, gradient.dtype) for gradient in gradients}
        if self._model_parallel is not None:  # a plain factor cannot be combined with a DTensor
            scaled = [(local * factor).to(local.dtype) for local in map(to_local, gradients)]
            scaled = [from_local_like(p, local) for p, local in zip(owners, scaled, strict=True)]
        elif len(kinds) == 1 or not isinstance(factor, torch.Tensor):
            factor = factor.to(*kinds.pop()) if isinstance(factor, torch.Tensor) else factor
            scaled = list(torch._foreach_mul(gradients, factor)) if gradients else []
        else:
            # a factor without a shape would widen a narrow gradient without a shape
            scaled = [(gradient * factor.to(gradient.device)).to(gradient.dtype) for gradient in gradients]
        for p, gradient in zip(owners, scaled, strict=True):
            p.grad = gradient

    def reset(self) -> None:
        had_sums, self._has_sums = self._has_sums, False
        self._reset_numbers()
        if self._is_view:
            self._buckets.zero_()
            self._versions = self._buckets.versions()
            return
        for p in self._parameters():
            p.grad = None
        if self._fixed_point is not None:
            self._fixed_point.reset()
        if had_sums and self._buckets.is_held():  # what is referenced elsewhere must not change
            self._buckets = GradientBuckets([], num_numbers=0)

    # ----------------------------------------------------------------------------------------- gradient_as_bucket_view

    def _accumulate_views(self, *, is_last: bool) -> None:
        """Autograd has accumulated already, unless each minibatch has the buckets to itself."""
        flats = self._buckets.flats
        if self._measures and self._has_sums:
            torch._foreach_add_(flats, self._held)
        if self._measures and not is_last:
            if len(self._held) != len(flats):
                self._held = [torch.empty_like(flat) for flat in flats]
            torch._foreach_copy_(self._held, flats)
            self._buckets.zero_()
        self._has_sums = True
        self._versions = self._buckets.versions()

    def _ensure_views(self, parameters: list[torch.nn.Parameter]) -> None:
        """Check that every trainable parameter's gradient is its view, and rebuild the buckets for new parameters."""
        for index, (p, view) in enumerate(zip(self._buckets.parameters, self._buckets.views, strict=True)):
            if p.grad is not view and (p.grad is not None or p.requires_grad):
                raise RuntimeError(
                    f"With `gradient_as_bucket_view`, p.grad must not be replaced, but the gradient of parameter "
                    f"{index} (shape {tuple(p.shape)}) was replaced between backward() and step(). Modify it in place."
                )
        trainable = [p for p in parameters if p.requires_grad]
        num_numbers = len(self.inner.param_groups) + 3
        if self._buckets.matches(trainable, num_numbers) and self._buckets.is_in_place():
            return
        if self._has_sums:
            raise RuntimeError(
                "With `gradient_as_bucket_view`, parameters must not be frozen, added, converted or moved within a "
                "step."
            )
        buckets = GradientBuckets(trainable, num_numbers=num_numbers)
        self._layout = self._layout_of(trainable)
        for p, view in zip(trainable, buckets.views, strict=True):
            if p.grad is not None:
                view.copy_(p.grad)
        for p in self._buckets.parameters:
            p.grad = None  # of those that are frozen now
        self._buckets, self._held = buckets, []
        self._attach_views()

    def _attach_views(self) -> None:
        for p, view in zip(self._buckets.parameters, self._buckets.views, strict=True):
            p.grad = view

    def begin_epoch(self, epoch: int) -> None:
        if self._is_view:
            super().zero_grad()
            self._attach_views()
            self._has_sums = False
            self._ensure_views(self._parameters())
        super().begin_epoch(epoch)

    def zero_grad(self) -> None:
        if not self._is_view:
            super().zero_grad()
            return
        is_untouched, own = self._versions == self._buckets.versions(), set(self._buckets.parameters)
        if not self._has_sums:  # parameters that were unfrozen since have a gradient outside the buckets
            if not is_untouched or any(p.grad is not None for p in self._parameters() if p not in own):
                self.begin_epoch(self._epoch)
        elif not is_untouched:
            if not self._measures:
                raise RuntimeError(
                    "With `gradient_as_bucket_view`, zero_grad() cannot drop the gradient of a backward pass without "
                    "step(): it was added to those of the minibatches before."
                )
            self._buckets.zero_()
            self._versions = self._buckets.versions()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._is_view:
            self._attach_views()
            if not self._has_sums:
                self._held = []  # the buckets of a module that was converted since are rebuilt
            self._versions = self._buckets.versions()

    # ------------------------------------------------------------------------------------------------ norms and state

    def _squared_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        if self._model_parallel is None:
            return squared_norm(gradients, like=self._parameters()[0])
        return self._squared_norms([gradients])[0]

    def _squared_norms(self, lists: list[list[torch.Tensor]]) -> torch.Tensor:
        if self._model_parallel is None:
            return super()._squared_norms(lists)
        like = to_local(self._parameters()[0])
        return sharded_squared_norms(lists, self._model_parallel, self._model_groups, like=like)

    def state_dict(self) -> dict[str, Any]:
        if self._fixed_point is None:
            return {}
        return self._fixed_point.state_dict(self._parameters(), is_between_steps=not self._has_sums)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._fixed_point is not None:
            self._fixed_point.load_state_dict(state, self._parameters())


def _any_sparse(parameters: list[torch.nn.Parameter]) -> bool:
    for p in parameters:  # noqa: SIM110 (a generator takes longer)
        if p.grad is not None and p.grad.is_sparse:
            return True
    return False
