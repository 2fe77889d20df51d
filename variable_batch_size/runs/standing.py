"""Standing: how many steps of an epoch a run has done, seen to be those of the loop that goes through the epochs."""

from __future__ import annotations

from variable_batch_size.training.optimizer import CustomOptimizer


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
