"""Makes runs in processes of their own, several at once, so that one that fails does not end the others."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from variable_batch_size.comparison.experiment import FAILED, Outcome, Run
from variable_batch_size.cores.processes import end_with_parent

Work = tuple[Callable[..., Outcome], tuple[Any, ...], dict[str, Any]]
"""A function, which is pickled and so at the top level of a module, and its arguments."""

_START_METHOD: Final = "spawn"  # a forked process would have the threads' locks of this one


class Workers:
    """Processes that each make one run after another.

        with Workers(2) as workers:
            workers.start(run, (function, args, options))
            run, outcome = workers.next_outcome()

    Args:
        number: of processes.
        environments: variables of the process in each place, besides those of this one; none if empty.
    """

    def __init__(self, number: int, *, environments: Sequence[Mapping[str, str]] = ()) -> None:
        self.number = number
        self._environments = environments
        self._free = list(range(number))  # places for a process
        self._places: dict[Any, int] = {}  # by process
        self._context = multiprocessing.get_context(_START_METHOD)
        self._waiting: list[tuple[Any, Any]] = []  # pipes and processes
        self._busy: dict[Any, tuple[Any, Run]] = {}  # by pipe

    @property
    def is_full(self) -> bool:
        return len(self._busy) == self.number

    def start(self, run: Run, work: Work) -> None:
        """Give a run to a process that has none, which may be a new one."""
        assert not self.is_full
        pipe, process = self._living_process() or self._new_process()
        with suppress(ConnectionError):  # one that has died is noticed when its outcome is waited for
            pipe.send(work)
        self._busy[pipe] = (process, run)

    def next_outcome(self) -> tuple[Run, Outcome]:
        """Wait for the next run to end."""
        pipe: Any = multiprocessing.connection.wait(list(self._busy))[0]
        process, run = self._busy.pop(pipe)
        try:
            outcome = pipe.recv()
        except (EOFError, ConnectionError):  # killed, by the system that is out of memory perhaps; or never begun
            self._bury(pipe, process)
            return run, Outcome(status=FAILED, reason=f"its process died with exit code {process.exitcode}")
        self._waiting.append((pipe, process))
        return run, outcome

    def _living_process(self) -> tuple[Any, Any] | None:
        """A process that waits for work; those that have died while they waited are forgotten."""
        while self._waiting:
            pipe, process = self._waiting.pop()
            if process.is_alive():
                return pipe, process
            self._bury(pipe, process)
        return None

    def _bury(self, pipe: Any, process: Any) -> None:
        process.join()
        pipe.close()
        self._free.append(self._places.pop(process))

    def _new_process(self) -> tuple[Any, Any]:
        ours, theirs = self._context.Pipe()
        place = self._free.pop(0)
        environment = self._environments[place] if self._environments else {}
        process = self._context.Process(target=_serve, args=(theirs, dict(environment)))
        process.start()
        self._places[process] = place
        theirs.close()
        return ours, process

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe, process in [*self._waiting, *((pipe, process) for pipe, (process, _) in self._busy.items())]:
            process.kill()
            process.join()
            pipe.close()
        self._waiting, self._busy = [], {}


def _serve(pipe: Any, environment: dict[str, str]) -> None:
    """Do the work that comes through the pipe until it is closed."""
    end_with_parent()
    os.environ.update(environment)
    logging.getLogger("variable_batch_size").setLevel(logging.ERROR)  # what a run has to say is in its outcome
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the one that started us decides
    for work in _received(pipe):
        pipe.send(outcome_of(work))


def _received(pipe: Any) -> Iterator[Work]:
    with suppress(EOFError):
        while True:
            yield pipe.recv()


def outcome_of(work: Work) -> Outcome:
    """Do a piece of work; one that fails has that as its outcome."""
    function, args, options = work
    try:
        return function(*args, **options)
    except Exception as error:
        traceback.print_exc()
        return Outcome(status=FAILED, reason=in_one_line(error))


def in_one_line(error: Exception) -> str:
    """The kind of an error and what it says: its first line, or the last where that of another core is inside."""
    lines = str(error).strip().splitlines() or [""]
    line = lines[-1] if "Traceback (most recent call last):" in lines else lines[0]
    return f"{type(error).__name__}: {line.strip()}"
