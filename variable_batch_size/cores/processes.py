"""Processes that do a piece of work and send back what came of it, none of which outlives the one that started them."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from variable_batch_size.cores import stopping

# ------------------------------------------------------------------------------------------ in the launching process


@dataclass(frozen=True)
class Process:
    """A process to start: its main function, what that needs to know, and its environment."""

    main: Callable[..., None]
    args: tuple[Any, ...]
    environment: Mapping[str, str]


def run_processes(processes: list[Process], work: bytes) -> list[Any]:
    """Start the processes, wait for what their cores send, and leave none behind."""
    started: list[tuple[Any, Any]] = []
    results: dict[int, Any] = {}
    with _passing_on_sigterm(started) as order:
        try:
            _start(processes, work, started)
            if order.is_given:  # perhaps while one was being started, which does not know of it yet
                _terminate(started)
            _receive(dict(started), results)
        finally:
            for receiver, child in started:
                if child.is_alive():
                    child.kill()
                child.join()
                receiver.close()
    return [results[rank] for rank in sorted(results)]


def _start(processes: list[Process], work: bytes, started: list[tuple[Any, Any]]) -> None:
    """Start the processes, noting each with the end of its pipe as soon as it runs."""
    context = multiprocessing.get_context("spawn")
    for process in processes:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=process.main, args=(*process.args, work, sender))
        with environment(process.environment):
            child.start()
        sender.close()  # the child holds the other end: a pipe at its end now means that the child is gone
        started.append((receiver, child))


def _receive(running: dict[Any, Any], results: dict[int, Any]) -> None:
    """Take in what the cores send until all processes have ended, or the first of them did not end well."""
    while running:
        for pipe in multiprocessing.connection.wait(list(running)):
            try:
                rank, outcome, payload = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                child = running.pop(pipe)
                child.join()
                if child.exitcode != 0:
                    raise RuntimeError(f"a process of the launch died with exit code {child.exitcode}") from None
                continue
            if outcome == _EXIT:
                sys.exit(payload)
            if outcome == _FAILURE:
                raise RuntimeError(f"core {rank} failed:\n{payload}")
            results[rank] = payload


@dataclass
class _Order:
    """Whether SIGTERM has come: without a lock, as one signal may interrupt what another one does."""

    is_given: bool = False


@contextmanager
def _passing_on_sigterm(started: list[tuple[Any, Any]]) -> Iterator[_Order]:
    """Within, SIGTERM goes on to the started processes, and is noted in the order that this yields.

    When they have ended, the signal ends this process, too, unless they end the launch with an exit code of their own.
    If that says that they have saved and stopped, the signal may come again while this process ends with it.
    A handler that the user has set is left alone.
    """
    order = _Order()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not stopping.ends_process():
        yield order
        return

    def pass_on(number: int, frame: Any) -> None:
        order.is_given = True
        _terminate(started)

    signal.signal(signal.SIGTERM, pass_on)
    has_stopped = False
    try:
        yield order
    except SystemExit as ended:
        has_stopped = ended.code == stopping.EXIT_STOPPED
        if has_stopped:
            stopping.obey()
            stopping.note_sigterm()
        order.is_given = False
        raise
    finally:
        if not has_stopped:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if order.is_given:
            os.kill(os.getpid(), signal.SIGTERM)


def _terminate(started: list[tuple[Any, Any]]) -> None:
    for _, child in started:
        child.terminate()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Within, these environment variables are set: a process started here has them before it imports anything."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# ------------------------------------------------------------------------------------------ in the started processes


_send_one_at_a_time = threading.Lock()

_RESULT, _FAILURE, _EXIT = "result", "failure", "exit"


def run_and_send(work: bytes, pipe: Any, rank: int) -> None:
    """Do the work as a core, and send its result, its failure or its exit code to the launching process."""
    try:
        fn, args = pickle.loads(work)  # each core its own copy, also where cores are threads of one process
        message = pickle.dumps((rank, _RESULT, fn(*args)))
    except SystemExit as exit:
        message = pickle.dumps((rank, _EXIT, exit.code))
    except BaseException:
        message = pickle.dumps((rank, _FAILURE, traceback.format_exc()))
    with _send_one_at_a_time:
        pipe.send_bytes(message)


def end_with_parent() -> None:
    """End this process, at once, when the process that started it has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
