"""simulate: the decisions of a policy for a given availability of cores, without training."""

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from variable_batch_size.checks import check_not_negative_number, check_positive, check_positive_number, refuse
from variable_batch_size.files import read_records
from variable_batch_size.planning.profile import BASES, MEASURED, Profile
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
    """The number of cores over time, as consecutive spans that repeat after the last one; `name` is for messages.

    >>> spans = iter(Availability.of_recording(Recording.from_counts([0, 30, 60, 90], [2, 2, 3])))
    >>> [next(spans) for _ in range(3)]
    [Span(cores=2, seconds=60.0), Span(cores=3, seconds=30.0), Span(cores=2, seconds=60.0)]
    """

    def __init__(self, spans: Iterable[Span], *, name: str) -> None:
        merged = itertools.groupby(spans, key=lambda span: span.cores)
        self.spans = [Span(cores, sum(span.seconds for span in group)) for cores, group in merged]
        self.name = name
        if not any(span.cores for span in self.spans):
            raise ValueError(f"{name}: no cores are available at any time")

    @classmethod
    def constant(cls, cores: int) -> "Availability":
        """The same number of cores at all times."""
        check_positive(cores=cores)
        return cls([Span(cores, math.inf)], name=f"{cores} core{'s' if cores > 1 else ''}")

    @classmethod
    def of_recording(cls, recording: Recording) -> "Availability":
        """As many cores as a recording has devices."""
        return cls(map(Span, recording.counts.tolist(), recording.durations.tolist()), name=recording.places[0])

    @classmethod
    def of_market(cls, trace: Trace, *, seconds_per_row: float) -> "Availability":
        """As many cores as the rows of a trace, such as :func:`spot_market` with one sample per device."""
        check_positive_number(seconds_per_row=seconds_per_row)
        return cls((Span(count, seconds_per_row) for count in trace.sizes.tolist()), name=trace.name)

    def __iter__(self) -> Iterator[Span]:
        first, last = self.spans[0], self.spans[-1]
        if len(self.spans) == 1:
            yield Span(first.cores, math.inf)
        elif first.cores != last.cores:
            yield from itertools.cycle(self.spans)
        else:  # no change between the end and the beginning
            yield first
            yield from itertools.cycle([*self.spans[1:-1], Span(last.cores, last.seconds + first.seconds)])


@dataclass(frozen=True)
class NoiseCurve:
    """The noise scale as a function of progress, by linear interpolation of its logarithm.

    >>> curve = NoiseCurve([0.0, 100.0], [10.0, 1000.0])
    >>> [round(curve(progress)) for progress in (0, 50, 100, 10_000)]
    [10, 100, 1000, 1000]
    """

    progress: Sequence[float]  # ascending, in steps at the reference batch size
    noise_scales: Sequence[float]  # V/G² at these points, in samples, positive

    def __call__(self, progress: float) -> float:
        """The noise scale at this progress; constant outside the given points."""
        return math.exp(float(np.interp(progress, self.progress, np.log(self.noise_scales))))

    @classmethod
    def constant(cls, noise_scale: float) -> "NoiseCurve":
        """A constant noise scale."""
        check_positive_number(noise_scale=noise_scale)
        return cls([0.0], [noise_scale])

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "NoiseCurve":
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
        return cls(sorted(found), [found[progress] for progress in sorted(found)])


class Moment(NamedTuple):
    """The time and progress at which a simulated run changes its cores or batch size."""

    seconds: float
    cores: int
    batch_size: int
    progress: float


