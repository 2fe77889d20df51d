"""Checkpoint: saves a run so that it can stop at any time and resume on any number of cores."""

import contextlib
import itertools
import json
import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from variable_batch_size.checks import check_one_of, check_positive
from variable_batch_size.cores import devices, signals
from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.cores.detect import everyone_for
from variable_batch_size.cores.messages import show
from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.files import DECISIONS, EXECUTED, RUN, write_json, write_text
from variable_batch_size.optim.attachments import EpochLoop
from variable_batch_size.optim.consistency import Changes, changes, differences, in_words
from variable_batch_size.optim.lr_scheduler import Stateful, load_schedulers, state_of_schedulers
from variable_batch_size.optim.optimizer import STATE_KEY, CustomOptimizer
from variable_batch_size.optim.proxy import OptimizerProxy
from variable_batch_size.optim.run import Limit
from variable_batch_size.policies.hints import HINTS
from variable_batch_size.policies.policy import depth_of, settings_of
from variable_batch_size.runs import state_file
from variable_batch_size.runs.checksums import DamagedFileError
from variable_batch_size.runs.log import Metrics
from variable_batch_size.runs.sinks import JsonLines
from variable_batch_size.runs.store import ASSIGNED, CheckpointStore, ExecutedTrace, Format
from variable_batch_size.schedules.policy_schedule import PolicySchedule
from variable_batch_size.schedules.schedule import BaseSchedule, ScheduleHistory

logger = logging.getLogger(__name__)

_MAY_CHANGE = (  # not the inner optimizer, whose state would mean something else
    *("trace", "on_end", "dataset_size", "minibatch_size", "seed", "shuffle"),
    *("rule", "ref_batchsize", "exact", "seed_minibatches", "threads"),
)
_SAVES_EARLY = (
    "must not be attached: it would save within optimizer.step(), before these have changed. Attach the schedulers, "
    "and for other objects call checkpoint.step() at the end of the loop instead"
)
_POLL_SECONDS = 1.0
_MAX_MINIBATCHES_BETWEEN_POLLS = 1_000_000
_SECONDS_BETWEEN_HINTS = 1.0


class CheckpointSignal(NamedTuple):
    """The result of a poll, the same on all ranks."""

    save_due: bool  # by the clock of rank 0
    stop_requested: bool  # on any rank


