"""BucketAccumulator: gradients on eager devices, accumulated in flat buckets."""

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, final

import torch
from torch.optim import Optimizer

from variable_batch_size.cores import devices
from variable_batch_size.cores.communicator import Communicator, Ranks
from variable_batch_size.cores.dtensor import from_local_like, redistribute_like, to_local
from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.optim.gradients.accumulator import (
    EPS,
    NUM_COUNTS,
    NUM_DIGEST,
    UNWEIGHTED,
    GradientAccumulator,
    StepGradient,
)
from variable_batch_size.optim.gradients.fixed_point import FixedPoint64
from variable_batch_size.optim.gradients.gradient_buckets import GradientBuckets
from variable_batch_size.optim.gradients.norms import (
    norms_of,
    sharded_squared_norms,
    squared_norm,
    squared_norms,
    sums_of_squares,
)
from variable_batch_size.optim.token_weights import Weight

_MOST_NORMS = 2**10  # that are held: each is a tensor

_grad_of, _is_sparse, _requires_grad = attrgetter("grad"), attrgetter("is_sparse"), attrgetter("requires_grad")


@final
class BucketAccumulator(GradientAccumulator):
    """Copies and adds the gradients of minibatches into buckets (:class:`GradientBuckets`).

    On a single rank, the gradients of a step's only minibatch are used as they are, without a copy, unless they are
    sparse or `exact` is set. Gradients of float16 and bfloat16 parameters are summed and reduced in float32 and rounded
    once: float16 would overflow, and bfloat16 would lose small terms, differently on each number of ranks.

    With `gradient_as_bucket_view`, ``p.grad`` is a view of a bucket for the whole run and autograd accumulates there:
    for CUDA graphs, which need static addresses, and to save memory. Then ``p.grad`` is the sum of the step's
    minibatches so far and must not be replaced, and every trainable parameter has a gradient in each update, 0 where
    none arrived. If norms are measured, or parameters are float16 or bfloat16, a second set of tensors holds the sum in
    float32 at least.

    With `exact`, gradients are summed in fixed point (:class:`FixedPoint64`). With tensor parallelism, the buckets hold
    local shards, and norms are completed over `model_parallel`, the ranks with this rank's samples and other shards.
    """

    _samples_weights = True

    def __init__(
        self,
        inner: Optimizer,
        communicator: Communicator,
        *,
        gradient_as_bucket_view: bool = False,
        exact: bool = False,
        model_parallel: Communicator | None = None,
        model_groups: Iterable[Ranks] = (),
        **common: Any,
    ) -> None:
        super().__init__(inner, communicator, **common)
        self.is_view = gradient_as_bucket_view
        self._model_parallel, self._model_groups = model_parallel, list(model_groups)
        self._fixed_point: FixedPoint64 | None = FixedPoint64(inner) if exact else None
        self._held_minibatches: list[tuple[Any, ...]] = []  # of the first step, in exact mode with several optimizers
        # for each group, the norms of the tensors of several minibatches, where those of a single one are not needed
        self._held_norms: list[list[torch.Tensor]] = []
        compiles = devices.compiles_for_shapes(self._first().device)  # as their number depends on the batch size
        self._holds_norms = not (compiles or exact or model_parallel is not None or self.norm_layers is not None)
        self._sum_dtype = torch.float64 if exact else torch.float32  # at least
        self._buckets = GradientBuckets([], num_numbers=0)
        self._wide: GradientBuckets | None = None  # with views of narrow dtypes: the sums, in float32
        self._has_sums = False  # whether the buckets hold minibatches of this step
        self._is_present: list[bool] = []  # which of their parameters had a gradient in this step, on this rank
        self._frozen: set[torch.Tensor] = set()  # parameters that require no gradient and were assigned one anyway
        self._held: list[torch.Tensor] = []  # with views: the buckets of the minibatches before, if norms are measured
        self._versions: list[int] = []  # with views: of the buckets, when they were last accumulated or zeroed
        if exact and any(p.is_complex() for p in self._parameters()):
            raise ValueError("`exact` must be False for complex parameters")
        trainable = [p for p in self._parameters() if p.requires_grad]
        self._layout = self._layout_of(trainable)
        self._agreed = self._layout, trainable, self._num_numbers()  # the same on all ranks
        self.begin_epoch(0)

    def accumulate(self, plan: StepPlan, weight: Weight | None = None, *, may_hold: bool = True) -> None:
        fixed_point = self._fixed_point
        if fixed_point is not None and may_hold and self._holds(plan, fixed_point):
            self._hold(plan, weight)
            return
        if plan.is_padding and not plan.is_idle:  # in lockstep; an idle rank drops all of the step in reduce()
            self.zero_grad()
            weight = None if weight is None else 0.0
        parameters = self._parameters()
        if self.is_view:
            self._ensure_views(parameters)
        elif self._model_parallel is not None:
            for p in parameters:
                p.grad = None if p.grad is None else redistribute_like(p, p.grad)
        if fixed_point is not None:
            fixed_point.check_num_minibatches(plan.num_minibatches)
            if not self._has_sums:
                fixed_point.update_scale(self.communicator, has_first=plan.has_first)
        if self.own_norms is not None:
            self.own_norms.add(plan, weight)
        self._is_weighted = weight is not None
        measures = self._measures and plan.num_minibatches > 1  # one minibatch shows no noise
        holds_norms = measures and weight is None and self._holds_norms
        if holds_norms:
            self._hold_norms()
        squares = self._squares_by_group() if measures and not holds_norms else None
        if self.norm_layers is not None and self.norm_layers.is_on:
            of_samples = self.norm_layers.take(plan, squared_norm=self._squared_norm_of_layers())
            squares = self._with_samples(squares, of_samples)
        if fixed_point is not None:
            fixed_point.add_numbers(squares, weight)
        elif squares is not None or weight is not None:
            self._add_numbers(squares, weight)
        if self.is_view:
            self._accumulate_views(is_last=plan.is_last)
        elif (
            not plan.is_last
            or self._has_sums
            or self.communicator.num_replicas > 1
            or fixed_point is not None
            # sums are dense, and the state of the inner optimizer cannot take both
            or any(p.grad is not None and p.grad.is_sparse for p in parameters)
        ):
            self._add(parameters, plan)

    def _hold_norms(self) -> None:
        """Measure a minibatch; its norms are squared and summed together with others, as each operation takes time."""
        gradients, held, like = self._measured_gradients(), self._held_norms, self._first()
        while len(held) < len(gradients):  # a group may have been added since
            held.append([])
        for norms, of_group in zip(held, gradients, strict=True):
            norms += norms_of(of_group, like=like)
        if sum(map(len, held)) >= _MOST_NORMS:
            self._sum_held_norms()

    def _sum_held_norms(self) -> None:
        if self._held_norms:
            held, self._held_norms = self._held_norms, []
            self._add_numbers(sums_of_squares(held, like=self._first()), None)

    def _holds(self, plan: StepPlan, fixed_point: FixedPoint64) -> bool:
        """Whether the first units are summed right before the reduction.

        Otherwise another optimizer would reduce in between on a rank with one minibatch, and sum units first on a rank
        with several.
        """
        is_shared = self.is_one_of_several and self.communicator.num_replicas > 1
        return not fixed_point.scale.has_asked and (plan.is_open or is_shared)

    def _hold(self, plan: StepPlan, weight: Weight | None) -> None:
        """Keep a minibatch of the first step until its gradients can be accumulated."""
        taken = {p: p.grad.clone() for p in self._parameters() if p.grad is not None}
        self.zero_grad()
        self._held_minibatches.append((plan, weight, taken))
        if plan.is_last and not plan.is_open:
            self._release_minibatches()

    def _release_minibatches(self) -> None:
        """Accumulate the minibatches of the first step that were held."""
        while self._held_minibatches:
            *minibatch, gradients = self._held_minibatches.pop(0)
            for p, gradient in gradients.items():
                p.grad = gradient
            self.accumulate(*minibatch, may_hold=False)

    def _num_numbers(self) -> int:
        own = self._num_measured() + 2 if self._fixed_point is None else self._fixed_point.num_numbers()
        return own + NUM_DIGEST

    def _add(self, parameters: list[torch.nn.Parameter], plan: StepPlan) -> None:
        """Add the gradients of the minibatch to the buckets, and leave ``p.grad`` None."""
        is_first = not self._has_sums
        if is_first or not self._buckets.are_for(parameters):  # otherwise none was added, unfrozen or converted
            if not all(map(_requires_grad, parameters)):  # as usual: without a loop in Python
                parameters = [p for p in parameters if p.requires_grad or self._is_assigned(p)]
            self._ensure_buckets(parameters)
        buckets = self._buckets
        gradients, number = list(map(_grad_of, buckets.parameters)), len(buckets.parameters)
        indices: Sequence[int] = range(number)
        if any(map(is_, gradients, repeat(None))):
            indices = [index for index in indices if gradients[index] is not None]
            gradients = [gradients[index] for index in indices]
        if any(map(_is_sparse, gradients)):
            gradients = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
        if self._model_parallel is not None:
            gradients = [to_local(gradient) for gradient in gradients]
        if self._fixed_point is not None:
            self._fixed_point.add_(buckets, indices, gradients, plan.num_minibatches, is_first=is_first)
        else:
            buckets.add_(indices, gradients, is_first=is_first)
        if len(indices) == number:
            self._is_present = [True] * number
        else:
            if is_first:
                self._is_present = [False] * number
            for index in indices:
                self._is_present[index] = True
        self._has_sums = True
        for p in parameters:
            p.grad = None

    def _is_assigned(self, p: torch.nn.Parameter) -> bool:
        """Whether a parameter that requires no gradient was assigned one, now or before."""
        if p.grad is not None:
            self._frozen.add(p)
        return p in self._frozen

    def _ensure_buckets(self, parameters: list[torch.nn.Parameter]) -> None:
        """Make buckets for the parameters as they are now, with the sums so far, if necessary."""
        old, fixed_point, num_numbers = self._buckets, self._fixed_point, self._num_numbers()
        if old.matches(parameters, num_numbers, checks_shapes=not self._has_sums):
            return
        if self._has_sums:
            # a parameter that was frozen since keeps its sum and its place, as other ranks may still have it there
            kept = {id(p) for p in (*parameters, *old.parameters)}
            parameters = [p for p in self._parameters() if id(p) in kept]
            if old.matches(parameters, num_numbers, checks_shapes=False):
                return
        self._buckets = GradientBuckets(parameters, num_numbers=num_numbers, dtype=self._sum_dtype)
        self._layout = self._layout_of(parameters)
        if self._has_sums:
            self._buckets.copy_from(old)
            present = {id(p) for p, is_present in zip(old.parameters, self._is_present, strict=True) if is_present}
            self._is_present = [id(p) in present for p in parameters]
            if fixed_point is not None:
                fixed_point.resize(self._buckets)

    def reduce(self, plan: StepPlan) -> StepGradient:
        if self._held_minibatches and self._fixed_point is not None:  # of an open step, which has no first minibatch
            taken = [gradients for *_, gradients in self._held_minibatches]
            self._fixed_point.agree_on_scale(taken, self.communicator)
            self._release_minibatches()
        self._sum_held_norms()
        if self._has_sums and self.communicator.num_replicas > 1:
            self._ensure_buckets(self._buckets.parameters)  # with space for the numbers of a group added in the step
        factor, fixed_point, buckets = self._factor(plan), self._fixed_point, self._wide or self._buckets
        if not self._has_sums:
            self._scale_single(factor * self._inverse_weight())
            return self._step_gradient(plan)
        if plan.is_idle:
            self.drop_sums()
        elif factor != 1 and fixed_point is None:
            buckets.mul_(factor)
        if self.communicator.num_replicas > 1:
            self._all_reduce()
        if fixed_point is not None:
            self._step_squares, self._weight, self._num_weighted = fixed_point.numbers()
            number = (self._closed(plan) if plan.is_open else plan).num_minibatches
            fixed_point.decode(buckets, self._is_present, factor * self._inverse_weight(), number)
            return self._step_gradient(plan)
        inverse, is_sharded = self._inverse_weight(), self._model_parallel is not None
        if isinstance(inverse, torch.Tensor) or inverse != 1:
            buckets.mul_(inverse)
        if not self.is_view:
            parameters, gradients = buckets.parameters, buckets.views
            if buckets.is_narrow:
                gradients = [view.to(p.dtype) for p, view in zip(parameters, gradients, strict=True)]
            if is_sharded:
                gradients = list(map(from_local_like, parameters, gradients))
            for p, gradient, is_present in zip(parameters, gradients, self._is_present, strict=True):
                p.grad = gradient if is_present else None
        elif self._wide is not None:
            torch._foreach_copy_(self._buckets.views, self._wide.views)
        return self._step_gradient(plan)

    def kept_sums(self) -> Any:
        """A copy of the sums of this rank, which reduce() overwrites even if it fails."""
        self._sum_held_norms()
        numbers = self._is_present, self._step_squares, self._weight, self._num_weighted
        of_rungs = None if self._fixed_point is None else self._fixed_point.kept_sums()
        return [flat.clone() for flat in self._buckets.flats], numbers, of_rungs

    def restore_sums(self, kept: Any) -> None:
        """Continue from what :meth:`kept_sums` has returned, with further minibatches of the step."""
        flats, numbers, of_rungs = kept
        # in other memory: a collective that waits for a core that hangs may write to this one when the core wakes up
        buckets = GradientBuckets(self._buckets.parameters, num_numbers=self._num_numbers(), dtype=self._sum_dtype)
        for flat, copy in zip(buckets.flats, flats, strict=True):
            flat.copy_(copy)
        self._buckets = buckets
        for p in self._parameters():
            p.grad = None  # the gradient of a step that was not complete
        self._is_present, self._step_squares, self._weight, self._num_weighted = numbers
        if self._fixed_point is not None:
            self._fixed_point.restore_sums(of_rungs, buckets)

    def drop_sums(self) -> None:
        """Leave this rank's minibatches out of the step."""
        self._sum_held_norms()
        (self._wide or self._buckets).zero_()
        self._is_present = [False] * len(self._is_present)
        self._weight = self._num_weighted = 0.0
        if self._step_squares is not None:
            self._step_squares = torch.zeros_like(self._step_squares)
        if self._fixed_point is not None:
            self._fixed_point.drop_sums()

    def _all_reduce(self) -> None:
        buckets, fixed_point = self._wide or self._buckets, self._fixed_point
        if self._layout != self._agreed[0]:
            self._agree_on_layout(buckets)
        numbers, digest = buckets.numbers[:-NUM_DIGEST], buckets.numbers[-NUM_DIGEST:]
        if not self.is_view:
            buckets.mark_present(self._is_present)
        if fixed_point is None:
            self._write_numbers(numbers)
            num_weighted = numbers[-1:]
        else:
            num_weighted = fixed_point.write(numbers)
        if not self._is_weighted:
            num_weighted.fill_(UNWEIGHTED)
        self._write_digest(digest)
        ranks = self.communicator.num_replicas  # which may change in the sum
        self.communicator.sum(buckets.flats)
        self._check_digest(digest, ranks)  # first: ranks of another layout have sent no number
        self._check_weights(num_weighted, ranks)
        if fixed_point is None:
            self._read_numbers(numbers.clone())
        else:
            fixed_point.read(numbers, buckets, self.communicator)
        # if this rank has all gradients, none is missing on all ranks, and there is no wait for the device
        if not self.is_view and not all(self._is_present):
            self._is_present = buckets.present_on_any_rank()

    def _agree_on_layout(self, buckets: GradientBuckets) -> None:
        """Compare a new layout in tensors of the previous one, as others may still have it and sizes must match."""
        _, parameters, num_numbers = self._agreed
        sent = GradientBuckets(parameters, num_numbers=num_numbers, dtype=self._sum_dtype)
        own = [*[0] * NUM_COUNTS, *self._checksums()]
        sent.numbers[-1:].fill_(own[-1])
        self.communicator.sum(sent.flats)
        total = float(sent.numbers[-1])
        self._refuse_different([*own[:-1], total], [*own[:-1], own[-1] * self.communicator.num_replicas])
        self._agreed = self._layout, buckets.parameters, self._num_numbers()

    def compare_again(self) -> None:
        super().compare_again()
        self._agreed = -1, [], 1  # other ranks may have frozen or unfrozen parameters: any layout is a new one

    def _clip_(self, limit: float, gradient: StepGradient) -> None:
        gradients = self._gradients()
        if not gradients or not self._has_sums or self._model_parallel is not None or self._buckets.is_narrow:
            self._scale_single(gradient.clip_factor(limit))
            return
        # like torch.nn.utils.clip_grad_norm_(), to the bit unless a tensor is large
        norm = torch.linalg.vector_norm(torch.stack(norms_of(gradients, like=gradients[0])))
        factor = (limit / (norm + EPS)).clamp(max=1.0)
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for one in gradients:
            by_device.setdefault(one.device, []).append(one)
        for device, some in by_device.items():
            torch._foreach_mul_(some, factor.to(device))

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
        elif not isinstance(factor, torch.Tensor) or (len(kinds) == 1 and not _is_narrow(gradients[0])):
            factor = factor.to(*kinds.pop()) if isinstance(factor, torch.Tensor) else factor
            scaled = list(torch._foreach_mul(gradients, factor)) if gradients else []
        else:
            # a narrow gradient would round the factor, and a scalar factor would widen a scalar gradient
            wide = [gradient.float() if _is_narrow(gradient) else gradient for gradient in gradients]
            scaled = [(one * factor.to(one.device)).to(own.dtype) for one, own in zip(wide, gradients, strict=True)]
        for p, gradient in zip(owners, scaled, strict=True):
            if self.is_view:
                p.grad.copy_(gradient)  # type: ignore[union-attr]
            else:
                p.grad = gradient

    def reset(self) -> None:
        had_sums, self._has_sums = self._has_sums, False
        self._held_minibatches, self._held_norms = [], []
        self._reset_numbers()
        if self.own_norms is not None:
            self.own_norms.reset()
        if self.is_view:
            self._buckets.zero_()
            self._versions = self._buckets.versions()
            return
        for p in self._parameters():
            p.grad = None
        if self._fixed_point is not None:
            self._fixed_point.reset()
        if had_sums and self._buckets.is_held():  # what is referenced elsewhere must not change
            self._buckets = GradientBuckets([], num_numbers=0)

    def _accumulate_views(self, *, is_last: bool) -> None:
        """Autograd has accumulated already, unless each minibatch has the buckets to itself."""
        flats = self._buckets.flats
        if self._wide is not None:
            self._wide.add_(list(range(len(self._buckets.views))), self._buckets.views, is_first=not self._has_sums)
            self._buckets.zero_()
        elif self._measures and self._has_sums:
            torch._foreach_add_(flats, self._held)
        if self._wide is None and self._measures and not is_last:
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
                which = f"the gradient of parameter {index} (shape {tuple(p.shape)})"
                problem = f"p.grad must not be replaced, but {which} was replaced between backward() and step()"
                raise RuntimeError(f"With `gradient_as_bucket_view`, {problem}. Modify it in place.")
        trainable = [p for p in parameters if p.requires_grad]
        num_numbers = self._num_numbers()
        if self._buckets.matches(trainable, num_numbers) and self._buckets.is_in_place():
            return
        if self._has_sums:
            reason = "parameters must not be frozen, added, converted or moved within a step."
            raise RuntimeError(f"With `gradient_as_bucket_view`, {reason}")
        buckets = GradientBuckets(trainable, num_numbers=num_numbers)
        self._layout = self._layout_of(trainable)
        for p, view in zip(trainable, buckets.views, strict=True):
            if p.grad is not None:
                view.copy_(p.grad)
        for p in self._buckets.parameters:
            p.grad = None  # of those that are frozen now
        self._buckets, self._held = buckets, []
        is_narrow = buckets.is_narrow
        self._wide = GradientBuckets(trainable, num_numbers=num_numbers, dtype=self._sum_dtype) if is_narrow else None
        self.is_summed_by_autograd = not self._measures and not is_narrow
        self._attach_views()

    def _attach_views(self) -> None:
        for p, view in zip(self._buckets.parameters, self._buckets.views, strict=True):
            p.grad = view

    def begin_epoch(self, epoch: int) -> None:
        if self.is_view:
            super().zero_grad()
            self._attach_views()
            self._has_sums = False
            self._ensure_views(self._parameters())
        super().begin_epoch(epoch)

    def has_gradients(self) -> bool:
        return self._versions != self._buckets.versions() if self.is_view else super().has_gradients()

    def zero_grad(self) -> None:
        if not self.is_view:
            super().zero_grad()
            return
        is_untouched, own = not self.has_gradients(), set(self._buckets.parameters)
        if not self._has_sums:  # parameters that were unfrozen since have a gradient outside the buckets
            if not is_untouched or any(p.grad is not None for p in self._parameters() if p not in own):
                self.begin_epoch(self._epoch)
        elif not is_untouched:
            if not self._measures and self._wide is None:
                raise RuntimeError(
                    "With `gradient_as_bucket_view`, zero_grad() cannot drop the gradient of a backward pass without "
                    "step(): it was added to those of earlier minibatches."
                )
            self._buckets.zero_()
            self._versions = self._buckets.versions()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.is_view:
            self._attach_views()
            if not self._has_sums:
                self._held = []  # the buckets of a module that was converted since are rebuilt
            self._versions = self._buckets.versions()

    def _squares_by_group(self) -> torch.Tensor:
        return self._squared_norms(self._measured_gradients())

    def _measured_gradients(self) -> list[list[torch.Tensor]]:
        """The gradients of each group as they are now, divided by their divisors."""
        if self.divisors is not None:
            return self._divided(self._gradients_by_group())
        return [[g for g in map(_grad_of, group) if g is not None] for group in self._measured()]

    def _squared_norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        if self._model_parallel is None:
            return squared_norm(gradients, like=self._first())
        return self._squared_norms([gradients])[0]

    def _squared_norms(self, lists: list[list[torch.Tensor]]) -> torch.Tensor:
        if self._model_parallel is None:
            return squared_norms(lists, like=self._first())
        like = to_local(self._first())
        return sharded_squared_norms(lists, self._model_parallel, self._model_groups, like=like)


def _is_narrow(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)
