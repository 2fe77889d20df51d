"""compare: executes the missing runs of an experiment, in local processes or on the executor of a cluster."""

import fcntl
import inspect
import io
import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch
from tqdm import tqdm

from variable_batch_size.cores.launch import end_with_parent
from variable_batch_size.lab.comparison.experiment import DONE, ENDED, FAILED, Outcome, Results, Run, Settings, runs_of
from variable_batch_size.lab.comparison.report import write_report
from variable_batch_size.lab.comparison.train import train
from variable_batch_size.lab.comparison.verdict import number
from variable_batch_size.lab.comparison.workload import load_function, source_of
from variable_batch_size.lab.planning.reports import duration
from variable_batch_size.traces.trace import Trace

Work = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # a picklable function and its arguments
_VARIABLE = "CUDA_VISIBLE_DEVICES"
_START_METHOD: Final = "spawn"  # a forked process would inherit locks held by threads of this one
_one_at_a_time = threading.Lock()  # the random generators belong to the process, and a worker may have several threads


def compare(
    settings: Settings,
    *,
    traces: Mapping[str, Trace | str],
    rules: Sequence[str],
    num_seeds: int,
    directory: Path,
    jobs: int,
    datadir: str | None = None,
    origin: Mapping[str, Any],
    executor: str | None = None,
) -> None:
    """Run every combination of traces, rules and seeds and the yardstick of each seed, and write the results.

    Runs that are done or diverged are not repeated; failed ones are. Results are also written after an interruption.
    """
    results, runs = Results(directory), runs_of(list(traces), rules, num_seeds)
    variables = environments(jobs, settings.cores) if settings.device == "cuda" and not executor else []
    makers = OnExecutor(executor, results) if executor else LocalProcesses(jobs, environments=variables)

    def outcomes(leaders: Mapping[Run, Run | None]) -> Iterator[tuple[Run, Outcome]]:
        """Execute runs, each after its leader, and yield each when it ends."""
        to_do, unfinished = list(leaders), set(leaders)
        while unfinished:
            run = next((run for run in to_do if leaders[run] not in unfinished), None)
            if run is None or makers.is_full:
                run, outcome = makers.next_outcome()
            else:
                to_do.remove(run)
                first = leaders[run]
                led = None if first is None else results.read(first) or Outcome(status=FAILED)
                if led is None or led.status != FAILED:
                    # if the leader diverged, as many updates as the yardstick
                    updates = led and (led.updates if led.status == DONE else settings.progress_goal)
                    options = {"datadir": datadir, "updates": updates}
                    makers.start(run, (train, (settings, run, results.directory), options))
                    continue
                outcome = Outcome(status=FAILED, reason=f"it needs the number of updates of ({first}), which failed")
            unfinished.remove(run)
            yield run, outcome

    with locked(directory, "vbs compare"):
        results.write_experiment(settings, origin, traces, runs)
        ended = {run for run, outcome in results.runs() if outcome.status in ENDED}
        leaders = {run: settings.leader(run, rules) for run in runs if run not in ended}
        with tqdm(total=len(runs), initial=len(runs) - len(leaders), unit="run", dynamic_ncols=True) as bar:
            try:
                with makers:
                    for run, outcome in outcomes(leaders):
                        results.write(run, outcome)
                        bar.update()
                        bar.write(f"{run}: {_in_words(settings, outcome)}", file=sys.stderr)
            finally:
                write_report(results)