class RankCoordinator:
    """Polls all ranks about once a second, with an all-reduce of three integers at the end of a step.

    Time is measured by the clock of rank 0, and SIGTERM may reach one rank first. Rank 0 determines the number of
    minibatches until the next poll from the duration of the latest ones; a larger batch delays it by at most one step.
    """

    def __init__(self, communicator: Communicator, device: torch.device, *, every_seconds: float | None) -> None:
        if every_seconds is not None and not every_seconds > 0:
            raise ValueError(f"`every_seconds` must be positive, got {every_seconds!r}")
        self.every_seconds, self._communicator, self._device = every_seconds, communicator, device
        self._minibatches = 0  # run by rank 0 since the last poll
        self._poll_after = 1
        self._saved_at = self._polled_at = time.monotonic()

    def after_minibatches(self, number: int) -> CheckpointSignal:
        """Poll if it is time, at the end of a step in which rank 0 has run `number` minibatches."""
        self._minibatches += number
        return self.poll() if self._minibatches >= self._poll_after else CheckpointSignal(False, False)

    def poll(self) -> CheckpointSignal:
        """Poll now. Every rank must call it."""
        now = time.monotonic()
        save_due = self.every_seconds is not None and now - self._saved_at >= self.every_seconds
        if self._communicator.num_replicas == 1:
            return CheckpointSignal(save_due, signals.is_stop_requested())
        is_first = self._communicator.rank == 0
        per_poll = self._minibatches * _POLL_SECONDS / max(now - self._polled_at, 1e-9)
        poll_after = round(min(max(per_poll, 1), _MAX_MINIBATCHES_BETWEEN_POLLS))
        numbers = [is_first * save_due, signals.is_stop_requested(), is_first * poll_after]
        num_due, num_stops, self._poll_after = self.all_reduce(numbers)
        self._minibatches, self._polled_at = 0, time.monotonic()
        return CheckpointSignal(num_due > 0, num_stops > 0)

    def mark_saved(self) -> None:
        """Restart the time until the next save."""
        self._saved_at = time.monotonic()

    def all_reduce(self, numbers: list[int]) -> list[int]:
        """All-reduce integers. Every rank must call it, and it returns once all have."""
        return [int(number) for number in self._total(torch.tensor(numbers, dtype=torch.int64))]

    def gather_rows(self, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gather byte tensors into tables with one row per rank. Every rank must call it."""
        table = torch.zeros(self._communicator.num_replicas, sum(map(len, own.values())), dtype=torch.int32)
        table[self._communicator.rank] = torch.cat(list(own.values()))
        table = self._total(table).to(torch.uint8)
        ends = itertools.accumulate(map(len, own.values()))
        return {name: table[:, end - len(own[name]) : end].clone() for name, end in zip(own, ends, strict=True)}

    def _total(self, tensor: torch.Tensor) -> torch.Tensor:
        with devices.preserve_rng(self._device):
            return self._communicator.total(tensor.to(self._device))


class Checkpoint(EpochLoop):
    """Saves a run periodically; when constructed, resumes from the newest checkpoint in its directory.

        checkpoint = vbs.Checkpoint("runs/a", model=model, optimizer=optimizer, every_seconds=600)
        optimizer.attach(checkpoint)
        for epoch in optimizer.epochs(5):
            for data, target in loader:
                loss_fn(model(data), target).backward()
                optimizer.step()

    An attached checkpoint saves inside ``optimizer.step()``. If the loop body changes saved state after that, such as a
    ``GradScaler``, use ``for epoch in checkpoint.epochs(5)`` and call ``checkpoint.step()`` at the end of the body.

    A checkpoint contains the model, the optimizer with its rule and attached schedulers, the position, and the random
    number generators of every core. Core 0 writes it and all cores read it, so machines must share the directory. The
    model's buffers are those of core 0. A run that resumes on the same cores is bitwise identical to one that was never
    stopped, with two exceptions: random numbers drawn by loader workers start over, and virtual XLA cores share the
    generators of the host. On a different number or kind of cores, only the generators that existed before are
    restored, so dropout differs unless minibatches are seeded.

    **SIGTERM**, which announces the end of a spot machine, saves at the end of a step, within about a second, and ends
    the process with :data:`EXIT_STOPPED`. **Ctrl-C** saves in the same way and raises KeyboardInterrupt; pressed
    again, it raises at once, without a save. A second run in the same directory is refused.

    Args:
        directory: for the checkpoints, created if necessary, or a URL such as ``"s3://bucket/run"``; None to save
            nothing, for scripts that leave the choice to their user. A ``~`` is not expanded, as in ``torch.save``.
        model: the model.
        optimizer: its optimizer, whose sampler has the schedule.
        schedulers: those that are not attached, or other objects with ``state_dict`` and ``load_state_dict``, the same
            on all cores.
        metrics: sums over all cores to save and restore, such as those of an unfinished epoch.
        every_steps: save every N steps.
        every_seconds: save when that many seconds have passed since the last save, by the clock of core 0.
        keep: number of checkpoints to keep.
        allow_changes: settings that may differ from those of the saved run: ``"trace"``, ``"on_end"``,
            ``"dataset_size"``, ``"minibatch_size"``, ``"seed"``, ``"shuffle"``, ``"rule"``, ``"ref_batchsize"``,
            ``"exact"``, ``"seed_minibatches"`` or, for exact runs on a CPU, ``"threads"``; changes are logged.
            Completed steps stay as they were, and row r of a new trace is step r.
        format: ``"file"`` for the full state in one file, ``"sharded"`` for a directory to which each process writes
            its shard, for states that do not fit on one host. A run can resume from either format, whatever this is.
        asynchronous: write while training continues. A failed write raises at the next step.
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
        allow_changes: Collection[str] = (),
        format: Format = "file",
        asynchronous: bool = False,
    ) -> None:
        if not isinstance(optimizer, CustomOptimizer):
            raise ValueError(f"`optimizer` must be a CustomOptimizer, got {type(optimizer).__name__}")
        if set(model.parameters()).isdisjoint(optimizer.parameters()):
            kind = type(model).__name__
            raise ValueError(f"`model` must be the model that the optimizer trains, got {kind} with other parameters")
        if optimizer.sampler.is_elastic:
            advice = "save optimizer.state_dict() and the model where optimizer.sampler.rank is 0"
            raise ValueError(f"a Checkpoint must not be used with `elastic`, as core 0 may leave: {advice}")
        check_positive(keep=keep, **({} if every_steps is None else {"every_steps": every_steps}))
        if isinstance(allow_changes, str):
            raise ValueError(f"`allow_changes` must be a set of names, got the str {allow_changes!r}")
        for name in allow_changes:
            check_one_of(_MAY_CHANGE, allow_changes=name)
        self._allow_changes = {*allow_changes, *(("settings of the rule",) if "rule" in allow_changes else ())}
        signals.shield_loader_workers()
        self.directory: Path | str | None = None
        self.every_steps = every_steps
        self._optimizer, self._sampler = optimizer, optimizer.sampler
        self._schedulers, self._metrics = list(schedulers), list(metrics)
        parameters = list(optimizer.parameters())
        self._device: torch.device = parameters[0].device
        self._communicator = everyone_for(parameters, self._sampler.process_group)
        self._coordinator = RankCoordinator(self._communicator, self._device, every_seconds=every_seconds)
        self._fingerprint = optimizer.description

        self._epoch = 0  # of the next pass, or of the current one
        self._first_step = self._num_assigned = 0  # the latter: steps whose cores were recorded
        self._steps_of_epochs: list[int] = []  # completed steps of each epoch before this one
        self._random: dict[str, torch.Tensor] | None = None  # loaded, and restored when the run resumes
        self._changes: list[tuple[int, Changes]] = []  # number of completed steps, and what changed then
        self._is_described = False  # in a file
        self._seconds_to_start: float | None = None  # from the start of the process to the end of its first step
        self._seconds_to_save = 0.0
        self._hinted_at = -float("inf")
        self._has_policy = isinstance(self._sampler.schedule, PolicySchedule)
        if directory is not None:
            how: dict[str, Any] = {"keep": keep, "format": format, "asynchronous": asynchronous}
            self._store = CheckpointStore(directory, model, optimizer, self._schedulers, self._communicator, **how)
            self.directory = self._store.directory
            with self._store.found() as paths:
                self._resume(paths)
            if self._communicator.rank == 0:
                optimizer.on_decision(JsonLines(self._store.folder / DECISIONS, open_per_record=True))
                optimizer.on_decision(self._on_decision)
        self._coordinator.mark_saved()
        self._steps_seen = self._steps_before = optimizer.steps_done  # the latter: before the epoch

    def epochs(
        self,
        num_epochs: int | None = None,
        *,
        progress: float | None = None,
        samples: float | None = None,
        tokens: float | None = None,
    ) -> Iterator[int]:
        """Iterate over the remaining epochs of a run, and call ``set_epoch`` on the sampler and the optimizer.

        An epoch that was interrupted continues after its completed steps; if all were completed, its loader is empty
        and the code after the loop runs. The end of the last epoch is saved. The loop may leave an epoch early, even in
        the middle of a step, which is then discarded. Raises at the start if the trace has fewer epochs.

        With `progress`, `samples` or `tokens`, the run ends after the step that reaches one of them, even within an
        epoch, as in :meth:`CustomOptimizer.epochs`. Called with a larger value, it resumes there.
        """
        limit, run = Limit(progress, samples, tokens), self._optimizer.run
        most = limit.num_epochs(num_epochs, self._sampler.schedule)
        on_interrupt = None if self.directory is None else self._announce_save
        with signals.listening(on_interrupt), contextlib.ExitStack() as at_end:
            if self.directory is not None:
                self._acquire()
                at_end.callback(self._store.release)
            at_end.callback(self.wait)
            at_end.enter_context(run.limited(limit, most))
            while (most is None or self._epoch < most) and not run.is_at(limit):
                self._begin_epoch()
                yield self._epoch
                is_within = run.is_at(limit) and not run.has_completed_epoch
                if not is_within:
                    self._end_epoch()
                most = limit.epochs_now(num_epochs, self._sampler.schedule)
                signal = self._coordinator.poll()
                if is_within or self._epoch == most or run.is_at(limit):
                    self.save()
                    signal = self._coordinator.poll()  # again, as there is no later poll
                elif signal.save_due or signal.stop_requested:
                    self.save()
                if signal.stop_requested:
                    self._stop()
            self._restore_random()  # if the run was complete already
        run.warn_unless_at(limit, num_epochs)

    def step(self) -> None:
        """Save if it is time, and stop if that was requested. Call it at the end of the loop body, after schedulers."""
        optimizer = self._optimizer
        if optimizer.steps_done == self._steps_seen:
            return
        self._steps_seen = optimizer.steps_done
        if self._seconds_to_start is None:
            self._seconds_to_start = _process_seconds()
        if self.directory is not None:
            self._store.check()
        if self._sampler.num_to_run is not None:  # epochs() saves the end of the run, after what the loop body does
            return
        is_due = self.every_steps is not None and optimizer.steps_done % self.every_steps == 0
        schedule, size = self._sampler.schedule, optimizer.batch_size
        depth = depth_of(size, schedule.minibatch_size_of(size), schedule.num_replicas)
        signal = self._coordinator.after_minibatches(depth)
        if is_due or signal.save_due or signal.stop_requested:
            self.save()
        if signal.stop_requested:
            self._stop()

    def on_attach(self, optimizer: OptimizerProxy) -> None:
        """Called by :meth:`CustomOptimizer.attach`."""
        if optimizer is not self._optimizer:
            raise ValueError("the checkpoint belongs to another optimizer: attach it there")
        if self._metrics:
            raise ValueError(f"a checkpoint with `metrics` {_SAVES_EARLY}")

    def check_attached(self, attached: Sequence[Stateful]) -> None:
        """Called by the optimizer to which the checkpoint is attached: raise if a state would be saved too early."""
        for one in self._schedulers:
            reads = (one, getattr(one, "dataset", None), getattr(one, "batch_sampler", None))
            if not any(one is other for other in attached) and not any(source is self._sampler for source in reads):
                kind = type(one).__name__
                raise ValueError(f"a checkpoint with {kind} in `schedulers`, which is not attached, {_SAVES_EARLY}")

    def after_minibatch(self, plan: StepPlan, loss: Any) -> None:
        """Called by the optimizer to which the checkpoint is attached."""
        self.step()

    def save(self) -> None:
        """Save now, between two steps. Every core must call it."""
        if self.directory is None:
            return
        if self._optimizer.is_accumulating:
            advice = "call it after optimizer.step() has completed one"
            raise RuntimeError(f"save() was called in the middle of a step: {advice}")
        began, epoch_step = time.monotonic(), self._epoch_step()
        random = self._coordinator.gather_rows(devices.capture(self._device))
        past = self._sampler.schedule.past(self._epoch, epoch_step)
        arrays = {"sizes": torch.from_numpy(past.sizes.copy()), "counts": torch.from_numpy(past.counts.copy())}
        steps_of_epochs = [*self._steps_of_epochs, epoch_step]
        state = {
            "run": self._fingerprint,
            "epoch": self._epoch,
            "epoch_step": epoch_step,
            "steps_of_epochs": list(self._steps_of_epochs),
            "schedulers": state_of_schedulers(self._schedulers),
            "past": {**past._asdict(), **arrays, "starts": list(past.starts)},
            "sums_gradients": self._optimizer.rule.sums_gradients,
            "changes": self._changes,
            "random": random,
            "metrics": [metrics.read() for metrics in self._metrics],
            "parts": self._optimizer.state_of_parts(),
        }
        self._take_shares(past.num_rows)
        self._store.save(state, when_done=lambda: self._append_rows(steps_of_epochs, past.num_rows))
        self._coordinator.mark_saved()
        self._seconds_to_save = time.monotonic() - began
        if self._has_policy:
            self._write_hints()

    def _on_decision(self, record: Mapping[str, Any]) -> None:
        """Called on rank 0; the first decision is made before the directory belongs to this run."""
        is_time = time.monotonic() - self._hinted_at >= _SECONDS_BETWEEN_HINTS
        if is_time and self._seconds_to_start is not None:
            self._write_hints()

    def _write_hints(self) -> None:
        if self._seconds_to_start is not None:
            self._optimizer.run.restart_seconds = self._seconds_to_start + self._seconds_to_save
        hints = self._optimizer.hints()  # on all ranks, as it may read from the device
        if self._communicator.rank == 0:
            write_text(self._store.folder / HINTS, json.dumps(hints) + "\n")
        self._hinted_at = time.monotonic()

    def _take_shares(self, num_rows: int) -> None:
        """Gather which core has run each minibatch since the last save, unless that was by round robin."""
        shares, first = self._sampler.shares, self._num_assigned
        if shares is not None:
            self._cores |= dict(zip(range(first, num_rows), shares.take_record(range(first, num_rows)), strict=True))
            self._num_assigned = num_rows

    def _append_rows(self, steps_of_epochs: list[int], num_rows: int) -> None:
        if not self._is_described:
            write_json(self._store.folder / RUN, self._described(), indent=1)
            self._is_described = True
        self._executed.append(steps_of_epochs)
        if self._sampler.shares is not None:
            self._assigned.append(steps_of_epochs)
            for step in [step for step in [*self._cores] if step < num_rows]:  # the next save may have added others
                del self._cores[step]

    def _described(self) -> dict[str, Any]:
        """What ``run.json`` says: the settings, what they were before, and what decides the batch sizes."""
        policy, schedule = self._sampler.policy, self._sampler.schedule
        return {
            "settings": dict(self._fingerprint),
            "trace": None if schedule.is_live or schedule.is_open else self._fingerprint["trace"],
            "policy": None if policy is None else {"name": type(policy).__name__, "settings": settings_of(policy)},
            "changes": [{"steps_done": steps, "settings": changed} for steps, changed in self._changes],
        }

    def wait(self) -> None:
        """Wait until an asynchronous write is complete. ``epochs`` calls it at its end."""
        if self.directory is not None:
            self._store.wait()

    def _acquire(self) -> None:
        """Start writing, or raise on all ranks if another run is writing."""
        problem = None
        if self._communicator.rank == 0:
            try:
                self._store.acquire()
                if not self._store.is_prepared and self._store.newest() != self._found:
                    raise RuntimeError(f"another run has saved to {self.directory} since: create a new Checkpoint")
                if not self._store.is_prepared and self._found is not None:
                    self._truncate_rows()
            except (RuntimeError, OSError) as error:
                self._store.release()
                problem = error
        if self._coordinator.all_reduce([problem is not None]) != [0]:
            raise problem or RuntimeError(f"rank 0 could not begin to write to {self.directory}")

    def _truncate_rows(self) -> None:
        for file in (self._executed, self._assigned):
            file.truncate([*self._steps_of_epochs, self._first_step])

    def _epoch_step(self) -> int:
        """Completed steps of the current epoch."""
        completed = self._optimizer.steps_done - self._steps_before
        step, optimizer = self._first_step + completed, self._optimizer
        if completed and (optimizer.epoch, optimizer.epoch_step) != (self._epoch, step):
            found = f"epoch {optimizer.epoch}, step {optimizer.epoch_step}"
            expected = f"checkpoint.epochs() expected epoch {self._epoch}, step {step}"
            advice = "Loop with `for epoch in checkpoint.epochs(…)`, and don't call set_epoch() inside it."
            raise RuntimeError(f"Optimizer is at {found}, but {expected}. {advice}")
        return step

    def _begin_epoch(self) -> None:
        if self._optimizer.steps_done > self._steps_before:  # an earlier loop ended within the epoch
            self._first_step, self._random = self._epoch_step(), None
            self._steps_before = self._optimizer.steps_done
        # generators saved between two epochs are restored here; those saved within one, when the loader is set up
        if not self._first_step:
            self._restore_random()
        self._sampler.set_epoch(self._epoch, self._first_step)
        if self._first_step:
            self._sampler.on_first_read(self._restore_random)

    def _restore_random(self) -> None:
        if self._random is not None:
            devices.restore(self._random, self._device)

    def _end_epoch(self) -> None:
        self._sampler.end_epoch()
        if self._optimizer.is_accumulating:
            self._optimizer.set_epoch(self._epoch, self._optimizer.epoch_step)  # discards the partial step
        self._steps_of_epochs.append(self._optimizer.epoch_step)
        self._epoch, self._first_step, self._random = self._epoch + 1, 0, None
        self._steps_before = self._optimizer.steps_done

    def _stop(self) -> None:
        """End this process once all ranks are here. The run has been saved."""
        self.wait()
        # on all ranks: if one exits early, the others may be killed, even rank 0 while it writes
        (interrupts,) = self._coordinator.all_reduce([signals.was_interrupted()])
        signals.acknowledge(is_exiting=not interrupts)
        signals.await_calls()
        if self._communicator.rank == 0:
            saved = "" if self.directory is None else f", saved in {self.directory}"
            logger.warning("stop requested: ended after %d steps%s", self._optimizer.steps_done, saved)
        raise KeyboardInterrupt if interrupts else SystemExit(signals.EXIT_STOPPED)

    def _announce_save(self) -> None:
        """Called at the first Ctrl-C."""
        if self._communicator.rank == 0:
            show(logger, "Ctrl-C: the run saves at the end of this step; press it again to end at once, without a save")

    def _resume(self, paths: list[Path]) -> None:
        """Resume from the newest intact checkpoint, if any. It is read and checked before anything is changed."""
        self._found = paths[-1].name if paths else None
        state = self._read_newest(paths)
        if state is not None:
            self._check_run(state, paths[-1])
            self._restore(state, paths[-1])
        origin = ", ".join(f"{name} {value}" for name, value in self._fingerprint.items())
        path, schedule = self._store.folder / EXECUTED, self._sampler.schedule
        changed = [(steps, "; ".join(in_words(what))) for steps, what in self._changes]
        self._executed = ExecutedTrace(path, schedule, origin=origin, changes=changed)
        self._cores: dict[int, list[int]] = {}  # of each minibatch, by the step in the schedule
        self._assigned = ExecutedTrace(path.with_name(ASSIGNED), schedule, origin=origin, cores=self._cores)
        self._num_assigned = schedule.past(self._epoch, self._first_step).num_rows
        if self._sampler.shares is not None:
            self._sampler.shares.keep_record()
        if state is not None and self._communicator.rank == 0:
            if self._store.is_prepared:
                self._truncate_rows()
            schedule = self._sampler.schedule
            of_all = f" of {len(schedule.trace)}" if schedule.on_end == "stop" else ""
            position = f"epoch {self._epoch}, step {self._optimizer.steps_done}{of_all}"
            show(logger, "resumed from %s/%s: %s", self.directory, paths[-1].name, position)

    def _read_newest(self, paths: list[Path]) -> dict[str, Any] | None:
        """The state in the newest checkpoint that no rank finds damaged; damaged ones are removed from the list."""
        rank, num_ranks = self._communicator.rank, self._communicator.num_replicas
        while True:
            state, problem = None, None
            try:
                state = self._store.read(paths[-1]) if paths else None
            except DamagedFileError as error:
                problem = error
            found = 1 + state_file.steps_of(paths[-1]) if paths else 0
            total, *are_damaged = self._coordinator.all_reduce([found, *_one_of(num_ranks, rank, problem is not None)])
            if total != found * num_ranks:
                here = f"rank {rank}: {paths[-1].name if paths else 'none'}"
                different = f"ranks found different checkpoints in {self.directory} ({here})"
                raise RuntimeError(f"{different}: all machines must share this directory")
            if not any(are_damaged):
                return state
            self._store.damaged.append(paths.pop())
            first = are_damaged.index(1)
            if not paths:
                names = ", ".join(path.name for path in self._store.damaged)
                text = problem or f"{names} cannot be read on rank {first}"
                raise ValueError(f"{text}; no older checkpoint is left: move {names} away to start from the beginning")
            if rank == first:
                logger.warning("%s; resuming from %s instead", problem, paths[-1].name)

    def _check_run(self, state: dict[str, Any], path: Path) -> None:
        """Raise if a checkpoint is of another run."""
        fixed = {name: value for name, value in self._fingerprint.items() if name not in self._allow_changes}
        different = differences(state["run"], fixed)
        for name, here in (("schedulers", len(self._schedulers)), ("metrics", len(self._metrics))):
            if len(state[name]) != here:
                different.append(f"{name} were {len(state[name])} and are {here}")
        if different:
            advice = "use another directory, or `allow_changes` to resume that run with other settings"
            raise ValueError(f"{path} was saved by another run: {'; '.join(different)}; {advice}")
        changed = [name for name in ("rule", "minibatch_size") if state["run"].get(name) != self._fingerprint[name]]
        if changed and (self._optimizer.rule.sums_gradients or state["sums_gradients"]):
            cannot = f"Cannot change {' and '.join(changed)} when resuming with a rule that sums gradients"
            raise ValueError(f"{cannot}: the saved momentum is scaled by the old number of minibatches.")

    def _restore(self, state: dict[str, Any], path: Path) -> None:
        """Load a state that was checked, and log what has changed since it was saved."""
        schedule, position = _resume_point(state, self._sampler.schedule)
        own = state["optimizer"][STATE_KEY]
        if state["run"]["rule"] != self._fingerprint["rule"]:
            own = {**own, "rule": self._optimizer.rule.state_dict()}
        self._store.load(path, state, own=own, schedule=schedule)
        load_schedulers(self._schedulers, state["schedulers"])
        for metrics, sums in zip(self._metrics, state["metrics"], strict=True):
            metrics.restore(sums)
        self._optimizer.load_state_of_parts(state["parts"])
        self._epoch, self._first_step, self._steps_of_epochs = position
        self._changes = [(steps, changed) for steps, changed in state["changes"]]
        rank, changed = self._communicator.rank, changes(state["run"], self._fingerprint)
        if changed:
            self._changes.append((self._optimizer.steps_done, changed))
            if rank == 0:
                place = (self.directory, path.name, "; ".join(in_words(changed)))
                logger.warning("resuming from %s/%s with changed settings: %s", *place)
        if rank < len(state["random"]["torch"]):
            self._random = {name: rows[rank].clone() for name, rows in state["random"].items()}


