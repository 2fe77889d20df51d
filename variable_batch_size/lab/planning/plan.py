"""Plan: the steps, epochs, load and learning-rate factors of a run before it starts."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from variable_batch_size.checks import check_positive, check_positive_number
from variable_batch_size.rules.registry import make_rule
from variable_batch_size.rules.rule import Rule, Step
from variable_batch_size.schedules.schedule import Schedule
from variable_batch_size.schedules.token_plan import TokenPlan

RULES: Mapping[str, Rule] = {name: make_rule(name) for name in ("linear", "root", "constant")}  # by default
Factors = Callable[[int, int], dict[str, float]]  # of each rule, in a step of some batch size, after some steps


def planned_rules(names: Sequence[str], *, noise_scale: float | None = None) -> dict[str, Rule]:
    """Create rules by name (:func:`make_rule`); with a noise scale, AdaScale is added if no rule uses it.

    The noise scale, V/G² in samples, is assumed to be measured in every step. It follows the names: ``adascale@1000``.
    """
    if noise_scale is not None:
        check_positive_number(noise_scale=noise_scale)
    made = {name: make_rule(name) for name in names}
    if noise_scale is not None and not any(rule.measures_noise for rule in made.values()):
        made["adascale"] = make_rule("adascale")
    planned = {}
    for name, rule in made.items():
        if rule.measures_noise and noise_scale is None:
            raise ValueError(f"the rule {name} depends on the gradient noise: pass --noise-scale to plan it")
        if rule.measures_noise:
            measured = {"variance": noise_scale, "square_norm": 1.0, "weight": 1.0, "count": 1}
            rule.load_state_dict({"averages": [measured], "active": [True], "weight": 0.0, "samples": 0})
        planned[f"{name}@{noise_scale:g}" if rule.measures_noise else name] = rule
    return planned


class PlannedSize(NamedTuple):
    batch_size: int  # samples in a step, summed over cores
    num_steps: int  # with this batch size
    num_minibatches: int  # per step, summed over cores
    depth: int  # minibatches per step of the busiest core
    num_idle_cores: int
    factors: dict[str, float]  # each rule's learning-rate factor at the end of the run, after warm-ups


class PlannedEpoch(NamedTuple):
    epoch: int
    first_step: int  # in the run, counting from 0
    num_steps: int
    num_samples: int
    num_left_over: int  # samples of the data set not used
    ends_with_trace: bool  # before the epoch is full


class Moment(NamedTuple):
    step: int  # with the position of the run before it
    epoch: int
    samples_before: int
    batch_size: int
    depth: int
    num_idle_cores: int
    factors: dict[str, float]


class Position(NamedTuple):
    epoch: int  # in which the last completed step is
    epoch_step: int
    steps_done: int
    samples_done: int


def _planned_sizes(schedule: Schedule, steps: range, factors: Factors) -> tuple[PlannedSize, ...]:
    found, cores = [], schedule.num_replicas
    for size, count in zip(*(values.tolist() for values in schedule.size_counts(steps)), strict=True):
        number = size // schedule.minibatch_size_of(size)
        depth, num_idle = -(-number // cores), max(0, cores - number)
        found.append(PlannedSize(size, count, number, depth, num_idle, factors(size, steps.stop - 1)))
    return tuple(found)


def _planned_epoch(schedule: Schedule, epoch: int) -> PlannedEpoch:
    assert schedule.dataset_size is not None
    steps = schedule.steps(epoch)
    num_samples = schedule.samples_before(steps.stop) - schedule.samples_before(steps.start)
    is_last = schedule.on_end == "stop" and steps.stop == len(schedule.trace)
    ends_with_trace = is_last and num_samples < schedule.capacity
    num_left_over = schedule.dataset_size - num_samples
    return PlannedEpoch(epoch, steps.start, len(steps), num_samples, num_left_over, ends_with_trace)


class Plan:
    """The summary of a run before it starts.

    Args:
        schedule: of the run.
        num_epochs: number of epochs; all epochs of the trace if None.
        rules: the rules whose factors to list, by name.
        ref_batchsize: the batch size for which the learning rate was chosen; the first of the trace if None.
        checkpoint_every: list the position every N steps.
        tokens_per_sample: also count tokens, with this many per sample.
        token_plan: the minibatches of a :class:`TokenBudget`, for a schedule in tokens.

    It has these options as attributes, the name of the `trace`, the `dataset_size`, `minibatch_size`, `num_cores`,
    `on_end`, `lockstep` and `unit` of the schedule, and:

    Attributes:
        num_epochs: number of epochs, including an incomplete last one.
        num_steps: number of updates.
        num_samples: samples used by these.
        num_tokens: tokens of all samples; None if tokens are not counted.
        num_left_over: samples of the data set not used, summed over all epochs that don't end with the trace.
        num_rows_unused: rows of the trace after the last epoch.
        num_minibatches: minibatches of the run, summed over cores.
        num_rounds: minibatches of the busiest core in each step, summed over steps.
        num_padding: padding minibatches, summed over cores.
        mean_batch_size: mean over the steps.
        mean_depth: minibatches of the busiest core, mean over the steps.
        core_minibatches: minibatches of each core, excluding padding.
        core_idle_steps: idle steps of each core.
        idle_share: the fraction of idle cores, mean over the steps.
        busy_share: the fraction of time in which cores are busy if all minibatches take equally long.
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

    def __init__(
        self,
        schedule: Schedule,
        *,
        num_epochs: int | None = None,
        rules: Mapping[str, Rule] = RULES,
        ref_batchsize: int | None = None,
        checkpoint_every: int | None = None,
        tokens_per_sample: int | None = None,
        token_plan: TokenPlan | None = None,
    ) -> None:
        if schedule.dataset_size is None:
            raise ValueError("the schedule of a plan must have a `dataset_size`, got None")
        num_epochs = schedule.num_epochs if num_epochs is None else num_epochs
        if num_epochs is None:
            raise ValueError(f"{schedule.trace.name} is endless: the number of epochs must be given")
        reference = schedule.batch_size(0) if ref_batchsize is None else ref_batchsize
        given = {"tokens_per_sample": tokens_per_sample, "checkpoint_every": checkpoint_every}
        given |= {"num_epochs": num_epochs, "ref_batchsize": reference}
        check_positive(**{name: value for name, value in given.items() if value is not None})

        def factors(size: int, steps_done: int) -> dict[str, float]:
            step = Step(size, schedule.minibatch_size, reference, steps_done)
            return {name: rule.factor(step) for name, rule in rules.items()}

        schedule.steps(num_epochs - 1)  # raises early if the trace has fewer epochs
        self.trace, self.on_end, self.lockstep = schedule.trace.name, schedule.on_end, schedule.lockstep
        self.dataset_size, self.minibatch_size = schedule.dataset_size, schedule.minibatch_size
        self.unit, self.token_plan = schedule.unit, None if token_plan is None else token_plan.as_dict()
        self.num_cores, self.num_epochs = schedule.num_replicas, num_epochs
        self.ref_batchsize, self.rules, self.tokens_per_sample = reference, tuple(rules), tokens_per_sample
        self.epochs = tuple(_planned_epoch(schedule, epoch) for epoch in range(num_epochs))
        self.num_steps = self.epochs[-1].first_step + self.epochs[-1].num_steps
        self.num_samples = schedule.samples_before(self.num_steps)
        self.num_tokens = None if tokens_per_sample is None else tokens_per_sample * self.num_samples
        self.num_left_over = sum(epoch.num_left_over for epoch in self.epochs if not epoch.ends_with_trace)
        self.num_rows_unused = 0 if schedule.trace.is_endless else max(0, len(schedule.trace) - self.num_steps)
        self.mean_batch_size = self.num_samples / self.num_steps
        steps = range(self.num_steps)
        self.sizes = _planned_sizes(schedule, steps, factors)
        self.core_minibatches = tuple(schedule.core_minibatches(steps).tolist())
        self.core_idle_steps = tuple(schedule.core_idle_steps(steps).tolist())
        self.num_minibatches = sum(self.core_minibatches)
        self.num_rounds = sum(size.depth * size.num_steps for size in self.sizes)
        num_core_rounds, num_idle = self.num_cores * self.num_rounds, sum(self.core_idle_steps)
        self.num_padding = num_core_rounds - self.num_minibatches if self.lockstep else num_idle
        self.mean_depth = self.num_rounds / self.num_steps
        self.idle_share = num_idle / (self.num_cores * self.num_steps)
        self.busy_share = self.num_minibatches / num_core_rounds
        shown = np.linspace(0, self.num_steps - 1, min(self.num_steps, 11)).round().astype(np.int64).tolist()
        self.moments = tuple(self._moment(schedule, step, factors) for step in shown)
        ends = [*range(checkpoint_every, self.num_steps, checkpoint_every), self.num_steps] if checkpoint_every else []
        self.checkpoints = tuple(self._position(schedule, steps_done) for steps_done in ends)

    def _moment(self, schedule: Schedule, step: int, factors: Factors) -> Moment:
        size = next(size for size in self.sizes if size.batch_size == schedule.batch_size(step))
        position = (step, self._epoch_of(step).epoch, schedule.samples_before(step))
        return Moment(*position, size.batch_size, size.depth, size.num_idle_cores, factors(size.batch_size, step))

    def _position(self, schedule: Schedule, steps_done: int) -> Position:
        epoch = self._epoch_of(steps_done - 1)  # of the last completed step
        return Position(epoch.epoch, steps_done - epoch.first_step, steps_done, schedule.samples_before(steps_done))

    def _epoch_of(self, step: int) -> PlannedEpoch:
        return self.epochs[bisect_right(self.epochs, step, key=lambda epoch: epoch.first_step) - 1]

    @classmethod
    def of(cls, schedule: Schedule, **options: Any) -> "Plan":
        """The plan of a schedule, with the options above."""
        return cls(schedule, **options)

    def as_dict(self) -> dict[str, Any]:
        """The plan as a JSON-serializable dictionary."""
        tables = ("sizes", "epochs", "moments", "checkpoints")
        return {**vars(self), **{name: [row._asdict() for row in getattr(self, name)] for name in tables}}
