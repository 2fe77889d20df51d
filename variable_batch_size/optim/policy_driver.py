"""PolicyDriver: lets a policy decide batch sizes during a run, with the same decision on all ranks."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from variable_batch_size.cores import devices
from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.optim.flow import Outcome
from variable_batch_size.optim.parts.part import Part
from variable_batch_size.optim.run import Run
from variable_batch_size.policies.hints import Hints, hints_of
from variable_batch_size.policies.policy import Decision, Situation, depth_of
from variable_batch_size.policies.timing import PolicyTiming, Times
from variable_batch_size.rules.rule import Step
from variable_batch_size.schedules.policy_schedule import PolicySchedule
from variable_batch_size.schedules.schedule import Integers

Record = dict[str, Any]


def agree(run: Run, numbers: Sequence[int] | Integers) -> list[int]:
    """Sum integers over all ranks, even those that share samples. Every rank calls it, all but rank 0 with zeros."""
    communicator = run.everyone()
    if communicator.num_replicas == 1:
        return [int(number) for number in numbers]
    device = run.like.device
    with devices.preserve_rng(device):
        total: list[int] = communicator.total(torch.tensor(numbers, dtype=torch.int64).to(device)).tolist()
    return total


class PolicyDriver(Part):
    """Times the steps of a run, and appends the decisions of the policy to its schedule.

    The first batch size is decided by every rank from the same numbers. From then on rank 0 decides, and the ranks sum
    one integer to agree on its decision: the only wait.
    """

    state_key = "deciding"

    def __init__(self, run: Run, schedule: PolicySchedule) -> None:
        if schedule.num_ahead or schedule.num_done:
            raise RuntimeError("the policy of this sampler decides for another optimizer: make a sampler for each")
        self.loss: float | None = None  # the latest that a log has recorded
        self.latest: Record | None = None  # of the latest decision: step, batch size, noise scale, seconds, reason
        self._run, self._schedule = run, schedule
        self._timing = PolicyTiming(schedule.policy)
        self.clock: Callable[[], float] = time.perf_counter  # in seconds
        self._listeners: list[Callable[[Record], Any]] = []
        self._began: float | None = None  # when the current step began
        self._began_update: float | None = None  # when its update began, if the host waits for it, on one core
        self._times_updates = schedule.num_replicas == 1 and run.like.device.type == "cpu"
        self._spent: dict[int, float] = {}  # the seconds of all steps, on each number of cores
        self._pass = self._num_in_pass = 0  # the sampler's pass in the latest step; the steps of that pass so far
        situation = self._situation()
        self._append(self._timing.answer(situation), situation)

    def on_decision(self, listener: Callable[[Record], Any]) -> None:
        """Call a function with the record of the latest and of every further decision."""
        self._listeners.append(listener)
        if self.latest is not None:
            listener(self.latest)

    def before_reduce(self, plan: StepPlan) -> None:
        self._began_update = self.clock() if self._times_updates else None

    def after_step(self, plan: StepPlan, step: Step, outcome: Outcome) -> None:
        """Record a step, and decide if it is time."""
        schedule, num_passes = self._schedule, self._run.sampler.num_passes
        now = self.clock()
        seconds = None if self._began is None else now - self._began
        if seconds is not None:
            self._spent[schedule.num_replicas] = self._spent.get(schedule.num_replicas, 0.0) + seconds
        overhead = None if self._began_update is None else now - self._began_update
        if num_passes != self._pass:  # in the first step of a pass a loader starts, which counts if there is no other
            seconds = seconds if self._num_in_pass == 1 else None
            self._pass, self._num_in_pass = num_passes, 0
        self._num_in_pass += 1
        size = schedule.batch_size(plan.step)
        depth = depth_of(size, schedule.minibatch_size, schedule.num_replicas)
        self._timing.note_steps(size, schedule.num_replicas, seconds, depth=depth, overhead=overhead)
        schedule.note_done(plan.step)
        if self._timing.num_rows(schedule.num_ahead):
            self._decide()
        self._began = self.clock()
        self._run.cursor.refresh()

    def report(self) -> dict[str, float]:
        """The measured times, for a log."""
        accumulating, updating = self._times or (math.nan, math.nan)
        return {"seconds_accumulating": accumulating, "seconds_updating": updating}

    def hints(self) -> Hints:
        """What the run is worth on other numbers of cores, from what has been measured so far."""
        run, schedule, timing = self._run, self._schedule, self._timing
        limit, num_epochs = run.limit, run.num_epochs
        ends = [] if limit is None or limit.samples is None else [math.ceil(limit.samples)]
        if num_epochs is not None and schedule.dataset_size is not None:
            ends.append(num_epochs * schedule.capacity)
        return hints_of(
            schedule.policy,
            timing.complete(self._situation()),
            timing.times,
            spent=self._spent,
            progress_goal=None if limit is None else limit.progress,
            samples_goal=min(ends, default=None),
            restart_seconds=run.restart_seconds,
        )

    @property
    def _times(self) -> Times | None:
        return self._timing.times.seconds(self._schedule.num_replicas)

    def _decide(self) -> None:
        """Let rank 0 decide, and broadcast its decision to all ranks, including those that share its samples."""
        communicator = self._run.everyone()
        situation = self._situation()
        decision = self._timing.answer(situation) if communicator.rank == 0 else Decision(0, "decided by core 0")
        if communicator.num_replicas > 1:
            decision = Decision(agree(self._run, [decision.batch_size])[0], decision.reason)
            self._timing.take_over(decision.batch_size)
        self._append(decision, situation)

    def _append(self, decision: Decision, situation: Situation) -> None:
        schedule, (accumulating, updating) = self._schedule, self._times or (None, None)
        self.latest = {
            "step": situation.steps_done,
            "samples": situation.samples_done,
            "from_step": schedule.num_done + schedule.num_ahead,
            "batch_size": decision.batch_size,
            "cores": situation.cores,
            "noise_scale": situation.noise_scale,
            "seconds_accumulating": accumulating,
            "seconds_updating": updating,
            "why": decision.reason,
        }
        schedule.append(decision.batch_size, number=self._timing.num_rows(schedule.num_ahead))
        for listener in self._listeners:
            listener(self.latest)

    def _situation(self) -> Situation:
        run, schedule = self._run, self._schedule
        try:
            noise_scale = run.noise_scale_in_samples()
        except RuntimeError:
            noise_scale = None
            if schedule.policy.needs_noise:
                raise ValueError(
                    f"{schedule.name} decides by the gradient noise, which {run.rule_name} does not "
                    "measure: use AdaScaleRule, or pass `measure_noise=True`"
                ) from None
        return Situation(
            cores=schedule.num_replicas,
            minibatch_size=schedule.minibatch_size,
            max_minibatch_size=schedule.max_minibatch_size,
            ref_batchsize=run.ref_batchsize,
            noise_scale=noise_scale,
            steps_done=run.steps_done,
            samples_done=run.samples_done,
            progress=run.progress,
            loss=self.loss,
            capacity=None if schedule.dataset_size is None else schedule.capacity,
        )

    def state_dict(self) -> dict[str, Any]:
        """The rows, and the state of the policy and its times."""
        schedule = self._schedule.state_dict()
        schedule["rows"] = torch.tensor(schedule["rows"], dtype=torch.int64)  # there may be millions
        return {
            "cores": self._schedule.num_replicas,
            "minibatch_size": self._schedule.minibatch_size,
            "schedule": schedule,
            "asking": self._timing.state_dict(),
            "loss": self.loss,
            "spent": self._spent,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Resume a run, also one that had a trace; decide again if the ranks or the minibatch size are different."""
        schedule = self._schedule
        self.latest = None  # it was of a run that begins
        if state is not None:
            saved = dict(state["schedule"])
            saved["rows"] = saved["rows"].tolist()
            schedule.load_state_dict(saved)
            self._timing.load_state_dict(state["asking"], cores=state["cores"])
            self.loss, self._spent = state["loss"], dict(state.get("spent", {}))
            if (state["cores"], state["minibatch_size"]) == (schedule.num_replicas, schedule.minibatch_size):
                return
        elif schedule.num_ahead:  # the decisions for a run that begins: the schedule has no steps of the trace
            raise ValueError("the state is that of a run with a trace, but this run has a policy")
        schedule.cut()
        is_same = state is not None and state["minibatch_size"] == schedule.minibatch_size
        self._timing.restart(schedule.latest, on_same_minibatches=is_same)
        self._decide()
