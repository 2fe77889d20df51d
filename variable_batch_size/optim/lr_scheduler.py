"""Schedulers of torch as functions of a position, and their saved state."""

import inspect
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler


def step_to(scheduler: LRScheduler, position: int) -> None:
    """Step a scheduler until it has made `position` steps, or to its end if that comes first.

    It makes its steps one by one: at the same position the learning rate is the same, to the last bit, however the run
    got there.
    """
    if position_of(scheduler) > position:
        raise RuntimeError(
            f"{type(scheduler).__name__} has made {position_of(scheduler)} steps, but the run has reached only "
            f"{position}: don't call its step(); to go back, load a state that holds both with "
            "optimizer.load_state_dict()"
        )
    # one by one, so that a schedule that multiplies always computes the same products
    while position_of(scheduler) < position and not _has_ended(scheduler):
        _step(scheduler)


def position_of(scheduler: LRScheduler) -> int:
    """How many steps a scheduler has made."""
    if isinstance(scheduler, ChainedScheduler):
        return max(map(position_of, scheduler._schedulers))
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
    """A saved scheduler state with each saved dict as a Counter again, wherever the present state has one."""
    if isinstance(present, Counter):
        return Counter(saved)
    if isinstance(present, dict) and isinstance(saved, dict):
        return {key: _with_counters_of(present.get(key), part) for key, part in saved.items()}
    if isinstance(present, list) and isinstance(saved, list) and len(present) == len(saved):
        return [_with_counters_of(*pair) for pair in zip(present, saved, strict=True)]
    return saved
