"""Writer: writes one thing after another in a thread of its own, and says what has failed when it is next asked."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from variable_batch_size.runs.at_exit import call_at_exit

logger = logging.getLogger(__name__)


class Writer:
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


def _finish(writer: Writer | None) -> None:
    """Wait for what was begun, when the process ends."""
    try:
        if writer is not None:
            writer.wait()
    except BaseException as error:
        logger.error("what was being written when the process ended is lost: %s", error)
