"""VariableBatchSize: a Lightning callback whose Trainer counts updates, not minibatches, as steps."""

import warnings
from contextlib import suppress
from typing import Any, final

import torch
from torch.optim import Optimizer

from variable_batch_size.checks import imported_extra
from variable_batch_size.data.sampler import MinibatchSource
from variable_batch_size.data.stream import Stream
from variable_batch_size.integrations.common import TRACE_DECIDES, check_same_run, check_setting, refuse_open_steps
from variable_batch_size.optim.optimizer import CustomOptimizer

with imported_extra("lightning", "variable_batch_size.integrations.lightning needs lightning", "lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
    from lightning.pytorch.utilities.model_helpers import is_overridden

NO_SHARDED_CHECKPOINTS = (
    "checkpoints of ModelParallelStrategy lack the optimizer's position. To save a sharded model, train it without the "
    "Trainer, in a loop of your own with vbs.Checkpoint"
)
_CALLBACKS = {
    callbacks.GradientAccumulationScheduler: TRACE_DECIDES,
    callbacks.StochasticWeightAveraging: "it runs an extra epoch. Use WeightAveraging or EMAWeightAveraging",
    callbacks.LearningRateFinder: "it counts every minibatch as a step",
    callbacks.BatchSizeFinder: "the size of a minibatch is `minibatch_size` of the sampler",
}


def check_trainer(trainer: Any, module: LightningModule) -> None:
    """Reject settings of the Trainer (some undeclared) and hooks of the module that would change the result."""
    connector = trainer._accelerator_connector
    limit = 1.0 if trainer.fast_dev_run else trainer.limit_train_batches
    replaces_sampler = connector.use_distributed_sampler and connector.is_distributed
    saves_shards = isinstance(trainer.strategy, ModelParallelStrategy) and bool(trainer.checkpoint_callbacks)
    for name, value, allowed, reason in (
        ("accumulate_grad_batches", trainer.accumulate_grad_batches, 1, TRACE_DECIDES),
        ("gradient_clip_val", trainer.gradient_clip_val, None, "set `clip_grad_norm=` of the optimizer"),
        ("overfit_batches", trainer.overfit_batches, 0, "use a sampler over a part of the data"),
        ("limit_train_batches", limit, 1.0, "the trace determines where an epoch ends; `max_steps` ends a run"),
        ("use_distributed_sampler", replaces_sampler, False, "only validation loaders need a DistributedSampler"),
        ("enable_checkpointing", saves_shards, False, NO_SHARDED_CHECKPOINTS),
    ):
        check_setting(f"`{name}` of the Trainer", value, allowed, because=reason)
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)):
        strategy = type(trainer.strategy).__name__
        raise ValueError(f"`strategy` must be a single device, DDP or ModelParallelStrategy, got {strategy}")
    if is_overridden("configure_gradient_clipping", module):
        wrong = "`configure_gradient_clipping` would clip the gradient of each minibatch"
        raise ValueError(f"{wrong}: set `clip_grad_norm=` of the optimizer")
    for kind, reason in _CALLBACKS.items():
        if any(isinstance(callback, kind) for callback in trainer.callbacks):
            raise ValueError(f"`callbacks` of the Trainer must contain no {kind.__name__}: {reason}")


