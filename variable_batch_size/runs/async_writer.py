"""AsyncWriter: writes in a background thread; HostStaging: copies of a state on the host for it."""

import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from variable_batch_size.runs.state_file import tree_map

logger = logging.getLogger(__name__)


def call_at_exit(finish: Callable[[], Any]) -> None:
    """Call a function, which must not raise, when this process ends, but not in processes forked from it."""
    process = os.getpid()  # atexit would be too late, as asyncio cannot look up host names by then
    threading._register_atexit(lambda: finish() if os.getpid() == process else None)  # type: ignore[attr-defined]


class HostStaging:
    """Copies a state to the host between two steps, into the memory of the previous copy: allocation takes longest."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    def reserve(self, state: dict[str, Any]) -> None:
        """Allocate memory for a copy, and touch it so that the system really provides it."""

        def allocate(part: Any, place: str) -> Any:
            if isinstance(part, torch.Tensor) and part.layout == torch.strided:
                self._copies[place] = torch.zeros(part.shape, dtype=part.dtype).fill_(1)
            return part

        tree_map(state, allocate)

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy all tensors of a state; tensors that share memory share their copy."""
        before, self._copies = self._copies, {}
        seen: dict[tuple[Any, ...], torch.Tensor] = {}

        def copy_of(part: Any, place: str) -> Any:
            if not isinstance(part, torch.Tensor):
                return part
            tensor, memory = part.detach(), _memory_of(part)
            if memory in seen:
                return seen[memory]
            copy = before.get(place)
            is_dense = tensor.layout == torch.strided
            if copy is None or not is_dense or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = tensor.to("cpu", copy=True)
            else:
                copy.copy_(tensor)
            self._copies[place] = copy
            if memory:
                seen[memory] = copy
            return copy

        return tree_map(state, copy_of)  # type: ignore[no-any-return]


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The address of a tensor and how it is read from there; empty if it has no address."""
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout != torch.strided or not tensor.numel():
        return ()
    view = (tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), *view)


class AsyncWriter:
    """A thread that writes while training continues; the process waits for it before it ends.

    An error is raised once, by :meth:`check` or :meth:`wait`, or logged if the process ends first.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._pending: Future[None] | None = None
        finish = weakref.WeakMethod(self._finish)
        call_at_exit(lambda: method() if (method := finish()) else None)

    def start(self, write: Callable[[], None]) -> None:
        """Begin a write once the previous one is complete."""
        self.wait()
        self._pending = self._thread.submit(write)

    def wait(self) -> None:
        """Wait until the write is complete, and raise if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def check(self) -> None:
        """Raise if a write has failed, without waiting for one that is running."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def _finish(self) -> None:
        try:
            self.wait()
        except BaseException as error:
            logger.error("a write that was running when the process ended has failed: %s", error)
