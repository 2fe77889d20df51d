"""Plan: the steps, epochs, load and learning-rate factors of a run before it starts."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from variable_batch_size.checks import check_positive
from variable_batch_size.rules.registry import RULES as rules_by_name
from variable_batch_size.rules.registry import make_rule
from variable_batch_size.rules.rule import Rule, Step
from variable_batch_size.schedules.batch_sizes import OnEnd
from variable_batch_size.schedules.schedule import Schedule

NAMES = tuple(rules_by_name)

RULES: Mapping[str, Rule] = {name: make_rule(name) for name in ("linear", "root", "constant")}
"""The rules in a plan by default."""


def planned_rules(names: Sequence[str], *, noise_scale: float | None = None) -> dict[str, Rule]:
    """Create rules by name (:func:`make_rule`); with a noise scale, AdaScale is added if no rule uses it.

    Args:
        names: of the rules.
        noise_scale: V/G², in samples, assumed to be measured in every step.

    >>> list(planned_rules(["root", "legw:5000", "surge"], noise_scale=1000))
    ['root', 'legw:5000', 'surge@1000']
    >>> list(planned_rules(["root"], noise_scale=1000))
    ['root', 'adascale@1000']
    """
    if noise_scale is not None and not 0 < noise_scale < math.inf:
        raise ValueError(f"`noise_scale` must be a positive number, got {noise_scale!r}")
    made = {name: make_rule(name) for name in names}
    if noise_scale is not None and not any(rule.measures_noise for rule in made.values()):
        made["adascale"] = make_rule("adascale")
    return dict(_planned(name, rule, noise_scale) for name, rule in made.items())


def _planned(name: str, rule: Rule, noise_scale: float | None) -> tuple[str, Rule]:
    if not rule.measures_noise:
        return name, rule
    if noise_scale is None:
        raise ValueError(f"the rule {name} depends on the gradient noise: pass --noise-scale to plan it")
    measured = {"variance": noise_scale, "square_norm": 1.0, "weight": 1.0, "count": 1}
    rule.load_state_dict({"averages": [measured]})
    return f"{name}@{noise_scale:g}", rule


_NUM_MOMENTS = 11


class PlannedSize(NamedTuple):
    """A batch size of the run.

    Args:
        batch_size: samples in a step, summed over cores.
        num_steps: number of steps with this batch size.
        num_minibatches: per step, summed over cores.
        depth: minibatches per step of the busiest core.
        num_idle_cores: cores without a minibatch.
        factors: each rule's learning-rate factor at the end of the run, after warm-ups.
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
        epoch: its number, counting from 0.
        first_step: its first step in the run, counting from 0.
        num_steps: number of steps.
        num_samples: samples used.
        num_left_over: samples of the data set not used.
        ends_with_trace: whether the trace ends before the epoch is full.
    """

    epoch: int
    first_step: int
    num_steps: int
    num_samples: int
    num_left_over: int
    ends_with_trace: bool


class Moment(NamedTuple):
    """A step of the run, and the position of the run before it."""

    step: int
    epoch: int
    samples_before: int
    batch_size: int
    depth: int
    num_idle_cores: int
    factors: dict[str, float]


class Position(NamedTuple):
    """The position of a run after some steps, as in a checkpoint."""

    epoch: int
    epoch_step: int
    steps_done: int
    samples_done: int


def planned_sizes(
    schedule: Schedule, steps: range, rules: Mapping[str, Rule], ref_batchsize: int
) -> tuple[PlannedSize, ...]:
    """The distinct batch sizes of these steps, ascending."""
    found = []
    for size, count in zip(*(values.tolist() for values in schedule.size_counts(steps)), strict=True):
        num_minibatches = size // schedule.minibatch_size
        found.append(
            PlannedSize(
                batch_size=size,
                num_steps=count,
                num_minibatches=num_minibatches,
                depth=-(-num_minibatches // schedule.num_replicas),
                num_idle_cores=max(0, schedule.num_replicas - num_minibatches),
                factors=factors_at(size, steps.stop - 1, schedule, rules, ref_batchsize),
            )
        )
    return tuple(found)


def factors_at(
    size: int, steps_done: int, schedule: Schedule, rules: Mapping[str, Rule], ref_batchsize: int
) -> dict[str, float]:
    """Each rule's learning-rate factor in a step of this batch size after `steps_done` steps."""
    step = Step(size, schedule.minibatch_size, ref_batchsize, steps_done)
    return {name: rule.factor(step) for name, rule in rules.items()}


