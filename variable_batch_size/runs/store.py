"""CheckpointStore: writes and loads the checkpoints of a run, in the background if wanted, and its executed trace."""

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from variable_batch_size.checks import check_one_of
from variable_batch_size.cores import xla
from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.files import DECISIONS, EXECUTED, RUN
from variable_batch_size.optim.lr_scheduler import Stateful, state_of_schedulers
from variable_batch_size.optim.optimizer import STATE_KEY, CustomOptimizer
from variable_batch_size.runs import sharded_state, state_file
from variable_batch_size.runs.checksums import DamagedFileError
from variable_batch_size.runs.lock import LOCK, RunLock
from variable_batch_size.runs.remote import RemoteDirectory, call_at_exit
from variable_batch_size.runs.state_file import tree_map
from variable_batch_size.schedules.schedule import BaseSchedule
from variable_batch_size.traces.trace import COLUMNS
from variable_batch_size.urls import is_url, local_path

logger = logging.getLogger(__name__)

Format = Literal["file", "sharded"]
ASSIGNED = "assigned.csv"  # like EXECUTED, with the cores of each step


class HostStaging:
    """Copies a state to the host between two steps, into the memory of the previous copy: allocation takes longest."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    def reserve(self, state: dict[str, Any]) -> None:
        """Allocate memory for a copy, and touch it so that the system really provides it."""

        def allocate(part: Any, place: str) -> Any:
            if isinstance(part, torch.Tensor) and part.layout == torch.strided:
                self._copies[place] = torch.zeros(part.shape, dtype=part.dtype).fill_(1)
            return part

        tree_map(state, allocate)

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy all tensors of a state; tensors that share memory share their copy."""
        before, self._copies = self._copies, {}
        seen: dict[tuple[Any, ...], torch.Tensor] = {}

        def copy_of(part: Any, place: str) -> Any:
            if not isinstance(part, torch.Tensor):
                return part
            tensor, memory = part.detach(), _memory_of(part)
            if memory in seen:
                return seen[memory]
            copy = before.get(place)
            is_dense = tensor.layout == torch.strided
            if copy is None or not is_dense or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = tensor.to("cpu", copy=True)
            else:
                copy.copy_(tensor)
            self._copies[place] = copy
            if memory:
                seen[memory] = copy
            return copy

        return tree_map(state, copy_of)  # type: ignore[no-any-return]


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The address of a tensor and how it is read from there; empty if it has no address."""
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout != torch.strided or not tensor.numel():
        return ()
    view = (tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), *view)


class AsyncWriter:
    """A thread that writes while training continues; the process waits for it. An error is raised or logged once."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._pending: Future[None] | None = None
        finish = weakref.WeakMethod(self._finish)
        call_at_exit(lambda: method() if (method := finish()) else None)

    def start(self, write: Callable[[], None]) -> None:
        """Begin a write once the previous one is complete."""
        self.wait()
        self._pending = self._thread.submit(write)

    def wait(self) -> None:
        """Wait until the write is complete, and raise if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def check(self) -> None:
        """Raise if a write has failed, without waiting for one that is running."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def _finish(self) -> None:
        try:
            self.wait()
        except BaseException as error:
            logger.error("a write that was running when the process ended has failed: %s", error)


