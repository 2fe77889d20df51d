"""Stop requests: SIGTERM, Ctrl-C, request_stop(), and DataLoader workers that leave signals to their parent.

Signals are handled in the main thread of a process, but cores may be threads (XLA), so a request is stored per process.
A signal to a process group or a systemd unit also reaches DataLoader workers. If they exited, the loader would raise
within a step, and the parent could neither complete the step nor save. SIGTERM is therefore blocked in workers from
their first instruction on, despite the handler that torch installs there. A thread receives it instead, and ends the
worker if the parent has sent it or has ended. SIGINT, which Ctrl-C sends to a process group, is ignored there.
"""

import _thread
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any

EXIT_STOPPED = 75
"""The exit code of a run that was requested to stop, has saved a checkpoint and can resume: EX_TEMPFAIL of sysexits.h.

A process that SIGTERM ended without a checkpoint has the usual code, 143 in a shell (128 + 15). Ctrl-C ends a run with
KeyboardInterrupt, even after a save: shells stop their loops for it, and show 130.
"""

# SIGTERM may reach a process through its group and from the launching process: within this time it is one request
_SECONDS_OF_ONE_REQUEST = 10.0
_SECONDS_OF_ONE_CTRL_C = 1.0  # the same for SIGINT, where a second one has another effect
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_END = 5.0  # after which SIGTERM is sent once more
_SECONDS_OF_CALLS = 10.0  # after which what Ctrl-C has called is not awaited any longer
_SIGTERM = frozenset({signal.SIGTERM})
_SIGINT = frozenset({signal.SIGINT})
_CAN_WAIT = hasattr(signal, "sigwaitinfo")  # not on macOS, where workers are not forked either

logger = logging.getLogger(__name__)

_is_requested = False  # not a threading.Event: a handler that interrupts another one would deadlock on its lock
_is_interrupted = False  # whether the request came from Ctrl-C
_interrupted_at = -float("inf")
# the pid of each, and what Ctrl-C calls: a forked process has a copy of all this and does not listen
_listeners: list[tuple[int, Callable[[], None] | None]] = []
_before: Any = signal.SIG_DFL  # the handler before the first listener
_acknowledged_at = -float("inf")
_calls: list[Any] = []  # locks that calls of Ctrl-C hold while they run
_is_shielding = False  # whether workers that this process forks leave SIGTERM to it
_ends_daemons = 0  # the pid of a process that ends its daemonic processes when it exits


def request_stop() -> None:
    """Stop the run like SIGTERM: a :class:`Checkpoint` saves at the end of a step and exits with code 75.

    Call it when a cloud notice or a scheduler's callback announces that the machine will be taken away. One core of a
    run is enough; the others stop at the same step.
    """
    global _is_requested
    _is_requested = True


def is_stop_requested() -> bool:
    """Whether SIGTERM or Ctrl-C was received or :func:`request_stop` was called."""
    return _is_requested


def was_interrupted() -> bool:
    """Whether Ctrl-C was received, and must end with KeyboardInterrupt."""
    return _is_interrupted


def acknowledge(*, is_exiting: bool = True) -> None:
    """Acknowledge the request; if this process is about to exit, another SIGTERM is then ignored for a while."""
    global _acknowledged_at, _is_requested, _is_interrupted
    _acknowledged_at = time.monotonic() if is_exiting else _acknowledged_at
    _is_requested = _is_interrupted = False


def ends_process() -> bool:
    """Whether SIGTERM would end this process: it has the default handler, or ours without a listener."""
    return not _is_listened_for() and signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _note)


def note_signals() -> None:
    """Install the handlers, in the main thread: signals are requests for listeners, and otherwise end the process."""
    signal.signal(signal.SIGTERM, _note)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # neither ignored nor the user's own
        signal.signal(signal.SIGINT, _interrupt)


@contextmanager
def listening(on_interrupt: Callable[[], None] | None = None) -> Iterator[None]:
    """Within, SIGTERM is a request and does not end the process; if it is not acknowledged, it takes effect on exit.

    So is the first Ctrl-C with `on_interrupt`, which is then called in another thread; the second one has its usual
    effect.
    """
    global _before
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    if not _is_listened_for():
        _before = before
    listener = (os.getpid(), on_interrupt)
    _listeners.append(listener)
    if is_main:
        note_signals()
    elif before is not _note:
        problem = "SIGTERM can only be handled in the main thread, and will end this process without a checkpoint"
        logger.warning("%s: call vbs.request_stop() when the machine is about to stop", problem)
    try:
        yield
    finally:
        _listeners.remove(listener)
        # the last one restores it: a loop that an exception has left may end during another one
        is_last = not _is_listened_for()
        if is_main and is_last and not (_was_just_acknowledged() and _before == signal.SIG_DFL):
            signal.signal(signal.SIGTERM, _before)
        if is_main and is_last and signal.getsignal(signal.SIGINT) is _interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if is_last and _is_requested:
            was_interrupt = _is_interrupted
            acknowledge(is_exiting=False)
            if was_interrupt:  # later: KeyboardInterrupt would be lost in a generator that is being closed
                _thread.start_new_thread(_interrupt_soon, ())
            else:
                os.kill(os.getpid(), signal.SIGTERM)


