"""epochs: a loop over epochs that takes sampler and optimizer with it."""

from __future__ import annotations

from collections.abc import Iterator

from variable_batch_size.checks import check_not_negative
from variable_batch_size.training.optimizer import CustomOptimizer


def epochs(optimizer: CustomOptimizer, num_epochs: int) -> Iterator[int]:
    """The epochs of a run that are still to be done, with ``set_epoch`` called on the sampler and the optimizer.

        for epoch in vbs.epochs(optimizer, 10):
            for data, target in loader:
                loss_fn(model(data), target).backward()
                optimizer.step()

    After ``optimizer.load_state_dict`` the run goes on behind the steps it had: within an epoch, or with the next one
    if all of that epoch's steps were made. An epoch may be left early. :class:`Checkpoint` has such a loop of its own.

    Args:
        optimizer: an optimizer of the library; its sampler follows, too.
        num_epochs: how many epochs the whole run has, those that were done before included.

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
    if _has_ended(optimizer):
        epoch, first_step = epoch + 1, 0
    for number in range(epoch, num_epochs):
        optimizer.sampler.set_epoch(number, first_step)
        optimizer.set_epoch(number, first_step)
        yield number
        first_step = 0


def _has_ended(optimizer: CustomOptimizer) -> bool:
    """Whether the epoch has no minibatch left; asked of what deals them, as a policy's epochs end where it decides."""
    schedule, rank = optimizer.sampler.schedule, optimizer.sampler.rank
    offsets = schedule.offsets(optimizer.epoch, rank, at_once=1, first_step=optimizer.epoch_step)
    return next(offsets, None) is None
