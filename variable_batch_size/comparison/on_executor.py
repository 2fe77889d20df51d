"""Makes runs through an executor of the user's: on a cluster, wherever its workers are."""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Callable
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from typing import Any

from variable_batch_size.comparison.experiment import FAILED, Outcome, Run
from variable_batch_size.comparison.functions import load_function
from variable_batch_size.comparison.parcel import Made, make, needs_of, unpack
from variable_batch_size.comparison.results import Results
from variable_batch_size.comparison.workers import in_one_line

_BREAKS_BY_CHANCE = 1


def load_executor(name: str) -> Callable[[], Executor]:
    """The function ``FILE.py:FUNCTION``, which makes an executor; what else it returns is refused when it is called."""
    if ":" not in name:
        raise ValueError(f"`executor` must be FILE.py:FUNCTION, got {name!r}")
    function = load_function(name)

    def make_executor() -> Executor:
        executor = function()
        if not isinstance(executor, Executor):
            raise ValueError(f"{name} must return a concurrent.futures.Executor, got {type(executor).__name__}")
        return executor

    return make_executor


class OnExecutor:
    """Gives all runs to an executor at once, and takes in each as it ends.

    A lost worker costs the others nothing. Many executors retry what it was at. A pool of processes breaks instead, and
    everything in it is lost: then another is made, and gets what has not ended. If that breaks, too, the runs are made
    one at a time until it is known by which, and that one has failed.

    Args:
        make_executor: makes the executor, and another when one is broken.
        results: where the runs go.
    """

    is_full: bool = False

    def __init__(self, make_executor: Callable[[], Executor], results: Results) -> None:
        self._make_executor = make_executor
        self._results = results
        self._executor: Executor
        self._work: dict[Run, tuple[Any, ...]] = {}  # of the runs that have not ended
        self._waiting: list[Run] = []  # to be submitted
        self._submitted: dict[Future[Made], Run] = {}
        self._num_breaks = 0
        self._suspects: set[Run] = set()  # one of which breaks executors, perhaps

    def start(self, run: Run, work: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> None:
        """Let a run be made, with the work that a process of this machine would be given."""
        _, (settings, *_), options = work
        self._work[run] = (settings, run, needs_of(run, self._results), options)
        self._waiting.append(run)

    def next_outcome(self) -> tuple[Run, Outcome]:
        """Wait for the next run to end."""
        outcome = None
        while outcome is None:
            self._submit()
            future = next(iter(wait(self._submitted, return_when=FIRST_COMPLETED).done))
            run = self._submitted.pop(future)
            outcome = self._outcome(run, future)
        del self._work[run]
        self._suspects.discard(run)
        return run, outcome

    def _submit(self) -> None:
        """Submit what waits; one at a time while somebody is suspected."""
        while self._waiting and not (self._suspects and self._submitted):
            run = self._waiting.pop(0)
            try:
                future = self._executor.submit(make, *self._work[run])
            except BrokenExecutor as error:
                future = Future()
                future.set_exception(error)
            self._submitted[future] = run

    def _outcome(self, run: Run, future: Future[Made]) -> Outcome | None:
        """How a run ended; None if it is to be made again."""
        try:
            made = future.result()
            unpack(made, run, self._results)
            return made.outcome
        except BrokenExecutor as error:
            return self._after_break(run, error)
        except (Exception, CancelledError) as error:
            return Outcome(status=FAILED, reason=in_one_line(error))

    def _after_break(self, run: Run, error: BrokenExecutor) -> Outcome | None:
        """Go on with another executor; return how the run ended if it is known that it has broken the one before."""
        lost = [run, *(other for future, other in self._submitted.items() if not _has_ended_well(future))]
        self._submitted = {future: other for future, other in self._submitted.items() if other not in lost}
        _abandon(self._executor)
        self._executor = self._make_executor()
        self._num_breaks += 1
        if self._suspects:
            self._suspects, self._num_breaks = set(), 0
            return Outcome(status=FAILED, reason=in_one_line(error))
        self._waiting = [*lost, *self._waiting]
        if self._num_breaks > _BREAKS_BY_CHANCE:
            self._suspects = set(lost)
        return None

    def __enter__(self) -> OnExecutor:
        self._executor = self._make_executor()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self._executor.shutdown()
        else:
            _abandon(self._executor)


def _has_ended_well(future: Future[Made]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _abandon(executor: Executor) -> None:
    """End an executor with what it is at, by whatever means it has for that."""
    known = inspect.signature(executor.shutdown).parameters
    executor.shutdown(wait=False, **{name: True for name in ("cancel_futures", "kill_workers") if name in known})
    if isinstance(executor, ProcessPoolExecutor):  # which would let its processes finish what they have begun
        for process in multiprocessing.active_children():
            process.kill()
