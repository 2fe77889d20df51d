"""The gradients of a step: kept while they accumulate, then weighted and summed over all cores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from operator import is_
from typing import Any, final

import torch

from variable_batch_size.communication import Communicator, Xla

Parameters = list[torch.nn.Parameter]
ParamGroups = Callable[[], list[dict[str, Any]]]


def gradients_for(param_groups: ParamGroups, communicator: Communicator) -> Gradients:
    """The kind of gradient buffers that suits the device."""
    return (SeparateGradients if isinstance(communicator, Xla) else FlatGradients)(param_groups, communicator)


class Gradients(ABC):
    """Gives every trainable parameter a gradient buffer that stays, so that autograd adds each minibatch in place.

    A parameter that has never had a gradient on any core has ``grad = None`` in the update, as in plain PyTorch: the
    inner optimizer then leaves it alone, weight decay and momentum included.

    Args:
        param_groups: returns the parameter groups of the inner optimizer as they are now.
        communicator: the way to the other cores.
    """

    def __init__(self, param_groups: ParamGroups, communicator: Communicator) -> None:
        self._param_groups = param_groups
        self._communicator = communicator
        self._parameters: Parameters = []
        self._buffers: list[torch.Tensor] = []
        self._waiting: dict[
            int, Any
        ] = {}  # number of a parameter that never had a gradient: the hook that waits for it
        self._arrived: set[int] = set()  # those of them that got one in this step, on this core
        for p in self._trainable():
            p.grad = None
        self._fit()

    def collect(self) -> None:
        """See to it that the latest minibatch's gradients are in the buffers, even where ``grad`` was replaced."""
        for p, buffer in zip(self._parameters, self._buffers, strict=True):
            if p.grad is not buffer:
                if p.grad is not None:
                    buffer.add_(p.grad)
                p.grad = buffer
        trainable = self._trainable()
        if len(trainable) != len(self._parameters) or not all(map(is_, trainable, self._parameters)):
            self._fit()

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
    def clear(self) -> None:
        """Start the next step from zero."""

    def parameters(self) -> Parameters:
        """The parameters that have a gradient."""
        return [p for p in self._parameters if p.grad is not None]

    @abstractmethod
    def _allocate(self, parameters: Parameters) -> list[torch.Tensor]:
        """A zero tensor for each parameter, of its shape."""

    @abstractmethod
    def _reduce(self, weight: float) -> None: ...

    @abstractmethod
    def _arrived_anywhere(self) -> Iterable[int]:
        """Which of the waiting parameters got a gradient on any core."""

    def _trainable(self) -> Parameters:
        return [p for group in self._param_groups() for p in group["params"] if p.requires_grad]

    def _fit(self) -> None:
        """Fit the buffers to the parameters that are trainable now, keeping what has accumulated."""
        old = {id(p): (i in self._waiting, i in self._arrived) for i, p in enumerate(self._parameters)}
        for hook in self._waiting.values():
            hook.remove()
        trainable = self._trainable()
        for p in set(self._parameters) - set(trainable):
            p.grad = None
        self._parameters, self._buffers = trainable, self._allocate(trainable)
        self._waiting, self._arrived = {}, set()
        for i, (p, buffer) in enumerate(zip(self._parameters, self._buffers, strict=True)):
            is_waiting, has_arrived = old.get(id(p), (True, p.grad is not None))
            if is_waiting:
                self._waiting[i] = p.register_post_accumulate_grad_hook(self._note_arrival(i))  # type: ignore[no-untyped-call]
            if has_arrived:
                self._arrived.add(i)
            if p.grad is not None:
                buffer.copy_(p.grad)
            p.grad = buffer

    def _note_arrival(self, number: int) -> Callable[[torch.Tensor], None]:
        return lambda parameter: self._arrived.add(number)


@final
class FlatGradients(Gradients):
    """For eager devices: all gradients of one dtype in one flat tensor, which one call sums, weighs or zeroes.

    A parameter's gradient is a view with the parameter's own strides. Behind the gradients each parameter has one more
    element, in which a core says that a first gradient has arrived; so that news travels in the same reduction.
    """

    def _allocate(self, parameters: Parameters) -> list[torch.Tensor]:
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, p in enumerate(parameters):
            kinds.setdefault((p.device, p.dtype), []).append(i)
        self._flats: list[torch.Tensor] = []
        self._arrivals: dict[int, torch.Tensor] = {}
        views: dict[int, torch.Tensor] = {}
        for (device, dtype), numbers in kinds.items():
            *offsets, end = _aligned_offsets((parameters[i].numel() for i in numbers), dtype)
            flat = torch.zeros(end + len(numbers), dtype=dtype, device=device)
            self._flats.append(flat)
            for place, (i, offset) in enumerate(zip(numbers, offsets, strict=True), start=end):
                views[i] = flat.as_strided(parameters[i].size(), _dense_strides(parameters[i]), offset)
                self._arrivals[i] = flat[place]
        return [views[i] for i in range(len(parameters))]

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

    def clear(self) -> None:
        for flat in self._flats:
            flat.zero_()


@final
class SeparateGradients(Gradients):
    """For XLA, whose compiler merges what it can: a tensor for each gradient, and the same program on every core.

    Whether a core is idle must therefore be data, in a tensor, and no branch.
    """

    def _allocate(self, parameters: Parameters) -> list[torch.Tensor]:
        # made on the host: zeros made on the device would be a program of their own
        return [torch.zeros(p.shape, dtype=p.dtype).to(p.device) for p in parameters]

    def _reduce(self, weight: float) -> None:
        if not self._buffers:
            return
        weight_tensor = torch.tensor([weight]).to(self._buffers[0].device)
        counts = weight_tensor != 0
        for buffer in self._buffers:
            weighted = torch.where(counts, buffer * weight_tensor, torch.zeros_like(buffer))
            buffer.copy_(weighted.view_as(buffer))
        self._communicator.sum(self._buffers)

    def _arrived_anywhere(self) -> Iterable[int]:
        return self._arrived & self._waiting.keys()  # the same on all cores, as their programs are

    def clear(self) -> None:
        for buffer in self._buffers:
            buffer.zero_()


def _aligned_offsets(sizes: Iterable[int], dtype: torch.dtype) -> Iterator[int]:
    """Where each gradient starts in a flat tensor, and the end; on 64 bytes, as vectorised kernels like it."""
    step = 64 // dtype.itemsize
    offset = 0
    for size in sizes:
        yield offset
        offset += -(-size // step) * step
    yield offset


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor's own layout without gaps: channels-last stays channels-last."""
    return torch.empty_like(tensor, device="meta").stride()