@contextmanager
def locked(directory: Path, command: str) -> Iterator[None]:
    """Keep other processes of a command out of this directory."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another {command} is running in {directory}") from None
        yield


def _in_words(settings: Settings, outcome: Outcome) -> str:
    if outcome.status != DONE or outcome.final_metric is None:
        return f"{outcome.status}, {outcome.reason}"
    metric = f"{settings.metric_name} {number(outcome.final_metric)}{settings.unit}"
    time = "–" if outcome.seconds is None else duration(outcome.seconds)
    return f"{metric} after {outcome.updates:,} updates, {outcome.samples:,} samples, {time}"


def environments(jobs: int, cores: int) -> list[dict[str, str]]:
    """The environment of each of `jobs` processes: all GPUs, rotated so that its core i trains on the i-th of them."""
    visible = os.environ.get(_VARIABLE)
    gpus = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    starts = [job * cores % len(gpus) for job in range(jobs)] if gpus else []
    return [{_VARIABLE: ",".join([*gpus[start:], *gpus[:start]])} for start in starts]


class LocalProcesses(AbstractContextManager["LocalProcesses"]):
    """Processes that each execute one run after another, with additional environment variables for each process."""

    def __init__(self, number: int, *, environments: Sequence[Mapping[str, str]] = ()) -> None:
        self._environments = environments or [{}] * number
        self._free = list(range(number))
        self._processes: dict[int, tuple[Any, Any]] = {}  # pipes and processes
        self._busy: dict[Any, tuple[int, Any]] = {}  # numbers of processes and their runs, by pipe

    @property
    def is_full(self) -> bool:
        return not self._free

    def start(self, run: Any, work: Work) -> None:
        """Give a run to an idle process, or to a new one if all are busy or dead."""
        alive = [number for number in self._free if number in self._processes and self._processes[number][1].is_alive()]
        number = (alive or self._free)[0]
        self._free.remove(number)
        if not alive:
            if number in self._processes:
                self._processes[number][0].close()
            context = multiprocessing.get_context(_START_METHOD)
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, dict(self._environments[number])))
            process.start()
            theirs.close()
            self._processes[number] = (ours, process)
        pipe = self._processes[number][0]
        with suppress(ConnectionError):  # next_outcome notices that the process has died
            pipe.send(work)
        self._busy[pipe] = (number, run)

    def next_outcome(self) -> tuple[Any, Any]:
        """Wait for the next run to end."""
        pipe: Any = multiprocessing.connection.wait(list(self._busy))[0]
        number, run = self._busy.pop(pipe)
        self._free.append(number)
        try:
            return run, pipe.recv()
        except (EOFError, ConnectionError):  # killed, for instance because the system is out of memory
            process = self._processes[number][1]
            process.join()
            return run, Outcome(status=FAILED, reason=f"its process died with exit code {process.exitcode}")

    def __exit__(self, *error: object) -> None:
        for pipe, process in self._processes.values():
            process.kill()
            process.join()
            pipe.close()


def _serve(pipe: Any, environment: dict[str, str]) -> None:
    """Do the work received through the pipe until it is closed."""
    end_with_parent()
    os.environ.update(environment)
    with _quiet(), suppress(EOFError):
        while True:
            pipe.send(outcome_of(pipe.recv()))


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore SIGINT, which a terminal sends to all processes, and log errors only: the outcome has the rest."""
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


def _quietly(work: Work) -> Any:
    with _one_at_a_time, _quiet():
        return outcome_of(work)


def outcome_of(work: Work) -> Any:
    """Do some work; an exception becomes its outcome."""
    function, args, options = work
    try:
        return function(*args, **options)
    except Exception as error:
        traceback.print_exc()
        return Outcome(status=FAILED, reason=_summary(error))


def _summary(error: BaseException) -> str:
    """The type of an error and its first line, or its last line if it contains the traceback of another core."""
    lines = str(error).strip().splitlines() or [""]
    line = lines[-1] if "Traceback (most recent call last):" in lines else lines[0]
    return f"{type(error).__name__}: {line.strip()}"


def make(settings: Settings, run: Run, files: Mapping[str, bytes], options: Mapping[str, Any]) -> tuple[Outcome, bytes]:
    """Execute a run in a temporary directory with these files; returns its outcome and a zip file of its directory."""
    with tempfile.TemporaryDirectory() as folder, _one_at_a_time, _quiet():
        results = Results(Path(folder))
        for name, content in files.items():
            (results.directory / name).parent.mkdir(parents=True, exist_ok=True)
            (results.directory / name).write_bytes(content)
        outcome = outcome_of((_train, (settings, run, results.directory), dict(options)))
        packed, directory = io.BytesIO(), results.run_directory(run)
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(directory.rglob("*")):
                archive.write(path, path.relative_to(directory))
        return outcome, packed.getvalue()


def _train(settings: Settings, run: Run, directory: Path, **options: Any) -> Outcome:
    if source_of(settings.workload) != settings.source:
        raise ValueError(f"the file of {settings.workload} differs on this worker: copy the same one to all workers")
    return train(settings, run, directory, **options)


