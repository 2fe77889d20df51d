"""Source: samples of a stream, read one after another and counted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeAlias

from torch.utils.data import _utils as loading

Samples: TypeAlias = Iterable[Any] | Callable[[], Iterable[Any]]
"""What may be read as a stream: an iterable, an iterator, or a function that makes one."""


class Source:
    """Reads a stream from its beginning or from a state that it had, and counts.

    The stream does not see that it is read in a loader worker: one that deals itself out to the workers would give each
    of them another part, and every worker must see all of it to know which minibatch is which.

    Args:
        samples: an iterable, an iterator, which can be read once, or a function that makes one.

    Attributes:
        num_read: samples read in this pass, skipped ones included.
        has_ended: whether there were fewer samples than were asked for.

    >>> source = Source(range(7))
    >>> source.begin(epoch=0)
    >>> source.skip(2)
    >>> source.take(3), source.num_read
    ([2, 3, 4], 5)
    >>> source.take(3), source.num_read, source.has_ended
    ([5, 6], 7, True)
    """

    def __init__(self, samples: Samples) -> None:
        if not isinstance(samples, Iterable) and not callable(samples):
            raise ValueError(
                f"`samples` must be an iterable or a function that makes one, got {type(samples).__name__}"
            )
        self._samples = samples
        self._is_iterator = isinstance(samples, Iterator)
        self._has_state = hasattr(samples, "state_dict") and hasattr(samples, "load_state_dict")
        self._first_state: Any = None  # of the stream at its beginning, once it has been in another
        self._has_begun = False
        self._iterator: Iterator[Any] = iter(())
        self._ahead: list[Any] = []  # samples that were looked at and not yet read
        self.num_read = 0
        self.has_ended = False

    def begin(self, *, epoch: int, state: dict[str, Any] | None = None) -> None:
        """Go to the beginning, or to where :meth:`state_dict` was called.

        Args:
            epoch: told to a stream that has ``set_epoch``.
            state: of such a stream; None for its beginning.
        """
        if self._is_iterator and self._has_begun:
            raise RuntimeError(
                "the stream is an iterator, which can be read once: pass an iterable, or a function that makes one"
            )
        with _as_outside_of_workers():
            if hasattr(self._samples, "set_epoch"):
                self._samples.set_epoch(epoch)
            if self._has_state:
                self._load(None if state is None else state["stream"])
            made = self._samples if isinstance(self._samples, Iterable) else self._samples()
            self._iterator = iter(made)
        self._has_begun = True
        self._ahead = []
        self.num_read = 0 if state is None else state["num_read"]
        self.has_ended = False

    def _load(self, state: Any) -> None:
        stream: Any = self._samples
        if not self._has_begun:
            self._first_state = stream.state_dict()
        if state is not None or self._has_begun:
            stream.load_state_dict(self._first_state if state is None else state)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, for :meth:`begin`."""
        stream: Any = self._samples
        with _as_outside_of_workers():
            state = stream.state_dict() if self._has_state and self._has_begun else None
        return {"num_read": self.num_read + len(self._ahead), "stream": state}

    def take(self, number: int) -> list[Any]:
        """The next samples; fewer if the stream ends."""
        found = self.peek(number)
        self._ahead = self._ahead[number:]
        self._count(number, len(found))
        return found

    def peek(self, number: int) -> list[Any]:
        """The next samples, which stay the next ones."""
        with _as_outside_of_workers():
            self._ahead += islice(self._iterator, max(0, number - len(self._ahead)))
        return self._ahead[:number]

    def skip(self, number: int) -> None:
        """Leave out the next samples."""
        if not number:
            return
        from_ahead = min(number, len(self._ahead))
        self._ahead = self._ahead[from_ahead:]
        with _as_outside_of_workers():
            self._count(number, from_ahead + sum(1 for _ in islice(self._iterator, number - from_ahead)))

    def _count(self, asked: int, found: int) -> None:
        self.num_read += found
        self.has_ended = self.has_ended or found < asked


@contextlib.contextmanager
def _as_outside_of_workers() -> Iterator[None]:
    """Let ``get_worker_info()`` say for a while that this is no loader worker."""
    info = loading.worker._worker_info
    loading.worker._worker_info = None
    try:
        yield
    finally:
        loading.worker._worker_info = info
