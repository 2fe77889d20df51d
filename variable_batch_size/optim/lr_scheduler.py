"""Learning-rate schedules over progress, samples or weight, their saved state, and a loop over epochs."""

import inspect
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler

from variable_batch_size.checks import check_not_negative, check_positive
from variable_batch_size.optim.optimizer import CustomOptimizer

_ROUNDING = 1e-9  # by which a sum of fractions may fall short of the whole number that it represents


def follow_samples(scheduler: LRScheduler, optimizer: CustomOptimizer, *, per: int) -> None:
    """Step a scheduler of torch according to the run's samples; call it after each ``optimizer.step()``.

    After s samples the scheduler has made ⌊s / per⌋ steps, one by one: at the same number of samples the learning rate
    is the same, to the last bit, whatever the batch sizes were. Once a schedule has ended, it stays at its end.

    Args:
        scheduler: one that depends on its steps only.
        optimizer: whose samples are counted, those of skipped updates too.
        per: samples per step of the scheduler: the minibatch size, so that every update steps it; or the reference
            batch size, for a schedule that was written for that batch size.
    """
    check_positive(per=per)
    _step_to(scheduler, optimizer.samples_done // per)


def follow_weight(scheduler: LRScheduler, optimizer: CustomOptimizer, *, per: float) -> None:
    """Step a scheduler of torch according to the weight of all minibatches so far, in most cases their tokens.

    Like :func:`follow_samples`, with ⌊w / per⌋ steps at the weight w. The weight is read from the device once in an
    update, not while the optimizer accumulates.

    Args:
        scheduler: one that depends on its steps only.
        optimizer: whose ``step(weight=…)`` is passed the weights.
        per: weight per step of the scheduler, such as the tokens of a minibatch, or a million.
    """
    if not 0 < per < math.inf:
        raise ValueError(f"`per` must be positive and finite, got {per!r}")
    if not optimizer.is_accumulating:
        _step_to(scheduler, math.floor(optimizer.weight_done / per + _ROUNDING))


def follow_progress(scheduler: LRScheduler, optimizer: CustomOptimizer) -> None:
    """Step a scheduler of torch according to the optimizer's progress; call it after each ``optimizer.step()``.

    At progress τ the scheduler has made ⌊τ⌋ steps: a run at scale 8 follows the schedule of the run at scale 1, in
    fewer updates. Once a schedule has ended, it stays at its end. Where the progress is computed on the device, it is
    that before the latest step, so that the host need not wait.
    """
    _step_to(scheduler, math.floor(optimizer.late_progress + _ROUNDING))


def _step_to(scheduler: LRScheduler, position: int) -> None:
    """Step a scheduler up to a position, or up to its end if that comes first."""
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        raise ValueError("`scheduler` must depend on its steps only, got ReduceLROnPlateau, which depends on a metric")
    if _position(scheduler) > position:
        raise RuntimeError(
            f"the scheduler has made {_position(scheduler)} steps, more than the {position} it should have made: call "
            "its step() nowhere else, and always follow the same measure"
        )
    # one by one, so that a schedule that multiplies always computes the same products
    while _position(scheduler) < position and not _has_ended(scheduler):
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
    """The number of steps that complete a schedule; infinite if it becomes constant, repeats or never ends."""
    if isinstance(scheduler, lr_scheduler.CosineAnnealingLR):
        return scheduler.T_max  # it would rise again
    if isinstance(scheduler, lr_scheduler.OneCycleLR):
        return scheduler.total_steps - 1  # it would raise an error
    if isinstance(scheduler, lr_scheduler.SequentialLR):
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
    """The remaining epochs of a run, with ``set_epoch`` called for each.

        for epoch in vbs.epochs(optimizer, 10):
            for data, target in loader:
                loss_fn(model(data), target).backward()
                optimizer.step()

    After ``optimizer.load_state_dict`` the run resumes after its last step: within an epoch, or with the next one if
    all steps of that epoch were done. The loop may leave an epoch early. :class:`Checkpoint` has a loop of its own.

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
    epoch, first_step, sampler = optimizer.epoch, optimizer.epoch_step, optimizer.sampler
    # whether the epoch has a minibatch left is looked up in the schedule, as a policy decides where its epochs end
    offsets = sampler.schedule.offsets(epoch, sampler.rank, at_once=1, first_step=first_step)
    if next(offsets, None) is None:
        epoch, first_step = epoch + 1, 0
    for number in range(epoch, num_epochs):
        sampler.set_epoch(number, first_step)
        yield number
        optimizer.sampler.end_pass()
        first_step = 0


class Stateful(Protocol):
    """An object with a state, such as a scheduler of torch."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def state_of_schedulers(schedulers: Sequence[Stateful]) -> list[dict[str, Any]]:
    """The state of each scheduler without its functions, which exist again once it is constructed."""
    return [_without_functions(scheduler.state_dict()) for scheduler in schedulers]


def load_schedulers(schedulers: Sequence[Stateful], states: Sequence[dict[str, Any]]) -> None:
    """Load the result of :func:`state_of_schedulers`."""
    for scheduler, saved in zip(schedulers, states, strict=True):
        scheduler.load_state_dict(_with_counters_of(scheduler.state_dict(), saved))


def _without_functions(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_functions(part) for key, part in value.items() if not inspect.isroutine(part)}
    return [_without_functions(part) for part in value] if isinstance(value, list) else value


def _with_counters_of(present: Any, saved: Any) -> Any:
    """The saved state of a scheduler with a Counter, which is saved as a dict, wherever the present state has one."""
    if isinstance(present, Counter):
        return Counter(saved)
    if isinstance(present, dict) and isinstance(saved, dict):
        return {key: _with_counters_of(present.get(key), part) for key, part in saved.items()}
    if isinstance(present, list) and isinstance(saved, list) and len(present) == len(saved):
        return [_with_counters_of(*pair) for pair in zip(present, saved, strict=True)]
    return saved
