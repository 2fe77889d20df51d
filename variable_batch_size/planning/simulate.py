"""simulate: what a policy would decide while cores come and go, before they are rented."""

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
    """A time in which the number of cores stays the same; it may be 0, and the time without end."""

    cores: int
    seconds: float


class Availability:
    """Spans of time, one after the other; after the last it begins again.

    Args:
        spans: with different numbers of cores from one to the next.
        name: where they come from.

    >>> spans = iter(Availability.of_recording(Recording.from_counts([0, 30, 60, 90], [2, 2, 3])))
    >>> [next(spans) for _ in range(3)]
    [Span(cores=2, seconds=60.0), Span(cores=3, seconds=30.0), Span(cores=2, seconds=60.0)]
    """

    def __init__(self, spans: list[Span], *, name: str) -> None:
        self.spans = _merged(spans)
        self.name = name
        if not any(span.cores for span in self.spans):
            raise ValueError(f"{name}: there must be a core at some time, got 0 at all times")

    @classmethod
    def constant(cls, cores: int) -> Availability:
        """The same number of cores for ever."""
        check_positive(cores=cores)
        return cls([Span(cores, math.inf)], name=f"{cores} cores")

    @classmethod
    def of_recording(cls, recording: Recording) -> Availability:
        """As many cores as a recording has devices."""
        counts, durations = recording.counts.tolist(), recording.durations.tolist()
        return cls([Span(*pair) for pair in zip(counts, durations, strict=True)], name=recording.places[0])

    @classmethod
    def of_market(cls, trace: Trace, *, seconds_per_row: float) -> Availability:
        """As many cores as the rows of a trace say, such as of :func:`spot_market` with one sample per device."""
        if not 0 < seconds_per_row < math.inf:
            raise ValueError(f"`seconds_per_row` must be a positive number, got {seconds_per_row!r}")
        return cls([Span(count, seconds_per_row) for count in trace.sizes.tolist()], name=trace.name)

    def __iter__(self) -> Iterator[Span]:
        first, last = self.spans[0], self.spans[-1]
        if len(self.spans) == 1:
            yield Span(first.cores, math.inf)
        elif first.cores != last.cores:
            yield from itertools.cycle(self.spans)
        else:  # where the end meets the beginning nothing changes
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
    """Noise scales at some progress; between them its logarithm is on a line, outside of them it stays the same.

    Args:
        progress: ascending, in steps at the reference batch size.
        noise_scales: V/G² there, in samples, positive.

    >>> curve = NoiseCurve([0.0, 100.0], [10.0, 1000.0])
    >>> [round(curve(progress)) for progress in (0, 50, 100, 10_000)]
    [10, 100, 1000, 1000]
    """

    progress: Sequence[float]
    noise_scales: Sequence[float]

    def __call__(self, progress: float) -> float:
        """The noise scale at some progress."""
        return math.exp(float(np.interp(progress, self.progress, np.log(self.noise_scales))))

    @classmethod
    def constant(cls, noise_scale: float) -> NoiseCurve:
        """The same noise scale at all times."""
        if not 0 < noise_scale < math.inf:
            raise ValueError(f"`noise_scale` must be a positive number, got {noise_scale!r}")
        return cls([0.0], [noise_scale])

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> NoiseCurve:
        """Take it from the log of a run, as :class:`JsonLines` writes it: the records that have a noise scale.

        Where minibatches had weights it is converted to samples, by what these have weighed on average.
        """
        found: dict[float, float] = {}
        for record in read_records(Path(path)):
            scale = record.get("noise_scale")
            if scale is not None and 0 < scale < math.inf:
                in_samples = record["samples"] / record["weight"] if "weight" in record else 1.0
                found[record["progress"]] = scale * in_samples
        if not found:
            refuse(os.fspath(path), "a log must have a record with a noise scale, as runs with AdaScale write", "none")
        progress = sorted(found)
        return cls(progress, [found[value] for value in progress])


_MOST_EMPTY_SPANS = 10_000
_HOUR = 3600.0


class Moment(NamedTuple):
    """From when on a simulated run has a batch size on a number of cores, and how far it had come."""

    seconds: float
    cores: int
    batch_size: int
    progress: float


@dataclass(frozen=True)
class Simulation:
    """What a run would do.

    Args:
        seconds: by the clock, times without cores included.
        device_seconds: of all cores together, restarts included.
        updates: steps.
        samples: in these.
        progress: what they are worth, in steps at the reference batch size.
        restarts: on another number of cores.
        trace: the batch size of every step.
        moments: where it changed.
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
        """At a price for each device and hour."""
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
    """Let a policy decide as it would in a run, with measured times in place of training.

    A step of depth d takes (d − 1)·a + u seconds, which the profile knows, and makes the progress gain(B) at the noise
    of its time. When the number of cores changes, the step under way is lost, rows decided ahead are dropped, and the
    run goes on after a restart.

    Args:
        policy: who decides; a function of the situation is one.
        profile: the seconds of minibatches.
        noise: the noise scale at some progress, such as a :class:`NoiseCurve`.
        availability: how many cores there are, and when.
        minibatch_size: samples that one core runs at once.
        ref_batchsize: the batch size that progress is counted in.
        progress: where the run ends.
        capacity: the most samples of a step, those of an epoch; None for no bound.
        restart_seconds: what each restart takes, on the new cores.

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
        raise ValueError(f"a simulation has no loss to decide by, got the policy {type(policy).__name__}")
    run = _Run(policy, profile, noise, minibatch_size, ref_batchsize, progress, capacity)
    num_empty = 0
    for span in availability:
        num_empty = 0 if run.spend(span, restart_seconds) else num_empty + 1
        if run.progress >= progress:
            break
        if num_empty > _MOST_EMPTY_SPANS:
            raise ValueError(
                f"{availability.name}: no step fits into any of the times between two changes of the cores"
            )
    return run.result()


class _Run:
    """A simulated run, up to some time."""

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
        self._asking = PolicyTiming(policy)
        self._profile, self._noise, self._goal = profile, noise, goal
        self._m, self._ref, self._capacity = minibatch_size, ref_batchsize, capacity
        self._rows: deque[tuple[int, int]] = deque()  # decided and not executed yet: batch sizes, and how often
        self._made: list[tuple[int, int]] = []  # executed, likewise
        self._moments: list[Moment] = []
        self._cores = 0
        self._tells_noise = False  # a step of several minibatches does
        self.seconds = self.device_seconds = self.progress = 0.0
        self.updates = self.samples = self.restarts = 0

    def spend(self, span: Span, restart_seconds: float) -> bool:
        """Run for as long as the cores stay the same; False if there was no time for a step."""
        begun, left = self.updates, span.seconds
        if span.cores:
            if self._cores:
                self.restarts += 1
                left -= self._wait(min(restart_seconds, left), span.cores)
                self._asking.restart(self._made[-1][0] if self._made else None)
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
        """Make steps as long as there is time for them, up to the goal; the time that is left."""
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
        """Ask for rows if it is time; how many steps there are until it is again."""
        ahead = sum(number for _, number in self._rows)
        while number := self._asking.num_rows(ahead):
            self._rows.append((self._asking.answer(self._situation()).batch_size, number))
            ahead += number
        return ahead - self._asking.policy.lead

    def _situation(self) -> Situation:
        return Situation(
            cores=self._cores,
            minibatch_size=self._m,
            ref_batchsize=self._ref,
            noise_scale=self._noise(self.progress) if self._tells_noise else None,
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
        self._asking.note_steps(size, self._depth(size), seconds, number)
        self._tells_noise = self._tells_noise or size > self._m
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
