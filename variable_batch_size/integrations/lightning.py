"""VariableBatchSize: a Lightning callback whose Trainer counts updates, not minibatches, as steps."""

from __future__ import annotations

import warnings
from typing import Any, final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from variable_batch_size.data.sampler import CustomSampler, MinibatchSource
from variable_batch_size.integrations.common import refuse_another_run
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.schedules.live import PolicySchedule


@final
class StepBuffers:
    """Copies of a module's buffers.

    A step that was not complete when a run was saved is made again from its beginning. BatchNorm's statistics must then
    not know its minibatches yet.
    """

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    def copy(self, module: torch.nn.Module) -> None:
        """Note the buffers as they are."""
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in self._copies and self._copies[name].shape == buffer.shape:
                    self._copies[name].copy_(buffer)
                else:
                    self._copies[name] = buffer.detach().clone()

    def put_into(self, state: dict[str, torch.Tensor]) -> None:
        """Replace the buffers in a module's state, which need not have all, by the copies."""
        state.update({name: copy for name, copy in self._copies.items() if name in state})


_STRATEGIES = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)

NO_SHARDED_CHECKPOINTS = (
    "those of ModelParallelStrategy do not hold the optimizer's position, as vbs.Checkpoint does in a loop of your own"
)

_CALLBACKS = {
    GradientAccumulationScheduler: "the trace says how many minibatches make up a step",
    StochasticWeightAveraging: "it runs an epoch of its own: take WeightAveraging or EMAWeightAveraging",
    LearningRateFinder: "it takes every minibatch for a step",
    BatchSizeFinder: "the size of a minibatch is `minibatch_size` of the sampler",
}


def check_trainer(trainer: Any, module: LightningModule) -> None:
    """Refuse settings of the Trainer, not all of which it declares, and hooks of the module that change the result."""
    connector = trainer._accelerator_connector
    refused = [
        (trainer.accumulate_grad_batches != 1, "accumulate_grad_batches", 1, "the trace says how many make up a step"),
        (trainer.gradient_clip_val is not None, "gradient_clip_val", None, "set `clip_grad_norm=` of the optimizer"),
        (trainer.overfit_batches > 0, "overfit_batches", 0, "a sampler over a part of the data does the same"),
        (
            trainer.limit_train_batches != 1.0 and not trainer.fast_dev_run,
            "limit_train_batches",
            1.0,
            "an epoch ends where the trace says; `max_steps` ends a run after so many updates",
        ),
        (
            connector.use_distributed_sampler and connector.is_distributed,
            "use_distributed_sampler",
            False,
            "the sampler of this library deals the samples to the processes; loaders for validation need one of their "
            "own",
        ),
    ]
    for is_refused, name, must_be, reason in refused:
        if is_refused:
            value = getattr(connector if name == "use_distributed_sampler" else trainer, name)
            raise ValueError(f"`{name}` of the Trainer must be {must_be!r}, got {value!r}: {reason}")
    if not isinstance(trainer.strategy, _STRATEGIES):
        raise ValueError(
            f"`strategy` of the Trainer must be one device, DDP or ModelParallelStrategy, got "
            f"{type(trainer.strategy).__name__}"
        )
    if isinstance(trainer.strategy, ModelParallelStrategy) and trainer.checkpoint_callbacks:
        raise ValueError(f"`enable_checkpointing` of the Trainer must be False, got True: {NO_SHARDED_CHECKPOINTS}")
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ValueError(
            f'`precision` of the Trainer must be "32-true", "bf16-mixed" or another one without a loss scale, got '
            f'"{trainer.precision}": its GradScaler would leave out minibatches'
        )
    if is_overridden("configure_gradient_clipping", module):
        raise ValueError(
            "`configure_gradient_clipping` would clip each minibatch's gradient: set `clip_grad_norm=` of the "
            "optimizer, which clips that of the step"
        )
    for callback in trainer.callbacks:
        for kind, reason in _CALLBACKS.items():
            if isinstance(callback, kind):
                raise ValueError(f"`callbacks` of the Trainer must have no {kind.__name__}: {reason}")


def check_optimizer(trainer: Trainer) -> CustomOptimizer:
    """The one optimizer of a fit, with schedulers and a sampler that fit Lightning."""
    optimizer = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
    if not isinstance(optimizer, CustomOptimizer):
        found = ", ".join(type(one).__name__ for one in trainer.optimizers) or "none"
        raise ValueError(
            f"`configure_optimizers` must return one optimizer of variable_batch_size, got {found}: one takes several "
            "of torch as its `inner`"
        )
    if trainer.fit_loop._combined_loader is not None:
        raise ValueError(
            "`trainer.estimated_stepping_batches` counts minibatches: the updates of N epochs are "
            "`sampler.schedule.steps(N - 1).stop`"
        )
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step" and (config.frequency != 1 or config.reduce_on_plateau):
            raise ValueError(
                f'a scheduler with interval="step" must have the frequency 1 and go by its steps, got '
                f"{type(config.scheduler).__name__} with {config.frequency}"
            )
    _check_sampler(trainer, optimizer.sampler)
    return optimizer


