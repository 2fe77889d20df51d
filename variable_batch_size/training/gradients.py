"""The gradients of a step: kept while they accumulate, measured, weighted and summed over all cores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from operator import is_
from typing import Any, final

import torch

from variable_batch_size.cores.communicator import Communicator

Parameters = list[torch.nn.Parameter]
ParamGroups = Callable[[], list[dict[str, Any]]]


def gradients_for(
    param_groups: ParamGroups, communicator: Communicator, *, measures: bool = False, is_preconditioned: bool = False
) -> Gradients:
    """The kind of gradient buffers that suits the device."""
    kind = FlatGradients if communicator.keeps_flat_gradients else SeparateGradients
    return kind(param_groups, communicator, measures=measures, is_preconditioned=is_preconditioned)


class Gradients(ABC):
    """Gives every trainable parameter a gradient buffer that stays, so that autograd adds each minibatch in place.

    A parameter that has never had a gradient on any core has ``grad = None`` in the update, as in plain PyTorch: the
    inner optimizer then leaves it alone, weight decay and momentum included.

    Args:
        param_groups: returns the parameter groups of the inner optimizer as they are now.
        communicator: the way to the other cores.
        measures: whether the squared norm of each minibatch's gradients is kept, for each parameter group.
        is_preconditioned: whether gradients are divided by :attr:`preconditioners`, at first 1, before that.
    """

    def __init__(
        self, param_groups: ParamGroups, communicator: Communicator, *, measures: bool, is_preconditioned: bool
    ) -> None:
        self._param_groups = param_groups
        self._communicator = communicator
        self._measures = measures
        self._is_preconditioned = is_preconditioned
        self._parameters: Parameters = []
        self._groups: list[int] = []  # to which group each parameter belongs
        self._buffers: list[torch.Tensor] = []
        self._waiting: dict[int, Any] = {}  # the hooks that wait for a first gradient, by the number of the parameter
        self._arrived: set[int] = set()  # those of them that got one in this step, on this core
        self.preconditioners: list[torch.Tensor] = []
        for p, _ in self._trainable():
            p.grad = None
        self._fit()

    def collect(self, is_last: bool) -> None:
        """Take in the latest minibatch's gradients, even where ``grad`` was replaced; `is_last` in the step, here."""
        if not all(map(is_, [p.grad for p in self._parameters], self._buffers)):
            self._take_back()
        if is_last or self._measures:  # until then, a new parameter's gradients accumulate where autograd puts them
            trainable = [p for group in self._param_groups() for p in group["params"] if p.requires_grad]
            if len(trainable) != len(self._parameters) or not all(map(is_, trainable, self._parameters)):
                self._fit()
        if self._measures:
            self._measure(is_last)

    def reduce(self, weight: float) -> None:
        """Replace the sums of this core by the weighted sum over all; what weighs 0 leaves no mark, not even NaN."""
        self._reduce(weight)
        if self._waiting:
            for i in self._arrived_anywhere():
                self._waiting.pop(i).remove()
            for i in self._waiting:
                self._parameters[i].grad = None
            self._arrived.clear()

    @abstractmethod
    def norms(self) -> list[tuple[float, float]]:
        """After :meth:`reduce`: for each group, the weighted sum of minibatches' squared norms, and that of the result.

        The one thing here that waits for the device.
        """

    @abstractmethod
    def clear(self) -> None:
        """Start the next step from zero."""

    def norm(self) -> torch.Tensor:
        """After :meth:`reduce`: the norm of the result over all parameters, on the device."""
        norms = [torch.linalg.vector_norm(p.grad) for p in self._parameters if p.grad is not None]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    @property
    def parameters(self) -> Parameters:
        """The trainable parameters."""
        return self._parameters

    @property
    def waiting(self) -> list[int]:
        """Which parameters have never had a gradient, by their number among all; part of the state of a run."""
        waiting = {id(self._parameters[i]) for i in self._waiting}
        return [number for number, p in enumerate(self._all()) if id(p) in waiting]

    @waiting.setter
    def waiting(self, numbers: Iterable[int]) -> None:
        waiting = {id(p) for number, p in enumerate(self._all()) if number in set(numbers)}
        for i in [i for i in self._waiting if id(self._parameters[i]) not in waiting]:
            self._waiting.pop(i).remove()

    @abstractmethod
    def _allocate(self, parameters: Parameters) -> list[torch.Tensor]:
        """A zero tensor for each parameter, of its shape."""

    @abstractmethod
    def _measure(self, is_last: bool) -> None:
        """Add the squared norms of the latest minibatch's gradients to those of the step."""

    @abstractmethod
    def _reduce(self, weight: float) -> None: ...

    @abstractmethod
    def _arrived_anywhere(self) -> Iterable[int]:
        """Which of the waiting parameters got a gradient on any core."""

    def _take_back(self) -> None:
        """Add to the buffers what is in gradients that have taken their place, and put the buffers there again."""
        for p, buffer in zip(self._parameters, self._buffers, strict=True):
            if p.grad is not buffer:
                if p.grad is not None:
                    buffer.add_(p.grad)
                p.grad = buffer

    def _all(self) -> Parameters:
        return [p for group in self._param_groups() for p in group["params"]]

    def _trainable(self) -> Iterator[tuple[torch.nn.Parameter, int]]:
        for number, group in enumerate(self._param_groups()):
            for p in group["params"]:
                if p.requires_grad:
                    yield p, number

    def _fit(self) -> None:
        """Fit the buffers to the parameters that are trainable now, keeping what has accumulated."""
        old = {id(p): (i in self._waiting, i in self._arrived) for i, p in enumerate(self._parameters)}
        for hook in self._waiting.values():
            hook.remove()
        trainable = list(self._trainable())
        for p in set(self._parameters) - {p for p, _ in trainable}:
            p.grad = None
        self._parameters, self._groups = [p for p, _ in trainable], [group for _, group in trainable]
        self._buffers = self._allocate(self._parameters)
        self._waiting, self._arrived = {}, set()
        for i, (p, buffer) in enumerate(zip(self._parameters, self._buffers, strict=True)):
            is_waiting, has_arrived = old.get(id(p), (True, p.grad is not None))
            if is_waiting:
                hook = p.register_post_accumulate_grad_hook(self._note_arrival(i))  # type: ignore[no-untyped-call]
                self._waiting[i] = hook
            if has_arrived:
                self._arrived.add(i)
            if p.grad is not None:
                buffer.copy_(p.grad)
            p.grad = buffer

    def _note_arrival(self, number: int) -> Callable[[torch.Tensor], None]:
        return lambda parameter: self._arrived.add(number)

    @property
    def _num_groups(self) -> int:
        return len(self._param_groups())