def check_optimizer(trainer: Trainer) -> CustomOptimizer:
    """The only optimizer of a fit, if it, its schedulers and its sampler are supported."""
    optimizer = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
    if not isinstance(optimizer, CustomOptimizer):
        found = ", ".join(type(one).__name__ for one in trainer.optimizers) or "none"
        rule = "`configure_optimizers` must return one optimizer of variable_batch_size"
        raise ValueError(f"{rule}, got {found}: pass several optimizers of torch as its `inner`")
    if trainer.fit_loop._combined_loader is not None:
        advice = "use `sampler.num_updates(N)`, the updates of N epochs"
        raise ValueError(f"`trainer.estimated_stepping_batches` counts minibatches: {advice}")
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step" and (config.frequency != 1 or config.reduce_on_plateau):
            rule = 'a scheduler with interval="step" must have frequency 1 and must not monitor a metric'
            raise ValueError(f"{rule}, got {type(config.scheduler).__name__} with frequency {config.frequency}")
    sampler = optimizer.sampler
    refuse_open_steps(sampler, "Lightning")
    check_stream(sampler)
    if (
        has_unknown_length(sampler)
        and trainer.val_check_interval != 1.0
        and isinstance(trainer.val_check_interval, float)
    ):
        live = f"{sampler.schedule.name} decides the length of an epoch during it"
        reason = live if sampler.schedule.is_live else "a stream may end earlier than its trace"
        rule = "`val_check_interval` of the Trainer must be 1.0 or a number of minibatches"
        raise ValueError(f"{rule}, got {trainer.val_check_interval}: {reason}")
    if sampler.num_replicas > 1 and not sampler.schedule.lockstep:
        reason = "Lightning synchronizes ranks in every minibatch"
        raise ValueError(f"`lockstep` of the sampler must be True on several ranks, got False: {reason}")
    max_epochs = trainer.fit_loop.max_epochs
    if max_epochs is not None and max_epochs > 0 and not sampler.schedule.is_live:
        sampler.schedule.steps(max_epochs - 1)  # raises if the trace has fewer
    return optimizer


def has_unknown_length(sampler: MinibatchSource) -> bool:
    """Whether the number of minibatches in an epoch is known only after the last one."""
    return sampler.schedule.is_live or isinstance(sampler, Stream)


def check_stream(sampler: MinibatchSource) -> None:
    """Reject streams that cannot begin again: Lightning starts to read before it resumes."""
    if not isinstance(sampler, Stream):
        return
    if sampler.schedule.is_live:
        raise ValueError(f"`trace` of a Stream must not be {sampler.schedule.name} with Lightning: use a trace")
    if not (sampler.can_be_reread or sampler.is_sharded):
        rule = "`samples` of a Stream must not be an iterator with Lightning, which starts to read before it resumes"
        raise ValueError(f"{rule}: pass an iterable, or a function that returns one")


def check_loader(trainer: Trainer, optimizer: CustomOptimizer) -> CombinedLoader:
    """Lightning's combined loader, if it contains only the loader of the optimizer's sampler."""
    combined = trainer.fit_loop._combined_loader
    assert combined is not None
    samplers = [
        getattr(loader, "batch_sampler", None) or getattr(loader, "dataset", loader) for loader in combined.flattened
    ]
    if len(samplers) != 1 or samplers[0] is not optimizer.sampler:
        found = f"{len(samplers)} with {', '.join(type(sampler).__name__ for sampler in samplers)}"
        rule = "`train_dataloader` must be one DataLoader with the optimizer's sampler (`batch_sampler=sampler`)"
        raise ValueError(f"{rule}, got {found}")
    if isinstance(optimizer.sampler, Stream):
        because = "Lightning starts the workers before it resumes"
        check_setting("`num_workers` of a stream's loader", combined.flattened[0].num_workers, 0, because=because)
    if hasattr(combined.flattened[0], "load_state_dict"):
        kind = type(combined.flattened[0]).__name__
        raise ValueError(f"`train_dataloader` must not be stateful, got {kind}: the sampler already resumes by itself")
    check_setting("`accumulate_grad_batches`", trainer.accumulate_grad_batches, 1, because=TRACE_DECIDES)
    return combined


def is_at_end_of_epoch(optimizer: CustomOptimizer) -> bool:
    """Whether no step of the optimizer's epoch is left, which a live schedule shows only after the last one."""
    return next(optimizer.sampler.schedule.steps_from(optimizer.epoch, optimizer.epoch_step), None) is None


