"""simulate: the decisions of a policy for a given availability of cores, without training."""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from variable_batch_size.checks import check_positive, refuse
from variable_batch_size.files import read_records
from variable_batch_size.planning.profile import Profile
from variable_batch_size.policies.autoscale import gain
from variable_batch_size.policies.policy import Policy, Situation, policy_of
from variable_batch_size.policies.timing import PolicyTiming
from variable_batch_size.traces.recording import Recording
from variable_batch_size.traces.trace import Trace


class Span(NamedTuple):
    """A period with a constant number of cores, possibly 0; it may be infinite."""

    cores: int
    seconds: float


class Availability:
    """The number of cores over time, as consecutive spans that repeat after the last one.

    Args:
        spans: neighbours with the same number of cores are merged.
        name: of their source, for messages.

    >>> spans = iter(Availability.of_recording(Recording.from_counts([0, 30, 60, 90], [2, 2, 3])))
    >>> [next(spans) for _ in range(3)]
    [Span(cores=2, seconds=60.0), Span(cores=3, seconds=30.0), Span(cores=2, seconds=60.0)]
    """

    def __init__(self, spans: list[Span], *, name: str) -> None:
        self.spans = _merged(spans)
        self.name = name
        if not any(span.cores for span in self.spans):
            raise ValueError(f"{name}: no cores are available at any time")

    @classmethod
    def constant(cls, cores: int) -> Availability:
        """The same number of cores at all times."""
        check_positive(cores=cores)
        return cls([Span(cores, math.inf)], name=f"{cores} cores")

    @classmethod
    def of_recording(cls, recording: Recording) -> Availability:
        """As many cores as a recording has devices."""
        counts, durations = recording.counts.tolist(), recording.durations.tolist()
        return cls([Span(*pair) for pair in zip(counts, durations, strict=True)], name=recording.places[0])

    @classmethod
    def of_market(cls, trace: Trace, *, seconds_per_row: float) -> Availability:
        """As many cores as the rows of a trace, such as :func:`spot_market` with one sample per device."""
        if not 0 < seconds_per_row < math.inf:
            raise ValueError(f"`seconds_per_row` must be a positive number, got {seconds_per_row!r}")
        return cls([Span(count, seconds_per_row) for count in trace.sizes.tolist()], name=trace.name)

    def __iter__(self) -> Iterator[Span]:
        first, last = self.spans[0], self.spans[-1]
        if len(self.spans) == 1:
            yield Span(first.cores, math.inf)
        elif first.cores != last.cores:
            yield from itertools.cycle(self.spans)
        else:  # no change between the end and the beginning
            yield first
            yield from itertools.cycle([*self.spans[1:-1], Span(last.cores, last.seconds + first.seconds)])


def _merged(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].cores == span.cores:
            merged[-1] = Span(span.cores, merged[-1].seconds + span.seconds)
        else:
            merged.append(span)
    return merged


@dataclass(frozen=True)
class NoiseCurve:
    """The noise scale as a function of progress, by linear interpolation of its logarithm.

    Args:
        progress: ascending, in steps at the reference batch size.
        noise_scales: V/G² at these points, in samples, positive.

    >>> curve = NoiseCurve([0.0, 100.0], [10.0, 1000.0])
    >>> [round(curve(progress)) for progress in (0, 50, 100, 10_000)]
    [10, 100, 1000, 1000]
    """

    progress: Sequence[float]
    noise_scales: Sequence[float]

    def __call__(self, progress: float) -> float:
        """The noise scale at this progress; constant outside the given points."""
        return math.exp(float(np.interp(progress, self.progress, np.log(self.noise_scales))))

    @classmethod
    def constant(cls, noise_scale: float) -> NoiseCurve:
        """A constant noise scale."""
        if not 0 < noise_scale < math.inf:
            raise ValueError(f"`noise_scale` must be a positive number, got {noise_scale!r}")
        return cls([0.0], [noise_scale])

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> NoiseCurve:
        """Read the noise scales from the log of a run, written by :class:`JsonLines`.

        With weighted minibatches they are converted to samples with the mean weight of a sample.
        """
        found: dict[float, float] = {}
        for record in read_records(Path(path)):
            scale = record.get("noise_scale")
            if scale is not None and 0 < scale < math.inf:
                in_samples = record["samples"] / record["weight"] if "weight" in record else 1.0
                found[record["progress"]] = scale * in_samples
        if not found:
            refuse(os.fspath(path), "the log must have records with a noise scale, as of runs with AdaScale", "none")
        progress = sorted(found)
        return cls(progress, [found[value] for value in progress])


