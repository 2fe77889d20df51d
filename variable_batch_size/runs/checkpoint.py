"""Checkpoint: saves a run so that it can stop at any time and resume on any number of cores."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from variable_batch_size.checks import check_not_negative, check_positive
from variable_batch_size.cores import devices, signals
from variable_batch_size.cores.detect import everyone_for
from variable_batch_size.optim.consistency import differences
from variable_batch_size.optim.optimizer import STATE_KEY, CustomOptimizer
from variable_batch_size.runs import resume, state_file
from variable_batch_size.runs.coordination import RankCoordinator
from variable_batch_size.runs.executed import ExecutedTrace
from variable_batch_size.runs.log import Metrics
from variable_batch_size.runs.sinks import ClosedAfterEach, JsonLines
from variable_batch_size.runs.state_file import Stateful, load_state, state_of
from variable_batch_size.runs.store import DECISIONS, EXECUTED, CheckpointStore, Format


def epoch_step(optimizer: CustomOptimizer, *, epoch: int, first_step: int, steps_before: int) -> int:
    """The steps of an epoch that are done.

    Args:
        optimizer: of the run.
        epoch: that the loop is in, or comes to next.
        first_step: after how many of its steps the loop has entered it.
        steps_before: how many steps of the run were done by then.

    Raises:
        RuntimeError: if the optimizer is elsewhere, as after a ``set_epoch`` that is not the loop's.
    """
    made = optimizer.steps_done - steps_before
    if made and (optimizer.epoch, optimizer.epoch_step) != (epoch, first_step + made):
        raise RuntimeError(
            f"the optimizer is behind step {optimizer.epoch_step} of epoch {optimizer.epoch}, and checkpoint.epochs() "
            f"behind step {first_step + made} of epoch {epoch}: go through epochs with it, and leave set_epoch to it"
        )
    return first_step + made


logger = logging.getLogger(__name__)


class Checkpoint:
    """Saves a run as it goes and, when it is made, takes up the one that its directory holds.

        checkpoint = vbs.Checkpoint("runs/a", model=model, optimizer=optimizer, every_seconds=600)
        for epoch in checkpoint.epochs(5):
            for data, target in loader:
                loss_fn(model(data), target).backward()
                optimizer.step()
                checkpoint.step()

    A checkpoint holds the model, the optimizer with its rule, the schedulers, the position and every core's random
    generators. It is written by core 0 and read by all: machines share the directory. The model's buffers are those of
    core 0. The same run on the same cores goes on to the last bit, with three exceptions: what loader workers draw
    themselves starts anew; virtual XLA cores share the host's generators; and on another number or kind of cores only
    the generators that were there before go on, so that dropout differs unless minibatches are seeded.

    **SIGTERM**, which announces the end of a spot machine, saves at the end of a step, within about a second, and ends
    the process with :data:`EXIT_STOPPED`.

    Args:
        directory: for the checkpoints, made if need be, or an address of objects such as ``"s3://bucket/run"``; None
            to save nothing, for scripts that leave it to their user.
        model: what is trained.
        optimizer: what trains it; its sampler has the schedule.
        schedulers: of torch, or anything else with ``state_dict`` and ``load_state_dict``, alike on all cores.
        metrics: sums over all cores, such as of an epoch that was stopped in the middle.
        every_steps: save every N steps.
        every_seconds: save when that much time has passed since the latest save, by the clock of core 0.
        keep: how many of the latest checkpoints stay.
        accept: in what this run may be another than the one that was saved: ``"trace"``, ``"on_end"``,
            ``"dataset_size"``, ``"minibatch_size"``, ``"seed"``, ``"shuffle"``, ``"rule"``, ``"ref_batchsize"``,
            ``"exact"``, ``"seed_minibatches"`` or, of exact runs on a CPU, ``"threads"``; what has changed is logged.
            Steps that were made stay as they were, and row r of another trace is step r.
        format: ``"file"`` for the whole state in one file, ``"sharded"`` for a directory in which each process writes
            its part, for what does not fit one host. Either is gone on from in any way.
        asynchronous: whether training goes on while they are written. A write that failed is an error at the next step.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        *,
        model: torch.nn.Module,
        optimizer: CustomOptimizer,
        schedulers: Sequence[Stateful] = (),
        metrics: Sequence[Metrics] = (),
        every_steps: int | None = None,
        every_seconds: float | None = None,
        keep: int = 2,
        accept: Collection[str] = (),
        format: Format = "file",
        asynchronous: bool = False,
    ) -> None:
        if not isinstance(optimizer, CustomOptimizer):
            raise ValueError(f"`optimizer` must be a CustomOptimizer, got {type(optimizer).__name__}")
        if every_steps is not None:
            check_positive(every_steps=every_steps)
        check_positive(keep=keep)
        self._accept = resume.check_accept(accept)
        signals.shield_loader_workers()
        self.directory: Path | str | None = None
        self.every_steps = every_steps
        self._optimizer = optimizer
        self._sampler = optimizer.sampler
        self._schedulers = list(schedulers)
        self._metrics = list(metrics)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._device: torch.device = parameters[0].device
        self._communicator = everyone_for(parameters, self._sampler.process_group)
        self._agreement = RankCoordinator(self._communicator, self._device, every_seconds=every_seconds)
        self._identity = optimizer.description

        self._epoch = 0  # where the next pass begins, or the present one began
        self._first_step = 0
        self._steps_of_epochs: list[int] = []  # how many steps of each epoch before this one were made
        self._random: dict[str, torch.Tensor] | None = None  # to be restored when the run goes on
        self._changes: list[tuple[int, str]] = []  # after how many steps the run became another, and in what
        if directory is not None:
            how: dict[str, Any] = {"keep": keep, "format": format, "asynchronous": asynchronous}
            self._saving = CheckpointStore(directory, model, optimizer, self._communicator, **how)
            self.directory = self._saving.directory
            with self._saving.found() as paths:
                self._take_up(paths)
            if self._communicator.rank == 0:
                optimizer.on_decision(ClosedAfterEach(JsonLines(self._saving.folder / DECISIONS)))
        self._agreement.note_saved()
        self._steps_seen = self._steps_before = optimizer.steps_done  # the latter: before the epoch

    # ----------------------------------------------------------------------------------------------------------- a run

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The epochs of a run that are still to be done, with ``set_epoch`` called on the sampler and the optimizer.

        An epoch that was stopped goes on after the steps it had; if it had all of them, its loader is empty and what
        follows the loop is done. When all epochs are done, that is saved too. An epoch may be left early, also in the
        middle of a step, which then is not made.

        Raises:
            ValueError: at the start, if the trace holds fewer epochs.
        """
        check_not_negative(num_epochs=num_epochs)
        if num_epochs:
            self._sampler.schedule.steps(num_epochs - 1)
        with signals.listening(), contextlib.ExitStack() as at_end:
            at_end.callback(self.wait)
            while self._epoch < num_epochs:
                self._begin_epoch()
                yield self._epoch
                self._end_epoch()
                decision = self._agreement.ask()
                if self._epoch == num_epochs:
                    self.save()
                    decision = self._agreement.ask()  # again: this is the last time
                elif decision.is_late or decision.is_told:
                    self.save()
                if decision.is_told:
                    self._stop()
            self._restore_random()  # if the run had ended before

    def step(self) -> None:
        """Call it at the end of the loop body, behind schedulers: saves if it is time, and stops if that was told."""
        optimizer = self._optimizer
        if optimizer.steps_done == self._steps_seen:
            return
        self._steps_seen = optimizer.steps_done
        if self.directory is not None:
            self._saving.check()
        is_due = self.every_steps is not None and optimizer.steps_done % self.every_steps == 0
        minibatches = -(-optimizer.batch_size // (self._sampler.minibatch_size * self._sampler.num_replicas))
        decision = self._agreement.after_minibatches(minibatches)
        if is_due or decision.is_late or decision.is_told:
            self.save()
        if decision.is_told:
            self._stop()

    def save(self) -> None:
        """Save now, between two steps. Every core must call it."""
        if self.directory is None:
            return
        if self._optimizer.is_accumulating:
            raise RuntimeError(
                "save() was called in the middle of a step: call it when optimizer.step() has completed one"
            )
        epoch_step = self._epoch_step()
        random = self._agreement.rows_of_all_cores(devices.capture(self._device))
        sums = [metrics.read() for metrics in self._metrics]
        rows = [*self._steps_of_epochs, epoch_step]
        state = {**self._state(epoch_step), "random": random, "metrics": sums}
        self._saving.save(state, when_done=lambda: self._executed.extend(rows))
        self._agreement.note_saved()

    def wait(self) -> None:
        """Until what is being written asynchronously is there; ``epochs`` does so at its end."""
        if self.directory is not None:
            self._saving.wait()

    # ------------------------------------------------------------------------------------------------- epochs and cores

    def _epoch_step(self) -> int:
        where = {"epoch": self._epoch, "first_step": self._first_step, "steps_before": self._steps_before}
        return epoch_step(self._optimizer, **where)

    def _begin_epoch(self) -> None:
        if self._optimizer.steps_done > self._steps_before:  # a loop before this one was left within the epoch
            self._first_step, self._random = self._epoch_step(), None
            self._steps_before = self._optimizer.steps_done
        # what was saved between two epochs is restored there; what was saved within one, when its loader is set up
        if not self._first_step:
            self._restore_random()
        self._sampler.set_epoch(self._epoch, self._first_step)
        if self._first_step:
            self._sampler.on_first_read(self._restore_random)

    def _restore_random(self) -> None:
        """As a checkpoint has them that was loaded, until the epoch ends."""
        if self._random is not None:
            devices.restore(self._random, self._device)

    def _end_epoch(self) -> None:
        if self._optimizer.is_accumulating:
            self._optimizer.set_epoch(self._epoch, self._optimizer.epoch_step)  # discards what there is of a step
        self._steps_of_epochs.append(self._optimizer.epoch_step)
        self._epoch, self._first_step, self._random = self._epoch + 1, 0, None
        self._steps_before = self._optimizer.steps_done

    def _stop(self) -> None:
        """End this process, once that all cores have come here: what there is to save has been saved."""
        self.wait()
        self._agreement.sums([0])  # a core that ended now would have the others killed, perhaps core 0 as it writes
        signals.obey()
        if self._communicator.rank == 0:
            saved = "" if self.directory is None else f", saved in {self.directory}"
            logger.warning("told to stop: ended after %d steps%s", self._optimizer.steps_done, saved)
        raise SystemExit(signals.EXIT_STOPPED)

    # ---------------------------------------------------------------------------------------------- writing and reading

    def _state(self, epoch_step: int) -> dict[str, Any]:
        """All but the model, the optimizer and the random generators."""
        return {
            "run": self._identity,
            "epoch": self._epoch,
            "epoch_step": epoch_step,
            "steps_of_epochs": list(self._steps_of_epochs),
            "schedulers": [state_of(scheduler) for scheduler in self._schedulers],
            "past": resume.past_state(self._sampler.schedule.past(self._epoch, epoch_step)),
            "sums_gradients": self._optimizer.rule.sums_gradients,
            "changes": self._changes,
        }

    def _take_up(self, paths: list[Path]) -> None:
        """Go on from the newest checkpoint, if there is one; it is read and checked before anything is changed."""
        state = self._read(paths) if paths else None
        found = 0 if state is None else 1 + state["optimizer"]["variable_batch_size"]["steps_done"]
        (total,) = self._agreement.sums([found])
        if total != found * self._communicator.num_replicas:
            raise RuntimeError(
                f"the cores do not find the same checkpoint in {self.directory} (on core {self._communicator.rank}: "
                f"{paths[-1].name if paths else 'none'}): it must be a directory that all machines share"
            )
        if state is not None:
            self._restore(state, paths[-1])
        origin = ", ".join(f"{name} {value}" for name, value in self._identity.items())
        path, schedule = self._saving.folder / EXECUTED, self._sampler.schedule
        self._executed = ExecutedTrace(path, schedule, origin=origin, changes=self._changes)
        if state is not None and self._communicator.rank == 0:
            self._executed.cut_back([*self._steps_of_epochs, self._first_step])
            name = f"{self.directory}/{paths[-1].name}"
            logger.info("going on from %s: epoch %d, step %d of it", name, self._epoch, self._first_step)

    def _restore(self, state: dict[str, Any], path: Path) -> None:
        """Take over a state that was checked, and say in what the run is another now."""
        place = resume.place_of(state, self._sampler.schedule, self._identity)
        own = state["optimizer"][STATE_KEY]
        if state["run"]["rule"] != self._identity["rule"]:
            own = {**own, "rule": self._optimizer.rule.state_dict()}
        self._saving.load(path, state, own=own, schedule=place.schedule)
        for scheduler, saved in zip(self._schedulers, state["schedulers"], strict=True):
            load_state(scheduler, saved)
        for metrics, sums in zip(self._metrics, state.get("metrics", ()), strict=True):
            metrics.restore(sums)
        self._epoch, self._first_step, self._steps_of_epochs = place.epoch, place.first_step, place.steps_of_epochs
        self._changes = [(steps, text) for steps, text in state.get("changes", [])]
        self._note_changes(state, path)
        rank = self._communicator.rank
        if rank < len(state["random"]["torch"]):
            self._random = {name: rows[rank].clone() for name, rows in state["random"].items()}

    def _note_changes(self, state: dict[str, Any], path: Path) -> None:
        changed = "; ".join(differences(state["run"], self._identity))
        if changed:
            self._changes.append((self._optimizer.steps_done, changed))
            if self._communicator.rank == 0:
                logger.warning("going on from %s/%s as another run: %s", self.directory, path.name, changed)

    def _read(self, paths: list[Path]) -> dict[str, Any]:
        path = paths[-1]
        try:
            state = state_file.load(path)
        except ValueError as error:
            before = f"go on from {paths[-2].name}" if len(paths) > 1 else "start from the beginning"
            raise ValueError(f"{error}; move it away to {before}") from error
        different = resume.refused(state["run"], self._identity, self._accept)
        for name, here in (("schedulers", len(self._schedulers)), ("metrics", len(self._metrics))):
            if len(state.get(name, ())) != here:
                different.append(f"{name} were {len(state.get(name, ()))} and are {here}")
        if different:
            raise ValueError(f"{path} was saved by another run: {'; '.join(different)}")
        resume.refuse_other_sums(state, self._identity, sums_gradients=self._optimizer.rule.sums_gradients)
        return state
