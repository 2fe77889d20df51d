"""AsyncWriter: writes in the background, from copies of the state on the host."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from variable_batch_size.runs.state_file import mapped


def call_at_exit(finish: Callable[[], Any]) -> None:
    """Call something when this process ends, and not in processes that are forked from it.

    What ``atexit`` calls comes too late: asyncio then resolves no more names of hosts.

    Args:
        finish: must not raise, as threads would then not be waited for.
    """
    process = os.getpid()
    threading._register_atexit(lambda: finish() if os.getpid() == process else None)  # type: ignore[attr-defined]


Need = tuple[str, torch.Size, torch.dtype]
"""Where a tensor is in a state, and what it is."""


def needs_of(state: Any) -> list[Need]:
    """What a copy of a state needs memory for."""
    found: list[Need] = []

    def note(part: Any, place: str) -> Any:
        if isinstance(part, torch.Tensor) and part.layout == torch.strided:
            found.append((place, part.shape, part.dtype))
        return part

    mapped(state, note)
    return found


class HostStaging:
    """Copies a state between two steps, so that it can be written while training changes the original.

    New memory is what takes most of the time, so that of the copy before is used again: it must have been written by
    then. For the first copy, :meth:`reserve` gets it ready.
    """

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    def of(self, state: dict[str, Any]) -> dict[str, Any]:
        """Nested containers with all tensors copied; tensors that are one remain one."""
        before, self._copies = self._copies, {}
        seen: dict[tuple[Any, ...], torch.Tensor] = {}

        def copy_of(part: Any, place: str) -> Any:
            return self._copy_of(part.detach(), place, before, seen) if isinstance(part, torch.Tensor) else part

        copied: dict[str, Any] = mapped(state, copy_of)
        return copied

    def reserve(self, needs: Iterable[Need]) -> None:
        """Have memory for a copy, touched so that the system has really given it."""
        self._copies = {place: torch.zeros(shape, dtype=dtype).fill_(1) for place, shape, dtype in needs}

    def _copy_of(
        self,
        tensor: torch.Tensor,
        place: str,
        before: dict[str, torch.Tensor],
        seen: dict[tuple[Any, ...], torch.Tensor],
    ) -> torch.Tensor:
        signs = (tensor.is_conj(), tensor.is_neg())  # of a view that says how to read what is there
        layout = (tensor.shape, tensor.stride(), tensor.dtype, signs) if _is_there(tensor) else ()
        one = (tensor.device, tensor.data_ptr(), *layout) if layout else ()
        if one and one in seen:
            return seen[one]
        copy = before.get(place)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype or tensor.layout != torch.strided:
            copy = tensor.to("cpu", copy=True)
        else:
            copy.copy_(tensor)
        self._copies[place] = copy
        if one:
            seen[one] = copy
        return copy


def _is_there(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own that its address tells."""
    return tensor.device.type in ("cpu", "cuda") and tensor.layout == torch.strided and tensor.numel() > 0


logger = logging.getLogger(__name__)


class AsyncWriter:
    """A thread that writes while training goes on.

    A process that ends lets it finish. What has failed is raised once, by :meth:`check` or :meth:`wait`, or logged
    where the process ends before.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._pending: Future[None] | None = None
        this = weakref.ref(self)
        call_at_exit(lambda: _finish(this()))

    def start(self, write: Callable[[], None]) -> None:
        """Begin to write, when what was begun before is written."""
        self.wait()
        self._pending = self._thread.submit(write)

    def wait(self) -> None:
        """Until what was begun is written; raises what has failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def check(self) -> None:
        """Raise what has failed, without waiting for what has not ended."""
        if self._pending is not None and self._pending.done():
            self.wait()


def _finish(writer: AsyncWriter | None) -> None:
    """Wait for what was begun, when the process ends."""
    try:
        if writer is not None:
            writer.wait()
    except BaseException as error:
        logger.error("what was being written when the process ended is lost: %s", error)