def _one_of(number: int, place: int, value: int) -> list[int]:
    """Zeros with a value at one place."""
    return [value if place == other else 0 for other in range(number)]


def _process_seconds() -> float | None:
    """How long ago this process was started; None where that is not known."""
    with contextlib.suppress(OSError, AttributeError):  # not on macOS
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return None


def _resume_point(state: Mapping[str, Any], schedule: BaseSchedule) -> tuple[BaseSchedule, tuple[int, int, list[int]]]:
    """The schedule after the steps of a saved run; its epoch, the completed steps in this epoch and in those before.

    An epoch that ended with the old trace continues if the new trace is longer.
    """
    epoch, first_step, steps_of_epochs = state["epoch"], state["epoch_step"], list(state["steps_of_epochs"])
    saved = state["past"]
    past = ScheduleHistory(saved["sizes"].numpy(), saved["counts"].numpy(), tuple(saved["starts"]), saved["has_ended"])
    if past.has_ended and not first_step and epoch:
        *before, number = steps_of_epochs
        longer = schedule.after(past._replace(starts=past.starts[:-1]))
        if past.starts[-2] + number == past.num_rows and number < len(longer.steps(epoch - 1)):
            return longer, (epoch - 1, number, before)
    return schedule.after(past), (epoch, first_step, steps_of_epochs)