@final
class FlatGradients(Gradients):
    """For eager devices: all gradients of one dtype in one flat tensor, which one call sums, weighs or zeroes.

    A parameter's gradient is a view with the parameter's own strides. Behind the gradients each parameter has one more
    element, in which a core says that a first gradient has arrived, and each group one for the norms that are measured;
    so these travel in the same reduction. (Norms need float32: beside narrower gradients only, they travel alone.)

    Where norms are measured, a minibatch has the flat tensors to itself, and a second set of them, made when a core
    first has several minibatches in a step, holds the sum of the ones before.
    """

    def _allocate(self, parameters: Parameters) -> list[torch.Tensor]:
        if getattr(self, "_has_sums", False):
            raise RuntimeError(
                "parameters changed while a step accumulates: freeze, unfreeze or add them between steps"
            )
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, p in enumerate(parameters):
            kinds.setdefault((p.device, p.dtype), []).append(i)
        self._flats: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []
        self._has_sums = False
        self._arrivals: dict[int, torch.Tensor] = {}
        self._segments: list[list[tuple[torch.Tensor, torch.Tensor | None]]] = [[] for _ in range(self._num_groups)]
        self._squares: list[torch.Tensor] = []
        views: dict[int, torch.Tensor] = {}
        divisors: dict[int, torch.Tensor] = {}
        for (device, dtype), numbers in kinds.items():
            *offsets, end = _aligned_offsets((parameters[i].numel() for i in numbers), dtype)
            has_squares = self._measures and not self._squares and dtype in (torch.float32, torch.float64)
            num_squares = self._num_groups if has_squares else 0
            flat = torch.zeros(end + len(numbers) + num_squares, dtype=dtype, device=device)
            divisor = torch.ones_like(flat) if self._is_preconditioned else None
            self._flats.append(flat)
            if has_squares:
                self._squares = list(flat[end + len(numbers) :])
            for place, (i, offset) in enumerate(zip(numbers, offsets, strict=True), start=end):
                views[i] = _view(flat, parameters[i], offset)
                self._arrivals[i] = flat[place]
                if divisor is not None:
                    divisors[i] = _view(divisor, parameters[i], offset)
            for group in range(self._num_groups):
                places = [k for k, i in enumerate(numbers) if self._groups[i] == group]
                if places:
                    part = slice(offsets[places[0]], [*offsets, end][places[-1] + 1])
                    self._segments[group].append((flat[part], None if divisor is None else divisor[part]))
        if self._measures and not self._squares and parameters:
            self._flats.append(torch.zeros(self._num_groups, device=parameters[0].device))
            self._squares = list(self._flats[-1])
        self.preconditioners = [divisors[i] for i in range(len(parameters))] if self._is_preconditioned else []
        return [views[i] for i in range(len(parameters))]

    def _measure(self, is_last: bool) -> None:
        if not self._squares:
            return
        squares = self._squares_now()
        if is_last and self._has_sums:
            for flat, held in zip(self._flats, self._sums, strict=True):
                flat.add_(held)
            self._has_sums = False
        for total, square in zip(self._squares, squares, strict=True):
            total.add_(square)
        if not is_last:
            self._hold()

    def _hold(self) -> None:
        """Add what the flat tensors hold to the sums, and clear them for the next minibatch."""
        if not self._sums:
            self._sums = [torch.zeros_like(flat) for flat in self._flats]
        for flat, held in zip(self._flats, self._sums, strict=True):
            if self._has_sums:
                held.add_(flat)
            else:
                held.copy_(flat)
            flat.zero_()
        self._has_sums = True

    def _squares_now(self) -> list[torch.Tensor]:
        """The squared norm of what the flat tensors hold, for each group."""
        squares = []
        for segments in self._segments:
            parts = [_square(gradients if divisor is None else gradients / divisor) for gradients, divisor in segments]
            squares.append(sum(parts[1:], start=parts[0]) if parts else torch.zeros((), device=self._flats[0].device))
        return squares

    def _reduce(self, weight: float) -> None:
        if weight == 0:
            self.clear()
            self._arrived.clear()
        elif weight != 1:
            for flat in self._flats:
                flat.mul_(weight)
        if self._communicator.num_replicas > 1:
            for i in self._arrived & self._waiting.keys():
                self._arrivals[i].fill_(1)
            self._communicator.sum(self._flats)

    def _arrived_anywhere(self) -> Iterable[int]:
        if self._communicator.num_replicas == 1:
            return self._arrived & self._waiting.keys()
        waiting = list(self._waiting)
        said = torch.stack([self._arrivals[i].ne(0).cpu() for i in waiting]).tolist()
        return [i for i, has_arrived in zip(waiting, said, strict=True) if has_arrived]

    def norms(self) -> list[tuple[float, float]]:
        of_result = self._squares_now()
        both = torch.stack([*(self._squares or map(torch.zeros_like, of_result)), *of_result]).tolist()
        return list(zip(both[: len(of_result)], both[len(of_result) :], strict=True))

    def clear(self) -> None:
        self._has_sums = False
        for flat in self._flats:
            flat.zero_()