def planned_epoch(schedule: Schedule, epoch: int) -> PlannedEpoch:
    """Summarize an epoch of a schedule."""
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
    """Evenly spaced steps of the run, including the first and the last."""
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
    """The position of the run after every N steps and at its end; empty without N."""
    if every is None:
        return ()
    check_positive(checkpoint_every=every)
    positions = []
    for steps_done in [*range(every, num_steps, every), num_steps]:
        epoch = _epoch_of(epochs, steps_done - 1)  # of the last completed step
        samples_done = schedule.samples_before(steps_done)
        positions.append(Position(epoch.epoch, steps_done - epoch.first_step, steps_done, samples_done))
    return tuple(positions)


def _epoch_of(epochs: tuple[PlannedEpoch, ...], step: int) -> PlannedEpoch:
    return epochs[bisect_right(epochs, step, key=lambda epoch: epoch.first_step) - 1]


@dataclass(frozen=True)
class Plan:
    """The summary of a run before it starts.

    Args:
        trace: the name of the trace.
        dataset_size: samples in an epoch.
        minibatch_size: samples that one core runs at once.
        num_cores: the number of cores.
        on_end: what follows the last row of the trace.
        lockstep: whether all cores run the same number of minibatches in a step.
        num_epochs: number of epochs, including an incomplete last one.
        num_steps: number of updates.
        num_samples: samples used by these.
        tokens_per_sample: None if tokens are not counted.
        num_tokens: tokens of all samples; None if tokens are not counted.
        num_left_over: samples of the data set not used, summed over all epochs that don't end with the trace.
        num_rows_unused: rows of the trace after the last epoch.
        num_minibatches: minibatches of the run, summed over cores.
        num_rounds: minibatches of the busiest core in each step, summed over steps.
        num_stand_ins: padding minibatches, summed over cores.
        mean_batch_size: mean over the steps.
        mean_depth: minibatches of the busiest core, mean over the steps.
        core_minibatches: minibatches of each core, excluding padding.
        core_idle_steps: idle steps of each core.
        idle_share: the fraction of idle cores, mean over the steps.
        busy_share: the fraction of time in which cores are busy if all minibatches take equally long.
        ref_batchsize: the batch size of an unscaled learning rate.
        rules: the names of the rules.
        sizes: the distinct batch sizes, ascending.
        epochs: the epochs, in order.
        moments: evenly spaced steps of the run, including the first and the last.
        checkpoints: the position after every N steps and at the end; empty unless requested.

    >>> from variable_batch_size.traces.trace import Trace
    >>> trace = Trace.from_sequence([64, 96, 32, 256])
    >>> plan = Plan.of(Schedule(trace, dataset_size=300, minibatch_size=32, num_replicas=4))
    >>> plan.num_epochs, plan.num_steps, plan.num_samples, plan.core_minibatches, plan.idle_share
    (2, 4, 448, (5, 4, 3, 2), 0.375)
    >>> [epoch.num_left_over for epoch in plan.epochs]
    [108, 44]
    >>> [(moment.batch_size, moment.factors["linear"]) for moment in plan.moments]
    [(64, 1.0), (96, 1.5), (32, 0.5), (256, 4.0)]
    """

    trace: str
    dataset_size: int
    minibatch_size: int
    num_cores: int
    on_end: OnEnd
    lockstep: bool
    num_epochs: int
    num_steps: int
    num_samples: int
    tokens_per_sample: int | None
    num_tokens: int | None
    num_left_over: int
    num_rows_unused: int
    num_minibatches: int
    num_rounds: int
    num_stand_ins: int
    mean_batch_size: float
    mean_depth: float
    core_minibatches: tuple[int, ...]
    core_idle_steps: tuple[int, ...]
    idle_share: float
    busy_share: float
    ref_batchsize: int
    rules: tuple[str, ...]
    sizes: tuple[PlannedSize, ...]
    epochs: tuple[PlannedEpoch, ...]
    moments: tuple[Moment, ...]
    checkpoints: tuple[Position, ...]

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        *,
        num_epochs: int | None = None,
        rules: Mapping[str, Rule] = RULES,
        ref_batchsize: int | None = None,
        checkpoint_every: int | None = None,
        tokens_per_sample: int | None = None,
    ) -> Plan:
        """Summarize a schedule.

        Args:
            schedule: of the run.
            num_epochs: number of epochs; all epochs of the trace if None.
            rules: the rules whose factors to list, by name.
            ref_batchsize: the batch size for which the learning rate was chosen; the first of the trace if None.
            checkpoint_every: list the position every N steps.
            tokens_per_sample: also count tokens, with this many per sample.
        """
        if schedule.dataset_size is None:
            raise ValueError("the schedule of a plan must have a `dataset_size`, got None")
        if num_epochs is None:
            num_epochs = schedule.num_epochs
            if num_epochs is None:
                raise ValueError(f"{schedule.trace.name} is endless: the number of epochs must be given")
        check_positive(num_epochs=num_epochs)
        schedule.steps(num_epochs - 1)  # raises early if the trace has fewer epochs
        ref_batchsize = schedule.batch_size(0) if ref_batchsize is None else ref_batchsize
        check_positive(ref_batchsize=ref_batchsize)
        if tokens_per_sample is not None:
            check_positive(tokens_per_sample=tokens_per_sample)
        epochs = tuple(planned_epoch(schedule, epoch) for epoch in range(num_epochs))
        steps = range(epochs[-1].first_step + epochs[-1].num_steps)
        sizes = planned_sizes(schedule, steps, rules, ref_batchsize)
        core_minibatches = schedule.core_minibatches(steps)
        core_idle_steps = schedule.core_idle_steps(steps)
        num_depths = sum(size.depth * size.num_steps for size in sizes)
        num_core_steps = schedule.num_replicas * len(steps)
        in_lockstep = schedule.num_replicas * num_depths - int(core_minibatches.sum())
        num_stand_ins = in_lockstep if schedule.lockstep else int(core_idle_steps.sum())
        num_samples = schedule.samples_before(steps.stop)
        return cls(
            trace=schedule.trace.name,
            dataset_size=schedule.dataset_size,
            minibatch_size=schedule.minibatch_size,
            num_cores=schedule.num_replicas,
            on_end=schedule.on_end,
            lockstep=schedule.lockstep,
            num_epochs=num_epochs,
            num_steps=len(steps),
            num_samples=num_samples,
            tokens_per_sample=tokens_per_sample,
            num_tokens=None if tokens_per_sample is None else tokens_per_sample * num_samples,
            num_left_over=sum(epoch.num_left_over for epoch in epochs if not epoch.ends_with_trace),
            num_rows_unused=0 if schedule.trace.is_endless else max(0, len(schedule.trace) - len(steps)),
            num_minibatches=int(core_minibatches.sum()),
            num_rounds=num_depths,
            num_stand_ins=num_stand_ins,
            mean_batch_size=num_samples / len(steps),
            mean_depth=num_depths / len(steps),
            core_minibatches=tuple(core_minibatches.tolist()),
            core_idle_steps=tuple(core_idle_steps.tolist()),
            idle_share=int(core_idle_steps.sum()) / num_core_steps,
            busy_share=int(core_minibatches.sum()) / (schedule.num_replicas * num_depths),
            ref_batchsize=ref_batchsize,
            rules=tuple(rules),
            sizes=sizes,
            epochs=epochs,
            moments=moments_of(schedule, epochs, sizes, rules, ref_batchsize),
            checkpoints=positions_of(schedule, epochs, len(steps), checkpoint_every),
        )

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON-serializable dictionary."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("sizes", "epochs", "moments", "checkpoints"):
            values[name] = [row._asdict() for row in values[name]]
        return values