def _interrupt_soon() -> None:
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


def _is_listened_for() -> bool:
    return any(pid == os.getpid() for pid, _ in _listeners)


def _was_just_acknowledged() -> bool:
    return time.monotonic() - _acknowledged_at < _SECONDS_OF_ONE_REQUEST


def _note(number: int, frame: FrameType | None) -> None:
    # torchrun sends SIGTERM for the second Ctrl-C; launch() forwards the first one as SIGTERM
    is_second = _is_interrupted and not _was_just_interrupted() and multiprocessing.parent_process() is None
    if _is_listened_for() and not is_second:
        request_stop()
    elif not _was_just_acknowledged():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _is_interrupted, _interrupted_at
    calls = [call for pid, call in _listeners if pid == os.getpid() and call is not None]
    if calls and _was_just_interrupted():
        return
    if not calls or _is_interrupted:
        acknowledge(is_exiting=False)
        signal.default_int_handler(number, frame)
    _is_interrupted, _interrupted_at = True, time.monotonic()
    request_stop()
    for call in calls:  # in threads: the handler may have interrupted code that holds a lock of logging
        is_running = _thread.allocate_lock()
        is_running.acquire()
        _calls.append(is_running)
        _thread.start_new_thread(_run, (call, is_running))


def _run(call: Callable[[], None], is_running: Any) -> None:
    try:
        call()
    finally:
        is_running.release()


def await_calls() -> None:
    """Wait until what Ctrl-C has called has returned, as the end of a process ends its threads."""
    while _calls:
        _calls.pop().acquire(timeout=_SECONDS_OF_CALLS)


def _was_just_interrupted() -> bool:
    return time.monotonic() - _interrupted_at < _SECONDS_OF_ONE_CTRL_C


def shield_loader_workers() -> None:
    """Let DataLoader workers that this process forks leave SIGTERM and Ctrl-C to it."""
    global _ends_daemons, _is_shielding
    if not _CAN_WAIT:
        return
    if _ends_daemons != os.getpid():
        _ends_daemons = os.getpid()
        Finalize(None, _end_daemons, exitpriority=0)
    if _is_shielding:
        return
    fork = threading.local()  # a thread's signal mask before it forks a worker; None if it forks something else

    def block() -> None:
        process = sys._getframe(1).f_locals.get("process_obj")  # of multiprocessing; a worker runs the loop of a loader
        is_worker = getattr(getattr(process, "_target", None), "__name__", None) == "_worker_loop"
        fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM | _SIGINT) if is_worker else None

    def unblock() -> None:
        if fork.mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, fork.mask)

    def begin() -> None:
        if fork.mask is not None:
            leave_sigterm_to_parent()
            signal.pthread_sigmask(signal.SIG_SETMASK, fork.mask | _SIGTERM)

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=begin)
    _is_shielding = True


def _end_daemons() -> None:
    """Send SIGTERM until the workers have ended, while multiprocessing would send it once and then wait forever.

    Its SIGTERM is lost if the process group's is still pending in a worker. Workers cannot be distinguished from other
    daemonic processes, which rarely take that long.
    """
    while daemons := [process for process in multiprocessing.active_children() if process.daemon]:
        for process in daemons:
            process.terminate()
        end = time.monotonic() + _SECONDS_TO_END
        for process in daemons:
            process.join(max(0.0, end - time.monotonic()))


def leave_sigterm_to_parent(worker_id: int | None = None) -> None:
    """In this DataLoader worker, ignore Ctrl-C, and SIGTERM unless the parent has sent it or has ended.

    A :class:`Checkpoint` does this in forked workers. For other start methods, pass this function as the loader's
    ``worker_init_fn``, whose argument is ignored. Programs started by a worker inherit the blocked signal and must be
    ended with SIGKILL.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _CAN_WAIT:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    sender = signal.sigwaitinfo(_SIGTERM).si_pid
    while sender != parent and os.getppid() == parent:
        again = signal.sigtimedwait(_SIGTERM, _SECONDS_BETWEEN_LOOKS)
        sender = again.si_pid if again else sender
    os._exit(0)  # like torch's handler: any other exit of a worker would be an error in its parent