_MOST_EMPTY_SPANS = 10_000
_HOUR = 3600.0


class Moment(NamedTuple):
    """The time and progress at which a simulated run changes its cores or batch size."""

    seconds: float
    cores: int
    batch_size: int
    progress: float


@dataclass(frozen=True)
class Simulation:
    """The result of a simulated run.

    Args:
        seconds: wall-clock time, including time without cores.
        device_seconds: summed over cores, including restarts.
        updates: number of steps.
        samples: in these steps.
        progress: of these steps, in steps at the reference batch size.
        restarts: number of restarts on another number of cores.
        trace: the batch size of every step.
        moments: the changes of cores or batch size, and the end.
    """

    seconds: float
    device_seconds: float
    updates: int
    samples: int
    progress: float
    restarts: int
    trace: Trace
    moments: tuple[Moment, ...]

    @property
    def hours(self) -> float:
        return self.seconds / _HOUR

    @property
    def device_hours(self) -> float:
        return self.device_seconds / _HOUR

    def cost(self, price: float) -> float:
        """The cost at a price per device-hour."""
        return self.device_hours * price


def simulate(
    policy: Policy | Callable[[Situation], float],
    *,
    profile: Profile,
    noise: Callable[[float], float],
    availability: Availability,
    minibatch_size: int,
    ref_batchsize: int,
    progress: float,
    capacity: int | None = None,
    restart_seconds: float = 0.0,
) -> Simulation:
    """Simulate a run with a policy, using measured times instead of training.

    A step of depth d takes (d − 1)·a + u seconds, given by the profile, and makes the progress gain(B) at the current
    noise. When the number of cores changes, the current step is lost, rows decided ahead are dropped, and the run
    resumes after a restart.

    Args:
        policy: a policy or a function of the situation.
        profile: the times of minibatches.
        noise: the noise scale as a function of progress, such as a :class:`NoiseCurve`.
        availability: the number of cores over time.
        minibatch_size: samples per forward and backward pass of one core.
        ref_batchsize: the batch size of the steps in which progress is counted.
        progress: at which the run ends.
        capacity: the most samples in a step, which is the capacity of an epoch; None for no bound.
        restart_seconds: duration of a restart, on the new cores.

    >>> from variable_batch_size.planning.profile import Measured
    >>> run = simulate(
    ...     lambda situation: 128,
    ...     profile=Profile((Measured(1, 4, 32, 1.0, 2.0),)),
    ...     noise=lambda progress: 1000.0,
    ...     availability=Availability.constant(4),
    ...     minibatch_size=32,
    ...     ref_batchsize=128,
    ...     progress=100,
    ... )
    >>> run.updates, run.seconds, run.device_seconds, run.progress
    (100, 200.0, 800.0, 100.0)
    """
    check_positive(minibatch_size=minibatch_size, ref_batchsize=ref_batchsize)
    if not 0 < progress < math.inf:
        raise ValueError(f"`progress` must be a positive number, got {progress!r}")
    if not 0 <= restart_seconds < math.inf:
        raise ValueError(f"`restart_seconds` must be a number of seconds, got {restart_seconds!r}")
    policy = policy_of(policy)
    if policy.needs_loss:
        raise ValueError(f"a simulation has no loss, which the policy {type(policy).__name__} needs")
    run = _Run(policy, profile, noise, minibatch_size, ref_batchsize, progress, capacity)
    num_empty = 0
    for span in availability:
        num_empty = 0 if run.spend(span, restart_seconds) else num_empty + 1
        if run.progress >= progress:
            break
        if num_empty > _MOST_EMPTY_SPANS:
            raise ValueError(f"{availability.name}: no step fits between two changes of the number of cores")
    return run.result()


