"""Drives a scheduler by progress instead of steps."""

from __future__ import annotations

import math

from torch.optim.lr_scheduler import LRScheduler

from variable_batch_size.training.optimizer import CustomOptimizer


def follow_progress(scheduler: LRScheduler, optimizer: CustomOptimizer) -> None:
    """Bring a scheduler of torch to where the optimizer's progress is; call it after each ``optimizer.step()``.

    At progress τ the scheduler has made ⌊τ⌋ of its steps, so that a run at scale 8 walks its schedule as the run at
    scale 1 does, in fewer updates.
    """
    while scheduler.last_epoch < math.floor(
        optimizer.progress + 1e-9
    ):  # a sum of gains of 1 may fall short by rounding
        scheduler.step()
