"""Lets the workers of a DataLoader leave SIGTERM to the process that started them.

A signal to a process group, or to all processes of a systemd unit, reaches a loader's workers too. If they ended, the
loader would raise in the middle of a step, and their parent could neither complete the step nor save. So SIGTERM is
blocked in a worker from its first instruction on, which holds although torch installs a handler there that ends it, and
a thread takes the signal: it has its effect if the parent has sent it, or as soon as the parent has ended.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

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