class OnExecutor:
    """Submits all runs to the executor that ``FILE.py:FUNCTION`` returns, with the interface of LocalProcesses.

    Runs receive the files of their experiment and return their own. Without `results`, work needs only its arguments.

    If a process pool breaks, its runs move to a new executor. If that also breaks, runs are submitted one at a time,
    until the run that breaks executors is found and marked as failed.
    """

    is_full: bool = False

    def __init__(self, name: str, results: Results | None = None) -> None:
        if ":" not in name:
            raise ValueError(f"`executor` must be FILE.py:FUNCTION, got {name!r}")
        self._name, self._function, self._results = name, load_function(name), results
        self._executor: Executor
        self._work: dict[Any, tuple[Any, ...]] = {}  # of the runs that have not ended
        self._waiting: list[Any] = []  # to be submitted
        self._submitted: dict[Future[Any], Any] = {}
        self._has_broken = False
        self._suspects: set[Any] = set()  # one of these may break executors

    def _new_executor(self) -> Executor:
        executor = self._function()
        if not isinstance(executor, Executor):
            raise ValueError(f"{self._name} must return a concurrent.futures.Executor, got {type(executor).__name__}")
        return executor

    def start(self, run: Any, work: Work) -> None:
        """Queue a run, with the same work as for a local process."""
        if self._results is None:
            self._work[run] = (_quietly, work)
        else:
            _, (settings, *_), options = work
            paths = (self._results.experiment_file, self._results.trace_file(run.trace))
            there = [path for path in paths if path.exists()]
            files = {str(path.relative_to(self._results.directory)): path.read_bytes() for path in there}
            self._work[run] = (make, settings, run, files, options)
        self._waiting.append(run)

    def next_outcome(self) -> tuple[Any, Any]:
        outcome = None
        while outcome is None:
            self._submit()
            future = next(iter(futures.wait(self._submitted, return_when=futures.FIRST_COMPLETED).done))
            run = self._submitted.pop(future)
            outcome = self._outcome(run, future)
        del self._work[run]
        self._suspects.discard(run)
        return run, outcome

    def _submit(self) -> None:
        """Submit all waiting runs, or one at a time while there are suspects."""
        while self._waiting and not (self._suspects and self._submitted):
            run = self._waiting.pop(0)
            try:
                future = self._executor.submit(*self._work[run])
            except BrokenExecutor as error:
                future = Future()
                future.set_exception(error)
            self._submitted[future] = run

    def _outcome(self, run: Any, future: Future[Any]) -> Any:
        """Unpack the files of a run and return its outcome; None if it must be submitted again."""
        try:
            if self._results is None:
                return future.result()
            outcome, packed = future.result()
            directory = self._results.run_directory(run)
            shutil.rmtree(directory, ignore_errors=True)
            with zipfile.ZipFile(io.BytesIO(packed)) as archive:
                archive.extractall(directory)
            return outcome
        except BrokenExecutor as error:
            return self._after_break(run, error)
        except (Exception, futures.CancelledError) as error:
            return Outcome(status=FAILED, reason=_summary(error))

    def _after_break(self, run: Any, error: BrokenExecutor) -> Outcome | None:
        """Continue with a new executor; returns an outcome if this run is known to have broken the old one."""
        done = [future for future in self._submitted if future.done() and not future.cancelled()]
        kept = {future: self._submitted[future] for future in done if future.exception() is None}
        lost = [run, *(other for future, other in self._submitted.items() if future not in kept)]
        self._submitted = kept
        _abandon(self._executor)
        self._executor = self._new_executor()
        if self._suspects:
            self._suspects, self._has_broken = set(), False
            return Outcome(status=FAILED, reason=_summary(error))
        self._waiting = [*lost, *self._waiting]
        self._suspects = set(lost) if self._has_broken else set()
        self._has_broken = True
        return None

    def __enter__(self) -> "OnExecutor":
        self._executor = self._new_executor()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._executor.shutdown() if kind is None else _abandon(self._executor)


def _abandon(executor: Executor) -> None:
    """Shut down an executor without waiting for its tasks, which are cancelled or killed if it supports that."""
    known = inspect.signature(executor.shutdown).parameters
    executor.shutdown(wait=False, **{name: True for name in ("cancel_futures", "kill_workers") if name in known})
    if isinstance(executor, futures.ProcessPoolExecutor):  # it would complete the running tasks
        for process in multiprocessing.active_children():
            process.kill()
