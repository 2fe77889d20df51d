"""Stop requests: SIGTERM, request_stop(), and loader workers that leave SIGTERM to their parent.

Signals belong to a process and reach its main thread, but cores may be threads (XLA). So the note is the process's.

A signal to a process group, or to all processes of a systemd unit, reaches a loader's workers too. If they ended, the
loader would raise in the middle of a step, and their parent could neither complete the step nor save. So SIGTERM is
blocked in a worker from its first instruction on, which holds although torch installs a handler there that ends it, and
a thread takes the signal: it has its effect if the parent has sent it, or as soon as the parent has ended.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_STOPPED = 75
"""The exit code of a run that was told to stop, has saved a checkpoint and can go on: EX_TEMPFAIL of sysexits.h.

A process that SIGTERM ended without such a save has the code 143 in a shell (128 + 15), as always.
"""

_SECONDS_OF_ONE_ORDER = 10.0
"""SIGTERM may reach a process through its group and from the process that launched it: within this time it is one."""

logger = logging.getLogger(__name__)

_told = False  # not a threading.Event, at whose lock a signal would hang that interrupts the note of another one
_changing = threading.Lock()
_num_listening = 0
_listening_in = 0  # the pid of the process; what it forks has a copy of all this, and does not listen
_obeyed_at = -float("inf")


def request_stop() -> None:
    """Stop the run as SIGTERM would: a :class:`Checkpoint` saves at the end of a step, and ends the process with 75.

    For whoever learns otherwise that the machine will be taken away: a notice of the cloud, a scheduler's callback, a
    thread that watches for one. One core of a run is enough; the others follow at the same step.
    """
    global _told
    _told = True


def was_told() -> bool:
    """Whether SIGTERM has come, or :func:`request_stop` was called."""
    return _told


def obey() -> None:
    """Take the note off, because this process is about to end as it was told to."""
    global _obeyed_at, _told
    _obeyed_at = time.monotonic()
    _told = False


def ends_process() -> bool:
    """Whether SIGTERM would end this process: nobody has set a handler, or only we have, and nobody listens."""
    return not _is_listened_for() and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _note)


def note_sigterm() -> None:
    """Let SIGTERM be noted while somebody listens, and end the process as usual if nobody does.

    Only possible in the main thread. Where cores are other threads, call it before they start.
    """
    signal.signal(signal.SIGTERM, _note)


@contextmanager
def listening() -> Iterator[None]:
    """Within, SIGTERM is noted and does not end the process; if nobody obeys it there, it has its effect afterwards."""
    global _told
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    _add_listeners(1)
    if is_main:
        note_sigterm()
    elif before is not _note:
        logger.warning(
            "SIGTERM cannot be listened to outside of the main thread, and will end the process without a save: call "
            "vbs.request_stop() from where the end of this machine is announced"
        )
    try:
        yield
    finally:
        _add_listeners(-1)
        if is_main and not (_has_just_obeyed() and before == signal.SIG_DFL):
            signal.signal(signal.SIGTERM, before)
        if not _num_listening and was_told():
            _told = False
            os.kill(os.getpid(), signal.SIGTERM)


def _add_listeners(number: int) -> None:
    global _num_listening, _listening_in
    with _changing:
        _num_listening = number + (_num_listening if _listening_in == os.getpid() else 0)
        _listening_in = os.getpid()


def _is_listened_for() -> bool:
    return _num_listening > 0 and _listening_in == os.getpid()


def _has_just_obeyed() -> bool:
    return time.monotonic() - _obeyed_at < _SECONDS_OF_ONE_ORDER


def _note(number: int, frame: FrameType | None) -> None:
    if _is_listened_for():
        request_stop()
    elif not _has_just_obeyed():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


_SIGTERM = frozenset({signal.SIGTERM})
_SECONDS_BETWEEN_LOOKS = 0.5
_CAN_WAIT = hasattr(signal, "sigwaitinfo")  # not on macOS, where workers are not forked either

_is_registered = False
_fork = threading.local()  # the signal mask of a thread before it forks a worker, or None while it forks something else


def shield_loader_workers() -> None:
    """From now on, let loader workers that this process forks leave SIGTERM to it."""
    global _is_registered
    if _CAN_WAIT and not _is_registered:
        os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_begin)
        _is_registered = True


def leave_sigterm_to_parent(worker_id: int | None = None) -> None:
    """In this loader worker, let SIGTERM have no effect unless the parent sends it, or until the parent has ended.

    A :class:`Checkpoint` sees to that in workers that are forked. Where they are started in another way, pass this as
    the loader's ``worker_init_fn``. Programs that a worker starts have to be ended by SIGKILL, for they inherit that
    SIGTERM is blocked.

    Args:
        worker_id: which worker of the loader this is; of no effect.
    """
    if _CAN_WAIT:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)
        threading.Thread(target=_end_when_told, args=(os.getppid(),), daemon=True).start()


def _end_when_told(parent: int) -> None:
    sender = signal.sigwaitinfo(_SIGTERM).si_pid
    while sender != parent and os.getppid() == parent:
        again = signal.sigtimedwait(_SIGTERM, _SECONDS_BETWEEN_LOOKS)
        sender = again.si_pid if again else sender
    os._exit(0)  # as torch's handler does: any other end of a worker would be an error to its parent


# --------------------------------------------------------------------------------------------------------- at each fork


def _block() -> None:
    is_worker = _starts_worker(sys._getframe(1))
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM) if is_worker else None


def _starts_worker(frame: FrameType) -> bool:
    """Whether it is a loader worker that is forked here: multiprocessing's process with the loop of a loader."""
    process = frame.f_locals.get("process_obj")
    return getattr(getattr(process, "_target", None), "__name__", None) == "_worker_loop"


def _unblock() -> None:
    if _fork.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _begin() -> None:
    if _fork.mask is not None:
        leave_sigterm_to_parent()
