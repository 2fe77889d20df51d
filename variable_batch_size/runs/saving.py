"""Saving: writes the checkpoints of a run, in one file each or in parts, and takes them up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from variable_batch_size.checks import check_one_of
from variable_batch_size.cores import xla
from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.runs import sharded_files, spread_state, storage
from variable_batch_size.schedules.layout import Layout
from variable_batch_size.training.optimizer import STATE_KEY, CustomOptimizer

Format = Literal["file", "sharded"]
FORMATS: tuple[Format, ...] = ("file", "sharded")


def check_format(format: Format, *, asynchronous: bool) -> None:
    """Refuse what is no way to save."""
    check_one_of(FORMATS, format=format)
    if format == "sharded" and xla.is_spmd():
        raise ValueError('`format` must be "file" in XLA\'s SPMD mode, got "sharded"')
    if asynchronous and format == "file":
        raise ValueError('`asynchronous` must be False with format="file", got True: format="sharded" can be so')


class Saving:
    """What all cores do together when a run is saved.

    Args:
        directory: for the checkpoints.
        model: of the run.
        optimizer: likewise.
        communicator: of all processes of the run.
        keep: how many of the latest checkpoints stay.
        format: ``"file"`` for the whole state in one file, ``"sharded"`` for a directory with a part of each process.
        asynchronous: whether training goes on while a directory is written.
    """

    def __init__(
        self,
        directory: Path,
        model: torch.nn.Module,
        optimizer: CustomOptimizer,
        communicator: Communicator,
        *,
        keep: int,
        format: Format,
        asynchronous: bool,
    ) -> None:
        self._directory, self._keep = directory, keep
        self._model, self._optimizer = model, optimizer
        self._communicator = communicator
        self._sharded = None
        if format == "sharded":
            device = next(optimizer.parameters()).device
            self._sharded = sharded_files.ShardedFiles(directory, communicator, device, asynchronous=asynchronous)

    def save(self, rest: dict[str, Any], *, when_done: Callable[[], None]) -> None:
        """Save the model and the optimizer with the rest of the state; every core must call it.

        Args:
            rest: on core 0, what else there is.
            when_done: called on core 0 when the checkpoint is there.
        """
        steps_done, is_writer = self._optimizer.steps_done, self._communicator.rank == 0

        def done() -> None:
            storage.keep_only(self._directory, self._keep)
            when_done()

        if self._sharded is not None:
            state = spread_state.state_in_parts(self._model, self._optimizer)
            self._sharded.save(steps_done, {**state, **rest}, when_done=done)
            return
        spread = spread_state.collect(self._model, self._optimizer, is_writer=is_writer)
        if is_writer:
            storage.save(storage.path_of(self._directory, steps_done), {**spread, **rest})
            done()

    def wait(self) -> None:
        """Until what is being written is there."""
        if self._sharded is not None:
            self._sharded.wait()

    def load(self, path: Path, state: dict[str, Any], *, own: dict[str, Any], schedule: Layout) -> None:
        """Give what was read of a checkpoint to the model and the optimizer; every core must call it.

        Args:
            path: of the checkpoint, which may be a directory with more of it.
            state: what was read.
            own: the part of the optimizer's state that is not the inner one's.
            schedule: with which the run goes on.
        """
        state = sharded_files.filled(path, state, self._model, self._optimizer)
        try:
            spread_state.load_model(self._model, state["model"])
        except RuntimeError as error:
            raise ValueError(f"{path} does not fit the model: {error}") from error
        optimizer = self._optimizer
        optimizer.go_on_with(schedule)
        spread = spread_state.split_optimizer_state(optimizer.inner, state["optimizer"])
        optimizer.load_state_dict({**spread, STATE_KEY: own})
        for one in (optimizer, optimizer.inner):
            # else torch would warn of a scheduler that comes before the optimizer, where an epoch has no steps left
            one._opt_called = optimizer.steps_done > 0  # type: ignore[attr-defined]
