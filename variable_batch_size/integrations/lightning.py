"""VariableBatchSize: a callback with which Lightning's Trainer counts updates, not minibatches, as its steps."""

from __future__ import annotations

from typing import Any, final

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy

from variable_batch_size.integrations import lightning_checks as checks
from variable_batch_size.integrations.going_on import refuse_another_run
from variable_batch_size.integrations.lightning_buffers import StepBuffers
from variable_batch_size.integrations.lightning_loop import UpdateLoop
from variable_batch_size.training.optimizer import CustomOptimizer


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
        checks.check_trainer(trainer, pl_module)
        trainer.fit_loop.epoch_loop = UpdateLoop.in_place_of(trainer.fit_loop.epoch_loop)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the optimizer and its schedulers."""
        self._optimizer = checks.check_optimizer(trainer)
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
            raise RuntimeError(f"Lightning cannot save this run: {checks.NO_SHARDED_CHECKPOINTS}")
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