class ExecutedTrace:
    """Appends a row for each completed step, and leaves existing rows as they are.

    A crash may leave rows of steps that the checkpoint does not have: :meth:`truncate` drops them. Comments name the
    run at the top (`origin`) and, after each number of completed steps in `changes`, what changed then. `cores`,
    if given, has the core of each minibatch of a step; rows then have these cores instead of the batch size.
    """

    def __init__(
        self,
        path: Path,
        schedule: BaseSchedule,
        *,
        origin: str,
        changes: Sequence[tuple[int, str]] = (),
        cores: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self.path, self._schedule, self._changes, self._cores = path, schedule, changes, cores
        columns = COLUMNS if cores is None else (COLUMNS[0], "cores")
        self._header = f"# executed from {schedule.name}: {origin}\n{','.join(columns)}\n"
        self._num_rows = self._num_bytes = 0

    def truncate(self, steps_of_epochs: Sequence[int]) -> None:
        """Drop the rows beyond the completed steps of each epoch, and comments without a row after them."""
        if self.path.exists():
            self._num_rows = self._num_bytes = position = 0
            for line in self.path.read_bytes().splitlines(keepends=True):
                position += len(line)
                step = line.partition(b",")[0]
                if step.isdigit() and int(step) < sum(steps_of_epochs) and line.endswith(b"\n"):
                    self._num_rows, self._num_bytes = int(step) + 1, position
            os.truncate(self.path, self._num_bytes)

    def append(self, steps_of_epochs: Sequence[int]) -> None:
        """Append rows for those completed steps of each epoch that have none."""
        if not self.path.exists() or self.path.stat().st_size != self._num_bytes:
            self._num_rows = self._num_bytes = 0
        lines = "".join(self._lines(steps_of_epochs))
        if lines:
            self._write(lines if self._num_rows else self._header + lines)
            self._num_rows = sum(steps_of_epochs)

    def _lines(self, steps_of_epochs: Sequence[int]) -> Iterator[str]:
        row = 0  # of the epoch's first step
        for epoch, number in enumerate(steps_of_epochs):
            first = max(0, self._num_rows - row)
            if first < number:
                if not first:
                    yield from self._comments_before(epoch, steps_of_epochs)
                steps = self._schedule.steps(epoch)
                for step in range(first, number):
                    yield from (f"# from here on: {text}\n" for after, text in self._changes if after == row + step)
                    yield f"{row + step},{self._value(steps[step])}\n"
            row += number

    def _value(self, step: int) -> object:
        return self._schedule.batch_size(step) if self._cores is None else " ".join(map(str, self._cores.get(step, ())))

    def _comments_before(self, epoch: int, steps_of_epochs: Sequence[int]) -> Iterator[str]:
        """A comment for each epoch that ended early since the last row."""
        for before in range(next((e for e in reversed(range(epoch)) if steps_of_epochs[e]), 0), epoch):
            number, full = steps_of_epochs[before], len(self._schedule.steps(before))
            if self._schedule.ended_early(before, number):
                of_its = f" of its {full}" if number < full else ""
                yield f"# epoch {before} was left after {number}{of_its} steps: in a replay, epochs begin elsewhere\n"

    def _write(self, text: str) -> None:
        try:
            with open(self.path, "ab") as file:
                file.truncate(self._num_bytes)
                num_written = file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(f"{self.path} could not be written: {error}") from error
        self._num_bytes += num_written


class CheckpointStore:
    """The directory of a run's checkpoints. The arguments are those of :class:`Checkpoint`."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: torch.nn.Module,
        optimizer: CustomOptimizer,
        schedulers: Sequence[Stateful],
        communicator: Communicator,
        *,
        keep: int,
        format: Format,
        asynchronous: bool,
    ) -> None:
        check_one_of(get_args(Format), format=format)
        if not isinstance(directory, str | os.PathLike):
            raise ValueError(f"`directory` must be a path, a URL, or None to save nothing, got {directory!r}")
        if not os.fspath(directory):  # often an environment variable that is not set
            raise ValueError('`directory` must not be empty: pass None to save nothing, or "." for the current folder')
        self._remote = RemoteDirectory(str(directory)) if is_url(directory) else None
        # the local directory of the files, which may be uploaded, and the directory as the user has passed it
        self.folder = local_path(directory) if self._remote is None else self._remote.folder
        self.directory = self.folder if self._remote is None else self._remote.url
        self._model, self._optimizer, self._schedulers = model, optimizer, schedulers
        self._keep, self._is_sharded, self._is_first = keep, format == "sharded", communicator.rank == 0
        self._rank, self._num_ranks = communicator.rank, communicator.num_replicas
        self.damaged: list[Path] = []  # checkpoints that were found to be
        self._writer = AsyncWriter() if asynchronous else None
        self._staging, self._has_stepped = HostStaging(), False
        if self._is_sharded:
            if xla.is_spmd():
                raise ValueError('`format` must be "file" in XLA\'s SPMD mode, got "sharded"')
            if self._remote is not None:
                raise ValueError(f'`format` must be "file" with a URL, got "sharded" for {self.directory}')
            self._group = sharded_state.host_group(communicator, next(optimizer.parameters()).device)
        self._lock = RunLock(self.folder, self._remote) if self._is_first else None
        # the files of another run are left as they are; it may end before acquire()
        self.is_prepared = self._lock is None or not self._lock.is_held_elsewhere()
        if self.is_prepared:
            self._prepare()
        sharded_state.try_out_model(model)
        sharded_state.try_out_optimizer(optimizer)

    def _prepare(self) -> None:
        if not self._is_first:
            return
        for name in (LOCK, RUN, EXECUTED, ASSIGNED, DECISIONS):
            if (self.folder / name).is_dir():
                raise ValueError(f"{self.folder / name} must be a file of the run, got a directory: remove it")
        state_file.prepare(self.folder) if self._remote is None else self._remote.check_writable()

    def acquire(self) -> None:
        """Start writing; raises if another run is writing. Called on rank 0."""
        if self._lock is not None:
            self._lock.acquire()
            if not self.is_prepared:
                self._prepare()

    def release(self) -> None:
        """Let other runs write."""
        if self._lock is not None:
            self._lock.release()

    def newest(self) -> str | None:
        """The name of the newest checkpoint."""
        if self._remote is None:
            names = [path.name for path in state_file.checkpoints(self.folder)]
        else:
            names = state_file.checkpoint_names(self._remote.names())
        return names[-1] if names else None

    def save(self, rest: dict[str, Any], *, when_done: Callable[[], None]) -> None:
        """Save the model, the optimizer and rank 0's `rest` of the state. Every rank must call it; rank 0 calls
        `when_done` once the checkpoint is complete."""
        steps_done, tensors = self._optimizer.steps_done, dict[str, torch.Tensor]()
        if self._is_sharded:
            self.wait()  # for the memory of the previous copy
            state = {**sharded_state.local_state(self._model, self._optimizer), **rest}
            state, tensors = sharded_state.split_sharded(state, copies=self._writer is not None)
        else:
            state = {**sharded_state.full_state(self._model, self._optimizer, is_first=self._is_first), **rest}
            if not self._is_first:
                return
        if self._writer is None:
            self._write(steps_done, state, tensors, when_done)
        else:
            self._writer.wait()
            state = self._staging.copy(state) if self._is_first else {}
            self._writer.start(lambda: self._write(steps_done, state, tensors, when_done))

    def _write(
        self, steps_done: int, state: dict[str, Any], tensors: dict[str, torch.Tensor], when_done: Callable[[], None]
    ) -> None:
        """Write a checkpoint. It is uploaded before other files are, and before older checkpoints are removed."""
        if self._lock is not None:
            self._lock.check()
        path = state_file.path_of(self.folder, steps_done)
        if self._is_first:
            self._set_damaged_aside()
        if self._is_sharded:
            sharded_state.write_directory(self.folder, steps_done, state, tensors, self._group, is_first=self._is_first)
        else:
            state_file.save(path, state)
        if not self._is_first:
            return
        before = state_file.checkpoints(self.folder)
        if self._remote is not None:
            self._remote.upload_and_truncate(path)
        state_file.keep_only(self.folder, self._keep)
        when_done()
        if self._remote is not None:
            self._remote.upload()
            for name in [one.name for one in before if not one.exists()]:
                self._remote.remove(name)

    def _set_damaged_aside(self) -> None:
        """Rename damaged checkpoints: they would count as the newest ones, and the older ones would be removed."""
        while self.damaged:
            path = self.damaged.pop()
            if self._remote is None:
                state_file.set_aside(path)
            else:
                path.unlink()  # its placeholder
                self._remote.rename(path.name, state_file.DAMAGED + path.name)

    def wait(self) -> None:
        """Wait until an asynchronous write is complete, and raise if it failed."""
        if self._writer is not None:
            self._writer.wait()

    def check(self) -> None:
        """Raise if an asynchronous write has failed. Every rank must call it after each step.

        After the first step, when all state exists, it raises for what a file cannot hold and allocates memory for
        copies.
        """
        if self._writer is not None:
            self._writer.check()
        if self._has_stepped:
            return
        self._has_stepped = True
        sharded_state.try_out_optimizer(self._optimizer)
        state_file.in_memory({"schedulers": state_of_schedulers(self._schedulers)})
        if self._writer is not None and not self._is_sharded:
            state = sharded_state.full_state(self._model, self._optimizer, is_first=self._is_first)
            if self._is_first:
                self._writer.start(lambda: self._staging.reserve(state))

    @contextmanager
    def found(self) -> Iterator[list[Path]]:
        """The existing checkpoints, the newest last."""
        if self._remote is None:
            yield state_file.checkpoints(self.folder)
            return
        for name in self._remote.names():
            if name != LOCK:
                self._remote.truncate_local(self.folder / name)
        paths = state_file.checkpoints(self.folder)
        own = [self.folder / name for name in (EXECUTED, DECISIONS, ASSIGNED)] if self._is_first else []
        for path in filter(Path.exists, own):
            self._remote.download(path)
        try:
            yield paths
        except ValueError as error:  # it should name the remote file
            raise ValueError(self._as_given(error)) from error

    def _as_given(self, error: Exception) -> str:
        """The text of an error, with the directory that the user has passed."""
        return str(error).replace(str(self.folder), str(self.directory))

    def read(self, path: Path) -> dict[str, Any]:
        """The state in a checkpoint; DamagedFileError if that is not what was written."""
        if self._remote is not None:
            self._remote.download(path)
        try:
            state = state_file.load(path)
            sharded_state.check_shards(path, state, rank=self._rank, num_ranks=self._num_ranks)
        except DamagedFileError as error:
            raise DamagedFileError(self._as_given(error)) from error
        finally:
            if self._remote is not None:
                self._remote.truncate_local(path)
        return state

    def load(self, path: Path, state: dict[str, Any], *, own: dict[str, Any], schedule: BaseSchedule) -> None:
        """Load the state of a checkpoint into the model and the optimizer, with the optimizer's `own` state and the
        `schedule` of the resumed run. Every rank must call it."""
        state = sharded_state.load_sharded(path, state, self._model, self._optimizer)
        try:
            sharded_state.load_model(self._model, state["model"])
        except RuntimeError as error:
            raise ValueError(f"{path} does not match the model, use another directory for it: {error}") from error
        optimizer = self._optimizer
        optimizer.set_schedule(schedule)
        sharded_state.load_full_optimizer_state(optimizer, {**state["optimizer"], STATE_KEY: own})
        for one in (optimizer, optimizer.inner):
            # otherwise torch warns that a scheduler was called first, if the epoch has no steps left
            one._opt_called = optimizer.steps_done > 0  # type: ignore[attr-defined]
