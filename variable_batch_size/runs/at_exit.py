"""What is still done when a process ends, at a time when it can start threads, which an upload may need."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 (first: the latest to ask is called first, and this ends all executors)
import os
import threading
from collections.abc import Callable
from typing import Any


def call_at_exit(finish: Callable[[], Any]) -> None:
    """Call something when this process ends, and not in processes that are forked from it.

    What ``atexit`` calls comes too late: asyncio then resolves no more names of hosts.

    Args:
        finish: must not raise, as threads would then not be waited for.
    """
    process = os.getpid()
    threading._register_atexit(lambda: finish() if os.getpid() == process else None)  # type: ignore[attr-defined]
