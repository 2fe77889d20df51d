"""Plan: what a run will do, in numbers, before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from variable_batch_size.checks import check_positive
from variable_batch_size.planning.rows import (
    Moment,
    PlannedEpoch,
    PlannedSize,
    Position,
    moments_of,
    planned_epoch,
    planned_sizes,
    positions_of,
)
from variable_batch_size.planning.rules import RULES
from variable_batch_size.rules.rule import Rule
from variable_batch_size.schedules.batch_sizes import OnEnd
from variable_batch_size.schedules.schedule import Schedule


@dataclass(frozen=True)
class Plan:
    """What a run will do.

    Args:
        trace: the name of the trace.
        dataset_size: samples in the data set.
        minibatch_size: samples that one core runs at once.
        num_cores: cores that share the work.
        on_end: what follows the last row of the trace.
        lockstep: whether all cores run as many minibatches in a step, stand-ins included.
        num_epochs: epochs of the run, the last one perhaps in part.
        num_steps: updates.
        num_samples: samples that these use.
        tokens_per_sample: tokens of a sample; None if tokens are not counted.
        num_tokens: tokens of all samples; None likewise.
        num_left_over: samples of the data set that are not used, over all epochs that do not end with the trace.
        num_rows_unused: rows of the trace that come after the last epoch.
        num_minibatches: minibatches of the run, over all cores.
        num_rounds: minibatches that the busiest core runs, all steps together.
        num_stand_ins: minibatches that cores run without any of their own, over all cores.
        mean_batch_size: over the steps.
        mean_depth: minibatches that the busiest core accumulates, mean over the steps.
        core_minibatches: how many minibatches each core runs, without stand-ins.
        core_idle_steps: in how many steps each core is idle.
        idle_share: the share of cores that are idle, over all steps.
        busy_share: the share of the cores' time in which they work, if all minibatches take equally long.
        ref_batchsize: the batch size at which each rule's factor is that of an unscaled learning rate.
        rules: the names of the rules.
        sizes: the distinct batch sizes, ascending.
        epochs: the epochs, in order.
        moments: steps spread evenly over the run, the first and the last included.
        checkpoints: where the run stands after every N steps, and at its end; empty if not asked for.

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
        """Summarise a schedule.

        Args:
            schedule: the trace, laid out over epochs and cores.
            num_epochs: how many epochs to train; all that the trace holds if None.
            rules: the rules whose factors to list, by name.
            ref_batchsize: the batch size at which the learning rate is right; the first of the trace if None.
            checkpoint_every: list the position every N steps.
            tokens_per_sample: count tokens, too: so many of each sample.
        """
        if schedule.dataset_size is None:
            raise ValueError("a plan is one of epochs: the schedule must have a `dataset_size`, got None")
        if num_epochs is None:
            num_epochs = schedule.num_epochs
            if num_epochs is None:
                raise ValueError(f"{schedule.trace.name} goes on forever: the number of epochs must be given")
        check_positive(num_epochs=num_epochs)
        schedule.steps(num_epochs - 1)  # refuses an epoch beyond the end, before the work of all others
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
        """The plan as a dictionary of plain numbers, texts, lists and dictionaries, ready for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("sizes", "epochs", "moments", "checkpoints"):
            values[name] = [row._asdict() for row in values[name]]
        return values