@dataclass(kw_only=True)
class Simulation:
    """The result of a simulated run."""

    seconds: float = 0.0  # wall-clock time, including time without cores
    device_seconds: float = 0.0  # summed over cores, including restarts
    updates: int = 0  # number of steps
    samples: int = 0  # in these steps
    progress: float = 0.0  # of these steps, in steps at the reference batch size
    restarts: int = 0  # number of restarts on another number of cores
    basis: str = MEASURED  # of the least certain times: measured, interpolated or extrapolated
    made: list[tuple[int, int]] = field(default_factory=list)  # batch sizes of consecutive steps, with numbers of steps
    moments: list[Moment] = field(default_factory=list)  # the changes of cores or batch size, and the end

    @property
    def trace(self) -> Trace:
        """The batch size of every step."""
        sizes, numbers = zip(*self.made, strict=True)
        return Trace.from_sequence(np.repeat(np.array(sizes, dtype=np.int64), numbers))

    def cost(self, price: float) -> float:
        """The cost at a price per device-hour."""
        check_not_negative_number(price=price)
        return self.device_seconds / 3600 * price


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
    """
    check_positive(minibatch_size=minibatch_size, ref_batchsize=ref_batchsize)
    check_positive_number(progress=progress)
    check_not_negative_number(restart_seconds=restart_seconds)
    policy = policy_of(policy)
    if policy.needs_loss:
        raise ValueError(f"a simulation has no loss, which the policy {type(policy).__name__} needs")
    run = _Run(PolicyTiming(policy), profile, noise, minibatch_size, ref_batchsize, capacity, progress)
    num_empty, spans = 0, iter(availability)
    while run.progress < progress:
        num_empty = 0 if run.spend(next(spans), restart_seconds) else num_empty + 1
        if num_empty > 10_000:
            raise ValueError(f"{availability.name}: no step fits between two changes of the number of cores")
    run.moments.append(Moment(run.seconds, run.cores, run.made[-1][0], run.progress))
    return run


@dataclass
class _Run(Simulation):
    timing: PolicyTiming
    profile: Profile
    noise: Callable[[float], float]
    minibatch_size: int
    ref_batchsize: int
    capacity: int | None
    goal: float
    cores: int = 0
    has_noise: bool = False  # true after a step with several minibatches
    rows: deque[tuple[int, int]] = field(default_factory=deque)  # like `made`, decided and not executed

    def spend(self, span: Span, restart_seconds: float) -> bool:
        """Run for one span; False if no step fits into it."""
        begun, left = self.updates, span.seconds
        if span.cores:
            if self.cores:
                self.restarts += 1
                left -= self._wait(min(restart_seconds, left), span.cores)
                self.timing.restart(self.made[-1][0] if self.made else None)
                self.rows.clear()
            self.cores = span.cores
            left = self._run_for(left)
        if self.progress < self.goal:
            self._wait(left, span.cores)
        return self.updates > begun

    def _wait(self, seconds: float, cores: int) -> float:
        self.seconds += seconds
        self.device_seconds += seconds * cores
        return seconds

    def _run_for(self, left: float) -> float:
        """Make steps while time remains, up to the goal; returns the remaining time."""
        while self.progress < self.goal:
            until_next = self._decide()
            size, number = self.rows.popleft()
            worth = gain(size, ref_batchsize=self.ref_batchsize, noise_scale=self.noise(self.progress))
            where = {"cores": self.cores, "minibatch_size": self.minibatch_size}
            times = self.profile.times(**where)
            depth = -(-size // (self.minibatch_size * self.cores))
            seconds = (depth - 1) * times.accumulating + times.updating
            wanted = min(number, until_next, max(1, math.ceil((self.goal - self.progress) / worth - 1e-9)))
            made = wanted if wanted * seconds <= left else int(left / seconds)
            if made:
                self.basis = max(self.basis, self.profile.basis(**where), key=BASES.index)
                if not self.moments or self.moments[-1][1:3] != (self.cores, size):
                    self.moments.append(Moment(self.seconds, self.cores, size, self.progress))
                self.made.append((size, made))
                self.timing.note_steps(size, self.cores, seconds, depth=depth, number=made)
                self.has_noise = self.has_noise or size > self.minibatch_size
                self._wait(made * seconds, self.cores)
                self.updates += made
                self.samples += made * size
                self.progress += made * worth
            left -= made * seconds
            if made < wanted:
                break
            if made < number:
                self.rows.appendleft((size, number - made))
        return left

    def _decide(self) -> int:
        """Let the policy decide rows if due; returns the number of steps until the next decision."""
        ahead = sum(number for _, number in self.rows)
        while number := self.timing.num_rows(ahead):
            situation = Situation(
                cores=self.cores,
                minibatch_size=self.minibatch_size,
                ref_batchsize=self.ref_batchsize,
                noise_scale=self.noise(self.progress) if self.has_noise else None,
                steps_done=self.updates,
                samples_done=self.samples,
                progress=self.progress,
                capacity=self.capacity,
            )
            self.rows.append((self.timing.answer(situation).batch_size, number))
            ahead += number
        return ahead - self.timing.policy.lead
