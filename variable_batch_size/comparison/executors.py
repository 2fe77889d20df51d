"""Runs an experiment's trainings in local processes or through a user's executor on a cluster."""

from __future__ import annotations

import inspect
import io
import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import tempfile
import threading
import traceback
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from variable_batch_size.comparison.experiment import FAILED, Outcome, Run, Settings
from variable_batch_size.comparison.results import Results
from variable_batch_size.comparison.train import train
from variable_batch_size.comparison.workload import load_function, source_of
from variable_batch_size.cores.launch import end_with_parent

_VARIABLE = "CUDA_VISIBLE_DEVICES"


def environments(jobs: int, cores: int) -> list[dict[str, str]]:
    """What each of `jobs` processes has in its environment, each with `cores` cores that train on GPUs 0, 1, 2 …"""
    gpus = _visible()
    return [{_VARIABLE: ",".join(in_turn(gpus, job * cores))} for job in range(jobs)] if gpus else []


def in_turn(gpus: Sequence[str], first: int) -> list[str]:
    """All GPUs, those from number `first` on in front: core i of a process that sees them so trains on the i-th.

    >>> in_turn(["0", "1", "2"], 4)
    ['1', '2', '0']
    """
    start = first % len(gpus)
    return [*gpus[start:], *gpus[:start]]


def _visible() -> list[str]:
    """The names of the GPUs that this process may use."""
    named = os.environ.get(_VARIABLE)
    if named:
        return named.split(",")
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


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


_one_at_a_time = threading.Lock()  # a process has one set of random generators, and may work in several threads


class Made(NamedTuple):
    """What comes back of a run.

    Attributes:
        outcome: how it ended.
        archive: a zip file of its directory.
    """

    outcome: Outcome
    archive: bytes


def needs_of(run: Run, results: Results) -> dict[str, bytes]:
    """The files of an experiment that one of its runs reads, by their place in its directory."""
    paths = [results.experiment_file, results.trace_file(run.trace)]
    return {str(path.relative_to(results.directory)): path.read_bytes() for path in paths if path.exists()}


def make(settings: Settings, run: Run, needs: Mapping[str, bytes], options: Mapping[str, Any]) -> Made:
    """Make a run in a temporary folder.

    Args:
        settings: of the experiment.
        run: which of its runs.
        needs: the files that it reads.
        options: of :func:`~variable_batch_size.comparison.train.train`.
    """
    with tempfile.TemporaryDirectory() as folder, _one_at_a_time, _undisturbed():
        results = Results(Path(folder))
        for name, content in needs.items():
            (results.directory / name).parent.mkdir(parents=True, exist_ok=True)
            (results.directory / name).write_bytes(content)
        outcome = outcome_of((_train, (settings, run, results.directory), dict(options)))
        return Made(outcome, _packed(results.run_directory(run)))


def unpack(made: Made, run: Run, results: Results) -> None:
    """Put the files of a run where they are as if it had been made there."""
    directory = results.run_directory(run)
    shutil.rmtree(directory, ignore_errors=True)
    with zipfile.ZipFile(io.BytesIO(made.archive)) as archive:
        archive.extractall(directory)


def _train(settings: Settings, run: Run, directory: Path, **options: Any) -> Outcome:
    if source_of(settings.workload) != settings.source:
        raise ValueError(f"the file of {settings.workload} is another one here: give all workers the same")
    return train(settings, run, directory, **options)


def _packed(directory: Path) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(directory.rglob("*")):
            archive.write(path, path.relative_to(directory))
    return packed.getvalue()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Within, an interruption is left to whoever asked for the run, and what the run has to say is in its outcome."""
    logger = logging.getLogger("variable_batch_size")
    is_main, level = threading.current_thread() is threading.main_thread(), logger.level
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        if is_main:
            signal.signal(signal.SIGINT, before)


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