def _check_sampler(trainer: Trainer, sampler: MinibatchSource) -> None:
    if not isinstance(sampler, CustomSampler):
        raise ValueError(
            f"`sampler` must be a CustomSampler with Lightning, which begins to read before a run is continued, got "
            f"{type(sampler).__name__}"
        )
    if isinstance(sampler.schedule, PolicySchedule):
        raise ValueError("`trace` must be known before the run where Lightning asks how long an epoch is, got a policy")
    if sampler.num_replicas > 1 and not sampler.schedule.lockstep:
        raise ValueError(
            "`lockstep` of the sampler must be True on several processes, which Lightning lets wait for each other in "
            "every minibatch, got False"
        )
    max_epochs = trainer.fit_loop.max_epochs
    if max_epochs is not None and max_epochs > 0:
        sampler.schedule.steps(max_epochs - 1)  # raises if the trace holds fewer


def check_loader(trainer: Trainer, optimizer: CustomOptimizer) -> CombinedLoader:
    """Lightning's loader of loaders, which must have one, that of the optimizer's sampler."""
    combined = trainer.fit_loop._combined_loader
    assert combined is not None
    samplers = [getattr(loader, "batch_sampler", loader) for loader in combined.flattened]
    if len(samplers) != 1 or samplers[0] is not optimizer.sampler:
        raise ValueError(
            f"`train_dataloader` must be one DataLoader that reads the optimizer's sampler (`batch_sampler=sampler`), "
            f"got {len(samplers)} with {', '.join(type(sampler).__name__ for sampler in samplers)}"
        )
    if hasattr(combined.flattened[0], "load_state_dict"):
        raise ValueError(
            f"`train_dataloader` must have no state of its own, got {type(combined.flattened[0]).__name__}: the "
            "sampler begins where a run was stopped, and the loader would leave out as much again"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"`accumulate_grad_batches` must stay 1, got {trainer.accumulate_grad_batches}: the trace says how many "
            "minibatches make up a step"
        )
    return combined


def check_first_fit(trainer: Trainer, before: CustomOptimizer | None, optimizer: CustomOptimizer) -> None:
    """Refuse a new optimizer, which stands before its first step, where the Trainer has counted some already."""
    is_another = before is not None and before is not optimizer and before.steps_made > 0
    if is_another and not trainer._checkpoint_connector._loaded_checkpoint:
        raise RuntimeError(
            "this Trainer has trained already, and `configure_optimizers` has returned another optimizer: make another "
            "Trainer, and go on with `fit(…, ckpt_path=…)`"
        )


def check_calls(trainer: Trainer, num_calls: int, *, has_run: bool) -> None:
    """Refuse a minibatch after which ``step()`` was not called once."""
    if has_run and num_calls != 1:
        raise RuntimeError(
            f"optimizer.step() must be called once for each minibatch, which then accumulates or updates, got "
            f"{num_calls} calls in minibatch {trainer.fit_loop.epoch_loop.batch_idx}"
        )


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
        check_first_fit(self.trainer, self._optimizer, optimizer)
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
        loader = check_loader(self.trainer, self._followed)
        self._num_calls, is_going_on = 0, self.restarting
        self._set_epoch()
        with warnings.catch_warnings():
            # the loader of this library begins where the epoch was left
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
            super().reset()
        sampler = self._followed.sampler
        done = sampler.schedule.num_minibatches_for(sampler.epoch, sampler.rank) - len(sampler)
        before = sum(
            sampler.schedule.num_minibatches_for(epoch, sampler.rank) for epoch in range(sampler.epoch * is_going_on)
        )
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
        check_calls(self.trainer, self._num_calls, has_run=has_run)

    def note_length(self) -> int:
        """Let Lightning know how many minibatches the epoch has, which it takes for the same in all."""
        sampler, fit_loop = self._followed.sampler, self.trainer.fit_loop
        number = sampler.schedule.num_minibatches_for(fit_loop.epoch_progress.current.processed, sampler.rank)
        fit_loop.max_batches = number
        return number

    def _set_epoch(self) -> None:
        optimizer, trainer = self._followed, self.trainer
        epoch = trainer.fit_loop.epoch_progress.current.processed
        first_step = optimizer.epoch_step if optimizer.epoch == epoch else 0
        optimizer.sampler.set_epoch(epoch, first_step)
        num_minibatches = self.note_length()
        if isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = max(1, int(num_minibatches * trainer.val_check_interval))

    @property
    def _followed(self) -> CustomOptimizer:
        assert self._optimizer is not None
        return self._optimizer


