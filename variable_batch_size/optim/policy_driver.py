"""PolicyDriver: asks a policy during a run, with the same answer on all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from variable_batch_size.cores import xla
from variable_batch_size.cores.detect import everyone_for
from variable_batch_size.data.sampler import MinibatchSource
from variable_batch_size.policies.policy import Decision, Situation
from variable_batch_size.policies.timing import PolicyTiming
from variable_batch_size.rules.rule import Rule
from variable_batch_size.schedules.live import PolicySchedule

Record = dict[str, Any]


class Run(Protocol):
    """What a policy is told of: an optimizer, while it trains."""

    sampler: MinibatchSource
    rule: Rule
    ref_batchsize: int
    steps_done: int
    samples_done: int

    @property
    def progress(self) -> float: ...
    @property
    def noise_scale_in_samples(self) -> float | None: ...
    def parameters(self) -> Iterable[torch.Tensor]: ...


class PolicyDriver:
    """Times the steps of a run, and appends to its schedule what the policy decides.

    The first batch size is decided by every core from the same numbers. From then on core 0 decides, and the cores sum
    one integer to know its answer: the only wait.

    Args:
        optimizer: of the run.
        schedule: of its sampler.

    Attributes:
        loss: the latest that a log has recorded; None before.
        latest: the record of the latest decision: step, batch size, noise scale, seconds and the reason.
    """

    def __init__(self, optimizer: Run, schedule: PolicySchedule) -> None:
        if schedule.num_ahead or schedule.num_done:
            raise RuntimeError("the policy of this sampler decides for another optimizer: make a sampler for each")
        self.loss: float | None = None
        self.latest: Record | None = None
        self._optimizer, self._schedule = optimizer, schedule
        self._asking = PolicyTiming(schedule.policy)
        self._listeners: list[Callable[[Record], Any]] = []
        self._began: float | None = None  # when the step under way did
        self._pass = 0  # of the sampler, that of the latest step
        situation = self._situation(_noise_scale(optimizer))  # refuses noise that is needed and nobody measures
        self._append(self._asking.answer(situation), situation)

    def on_decision(self, listener: Callable[[Record], Any]) -> None:
        """Give every decision to come, and the latest, to something, as a record."""
        self._listeners.append(listener)
        if self.latest is not None:
            listener(self.latest)

    def after_step(self, step: int) -> None:
        """Note a step, by its number in the run, and decide if it is time. Every core must call it."""
        schedule = self._schedule
        size = schedule.batch_size(step)
        depth = -(-size // (schedule.minibatch_size * schedule.num_replicas))
        self._asking.note_steps(size, depth, self._seconds())
        schedule.note_done(step)
        if self._asking.num_rows(schedule.num_ahead):
            self._decide()
        self._began = time.perf_counter()

    def report(self) -> dict[str, float]:
        """The measured times, for a log."""
        accumulating, updating = self._asking.times.seconds or (math.nan, math.nan)
        return {"seconds_accumulating": accumulating, "seconds_updating": updating}

    def _seconds(self) -> float | None:
        """Of the step that has just ended; None for the first of a pass, in which a loader starts."""
        seconds = None if self._began is None else time.perf_counter() - self._began
        is_first, self._pass = self._optimizer.sampler.num_passes != self._pass, self._optimizer.sampler.num_passes
        return None if is_first else seconds

    def _decide(self) -> None:
        """Let core 0 decide, and all cores know its answer, those that share its parameters included."""
        communicator = everyone_for(self._optimizer.parameters(), self._optimizer.sampler.process_group)
        situation = self._situation(_noise_scale(self._optimizer))
        decision = self._asking.answer(situation) if communicator.rank == 0 else Decision(0, "decided by core 0")
        if communicator.num_replicas > 1:
            device = next(iter(self._optimizer.parameters())).device
            with xla.preserve_rng(device) if device.type == "xla" else nullcontext():
                communicator.flush()  # else the update would be another program, together with the sum
                total = communicator.total(torch.tensor([decision.batch_size], dtype=torch.int64).to(device))
            decision = Decision(int(total), decision.reason)
            self._asking.take_over(decision.batch_size)
        self._append(decision, situation)

    def _append(self, decision: Decision, situation: Situation) -> None:
        schedule, (accumulating, updating) = self._schedule, self._asking.times.seconds or (None, None)
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
        schedule.append(decision.batch_size, number=self._asking.num_rows(schedule.num_ahead))
        for listener in self._listeners:
            listener(self.latest)

    def _situation(self, noise_scale: float | None) -> Situation:
        optimizer, schedule = self._optimizer, self._schedule
        return Situation(
            cores=schedule.num_replicas,
            minibatch_size=schedule.minibatch_size,
            ref_batchsize=optimizer.ref_batchsize,
            noise_scale=noise_scale,
            steps_done=optimizer.steps_done,
            samples_done=optimizer.samples_done,
            progress=optimizer.progress,
            loss=self.loss,
            capacity=None if schedule.dataset_size is None else schedule.capacity,
        )

    # --------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The rows, and what the policy and its times remember."""
        schedule = self._schedule.state_dict()
        schedule["rows"] = torch.tensor(schedule["rows"], dtype=torch.int64)  # there may be millions
        return {
            "cores": self._schedule.num_replicas,
            "minibatch_size": self._schedule.minibatch_size,
            "schedule": schedule,
            "asking": self._asking.state_dict(),
            "loss": self.loss,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on where a run stopped; on other cores or with other minibatches, with what is decided for these.

        Args:
            state: what :meth:`state_dict` returned; None for a run that had a trace, whose past the schedule has.
        """
        self.latest = None  # it was of a run that begins
        if state is not None:
            schedule = dict(state["schedule"])
            schedule["rows"] = schedule["rows"].tolist()
            self._schedule.load_state_dict(schedule)
            self._asking.load_state_dict(state["asking"])
            self.loss = state["loss"]
        elif self._schedule.num_ahead:  # decided for a run that begins: nobody has put the past there
            raise ValueError("the state is that of a run with a trace, and this one has a policy")
        if state is None or not self._is_as_saved(state):
            self._schedule.cut()
            self._asking.restart(self._schedule.latest)
            self._decide()

    def _is_as_saved(self, state: Mapping[str, Any]) -> bool:
        schedule = self._schedule
        return (state["cores"], state["minibatch_size"]) == (schedule.num_replicas, schedule.minibatch_size)


def driver_for(optimizer: Run) -> PolicyDriver | None:
    """What decides, where batch sizes are decided while the run goes on."""
    schedule = optimizer.sampler.schedule
    return PolicyDriver(optimizer, schedule) if isinstance(schedule, PolicySchedule) else None


def _noise_scale(optimizer: Run) -> float | None:
    try:
        return optimizer.noise_scale_in_samples
    except RuntimeError:
        schedule = optimizer.sampler.schedule
        assert isinstance(schedule, PolicySchedule)
        if schedule.policy.needs_noise:
            raise ValueError(
                f"{schedule.name} decides by the noise of the gradient, which {type(optimizer.rule).__name__} does not "
                "measure: AdaScaleRule does, and so does any rule with `measure_noise=True`"
            ) from None
        return None