class _Run:
    """The state of a simulated run."""

    def __init__(
        self,
        policy: Policy,
        profile: Profile,
        noise: Callable[[float], float],
        minibatch_size: int,
        ref_batchsize: int,
        goal: float,
        capacity: int | None,
    ) -> None:
        self._timing = PolicyTiming(policy)
        self._profile, self._noise, self._goal = profile, noise, goal
        self._m, self._ref, self._capacity = minibatch_size, ref_batchsize, capacity
        self._rows: deque[tuple[int, int]] = deque()  # decided, not executed: batch sizes and numbers of steps
        self._made: list[tuple[int, int]] = []  # executed
        self._moments: list[Moment] = []
        self._cores = 0
        self._has_noise = False  # true after a step with several minibatches
        self.seconds = self.device_seconds = self.progress = 0.0
        self.updates = self.samples = self.restarts = 0

    def spend(self, span: Span, restart_seconds: float) -> bool:
        """Run for one span; False if no step fits into it."""
        begun, left = self.updates, span.seconds
        if span.cores:
            if self._cores:
                self.restarts += 1
                left -= self._wait(min(restart_seconds, left), span.cores)
                self._timing.restart(self._made[-1][0] if self._made else None)
                self._rows.clear()
            self._cores = span.cores
            left = self._run_for(left)
        if self.progress < self._goal:
            self._wait(left, span.cores)
        return self.updates > begun

    def _wait(self, seconds: float, cores: int) -> float:
        self.seconds += seconds
        self.device_seconds += seconds * cores
        return seconds

    def _run_for(self, left: float) -> float:
        """Make steps while time remains, up to the goal; returns the remaining time."""
        while self.progress < self._goal:
            until_next = self._decide()
            size, number = self._rows.popleft()
            worth = gain(size, ref_batchsize=self._ref, noise_scale=self._noise(self.progress))
            seconds = self._step_seconds(size)
            wanted = min(number, until_next, max(1, math.ceil((self._goal - self.progress) / worth - 1e-9)))
            made = wanted if wanted * seconds <= left else int(left / seconds)
            self._note(size, made, seconds, worth)
            left -= made * seconds
            if made < wanted:
                break
            if made < number:
                self._rows.appendleft((size, number - made))
        return left

    def _decide(self) -> int:
        """Let the policy decide rows if due; returns the number of steps until the next decision."""
        ahead = sum(number for _, number in self._rows)
        while number := self._timing.num_rows(ahead):
            self._rows.append((self._timing.answer(self._situation()).batch_size, number))
            ahead += number
        return ahead - self._timing.policy.lead

    def _situation(self) -> Situation:
        return Situation(
            cores=self._cores,
            minibatch_size=self._m,
            ref_batchsize=self._ref,
            noise_scale=self._noise(self.progress) if self._has_noise else None,
            steps_done=self.updates,
            samples_done=self.samples,
            progress=self.progress,
            capacity=self._capacity,
        )

    def _step_seconds(self, size: int) -> float:
        times = self._profile.times(cores=self._cores, minibatch_size=self._m)
        return (self._depth(size) - 1) * times.accumulating + times.updating

    def _depth(self, size: int) -> int:
        return -(-size // (self._m * self._cores))

    def _note(self, size: int, number: int, seconds: float, worth: float) -> None:
        if not number:
            return
        if not self._moments or self._moments[-1][1:3] != (self._cores, size):
            self._moments.append(Moment(self.seconds, self._cores, size, self.progress))
        self._made.append((size, number))
        self._timing.note_steps(size, self._depth(size), seconds, number)
        self._has_noise = self._has_noise or size > self._m
        self._wait(number * seconds, self._cores)
        self.updates += number
        self.samples += number * size
        self.progress += number * worth

    def result(self) -> Simulation:
        sizes, numbers = zip(*self._made, strict=True)
        end = Moment(self.seconds, self._cores, sizes[-1], self.progress)
        return Simulation(
            seconds=self.seconds,
            device_seconds=self.device_seconds,
            updates=self.updates,
            samples=self.samples,
            progress=self.progress,
            restarts=self.restarts,
            trace=Trace.from_sequence(np.repeat(np.array(sizes, dtype=np.int64), numbers)),
            moments=(*self._moments, end),
        )
