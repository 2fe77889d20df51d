"""Whether this process was told to stop: SIGTERM, noted while somebody listens for it.

Signals belong to a process and reach its main thread, but cores may be threads (XLA). So the note is the process's.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_STOPPED = 75
"""The exit code of a run that was told to stop, has saved a checkpoint and can go on: EX_TEMPFAIL of sysexits.h.

A process that SIGTERM ended without such a save has the code 143 in a shell (128 + 15), as always.
"""

_told = threading.Event()
_changing = threading.Lock()
_num_listening = 0


def was_told() -> bool:
    """Whether SIGTERM has come."""
    return _told.is_set()


def forget() -> None:
    """Take the note off, because it has been acted upon."""
    _told.clear()


def note_sigterm() -> None:
    """Let SIGTERM be noted while somebody listens, and end the process as usual if nobody does.

    Only possible in the main thread. Where cores are other threads, call it before they start.
    """
    signal.signal(signal.SIGTERM, _note)


@contextmanager
def listening() -> Iterator[None]:
    """Within, SIGTERM is noted and does not end the process."""
    global _num_listening
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    with _changing:
        _num_listening += 1
    if is_main:
        note_sigterm()
    try:
        yield
    finally:
        with _changing:
            _num_listening -= 1
        if is_main:
            signal.signal(signal.SIGTERM, before)


def _note(number: int, frame: FrameType | None) -> None:
    if _num_listening:
        _told.set()
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
