"""The rows of a plan: its batch sizes, epochs, moments and checkpoints."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from variable_batch_size.checks import check_positive
from variable_batch_size.rules.rule import Rule, Step
from variable_batch_size.schedules.schedule import Schedule

_NUM_MOMENTS = 11


class PlannedSize(NamedTuple):
    """A batch size of the run.

    Args:
        batch_size: samples in a step, over all cores.
        num_steps: how many steps have it.
        num_minibatches: of such a step, over all cores.
        depth: how many of them the busiest core accumulates.
        num_idle_cores: how many cores have none.
        factors: what each rule multiplies the learning rate by, at the end of the run: when warm-ups are over.
    """

    batch_size: int
    num_steps: int
    num_minibatches: int
    depth: int
    num_idle_cores: int
    factors: dict[str, float]


class PlannedEpoch(NamedTuple):
    """An epoch of the run.

    Args:
        epoch: its number, from 0.
        first_step: the number of its first step in the run, from 0.
        num_steps: how many steps it has.
        num_samples: how many samples they use.
        num_left_over: how many samples of the data set it does not use.
        ends_with_trace: whether it ends because the trace does, before its samples do.
    """

    epoch: int
    first_step: int
    num_steps: int
    num_samples: int
    num_left_over: int
    ends_with_trace: bool


class Moment(NamedTuple):
    """A step of the run, and how far the run has come before it."""

    step: int
    epoch: int
    samples_before: int
    batch_size: int
    depth: int
    num_idle_cores: int
    factors: dict[str, float]


class Position(NamedTuple):
    """Where a run stands after some steps, as a checkpoint holds it."""

    epoch: int
    epoch_step: int
    steps_done: int
    samples_done: int


def planned_sizes(
    schedule: Schedule, steps: range, rules: Mapping[str, Rule], ref_batchsize: int
) -> tuple[PlannedSize, ...]:
    """The distinct batch sizes of some steps, ascending."""
    sizes, counts = (values.tolist() for values in schedule.size_counts(steps))
    return tuple(
        _planned_size(schedule, size, count, factors_at(size, steps.stop - 1, schedule, rules, ref_batchsize))
        for size, count in zip(sizes, counts, strict=True)
    )


def factors_at(
    size: int, steps_done: int, schedule: Schedule, rules: Mapping[str, Rule], ref_batchsize: int
) -> dict[str, float]:
    """What each rule multiplies the learning rate by in a step of a batch size, after some steps."""
    step = Step(size, schedule.minibatch_size, ref_batchsize, steps_done)
    return {name: rule.factor(step) for name, rule in rules.items()}


def _planned_size(schedule: Schedule, size: int, num_steps: int, factors: dict[str, float]) -> PlannedSize:
    num_minibatches = size // schedule.minibatch_size
    return PlannedSize(
        batch_size=size,
        num_steps=num_steps,
        num_minibatches=num_minibatches,
        depth=-(-num_minibatches // schedule.num_replicas),
        num_idle_cores=max(0, schedule.num_replicas - num_minibatches),
        factors=factors,
    )


def planned_epoch(schedule: Schedule, epoch: int) -> PlannedEpoch:
    """What a schedule does in an epoch."""
    assert schedule.dataset_size is not None
    steps = schedule.steps(epoch)
    num_samples = schedule.samples_before(steps.stop) - schedule.samples_before(steps.start)
    is_last = schedule.on_end == "stop" and steps.stop == len(schedule.trace)
    return PlannedEpoch(
        epoch=epoch,
        first_step=steps.start,
        num_steps=len(steps),
        num_samples=num_samples,
        num_left_over=schedule.dataset_size - num_samples,
        ends_with_trace=is_last and num_samples < schedule.capacity,
    )


def moments_of(
    schedule: Schedule,
    epochs: tuple[PlannedEpoch, ...],
    sizes: tuple[PlannedSize, ...],
    rules: Mapping[str, Rule],
    ref_batchsize: int,
) -> tuple[Moment, ...]:
    """Steps spread evenly over the run, the first and the last included."""
    of_size = {size.batch_size: size for size in sizes}
    num_steps = epochs[-1].first_step + epochs[-1].num_steps
    moments = []
    for step in np.linspace(0, num_steps - 1, min(num_steps, _NUM_MOMENTS)).round().astype(np.int64).tolist():
        size = of_size[schedule.batch_size(step)]
        moments.append(
            Moment(
                step=step,
                epoch=_epoch_of(epochs, step).epoch,
                samples_before=schedule.samples_before(step),
                batch_size=size.batch_size,
                depth=size.depth,
                num_idle_cores=size.num_idle_cores,
                factors=factors_at(size.batch_size, step, schedule, rules, ref_batchsize),
            )
        )
    return tuple(moments)


def positions_of(
    schedule: Schedule, epochs: tuple[PlannedEpoch, ...], num_steps: int, every: int | None
) -> tuple[Position, ...]:
    """Where the run stands after every N steps, and at its end; none if N is not given."""
    if every is None:
        return ()
    check_positive(checkpoint_every=every)
    positions = []
    for steps_done in [*range(every, num_steps, every), num_steps]:
        epoch = _epoch_of(epochs, steps_done - 1)  # of the step just done, even if it was the epoch's last
        positions.append(
            Position(
                epoch=epoch.epoch,
                epoch_step=steps_done - epoch.first_step,
                steps_done=steps_done,
                samples_done=schedule.samples_before(steps_done),
            )
        )
    return tuple(positions)


def _epoch_of(epochs: tuple[PlannedEpoch, ...], step: int) -> PlannedEpoch:
    return epochs[bisect_right(epochs, step, key=lambda epoch: epoch.first_step) - 1]