@final
class VariableBatchSize(Callback):
    """Lets ``Trainer.fit`` train a module whose ``configure_optimizers`` returns an optimizer of this library.

        trainer = Trainer(max_epochs=2, callbacks=[VariableBatchSize()], use_distributed_sampler=False)

    It sets the epochs of sampler and optimizer, lets ``trainer.global_step``, ``max_steps``, loggers and checkpoints
    count updates, steps schedulers with ``interval="step"`` once for each update, shows batch size and learning rate in
    the progress bar, and continues Lightning's checkpoints behind the steps they had. What would silently change the
    result is refused when ``fit`` begins.

    Args:
        prog_bar: whether the progress bar shows batch size and learning rate.
        logger: whether the loggers get them.
    """

    def __init__(self, *, prog_bar: bool = True, logger: bool = True) -> None:
        self._prog_bar = prog_bar
        self._logger = logger
        self._saved: dict[str, Any] | None = None
        self._optimizer: CustomOptimizer | None = None
        self._buffers = StepBuffers()

    # -------------------------------------------------------------------------------------------------------- a fit

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check what can be checked before anything is made, and count updates from now on."""
        if stage != "fit":
            return
        check_trainer(trainer, pl_module)
        trainer.fit_loop.epoch_loop = UpdateLoop.in_place_of(trainer.fit_loop.epoch_loop)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the optimizer and its schedulers."""
        self._optimizer = check_optimizer(trainer)
        _loop_of(trainer).follow(self._optimizer)
        saved, self._saved = self._saved, None
        refuse_another_run(self._optimizer, saved)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the progress bar know how long this epoch is."""
        _loop_of(trainer).note_length()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note the buffers with which a step of several minibatches begins."""
        optimizer = self._optimizer
        assert optimizer is not None
        at_once = optimizer.sampler.minibatch_size * optimizer.sampler.num_replicas
        if not optimizer.is_accumulating and optimizer.get_bs() > at_once:
            self._buffers.copy(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the batch size and the learning rate of each update."""
        optimizer = self._optimizer
        assert optimizer is not None
        if pl_module.automatic_optimization and not outputs:
            raise RuntimeError(
                f"training_step returned None for minibatch {batch_idx}, which would count as a gradient of 0: return a"
                " loss for each"
            )
        logger = self._logger and bool(trainer.loggers)
        if optimizer.updated and (self._prog_bar or logger):
            shown = {"batch_size": float(optimizer.batch_size), "learning_rate": optimizer.current_lr()}
            pl_module.log_dict(shown, prog_bar=self._prog_bar, logger=logger, on_step=True, batch_size=1)

    # -------------------------------------------------------------------------------------------------- checkpoints

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Leave no mark of a step that is not complete: it is made again when the run goes on."""
        if isinstance(trainer.strategy, ModelParallelStrategy):
            raise RuntimeError(f"Lightning cannot save this run: {NO_SHARDED_CHECKPOINTS}")
        if self._optimizer is None:
            return
        if self._optimizer.is_accumulating:
            self._buffers.put_into(checkpoint["state_dict"])
        _leave_epoch_open(checkpoint["loops"]["fit_loop"]["epoch_progress"], self._optimizer)

    def state_dict(self) -> dict[str, Any]:
        """What a run is, for those that go on from it."""
        return {} if self._optimizer is None else {"run": self._optimizer.description}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember what the saved run was, until there is an optimizer to compare it with."""
        self._saved = state_dict.get("run")


def _leave_epoch_open(progress: dict[str, dict[str, int]], optimizer: CustomOptimizer) -> None:
    """Take back that an epoch is done which `max_steps` or a stop has left early: a run that goes on completes it."""
    excess = progress["current"]["processed"] - optimizer.epoch
    if excess <= 0 or optimizer.epoch_step == len(optimizer.sampler.schedule.steps(optimizer.epoch)):
        return
    for counts in progress.values():
        counts["processed"] -= excess
        counts["completed"] = counts["processed"]


def _loop_of(trainer: Trainer) -> UpdateLoop:
    loop = trainer.fit_loop.epoch_loop
    assert isinstance(loop, UpdateLoop)
    return loop
