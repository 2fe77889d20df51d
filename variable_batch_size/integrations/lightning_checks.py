"""What Lightning's Trainer cannot be asked for together with a variable batch size, each refused in a sentence."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden

from variable_batch_size.schedules.live import LiveSchedule
from variable_batch_size.training.dealer import Dealer
from variable_batch_size.training.optimizer import CustomOptimizer
from variable_batch_size.training.sampler import CustomSampler

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


def _check_sampler(trainer: Trainer, sampler: Dealer) -> None:
    if not isinstance(sampler, CustomSampler):
        raise ValueError(
            f"`sampler` must be a CustomSampler with Lightning, which begins to read before a run is continued, got "
            f"{type(sampler).__name__}"
        )
    if isinstance(sampler.schedule, LiveSchedule):
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
