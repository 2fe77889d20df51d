"""BucketAccumulator: gradients on eager devices, accumulated in flat buckets that one all-reduce sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import is_
from sys import getrefcount
from typing import Any, final

import torch

from variable_batch_size.cores.communicator import Communicator, Ranks
from variable_batch_size.cores.dtensor import from_local_like, is_dtensor, placed_like, to_local
from variable_batch_size.optim.gradients.accumulator import TINY, UNWEIGHTED, GradientAccumulator, Mean, put
from variable_batch_size.optim.gradients.norms import SplitSquares, square_of
from variable_batch_size.optim.token_weights import Weight

_DOUBLE = {torch.float64, torch.complex128}


class GradientBuckets:
    """One flat tensor for all gradients of a device and dtype; a gradient is a view of it with the parameter's strides.

    Of a parameter that is split over processes it holds the gradient of the part that is here.

    Behind the gradients there is one more element for each parameter, in which a core notes that it had a gradient, and
    in one flat tensor of at least float32 some for numbers, such as squared norms; so all of these travel in the same
    reduction. (Beside narrower gradients only, the numbers travel in a tensor of their own.)

    Args:
        parameters: whose gradients are to be kept.
        num_numbers: how many numbers there may be.
        dtype: of the memory; the parameters' own if None.

    Attributes:
        flats: the flat tensors.
        views: the gradients, in the order of the parameters.
        numbers: the numbers.
    """

    def __init__(
        self, parameters: list[torch.nn.Parameter], *, num_numbers: int, dtype: torch.dtype | None = None
    ) -> None:
        self.parameters = parameters
        self._dtype = dtype
        self._dtypes = [p.dtype for p in parameters]
        self._kinds = [(p.shape, p.device) for p in parameters]
        self.flats: list[torch.Tensor] = []
        self._notes: list[tuple[torch.Tensor, list[int]]] = []  # and the numbers of their parameters
        views: dict[int, torch.Tensor] = {}
        of_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for number, p in enumerate(parameters):
            of_kind.setdefault((p.device, dtype or p.dtype), []).append(number)
        precision = torch.float64 if _DOUBLE & {dtype for _, dtype in of_kind} else torch.float32
        carrier = next((kind for kind in of_kind if kind[1] == precision), None)
        for kind, members in of_kind.items():
            *offsets, end = _aligned_offsets((to_local(parameters[number]).numel() for number in members), kind[1])
            num_extras = len(members) + (num_numbers if kind == carrier else 0)
            flat = torch.zeros(end + num_extras, dtype=kind[1], device=kind[0])
            self.flats.append(flat)
            self._notes.append((flat[end : end + len(members)], members))
            views |= {
                n: _view(flat, to_local(parameters[n]), offset) for n, offset in zip(members, offsets, strict=True)
            }
            if kind == carrier:
                self.numbers = flat[end + len(members) :]
        self.views = [views.pop(number) for number in range(len(parameters))]  # nobody else may hold them, see is_held
        if carrier is None:
            place = parameters[0].device if parameters else None
            self.numbers = torch.zeros(num_numbers, dtype=precision, device=place)
            self.flats.append(self.numbers)
        self._addresses = [view.data_ptr() for view in self.views]
        self._holders = self._count_holders()

    def fits(self, parameters: list[torch.nn.Parameter], num_numbers: int, *, is_thorough: bool = True) -> bool:
        """Whether these are the parameters, of the same dtype and as many groups; if thorough, shape and device."""
        return (
            num_numbers == len(self.numbers)
            and len(parameters) == len(self.parameters)
            and all(map(is_, parameters, self.parameters))
            and [p.dtype for p in parameters] == self._dtypes
            and not (is_thorough and [(p.shape, p.device) for p in parameters] != self._kinds)
        )

    def is_in_place(self) -> bool:
        """Whether the gradients still are views of this memory, which converting a module changes."""
        return [view.data_ptr() for view in self.views] == self._addresses

    def is_held(self) -> bool:
        """Whether someone has kept a gradient, as an optimizer may that needs the one before: it must stay as it is."""
        return self._count_holders() != self._holders

    def _count_holders(self) -> list[int]:
        of_storages = [torch._C._storage_Use_Count(flat.untyped_storage()._cdata) for flat in self.flats]
        return [*of_storages, sum(map(getrefcount, self.views))]

    def take_over(self, old: GradientBuckets) -> None:
        """Take over the gradients of other memory, as far as the parameters are the same."""
        values = {id(p): view for p, view in zip(old.parameters, old.views, strict=True)}
        for p, view in zip(self.parameters, self.views, strict=True):
            if id(p) in values:
                view.copy_(values[id(p)])

    def __reduce__(self) -> Any:
        # a copy of the views would not be views of the copy
        values = [place.clone() for place in (*self.views, self.numbers)]
        return _restored, (self.parameters, len(self.numbers), self._dtype, values)

    def zero(self) -> None:
        for flat in self.flats:
            flat.zero_()

    def multiply(self, factor: float | torch.Tensor) -> None:
        """Multiply everything, the numbers included."""
        for flat in self.flats:
            flat.mul_(factor.to(flat.device) if isinstance(factor, torch.Tensor) else factor)

    def note(self, is_present: list[bool]) -> None:
        """Note which parameters had a gradient on this core."""
        is_whole = all(is_present)
        for notes, members in self._notes:
            if is_whole:
                notes.fill_(1)
            else:
                notes.copy_(torch.tensor([float(is_present[number]) for number in members]))

    def noted(self) -> list[bool]:
        """Which parameters had a gradient on any core, after the sum over all of them; waits for the device."""
        found: dict[int, bool] = {}
        for notes, members in self._notes:
            found.update(zip(members, notes.ne(0).tolist(), strict=True))
        return [found[number] for number in range(len(self.parameters))]


def _restored(
    parameters: list[torch.nn.Parameter], num_numbers: int, dtype: torch.dtype | None, values: list[torch.Tensor]
) -> GradientBuckets:
    memory = GradientBuckets(parameters, num_numbers=num_numbers, dtype=dtype)
    for place, value in zip((*memory.views, memory.numbers), values, strict=True):
        place.copy_(value)
    return memory


def _aligned_offsets(sizes: Iterable[int], dtype: torch.dtype) -> Iterator[int]:
    """Where each gradient starts in a flat tensor, and the end; on 64 bytes, as vectorised kernels like it."""
    step = 64 // dtype.itemsize
    offset = 0
    for size in sizes:
        yield offset
        offset += -(-size // step) * step
    yield offset


def _view(flat: torch.Tensor, like: torch.Tensor, offset: int) -> torch.Tensor:
    """A part of a flat tensor in the shape and layout of another one: channels-last stays channels-last."""
    return flat.as_strided(like.size(), torch.empty_like(like, device="meta").stride(), offset)


class BucketAccumulator(GradientAccumulator):
    """Autograd hands over each minibatch's gradients as tensors of their own, which costs nothing.

    Where a core has a single minibatch in a step and no other core, they are used as they are. Else, and where some are
    sparse, they are copied and added into flat memory (:class:`GradientBuckets`).
    """

    _has_sums: bool  # whether the memory holds minibatches of this step
    _is_present: list[bool]  # which of its parameters had a gradient in this step, on this core
    _step_squares: torch.Tensor | None
    _weight: Weight
    _num_weighted: Weight

    def __init__(self, *args: Any, **options: Any) -> None:
        self._memory = self._new_memory([], 0)
        self._frozen: set[torch.Tensor] = set()  # parameters that need no gradient and were given one all the same
        super().__init__(*args, **options)

    def _new_memory(self, parameters: list[torch.nn.Parameter], num_numbers: int) -> GradientBuckets:
        return GradientBuckets(parameters, num_numbers=num_numbers)

    def take(self, mean: Mean, *, is_last: bool, weight: Weight | None = None) -> None:
        self._is_weighted = weight is not None
        if self._measures and mean.num_minibatches > 1:  # one minibatch tells nothing of the noise
            self._measure(weight)
        if weight is not None:
            self._weight = self._weight + weight
            self._num_weighted = self._num_weighted + (weight > 0)
        if not is_last or self._has_sums or self._communicator.num_replicas > 1 or self._has_sparse():
            self._add()

    def _has_sparse(self) -> bool:
        """Sums are dense, and the inner optimizer must not get both kinds, which its state would not bear."""
        return any(p.grad is not None and p.grad.is_sparse for p in self.parameters())

    def _measure(self, weight: Weight | None) -> None:
        squares = self._per_weight(self._squares(self._with_gradients()), weight)
        if self._step_squares is not None:
            squares[: len(self._step_squares)] += self._step_squares  # a group may have been added since
        self._step_squares = squares

    def _add(self) -> None:
        """Add the gradients of the minibatch to the sums, and leave none behind."""
        self._frozen.update(p for p in self.parameters() if not p.requires_grad and p.grad is not None)
        self._fit([p for p in self.parameters() if p.requires_grad or p in self._frozen])
        gradients = [p.grad for p in self._memory.parameters]
        self._put(gradients)
        before = self._is_present if self._has_sums else [False] * len(gradients)
        self._is_present = [was or gradient is not None for was, gradient in zip(before, gradients, strict=True)]
        self._has_sums = True
        for p in self.parameters():
            p.grad = None

    def _put(self, gradients: list[torch.Tensor | None]) -> None:
        """Copy gradients to the memory, or add them to what is there."""
        memory = self._memory
        is_whole = not any(gradient is None for gradient in gradients)
        if gradients and is_whole and not self._has_sums:
            torch._foreach_copy_(memory.views, dense(gradients))
            return
        if not self._has_sums:
            memory.zero()
        found = [number for number, gradient in enumerate(gradients) if gradient is not None]
        if found:
            views = memory.views if is_whole else [memory.views[number] for number in found]
            torch._foreach_add_(views, dense([gradients[number] for number in found]))

    def _fit(self, parameters: list[torch.nn.Parameter]) -> None:
        """Have memory that fits the parameters as they are now, with the sums so far."""
        old = self._memory
        if self._has_sums:
            # one that was frozen since has its part in the step, and its place, which other cores may still have it at
            kept = {id(p) for p in (*parameters, *old.parameters)}
            parameters = [p for p in self.parameters() if id(p) in kept]
        num_numbers = self._num_numbers() + 1  # behind them, the layout
        if old.fits(parameters, num_numbers, is_thorough=not self._has_sums):
            return
        self._memory = self._new_memory(parameters, num_numbers)
        self._layout = self._layout_of(parameters)
        if self._has_sums:
            self._memory.take_over(old)
            was_present = {id(p) for p, has in zip(old.parameters, self._is_present, strict=True) if has}
            self._is_present = [id(p) in was_present for p in parameters]

    def _num_numbers(self) -> int:
        return len(self._inner.param_groups) + 2

    def reduce(self, mean: Mean, *, is_idle: bool) -> None:
        self._mean = mean
        if self._step_squares is not None:
            self._step_squares = self._step_squares / mean.loss_scale**2
        if not self._has_sums:
            self._scale_single(mean.factor(is_weighted=self._is_weighted) * self._share_of_weight())
            return
        if is_idle:
            self._drop_sums()
        else:
            self._scale_sums(mean.factor(is_weighted=self._is_weighted))
        if self._communicator.num_replicas > 1:
            self._sum_over_cores()
        self._scale_sums(self._share_of_weight())
        for p, view, has in zip(self._memory.parameters, self._memory.views, self._is_present, strict=True):
            p.grad = self._gradient_of(p, view) if has else None

    def _gradient_of(self, p: torch.nn.Parameter, view: torch.Tensor) -> torch.Tensor:
        return view

    def _share_of_weight(self) -> Weight:
        """What the sum over all cores is to be multiplied by: 1/W, or 1 where minibatches have no weights."""
        if not self._is_weighted:
            return 1.0
        if isinstance(self._weight, torch.Tensor):
            return torch.where(self._weight == 0, 0.0, 1 / self._weight)  # NaN stays NaN, and is seen
        return 1 / self._weight if self._weight else 0.0

    def _drop_sums(self) -> None:
        """Let what this core has not count."""
        self._memory.zero()
        self._is_present = [False] * len(self._is_present)
        self._weight = self._num_weighted = 0.0
        if self._step_squares is not None:
            self._step_squares = torch.zeros_like(self._step_squares)

    def _scale_sums(self, factor: Weight) -> None:
        if isinstance(factor, torch.Tensor) or factor != 1:
            self._memory.multiply(factor)

    def clip(self, largest: float) -> None:
        if self._has_sums:
            super().clip(largest)
        else:
            self._scale_single((largest / (self.norm() * self._mean.multiple + TINY)).clamp(max=1.0))

    def _scale_single(self, factor: Weight) -> None:
        """A single minibatch, used as it is; what the user may still hold is left alone."""
        owners = [p for p in self.parameters() if p.grad is not None]
        if owners and (isinstance(factor, torch.Tensor) or factor != 1):
            gradients: list[Any] = [p.grad.detach() for p in owners]  # type: ignore[union-attr]
            kinds = {(gradient.device, gradient.dtype) for gradient in gradients}
            if not isinstance(factor, torch.Tensor):
                scaled = list(torch._foreach_mul(gradients, factor))
            elif len(kinds) == 1:  # all at once, if the factor is of their kind
                scaled = list(torch._foreach_mul(gradients, factor.to(*kinds.pop())))
            else:
                # a factor is wider than a narrow gradient of one element without a shape
                scaled = [(gradient * factor.to(gradient.device)).to(gradient.dtype) for gradient in gradients]
            for p, gradient in zip(owners, scaled, strict=True):
                p.grad = gradient

    def _sum_over_cores(self) -> None:
        memory = self._memory
        memory.note(self._is_present)
        numbers, layout = memory.numbers[:-1], memory.numbers[-1:]
        self._write_numbers(numbers)
        if not self._is_weighted:
            put(numbers[-1:], UNWEIGHTED)
        layout.fill_(self._layout_and_epoch())
        self._communicator.sum(memory.flats)
        self._compare(numbers[-1])
        self._compare_layout(layout)
        self._read_numbers(numbers.clone())
        # who has all gradients here knows that none is missing on all cores, and need not wait for the device
        if not all(self._is_present):
            self._is_present = memory.noted()

    def _write_numbers(self, numbers: torch.Tensor) -> None:
        if self._step_squares is not None:
            numbers[:-2].copy_(self._step_squares)
        if self._is_weighted:
            put(numbers[-2], self._weight)
            put(numbers[-1], self._num_weighted)

    def _read_numbers(self, numbers: torch.Tensor) -> None:
        if self._step_squares is not None:
            self._step_squares = numbers[:-2]
        if self._is_weighted:
            self._weight, self._num_weighted = numbers[-2], numbers[-1]

    def clear(self) -> None:
        self._has_sums = False
        self._step_squares = None
        self._weight = self._num_weighted = 0.0
        for p in self.parameters():
            p.grad = None
        if self._memory.is_held():
            self._memory = self._new_memory([], 0)

    def discard(self) -> None:
        self.clear()

    def weight(self) -> Weight | None:
        return self._weight if self._is_weighted else None

    def _numbers(self) -> torch.Tensor:
        numbers = self._square([]).repeat(len(self._inner.param_groups) + 2)
        self._write_numbers(numbers)
        return numbers

    def _device(self) -> torch.device:
        return next(self.parameters()).device

    def _read(self, numbers: torch.Tensor) -> list[float]:
        return [float(number) for number in numbers.tolist()]

    def _square(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return square_of(gradients, like=next(self.parameters()))


def dense(gradients: list[Any]) -> list[torch.Tensor]:
    """Gradients of embeddings may be sparse."""
    return [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]


@final
class BucketViewAccumulator(GradientAccumulator):
    """For CUDA graphs, which need static addresses, and where there is no memory for one more gradient.

    ``p.grad`` is a view of flat memory for the whole run, and autograd accumulates there. So it is the sum over the
    step's minibatches so far, and must not be replaced: :meth:`take` refuses that. Every trainable parameter has a
    gradient in each update, 0 where none arrived. Where norms are measured each minibatch has the memory to itself, and
    a second set holds the sum of those before.
    """

    _sums: list[torch.Tensor]
    _has_taken: bool  # minibatches of this step
    _versions: list[int]

    def __init__(self, *args: Any, **options: Any) -> None:
        self._memory = GradientBuckets([], num_numbers=0)
        super().__init__(*args, **options)

    def take(self, mean: Mean, *, is_last: bool, weight: Weight | None = None) -> None:
        self._fit()
        self._is_weighted = weight is not None
        is_first, self._has_taken = not self._has_taken, not is_last
        if self._measures:
            self._measure(weight, is_first=is_first)
        if weight is not None:
            self._numbers()[-2].add_(weight)
            self._numbers()[-1].add_(weight > 0)
        if self._measures and not is_last:
            self._hold()
        self._note_versions()

    def _measure(self, weight: Weight | None, *, is_first: bool) -> None:
        squares = self._per_weight(self._squares(self._with_gradients()), weight)
        if not is_first:
            for flat, held in zip(self._memory.flats, self._sums, strict=True):
                flat.add_(held)  # the numbers so far among them
        self._numbers()[:-2].add_(squares)

    def _hold(self) -> None:
        """Put the sums aside and clear the memory for the next minibatch."""
        if len(self._sums) != len(self._memory.flats):
            self._sums = [torch.empty_like(flat) for flat in self._memory.flats]
        for flat, held in zip(self._memory.flats, self._sums, strict=True):
            held.copy_(flat)
            flat.zero_()

    def _fit(self) -> None:
        """See that every trainable parameter's gradient is its view, and make room for parameters that are new."""
        for number, (p, view) in enumerate(zip(self._memory.parameters, self._memory.views, strict=True)):
            is_frozen_and_empty = p.grad is None and not p.requires_grad
            if p.grad is not view and not is_frozen_and_empty:
                raise RuntimeError(
                    f"with `keep_gradients` a gradient must stay in its place, but that of parameter {number}, of the "
                    f"shape {tuple(p.shape)}, was replaced between backward() and step()"
                )
        trainable = [p for p in self.parameters() if p.requires_grad]
        num_numbers = len(self._inner.param_groups) + 3  # the last one for the layout
        if self._memory.fits(trainable, num_numbers) and self._memory.is_in_place():
            return
        if self._has_taken:
            raise RuntimeError(
                "with `keep_gradients` the trainable parameters must stay the same within a step, and where they are"
            )
        memory = GradientBuckets(trainable, num_numbers=num_numbers)
        self._layout = self._layout_of(trainable)
        for p, view in zip(trainable, memory.views, strict=True):
            if p.grad is not None:
                view.copy_(p.grad)
        for p in self._memory.parameters:
            p.grad = None  # of those that are frozen now
        for p, view in zip(trainable, memory.views, strict=True):
            p.grad = view
        self._memory, self._sums = memory, []

    def drop(self) -> None:
        is_untouched = self._versions == self._versions_now()
        if not self._has_taken:
            if not is_untouched or self._are_elsewhere():
                self.discard()
            return
        if is_untouched:
            return
        if not self._measures:
            raise RuntimeError(
                "with `keep_gradients` zero_grad() cannot drop the gradient of a backward pass without step(), as it "
                "was added to those of the minibatches before"
            )
        self._memory.zero()
        self._note_versions()

    def _are_elsewhere(self) -> bool:
        """Whether there are gradients beside the memory, of parameters that were unfrozen since."""
        own = set(self._memory.parameters)
        return any(p.grad is not None for p in self.parameters() if p not in own)

    def _note_versions(self) -> None:
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        """Another one for each change of the memory."""
        return [flat._version for flat in self._memory.flats]

    def reduce(self, mean: Mean, *, is_idle: bool) -> None:
        self._mean = mean
        if is_idle:
            self._memory.zero()
        else:
            self._scale(mean.factor(is_weighted=self._is_weighted))
            self._numbers()[:-2].div_(mean.loss_scale**2)
        if self._communicator.num_replicas > 1:
            if not self._is_weighted:
                put(self._numbers()[-1], UNWEIGHTED)
            layout = self._memory.numbers[-1:]
            put(layout, self._layout_and_epoch())
            self._communicator.sum(self._memory.flats)
            self._compare(self._numbers()[-1])
            self._compare_layout(layout)
        if self._is_weighted:
            weight = self._numbers()[-2]
            self._scale(torch.where(weight == 0, 0.0, 1 / weight))

    def _scale(self, factor: Weight) -> None:
        """Multiply the gradients, and leave the numbers behind them as they are."""
        if isinstance(factor, torch.Tensor) or factor != 1:
            numbers = self._memory.numbers.clone()
            self._memory.multiply(factor)
            self._memory.numbers.copy_(numbers)

    def clear(self) -> None:
        self._has_taken = False
        self._memory.zero()
        self._note_versions()

    def discard(self) -> None:
        super().discard()
        for p, view in zip(self._memory.parameters, self._memory.views, strict=True):
            p.grad = view
        self._has_taken = False
        self._fit()
        self.clear()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for p, view in zip(self._memory.parameters, self._memory.views, strict=True):
            p.grad = view
        if not self._has_taken:
            self._sums = []  # a module that was converted since has its memory made anew
        self._note_versions()

    def weight(self) -> Weight | None:
        return self._numbers()[-2].clone() if self._is_weighted else None

    def _numbers(self) -> torch.Tensor:
        return self._memory.numbers[:-1]

    def _read(self, numbers: torch.Tensor) -> list[float]:
        return [float(number) for number in numbers.tolist()]

    def _square(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return square_of(gradients, like=next(self.parameters()))


@final
class ShardedBucketAccumulator(BucketAccumulator):
    """The part of each gradient that is here, summed over the cores that have the same part of other samples.

    Norms are those of the whole gradients: processes that share the samples add up what each has of them.

    Args:
        model: the processes that share this one's samples.
        model_groups: the groups that these are made of.
    """

    def __init__(self, *args: Any, model: Communicator, model_groups: list[Ranks], **options: Any) -> None:
        self._model, self._model_groups = model, model_groups
        super().__init__(*args, **options)

    def take(self, mean: Mean, *, is_last: bool, weight: Weight | None = None) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad = placed_like(p, p.grad)
        super().take(mean, is_last=is_last, weight=weight)

    def _put(self, gradients: list[torch.Tensor | None]) -> None:
        super()._put([None if gradient is None else to_local(gradient) for gradient in gradients])

    def _gradient_of(self, p: torch.nn.Parameter, view: torch.Tensor) -> torch.Tensor:
        return from_local_like(p, view) if is_dtensor(p) else view

    def clip(self, largest: float) -> None:
        factor = (largest / (self.norm() * self._mean.multiple + TINY)).clamp(max=1.0)
        self._scale_single(factor)

    def _scale_single(self, factor: Weight) -> None:
        """A factor is a plain tensor, which must not meet one that is split."""
        for p in self.parameters():
            if p.grad is not None:
                part = to_local(p.grad.detach())
                p.grad = self._gradient_of(p, (part * factor).to(part.dtype))

    def _square(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return self._square_each([gradients])[0]

    def _square_each(self, lists: list[list[torch.Tensor]]) -> torch.Tensor:
        return SplitSquares(self._model, self._model_groups, self._like()).of_each(lists)

    def _like(self) -> torch.Tensor:
        return to_local(next(self.parameters()))
