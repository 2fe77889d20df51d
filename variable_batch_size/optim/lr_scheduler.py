"""Learning-rate schedules over progress, samples or weight, and a loop over epochs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from variable_batch_size.checks import check_not_negative, check_positive
from variable_batch_size.optim.optimizer import CustomOptimizer

_ROUNDING = 1e-9  # by which a sum of fractions may fall short of the whole number that it stands for


def follow_samples(scheduler: LRScheduler, optimizer: CustomOptimizer, *, per: int) -> None:
    """Step a scheduler of torch according to the run's samples; call it after each ``optimizer.step()``.

    After s samples the scheduler has made ⌊s / per⌋ of its steps, one by one: at the same number of samples the
    learning rate is the same, to the last bit, whatever batch sizes led there. Once a schedule has ended, it stays at
    its end.

    Args:
        scheduler: one that depends on its steps only.
        optimizer: whose samples are counted, those of skipped updates too.
        per: samples to a step of the scheduler. The minibatch size lets every update move it, by whole steps; the
            reference batch size takes a schedule as it was written for that batch size.
    """
    check_positive(per=per)
    _step_to(scheduler, to=optimizer.samples_done // per)


def follow_weight(scheduler: LRScheduler, optimizer: CustomOptimizer, *, per: float) -> None:
    """Step a scheduler of torch according to the weight of all minibatches so far, in most cases their tokens.

    As :func:`follow_samples` does, with ⌊w / per⌋ steps at the weight w. The weight is read from the device once in an
    update, not while the optimizer accumulates.

    Args:
        scheduler: one that depends on its steps only.
        optimizer: whose ``step(weight=…)`` says what minibatches weigh.
        per: weight to a step of the scheduler, such as the tokens of a minibatch or of a million.
    """
    if not 0 < per < math.inf:
        raise ValueError(f"`per` must be positive and finite, got {per!r}")
    if not optimizer.is_accumulating:
        weight: float = optimizer.weight_done
        _step_to(scheduler, to=math.floor(weight / per + _ROUNDING))


def follow_progress(scheduler: LRScheduler, optimizer: CustomOptimizer) -> None:
    """Step a scheduler of torch according to the optimizer's progress; call it after each ``optimizer.step()``.

    At progress τ the scheduler has made ⌊τ⌋ of its steps, so that a run at scale 8 walks its schedule as the run at
    scale 1 does, in fewer updates. Once a schedule has ended, it stays at its end.
    """
    _step_to(scheduler, to=math.floor(optimizer.progress + _ROUNDING))


def _step_to(scheduler: LRScheduler, *, to: int) -> None:
    """Step a scheduler up to a position, or up to its end if that comes first.

    Cosine annealing ends at ``T_max``, after which it would rise again; one cycle one step before ``total_steps``,
    after which it would raise; a sequence where its last part ends; and each part of a chain at its own end. Schedules
    that become constant, repeat or never end are stepped without a limit.

    Args:
        scheduler: one that depends on its steps only.
        to: how many steps it should have made; never less than before.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError("`scheduler` must depend on its steps only, got ReduceLROnPlateau, which depends on a metric")
    if _position(scheduler) > to:
        raise RuntimeError(
            f"the scheduler has made {_position(scheduler)} steps, more than the {to} it should have made: call its "
            "step() nowhere else, and always follow the same measure"
        )
    # one by one, never in a jump, so that a schedule that multiplies always computes the same products
    while _position(scheduler) < to and not _has_ended(scheduler):
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
    """The number of steps after which the schedule is complete."""
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


def epochs(optimizer: CustomOptimizer, num_epochs: int) -> Iterator[int]:
    """The epochs of a run that are still to be done, with ``set_epoch`` called for each.

        for epoch in vbs.epochs(optimizer, 10):
            for data, target in loader:
                loss_fn(model(data), target).backward()
                optimizer.step()

    After ``optimizer.load_state_dict`` the run resumes after the steps it had: within an epoch, or with the next one if
    all of that epoch's steps were done. The loop may leave an epoch early. :class:`Checkpoint` has a loop of its own.

    Args:
        optimizer: an optimizer of the library.
        num_epochs: how many epochs the whole run has, including those done before.

    Raises:
        ValueError: at the start, if the trace holds fewer epochs.
    """
    if not isinstance(optimizer, CustomOptimizer):
        raise ValueError(f"`optimizer` must be a CustomOptimizer, got {type(optimizer).__name__}")
    check_not_negative(num_epochs=num_epochs)
    if num_epochs:
        optimizer.sampler.schedule.steps(num_epochs - 1)
    return _epochs(optimizer, num_epochs)


def _epochs(optimizer: CustomOptimizer, num_epochs: int) -> Iterator[int]:
    epoch, first_step = optimizer.epoch, optimizer.epoch_step
    if _has_ended_early(optimizer):
        epoch, first_step = epoch + 1, 0
    for number in range(epoch, num_epochs):
        optimizer.sampler.set_epoch(number, first_step)
        yield number
        first_step = 0


def _has_ended_early(optimizer: CustomOptimizer) -> bool:
    """Whether the epoch has no minibatch left; looked up in the schedule, as a policy decides where its epochs end."""
    schedule, rank = optimizer.sampler.schedule, optimizer.sampler.rank
    offsets = schedule.offsets(optimizer.epoch, rank, at_once=1, first_step=optimizer.epoch_step)
    return next(offsets, None) is None