@final
class UpdateLoop(_TrainingEpochLoop):
    """Runs every minibatch through ``optimizer.step()`` and counts updates as steps."""

    optimizer: CustomOptimizer  # set by follow()
    _num_calls = 0  # of the optimizer's step() in the last minibatch

    def follow(self, optimizer: CustomOptimizer) -> None:
        before = getattr(self, "optimizer", None)
        if optimizer is before:
            return
        if before is not None and before.steps_made and not self.trainer._checkpoint_connector._loaded_checkpoint:
            reason = "this Trainer was already used, and `configure_optimizers` returned another optimizer"
            raise RuntimeError(f"{reason}: create a new Trainer and resume with `fit(…, ckpt_path=…)`")
        optimizer.register_step_post_hook(self._count_call)
        self.optimizer = optimizer

    def _count_call(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._num_calls += 1
        if not self.optimizer.updated:
            self.trainer.log_every_n_steps = 0  # until the minibatch ends: there is nothing to log
        if self._is_live and not self.optimizer.is_accumulating:
            self._set_last(is_at_end_of_epoch(self.optimizer))

    @property
    def _is_live(self) -> bool:
        return self.optimizer.sampler.schedule.is_live

    @property
    def _is_stream(self) -> bool:
        return isinstance(self.optimizer.sampler, Stream)

    def _set_last(self, is_last: bool) -> None:
        """Set whether the latest minibatch is the last one of the epoch."""
        self.batch_progress.is_last_batch = self.trainer.fit_loop._data_fetcher.done = is_last

    @property
    def global_step(self) -> int:
        return self.optimizer.steps_done - self.optimizer.steps_skipped if hasattr(self, "optimizer") else 0

    def _should_accumulate(self) -> bool:
        # before a minibatch Lightning asks whether to leave the optimizer out: never; after it, whether it has updated
        return self._num_calls > 0 and not self.optimizer.updated

    def reset(self) -> None:
        """Begin an epoch, or resume within one: Lightning's counters follow the optimizer's position."""
        optimizer, trainer = self.optimizer, self.trainer
        loader = check_loader(trainer, optimizer)
        self._num_calls, is_resuming, sampler = 0, self.restarting, optimizer.sampler
        epoch = trainer.fit_loop.epoch_progress.current.processed
        sampler.set_epoch(epoch, optimizer.epoch_step if optimizer.epoch == epoch else 0)
        if self._is_stream:
            with suppress(TypeError):  # endless
                len(loader.flattened[0])  # which torch compares with what is read in the epoch
        num_minibatches = self.set_length()
        if isinstance(trainer.val_check_interval, float):
            share = num_minibatches * trainer.val_check_interval
            trainer.val_check_batch = share if has_unknown_length(sampler) else max(1, int(share))
        with warnings.catch_warnings():
            # the sampler resumes within the epoch
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")
            super().reset()
        first = sampler.schedule.steps(epoch).start
        done = sum(sampler.schedule.rounds_for(first + step, sampler.rank) for step in range(sampler.first_step))
        before = sum(map(self._num_minibatches, range(epoch * is_resuming)))
        for count in ("ready", "started", "processed", "completed"):
            setattr(self.batch_progress.current, count, done)
            if is_resuming:  # without those of a step that is repeated
                setattr(self.batch_progress.total, count, before + done)
        self._batches_that_stepped = self.global_step
        if has_unknown_length(sampler):
            self._set_last(is_at_end_of_epoch(optimizer))
        loader.limits = None  # the length of another epoch

    def on_run_start(self, data_fetcher: Any) -> None:
        """Restart the loader, which was created before the epoch was set."""
        iter(data_fetcher)  # only once: with workers this alone reads the sampler
        if has_unknown_length(self.optimizer.sampler):
            data_fetcher.length = None  # an estimate
        if self._is_stream and not (data_fetcher.done or data_fetcher.batches):
            with suppress(StopIteration):
                data_fetcher.batches.append(next(data_fetcher))  # reads ahead: the last one is then known as such
        data_fetcher._start_profiler = self._on_before_fetch
        data_fetcher._stop_profiler = self._on_after_fetch

    def advance(self, data_fetcher: Any) -> None:
        """Run one minibatch, in which the optimizer's ``step()`` must be called once."""
        self._num_calls, before, log_every = 0, self.batch_progress.current.ready, self.trainer.log_every_n_steps
        try:
            super().advance(data_fetcher)
        finally:
            self.trainer.log_every_n_steps = log_every
        if self.batch_progress.current.ready > before and self._num_calls != 1:
            calls = f"{self._num_calls} calls in minibatch {self.batch_idx}"
            raise RuntimeError(f"optimizer.step() must be called once per minibatch, even to accumulate, got {calls}")

    def set_length(self) -> float:
        """Set the number of minibatches in the epoch, which Lightning assumes to be the same in all."""
        fit_loop, unknown = self.trainer.fit_loop, float("inf")
        epoch = fit_loop.epoch_progress.current.processed
        is_unknown = has_unknown_length(self.optimizer.sampler)
        number = fit_loop.max_batches = unknown if is_unknown else self._num_minibatches(epoch)
        return number

    def _num_minibatches(self, epoch: int) -> int:
        sampler = self.optimizer.sampler
        return sampler.schedule.num_minibatches_for(epoch, sampler.rank)


@final
class VariableBatchSize(Callback):
    """Lets ``Trainer.fit`` train a module whose ``configure_optimizers`` returns an optimizer of this library.

        trainer = Trainer(max_epochs=2, callbacks=[VariableBatchSize()], use_distributed_sampler=False)

    It sets the epochs of sampler and optimizer. ``trainer.global_step``, ``max_steps``, loggers and checkpoints count
    updates, and schedulers with ``interval="step"`` step once per update. Lightning's checkpoints resume after their
    last complete step. Settings that would silently change the result are rejected when ``fit`` begins.

    Args:
        prog_bar: whether to show batch size and learning rate in the progress bar.
        logger: whether to log them.
    """

    def __init__(self, *, prog_bar: bool = True, logger: bool = True) -> None:
        self._prog_bar, self._logger = prog_bar, logger
        self._saved: dict[str, Any] | None = None
        self._optimizer: CustomOptimizer | None = None
        # an incomplete step is repeated in a resumed run, and must then find BatchNorm's statistics from before it
        self._buffers: dict[str, torch.Tensor] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            check_trainer(trainer, pl_module)
            loop = trainer.fit_loop.epoch_loop
            if not isinstance(loop, UpdateLoop):
                before, loop = loop, UpdateLoop(trainer, loop.min_steps, loop.max_steps)
                loop.__dict__.update(before.__dict__)  # settings, progress and validation loop
                trainer.fit_loop.epoch_loop = loop
            self._loop = loop

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._optimizer = check_optimizer(trainer)
        self._loop.follow(self._optimizer)
        saved, self._saved = self._saved, None
        check_same_run(self._optimizer, saved)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loop.set_length()  # for the progress bar

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Copy the buffers before a step of several minibatches."""
        optimizer = self._loop.optimizer
        size, sampler = optimizer.get_bs(), optimizer.sampler
        if not optimizer.is_accumulating and size > sampler.schedule.minibatch_size_of(size) * sampler.num_replicas:
            self._buffers = {name: buffer.detach().clone() for name, buffer in pl_module.named_buffers()}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the batch size and the learning rate of each update."""
        optimizer = self._loop.optimizer
        if pl_module.automatic_optimization and not outputs:
            wrong = f"training_step returned None for minibatch {batch_idx}, which would count as a gradient of 0"
            raise RuntimeError(f"{wrong}: return its loss")
        logger = self._logger and bool(trainer.loggers)
        if optimizer.updated and (self._prog_bar or logger):
            shown = {"batch_size": float(optimizer.batch_size), "learning_rate": optimizer.current_lr()}
            pl_module.log_dict(shown, prog_bar=self._prog_bar, logger=logger, on_step=True, batch_size=1)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remove all effects of an incomplete step and epoch, which a resumed run repeats or completes."""
        if isinstance(trainer.strategy, ModelParallelStrategy):
            raise RuntimeError(f"Lightning cannot save this run: {NO_SHARDED_CHECKPOINTS}")
        optimizer, state = self._optimizer, checkpoint["state_dict"]
        if optimizer is None:
            return
        if optimizer.is_accumulating:
            state.update({name: copy for name, copy in self._buffers.items() if name in state})
        # Lightning counts an epoch as done that ended early by `max_steps` or a stop
        progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]
        excess = progress["current"]["processed"] - optimizer.epoch
        if excess > 0 and not is_at_end_of_epoch(optimizer):
            for counts in progress.values():
                counts["processed"] -= excess
                counts["completed"] = counts["processed"]

    def state_dict(self) -> dict[str, Any]:
        return {} if self._optimizer is None else {"run": self._optimizer.description}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict.get("run")  # compared when there is an optimizer
