"""Drives a scheduler of torch by what a run has done, instead of by its steps."""

from __future__ import annotations

import math

from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from variable_batch_size.training.optimizer import CustomOptimizer

_ROUNDING = 1e-9  # by which a sum of gains of 1 may fall short


def follow_progress(scheduler: LRScheduler, optimizer: CustomOptimizer) -> None:
    """Bring a scheduler of torch to where the optimizer's progress is; call it after each ``optimizer.step()``.

    At progress τ the scheduler has made ⌊τ⌋ of its steps, so that a run at scale 8 walks its schedule as the run at
    scale 1 does, in fewer updates. Once a schedule has ended, it stays at its end.
    """
    bring(scheduler, to=optimizer.progress)


def bring(scheduler: LRScheduler, *, to: float) -> None:
    """Let a scheduler make its steps up to a position, or up to its end if that comes first.

    Cosine annealing ends at ``T_max``, where it would rise again; one cycle one step before ``total_steps``, behind
    which it would raise; a sequence where its last part ends; and each part of a chain at an end of its own. Schedules
    that stay as they are by themselves, repeat or go on for ever are just stepped.

    Args:
        scheduler: one that goes by its steps alone.
        to: the position, in steps of the scheduler; never less than before.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError("`scheduler` must go by its steps alone, got ReduceLROnPlateau, which goes by a metric")
    while _position(scheduler) < math.floor(to + _ROUNDING) and not _has_ended(scheduler):
        _step(scheduler)


def _position(scheduler: LRScheduler) -> int:
    if isinstance(scheduler, ChainedScheduler):
        return max(map(_position, scheduler._schedulers))
    return scheduler.last_epoch


def _has_ended(scheduler: LRScheduler) -> bool:
    if isinstance(scheduler, ChainedScheduler):
        return all(map(_has_ended, scheduler._schedulers))
    return scheduler.last_epoch >= _end(scheduler)


def _end(scheduler: LRScheduler) -> float:
    """After how many steps there is nothing more to come that belongs to the schedule."""
    if isinstance(scheduler, CosineAnnealingLR):
        return scheduler.T_max
    if isinstance(scheduler, OneCycleLR):
        return scheduler.total_steps - 1
    if isinstance(scheduler, SequentialLR):
        return sum(scheduler._milestones[-1:]) + _end(scheduler._schedulers[-1])
    return math.inf


def _step(scheduler: LRScheduler) -> None:
    if not isinstance(scheduler, ChainedScheduler):
        scheduler.step()
        return
    for part in scheduler._schedulers:
        if not _has_ended(part):
            _step(part)
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