@final
class SeparateGradients(Gradients):
    """For XLA, whose compiler merges what it can: a tensor for each gradient, and the same program on every core.

    Whether a core is idle must therefore be data, in a tensor, and no branch. Norms are taken by hooks, of each
    gradient as it arrives.
    """

    def _allocate(self, parameters: Parameters) -> list[torch.Tensor]:
        for hook in getattr(self, "_norm_hooks", []):
            hook.remove()
        # made on the host: zeros made on the device would be a program of their own
        buffers = [torch.zeros(p.shape, dtype=p.dtype).to(p.device) for p in parameters]
        self._norm_hooks: list[Any] = []
        self._squares: list[torch.Tensor] = []
        if self._measures and parameters:
            self._squares = [torch.zeros(1).to(parameters[0].device) for _ in range(self._num_groups)]
            self._norm_hooks = [
                p.register_hook(self._add_square(i))  # type: ignore[no-untyped-call]
                for i, p in enumerate(parameters)
            ]
        if self._is_preconditioned:
            self.preconditioners = [torch.ones(p.shape, dtype=p.dtype).to(p.device) for p in parameters]
        return buffers

    def _add_square(self, number: int) -> Callable[[torch.Tensor], None]:
        def add(gradient: torch.Tensor) -> None:
            self._squares[self._groups[number]].add_(self._square(gradient, number))

        return add

    def _square(self, gradient: torch.Tensor, number: int) -> torch.Tensor:
        if self._is_preconditioned:
            gradient = gradient / self.preconditioners[number]
        return gradient.float().pow(2).sum()

    def _measure(self, is_last: bool) -> None:
        """The hooks have done it."""

    def _reduce(self, weight: float) -> None:
        if not self._buffers:
            return
        weight_tensor = torch.tensor([weight]).to(self._buffers[0].device)
        counts = weight_tensor != 0
        for tensor in (*self._buffers, *self._squares):
            weighted = torch.where(counts, tensor * weight_tensor, torch.zeros_like(tensor))
            tensor.copy_(weighted.view_as(tensor))
        self._communicator.sum([*self._buffers, *self._squares])

    def _arrived_anywhere(self) -> Iterable[int]:
        return self._arrived & self._waiting.keys()  # the same on all cores, as their programs are

    def norms(self) -> list[tuple[float, float]]:
        if not self._buffers:
            return [(0.0, 0.0)] * self._num_groups
        of_result = [torch.zeros(1, device=self._buffers[0].device) for _ in range(self._num_groups)]
        for i, buffer in enumerate(self._buffers):
            of_result[self._groups[i]] = of_result[self._groups[i]] + self._square(buffer, i)
        both = torch.cat([*(self._squares or [torch.zeros_like(square) for square in of_result]), *of_result])
        self._communicator.flush()
        values = both.cpu().tolist()
        return list(zip(values[: self._num_groups], values[self._num_groups :], strict=True))

    def clear(self) -> None:
        for tensor in (*self._buffers, *self._squares):
            tensor.zero_()


def _aligned_offsets(sizes: Iterable[int], dtype: torch.dtype) -> Iterator[int]:
    """Where each gradient starts in a flat tensor, and the end; on 64 bytes, as vectorised kernels like it."""
    step = 64 // dtype.itemsize
    offset = 0
    for size in sizes:
        yield offset
        offset += -(-size // step) * step
    yield offset


def _square(tensor: torch.Tensor) -> torch.Tensor:
    """The squared norm, in float32 at least."""
    if tensor.dtype in (torch.float32, torch.float64):
        return torch.dot(tensor, tensor)
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32)
    return norm.square()


def _view(flat: torch.Tensor, like: torch.Tensor, offset: int) -> torch.Tensor:
    """A part of a flat tensor in the shape and layout of another one: channels-last stays channels-last."""
    return flat.as_strided(like.size(), torch.empty_like(like, device="meta").stride(), offset)
