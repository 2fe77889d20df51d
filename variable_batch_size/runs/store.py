"""CheckpointStore: writes and loads the checkpoints of a run, as single files or sharded directories."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from variable_batch_size.checks import check_one_of
from variable_batch_size.cores import xla
from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.optim.lr_scheduler import Stateful, state_of_schedulers
from variable_batch_size.optim.optimizer import STATE_KEY, CustomOptimizer
from variable_batch_size.runs import sharded_state, state_file
from variable_batch_size.runs.async_writer import AsyncWriter, HostStaging
from variable_batch_size.runs.remote import RemoteDirectory, is_url, local_path
from variable_batch_size.schedules.schedule import BaseSchedule

Format = Literal["file", "sharded"]
EXECUTED, DECISIONS = "executed.csv", "decisions.jsonl"  # files that grow next to the checkpoints


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
        self._remote = RemoteDirectory(str(directory)) if is_url(directory) else None
        # the local directory of the files, perhaps to be uploaded, and the directory as the user knows it
        self.folder = local_path(directory) if self._remote is None else self._remote.folder
        self.directory = self.folder if self._remote is None else self._remote.url
        self._model, self._optimizer, self._schedulers = model, optimizer, schedulers
        self._keep, self._is_sharded, self._is_first = keep, format == "sharded", communicator.rank == 0
        self._writer = AsyncWriter() if asynchronous else None
        self._staging, self._has_stepped = HostStaging(), False
        if self._is_sharded:
            if xla.is_spmd():
                raise ValueError('`format` must be "file" in XLA\'s SPMD mode, got "sharded"')
            if self._remote is not None:
                raise ValueError(f'`format` must be "file" with a URL, got "sharded" for {self.directory}')
            self._group = sharded_state.host_group(communicator, next(optimizer.parameters()).device)
        if self._is_first:
            state_file.prepare(self.folder) if self._remote is None else self._remote.check_writable()
        sharded_state.try_out_model(model)
        sharded_state.try_out_optimizer(optimizer)

    def save(self, rest: dict[str, Any], *, when_done: Callable[[], None]) -> None:
        """Save the model, the optimizer and the rest of the state, that of rank 0, on which `when_done` is called once
        the checkpoint is complete. Every rank must call it."""
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
        path = state_file.path_of(self.folder, steps_done)
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

    def wait(self) -> None:
        """Wait until an asynchronous write is complete, and raise if it failed."""
        if self._writer is not None:
            self._writer.wait()

    def check(self) -> None:
        """Raise if an asynchronous write has failed. Every rank must call it after each step.

        After the first step, when all state exists, what a file cannot hold raises, and memory for copies is allocated.
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
        """The existing checkpoints, the newest last and readable within the context."""
        if self._remote is None:
            yield state_file.checkpoints(self.folder)
            return
        for name in self._remote.names():
            self._remote.truncate_local(self.folder / name)
        paths = state_file.checkpoints(self.folder)
        own = [self.folder / name for name in (EXECUTED, DECISIONS)] if self._is_first else []
        for path in [*paths[-1:], *(path for path in own if path.exists())]:
            self._remote.download(path)
        try:
            yield paths
        except ValueError as error:  # it should name the remote file
            raise ValueError(str(error).replace(str(self.folder), self._remote.url)) from error
        for path in paths[-1:]:
            self._remote.truncate_local(path)

    def load(self, path: Path, state: dict[str, Any], *, own: dict[str, Any], schedule: BaseSchedule) -> None:
        """Load the state of a checkpoint into the model and the optimizer, with the optimizer's `own` state and the
        `schedule` of the resumed run. Every rank must call it."""
        state = sharded_state.load_sharded(path, state, self._model, self._optimizer)
        try:
            sharded_state.load_model(self._model, state["model"])
        except RuntimeError as error:
            raise ValueError(f"{path} does not match the model: {error}") from error
        optimizer = self._optimizer
        optimizer.set_schedule(schedule)
        sharded = sharded_state.map_params(optimizer.inner, state["optimizer"], sharded_state.shard)
        optimizer.load_state_dict({**sharded, STATE_KEY: own})
        for one in (optimizer, optimizer.inner):
            # otherwise torch warns that a scheduler was called first, if the epoch has no steps left
            one._opt_called = optimizer.steps_done > 0  # type: ignore[attr-defined]
