"""CheckpointStore: writes and loads the checkpoints of a run, as single files or sharded directories."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from variable_batch_size.checks import check_one_of
from variable_batch_size.cores import xla
from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.optim.optimizer import STATE_KEY, CustomOptimizer
from variable_batch_size.runs import sharded_state, state_file
from variable_batch_size.runs.async_writer import AsyncWriter, HostStaging, needs_of
from variable_batch_size.runs.remote import Mirror, is_address, local_path
from variable_batch_size.schedules.schedule import BaseSchedule

Format = Literal["file", "sharded"]
FORMATS: tuple[Format, ...] = ("file", "sharded")


EXECUTED, DECISIONS = "executed.csv", "decisions.jsonl"
"""What grows beside the checkpoints."""


class CheckpointStore:
    """What all cores do together when a run is saved.

    Args:
        directory: for the checkpoints, or an address of objects.
        model: of the run.
        optimizer: likewise.
        communicator: of all processes of the run.
        keep: how many of the latest checkpoints stay.
        format: ``"file"`` for the whole state in one file, ``"sharded"`` for a directory with a part of each process.
        asynchronous: whether training goes on while they are written.

    Attributes:
        folder: of this machine, where the files are or whence they are uploaded.
        directory: as a user knows it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: torch.nn.Module,
        optimizer: CustomOptimizer,
        communicator: Communicator,
        *,
        keep: int,
        format: Format,
        asynchronous: bool,
    ) -> None:
        check_one_of(FORMATS, format=format)
        self._mirror = Mirror(str(directory)) if is_address(directory) else None
        self.folder = local_path(directory) if self._mirror is None else self._mirror.folder
        self.directory = self.folder if self._mirror is None else self._mirror.address
        self._keep = keep
        self._model, self._optimizer = model, optimizer
        self._communicator = communicator
        self._writer = AsyncWriter() if asynchronous else None
        self._host_copy, self._has_reserved = HostStaging(), False
        self._sharded = None
        if format == "sharded":
            if xla.is_spmd():
                raise ValueError('`format` must be "file" in XLA\'s SPMD mode, got "sharded"')
            if self._mirror is not None:
                raise ValueError(f'`format` must be "file" with an address, got "sharded" for {self.directory}')
            device = next(optimizer.parameters()).device
            self._sharded = sharded_state.ShardedFiles(self.folder, communicator, device, writer=self._writer)
        if communicator.rank == 0:
            state_file.prepare(self.folder) if self._mirror is None else self._mirror.prepare()

    def save(self, rest: dict[str, Any], *, when_done: Callable[[], None]) -> None:
        """Save the model and the optimizer with the rest of the state; every core must call it.

        Args:
            rest: on core 0, what else there is.
            when_done: called on core 0 when the checkpoint is there.
        """
        steps_done, is_writer = self._optimizer.steps_done, self._communicator.rank == 0

        def done() -> None:
            state_file.keep_only(self.folder, self._keep)
            when_done()

        if self._sharded is not None:
            state = sharded_state.state_in_parts(self._model, self._optimizer)
            self._sharded.save(steps_done, {**state, **rest}, when_done=done)
            return
        spread = sharded_state.collect(self._model, self._optimizer, is_writer=is_writer)
        self._has_reserved = True  # by the first copy, if it comes first
        if not is_writer:
            return
        path, state = state_file.path_of(self.folder, steps_done), {**spread, **rest}
        if self._writer is None:
            self._write(path, state, done)
            return
        self._writer.wait()
        copied = self._host_copy.of(state)
        self._writer.start(lambda: self._write(path, copied, done))

    def _write(self, path: Path, state: dict[str, Any], done: Callable[[], None]) -> None:
        """Write a checkpoint; where it is uploaded, before anything else is, and before older ones are removed."""
        state_file.save(path, state)
        if self._mirror is None:
            done()
            return
        before = state_file.checkpoints(self.folder)
        self._mirror.move(path)
        done()
        self._mirror.upload([self.folder / name for name in (EXECUTED, DECISIONS)])
        self._mirror.remove_gone([one.name for one in before])

    def wait(self) -> None:
        """Until what is being written is there; raises what has failed."""
        if self._writer is not None:
            self._writer.wait()

    def check(self) -> None:
        """Raise what has failed in writing, without waiting; every core must call it after its first step, at least."""
        if self._writer is not None:
            self._writer.check()
            if self._sharded is None and not self._has_reserved:
                self._reserve(self._writer)

    def _reserve(self, writer: AsyncWriter) -> None:
        """Get memory for the first copy while training goes on; the optimizer has all of its state after a step."""
        self._has_reserved = True
        is_writer = self._communicator.rank == 0
        needs = needs_of(sharded_state.collect(self._model, self._optimizer, is_writer=is_writer))
        if is_writer:
            writer.start(lambda: self._host_copy.reserve(needs))

    # --------------------------------------------------------------------------------------------------------- going on

    @contextmanager
    def found(self) -> Iterator[list[Path]]:
        """Within, the checkpoints that there are, the newest last and readable; errors name them as a user does."""
        if self._mirror is None:
            yield state_file.checkpoints(self.folder)
            return
        self._mirror.name_all()
        paths = state_file.checkpoints(self.folder)
        own = [self.folder / name for name in (EXECUTED, DECISIONS)] if self._communicator.rank == 0 else []
        for path in [*paths[-1:], *(path for path in own if path.exists())]:
            self._mirror.fetch(path)
        with self._mirror.naming_objects():
            yield paths
        for path in paths[-1:]:
            self._mirror.forget(path)

    def load(self, path: Path, state: dict[str, Any], *, own: dict[str, Any], schedule: BaseSchedule) -> None:
        """Give what was read of a checkpoint to the model and the optimizer; every core must call it.

        Args:
            path: of the checkpoint, which may be a directory with more of it.
            state: what was read.
            own: the part of the optimizer's state that is not the inner one's.
            schedule: with which the run goes on.
        """
        state = sharded_state.filled(path, state, self._model, self._optimizer)
        try:
            sharded_state.load_model(self._model, state["model"])
        except RuntimeError as error:
            raise ValueError(f"{path} does not fit the model: {error}") from error
        optimizer = self._optimizer
        optimizer.set_schedule(schedule)
        spread = sharded_state.split_optimizer_state(optimizer.inner, state["optimizer"])
        optimizer.load_state_dict({**spread, STATE_KEY: own})
        for one in (optimizer, optimizer.inner):
            # else torch would warn of a scheduler that comes before the optimizer, where an epoch has no steps left
            one._opt_called = optimizer.steps_done > 0  # type: ignore[attr-defined]
