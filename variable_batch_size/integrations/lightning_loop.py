"""UpdateLoop: Lightning's loop over an epoch's minibatches, in which a step is an update of the weights."""

from __future__ import annotations

import warnings
from typing import Any, final

from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch.optim import Optimizer

from variable_batch_size.integrations import lightning_checks as checks
from variable_batch_size.training.optimizer import CustomOptimizer


@final
class UpdateLoop(_TrainingEpochLoop):
    """Runs every minibatch through ``optimizer.step()`` and counts as a step what has updated the weights.

    Lightning asks ``_should_accumulate()`` whether a minibatch ends in a step: before its optimizer is called, to
    decide whether to call it, and afterwards for schedulers, loggers and counters. The optimizer of this library is
    called for every minibatch, so that the answer before is always no.
    """

    @classmethod
    def in_place_of(cls, loop: _TrainingEpochLoop) -> UpdateLoop:
        """A loop with the same settings, progress and loop for validation."""
        if isinstance(loop, cls):
            return loop
        own = cls(loop.trainer, loop.min_steps, loop.max_steps)
        own.__dict__.update(loop.__dict__)
        return own

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._optimizer: CustomOptimizer | None = None
        self._num_calls = 0  # of the optimizer's step() in the latest minibatch

    def follow(self, optimizer: CustomOptimizer) -> None:
        """Count the updates of an optimizer from now on."""
        checks.check_first_fit(self.trainer, self._optimizer, optimizer)
        if optimizer is not self._optimizer:
            optimizer.register_step_post_hook(self._note_call)
        self._optimizer = optimizer

    def _note_call(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._num_calls += 1
        if not self._followed.updated:
            self.trainer.log_every_n_steps = 0  # until the minibatch has ended: there is nothing to log

    @property
    def global_step(self) -> int:
        """How many updates were made."""
        return 0 if self._optimizer is None else self._optimizer.steps_done - self._optimizer.steps_skipped

    def _should_accumulate(self) -> bool:
        return self._num_calls > 0 and self._optimizer is not None and not self._optimizer.updated

    # ------------------------------------------------------------------------------------------------------ an epoch

    def reset(self) -> None:
        """Begin an epoch, or go on within one: Lightning's counters follow the optimizer's position."""
        loader = checks.check_loader(self.trainer, self._followed)
        self._num_calls, is_going_on = 0, self.restarting
        self._set_epoch()
        with warnings.catch_warnings():
            # the loader of this library begins where the epoch was left
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
            super().reset()
        sampler = self._followed.sampler
        done = sampler.schedule.num_yielded(sampler.epoch, sampler.rank) - len(sampler)
        before = sum(sampler.schedule.num_yielded(epoch, sampler.rank) for epoch in range(sampler.epoch * is_going_on))
        for count in ("ready", "started", "processed", "completed"):
            setattr(self.batch_progress.current, count, done)
            if is_going_on:  # without those of a step that is made again
                setattr(self.batch_progress.total, count, before + done)
        self._batches_that_stepped = self.global_step
        loader.limits = None  # of the length of another epoch

    def on_run_start(self, data_fetcher: Any) -> None:
        """Read the loader anew: it was set up before the epoch was known."""
        # once only: with workers that alone reads the sampler
        iter(data_fetcher)
        data_fetcher._start_profiler = self._on_before_fetch
        data_fetcher._stop_profiler = self._on_after_fetch

    def advance(self, data_fetcher: Any) -> None:
        """Run one minibatch, which must end in one call of the optimizer's ``step()``."""
        self._num_calls, before, log_every = 0, self.batch_progress.current.ready, self.trainer.log_every_n_steps
        try:
            super().advance(data_fetcher)
        finally:
            self.trainer.log_every_n_steps = log_every
        has_run = self.batch_progress.current.ready > before
        checks.check_calls(self.trainer, self._num_calls, has_run=has_run)

    def note_length(self) -> int:
        """Let Lightning know how many minibatches the epoch has, which it takes for the same in all."""
        sampler, fit_loop = self._followed.sampler, self.trainer.fit_loop
        number = sampler.schedule.num_yielded(fit_loop.epoch_progress.current.processed, sampler.rank)
        fit_loop.max_batches = number
        return number

    def _set_epoch(self) -> None:
        optimizer, trainer = self._followed, self.trainer
        epoch = trainer.fit_loop.epoch_progress.current.processed
        first_step = optimizer.epoch_step if optimizer.epoch == epoch else 0
        optimizer.sampler.set_epoch(epoch, first_step)
        optimizer.set_epoch(epoch, first_step)
        num_minibatches = self.note_length()
        if isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = max(1, int(num_minibatches * trainer.val_check_interval))

    @property
    def _followed(self) -> CustomOptimizer:
        assert self._optimizer is not None
        return self._optimizer
