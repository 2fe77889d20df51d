"""simulate: the decisions of a policy for a given availability of cores, without training."""

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from variable_batch_size.checks import check_not_negative_number, check_positive, check_positive_number, refuse
from variable_batch_size.files import numbered_lines, read_records
from variable_batch_size.lab.planning.profile import BASES, MEASURED, Profile, half_interval
from variable_batch_size.lab.planning.rental import Offer, Prices, Rental
from variable_batch_size.policies.autoscale import Goodput, gain
from variable_batch_size.policies.policy import Policy, Situation, depth_of, policy_of
from variable_batch_size.policies.timing import PolicyTiming
from variable_batch_size.traces.recording import Recording
from variable_batch_size.traces.trace import Trace


class Span(NamedTuple):
    """A period with a constant number of cores, possibly 0; it may be infinite."""

    cores: int
    seconds: float


class Availability:
    """The number of cores over time, as consecutive spans that repeat after the last one; `name` is for messages.

    Machines are filled one after the other; `cores_per_machine` is None if it is not known.

    >>> spans = iter(Availability.of_recording(Recording.from_counts([0, 30, 60, 90], [2, 2, 3])))
    >>> [next(spans) for _ in range(3)]
    [Span(cores=2, seconds=60.0), Span(cores=3, seconds=30.0), Span(cores=2, seconds=60.0)]
    """

    def __init__(self, spans: Iterable[Span], *, name: str, cores_per_machine: int | None = None) -> None:
        if cores_per_machine is not None:
            check_positive(cores_per_machine=cores_per_machine)
        merged = itertools.groupby(spans, key=lambda span: span.cores)
        self.spans = [Span(cores, sum(span.seconds for span in group)) for cores, group in merged]
        self.name, self.cores_per_machine = name, cores_per_machine
        if not any(span.cores for span in self.spans):
            raise ValueError(f"{name}: no cores are available at any time")

    @classmethod
    def constant(cls, cores: int, *, cores_per_machine: int | None = None) -> "Availability":
        """The same number of cores at all times."""
        check_positive(cores=cores)
        name = f"{cores} core{'s' if cores > 1 else ''}"
        return cls([Span(cores, math.inf)], name=name, cores_per_machine=cores_per_machine)

    @classmethod
    def of_recording(cls, recording: Recording, *, cores_per_machine: int | None = None) -> "Availability":
        """As many cores as a recording has devices."""
        spans = map(Span, recording.counts.tolist(), recording.durations.tolist())
        return cls(spans, name=recording.places[0], cores_per_machine=cores_per_machine)

    @classmethod
    def of_market(cls, trace: Trace, *, seconds_per_row: float, cores_per_machine: int | None = None) -> "Availability":
        """As many cores as the rows of a trace, such as :func:`spot_market` with one sample per device."""
        check_positive_number(seconds_per_row=seconds_per_row)
        spans = (Span(count, seconds_per_row) for count in trace.sizes.tolist())
        return cls(spans, name=trace.name, cores_per_machine=cores_per_machine)

    def machines(self, cores: int, profile: Profile) -> int:
        """How many machines these cores are on; ValueError if the profile depends on that and it is not known."""
        if self.cores_per_machine is not None:
            return -(-cores // self.cores_per_machine)
        if cores > 1 and profile.has_several_machines:
            needed = "set `cores_per_machine` (--cores-per-machine), which determines how many machines they are on"
            problem = f"{profile.name} has times on several machines, but the placement of {self.name} is unknown"
            raise ValueError(f"{problem}: {needed}")
        return 1

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
    """The noise scale of a run as a function of progress, by linear interpolation of its logarithm.

    >>> curve = NoiseCurve([0.0, 100.0], [10.0, 1000.0])
    >>> [round(curve(progress)) for progress in (0, 50, 100, 10_000)]
    [10, 100, 1000, 1000]
    """

    progress: Sequence[float]  # ascending, in steps at the reference batch size
    noise_scales: Sequence[float]  # V/G² at these points, in samples, positive
    batch_sizes: Sequence[float] | None = None  # of the run at these points; None if not known

    def __call__(self, progress: float, batch_size: float | None = None) -> float:
        """The noise scale at this progress, for any batch size; constant outside the given points."""
        return self._at(progress, self.noise_scales)

    def batch_size(self, progress: float) -> float:
        """The batch size of the run at this progress."""
        assert self.batch_sizes is not None
        return self._at(progress, self.batch_sizes)

    def _at(self, progress: float, values: Sequence[float]) -> float:
        return math.exp(float(np.interp(progress, self.progress, np.log(values))))

    @property
    def is_constant(self) -> bool:
        """Whether it was assumed, and so has no points beyond which it is extrapolated."""
        return len(self.progress) == 1 and not self.progress[0]

    @classmethod
    def constant(cls, noise_scale: float, *, batch_size: int | None = None) -> "NoiseCurve":
        """A noise scale that does not depend on progress."""
        check_positive_number(noise_scale=noise_scale)
        if batch_size is None:
            return cls([0.0], [noise_scale])
        check_positive(batch_size=batch_size)
        return cls([0.0], [noise_scale], [batch_size])

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "NoiseCurve":
        """Read the noise scales of a run: its log, written by :class:`JsonLines`, or a CSV file.

        A CSV file has the columns ``progress,noise_scale`` or ``progress,noise_scale,batch_size``. With weighted
        minibatches, the noise scales of a log are converted to samples with the mean weight of a sample.
        """
        name, numbered = os.fspath(path), numbered_lines(path)
        if numbered and not numbered[0][1].lstrip().startswith("{"):
            return cls(*zip(*_noise_rows(numbered, name), strict=True))
        found: dict[float, tuple[float, ...]] = {}
        for record in read_records(Path(path)):
            scale = record.get("noise_scale")
            if scale is not None and 0 < scale < math.inf:
                in_samples = record["samples"] / record["weight"] if "weight" in record else 1.0
                size = (record["batch_size"],) if "batch_size" in record else ()
                found[record["progress"]] = (scale * in_samples, *size)
        if not found:
            refuse(name, "the log must have records with a noise scale, as in runs with AdaScale", "none")
        if len({len(values) for values in found.values()}) > 1:
            refuse(name, "all records with a noise scale must have a batch_size, or none", "some")
        return cls(sorted(found), *map(list, zip(*(found[progress] for progress in sorted(found)), strict=True)))


def _noise_rows(numbered: Sequence[tuple[int, str]], name: str) -> Iterator[tuple[float, ...]]:
    """The rows of a CSV file of noise scales."""
    (line, head), *rows = numbered
    columns = [cell.strip() for cell in head.split(",")]
    if columns not in (["progress", "noise_scale"], ["progress", "noise_scale", "batch_size"]):
        refuse(f"{name}:{line}", "the columns must be progress,noise_scale or progress,noise_scale,batch_size", head)
    if not rows:
        refuse(name, "a table of noise scales must have a row", "none")
    before = -math.inf
    for line, text in rows:
        try:
            row = tuple(map(float, text.split(",")))
        except ValueError:
            row = ()
        if len(row) != len(columns) or not all(math.isfinite(value) for value in row) or min(row[1:]) <= 0:
            refuse(f"{name}:{line}", "a row must be a progress and positive numbers", text.strip())
        if row[0] <= before:
            refuse(
                f"{name}:{line}", "progress must ascend: each run, or batch size, is a file of its own", f"{row[0]:g}"
            )
        before = row[0]
        yield row


@dataclass(frozen=True)
class NoiseCurves:
    """The noise scale as a function of progress and batch size, from runs at several batch sizes.

    Its logarithm is interpolated linearly over the logarithm of the batch size, between the runs at the same progress,
    and is constant outside. Runs at the same batch size are averaged.

    >>> runs = [NoiseCurve.constant(100.0, batch_size=64), NoiseCurve.constant(400.0, batch_size=256)]
    >>> [round(NoiseCurves(runs)(0.0, size)) for size in (32, 64, 128, 256, 512)]
    [100, 100, 200, 400, 400]
    """

    curves: Sequence[NoiseCurve]  # all with batch sizes
    end: int = 0  # -1 or 1 for an end of the 95 % interval of the mean over runs at the same batch size

    def __post_init__(self) -> None:
        if not self.curves or any(curve.batch_sizes is None for curve in self.curves):
            raise ValueError("the noise of several runs needs the batch size of each: one has none")

    def __call__(self, progress: float, batch_size: float) -> float:
        """The noise scale of a run with this batch size at this progress."""
        found: dict[float, list[float]] = {}
        for curve in self.curves:
            found.setdefault(curve.batch_size(progress), []).append(math.log(curve(progress)))
        sizes = sorted(found)
        means = [fmean(found[size]) + (self.end and self.end * half_interval(found[size])) for size in sizes]
        return math.exp(float(np.interp(math.log(batch_size), np.log(sizes), means)))

    @property
    def ends(self) -> "tuple[NoiseCurves, NoiseCurves] | None":
        """The ends of the 95 % interval; None if no two runs have a batch size in common."""
        sizes = [size for curve in self.curves for size in set(curve.batch_sizes or ())]
        return (replace(self, end=-1), replace(self, end=1)) if len(set(sizes)) < len(sizes) else None


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
    cost: float | None = None  # of these; None without a price
    updates: int = 0  # number of steps
    samples: int = 0  # in these steps
    progress: float = 0.0  # of these steps, in steps at the reference batch size
    restarts: int = 0  # number of restarts on another number of cores
    lost_seconds: float = 0.0  # of steps that were interrupted, or not in the checkpoint of a restart
    basis: str = MEASURED  # of the least certain times: measured, interpolated or extrapolated
    made: list[tuple[int, int]] = field(default_factory=list)  # batch sizes of consecutive steps, with numbers of steps
    moments: list[Moment] = field(default_factory=list)  # the changes of cores or batch size, and the end
    ends: "tuple[Simulation, Simulation] | None" = None  # the fastest and slowest, of :func:`simulate_with_ends`

    @property
    def trace(self) -> Trace:
        """The batch size of every step."""
        sizes, numbers = zip(*self.made, strict=True)
        return Trace.from_sequence(np.repeat(np.array(sizes, dtype=np.int64), numbers))


Runs = Sequence[tuple[str, Simulation]]  # policies as text, and their simulated runs


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The position of a run whose rest is simulated. The result has the updates and samples of the rest only."""

    progress: float  # so far, in steps at the reference batch size
    updates: int
    samples: int
    cores: int
    batch_size: int  # of the latest step
    times: Sequence[tuple[int, int, float]] = ()  # of measured steps: cores, minibatches of the busiest core, seconds


def simulate(
    policy: Policy | Rental | Callable[[Situation], float],
    *,
    profile: Profile,
    noise: Callable[[float, int], float],
    availability: Availability,
    minibatch_size: int,
    ref_batchsize: int,
    progress: float,
    capacity: int | None = None,
    restart_seconds: float = 0.0,
    checkpoint_seconds: float | None = None,
    price: float | Prices | None = None,
    resumed: Resumed | None = None,
    most_samples: int | None = None,
) -> Simulation:
    """Simulate a run with a policy, using measured times instead of training.

    A step of depth d takes (d − 1)·a + u seconds, given by the profile, and makes the progress gain(B) at the current
    noise. When the number of cores changes, the current step is lost, rows decided ahead are dropped, and the run
    resumes after a restart. With `checkpoint_seconds`, it resumes from the last checkpoint, and the steps since then
    are lost as well.

    Args:
        policy: a policy, a function of the situation, or a :class:`Rental`, which also chooses the number of cores.
        profile: the times of minibatches.
        noise: the noise scale as a function of progress and batch size, such as a :class:`NoiseCurve` or
            :class:`NoiseCurves`.
        availability: the number of cores over time, and the machines that they are on.
        minibatch_size: samples per forward and backward pass of one core.
        ref_batchsize: the batch size of the steps in which progress is counted.
        progress: the progress at which the run ends.
        capacity: the most samples in a step, which is the capacity of an epoch; None for no bound.
        restart_seconds: duration of a restart, on the new cores.
        checkpoint_seconds: time between checkpoints, which are saved at the end of a step, if cores leave without
            notice; None if a signal lets the run save.
        price: of a device-hour, constant or over time; None for no costs.
        resumed: the position of the run, to simulate its rest; None to simulate it from the beginning.
        most_samples: samples of the whole run at which it ends even before that progress; None for no bound.
    """
    check_positive(minibatch_size=minibatch_size, ref_batchsize=ref_batchsize)
    check_positive_number(progress=progress)
    check_not_negative_number(restart_seconds=restart_seconds)
    if checkpoint_seconds is not None:
        check_positive_number(checkpoint_seconds=checkpoint_seconds)
    prices = price if price is None or isinstance(price, Prices) else Prices.constant(price)
    rental = policy if isinstance(policy, Rental) else None
    policy = policy_of(policy.policy if isinstance(policy, Rental) else policy)
    if policy.needs_loss:
        raise ValueError(f"a simulation has no loss, which the policy {type(policy).__name__} needs")
    sizes = (minibatch_size, ref_batchsize, capacity, progress, most_samples)
    times = (restart_seconds, checkpoint_seconds)
    run = _Run(PolicyTiming(policy), profile, noise, availability, prices, *sizes, *times)
    if resumed is not None:
        run.resume(resumed)
    num_empty, spans = 0, iter(availability) if rental is None else run.rented(rental)
    while not run.is_done:
        num_empty = 0 if run.spend(next(spans)) else num_empty + 1
        if num_empty > 10_000:
            what = "step" if checkpoint_seconds is None else "checkpoint"
            raise ValueError(f"{availability.name}: no {what} fits between two changes of the number of cores")
    if not run.made:
        raise ValueError(f"`progress` must be above {run.progress:g}, where the run is already, got {progress:g}")
    run.moments.append(Moment(run.seconds, run.cores, run.made[-1][0], run.progress))
    if resumed is not None:
        run.updates, run.samples = run.updates - resumed.updates, run.samples - resumed.samples
    return run


def simulate_with_ends(
    policy: Policy | Rental | Callable[[Situation], float],
    *,
    profile: Profile,
    noise: NoiseCurve | NoiseCurves,
    **options: Any,
) -> Simulation:
    """Like :func:`simulate`, also at the ends of the 95 % intervals of times that were not measured and of the noise.

    `ends` are the fastest and the slowest of these runs; None if there are no intervals.
    """
    run = simulate(policy, profile=profile, noise=noise, **options)
    profiles = (run.basis != MEASURED and profile.ends) or (profile,)
    noises = (isinstance(noise, NoiseCurves) and noise.ends) or (noise,)
    if len(profiles) * len(noises) > 1:
        pairs = itertools.product(profiles, noises)
        others = [run, *(simulate(policy, profile=times, noise=curve, **options) for times, curve in pairs)]
        run.ends = min(others, key=lambda other: other.seconds), max(others, key=lambda other: other.seconds)
    return run


class _Saved(NamedTuple):
    """What a checkpoint restores."""

    progress: float = 0.0
    updates: int = 0
    samples: int = 0
    num_made: int = 0  # entries of `made`


@dataclass
class _Run(Simulation):
    timing: PolicyTiming
    profile: Profile
    noise: Callable[[float, int], float]
    availability: Availability
    prices: Prices | None
    minibatch_size: int
    ref_batchsize: int
    capacity: int | None
    goal: float
    most_samples: int | None
    restart_seconds: float
    checkpoint_seconds: float | None
    cores: int = 0  # of the latest span, which may be 0
    machines: int = 1
    is_started: bool = False
    restart_left: float = 0.0  # seconds of the current restart
    left: float = 0.0  # seconds of that span, too few for a step unless the next span has the same cores
    noise_size: int | None = None  # the latest batch size with several minibatches, which show the noise
    rows: deque[tuple[int, int]] = field(default_factory=deque)  # like `made`, decided but not executed
    saved: _Saved = field(default_factory=_Saved)
    unsaved_seconds: float = 0.0  # of the steps since then

    def __post_init__(self) -> None:
        self.cost = None if self.prices is None else 0.0

    @property
    def is_done(self) -> bool:
        """Whether it has reached its goal."""
        return self.progress >= self.goal or (self.most_samples is not None and self.samples >= self.most_samples)

    def resume(self, resumed: Resumed) -> None:
        """Begin at the position of a run; on another number of cores, its policy decides anew."""
        self.progress, self.updates, self.samples = resumed.progress, resumed.updates, resumed.samples
        self.noise_size = resumed.batch_size if resumed.batch_size > self.minibatch_size else None
        self.timing.restart(resumed.batch_size)
        for time in resumed.times:
            self.timing.times.add(*time)
        if resumed.cores == self.availability.spans[0].cores:
            depth = depth_of(resumed.batch_size, self.minibatch_size, resumed.cores)
            self.timing.note_steps(resumed.batch_size, resumed.cores, None, depth=depth)
        else:
            self.restarts, self.restart_left = 1, self.restart_seconds
        self._save()

    def spend(self, span: Span) -> bool:
        """Run for one span; False if its number of cores is new and no step, or no checkpoint, fits into it."""
        begun, stays = self.saved.updates, span.cores == self.cores
        if stays:
            self.left += span.seconds
        else:
            self._leave()
            self.cores, self.left = span.cores, span.seconds
            if self.cores and self.is_started:
                self.restarts += 1
                self.restart_left = self.restart_seconds
                self.timing.restart(self.made[-1][0] if self.made else None)
                self.rows.clear()
        if self.cores:
            self.is_started, self.machines = True, self.availability.machines(self.cores, self.profile)
            restarting = self._wait(min(self.restart_left, self.left))
            self.restart_left, self.left = self.restart_left - restarting, self.left - restarting
            self.left = self._run_for(self.left)
        return stays or self.saved.updates > begun

    def _leave(self) -> None:
        """Leave the cores, and lose the current step and the steps since the last checkpoint."""
        self._wait(self.left)
        if self.cores:
            self.lost_seconds += self.left
        if self.unsaved_seconds:
            last = self.moments[-1]._replace(seconds=self.seconds)
            self.moments += [last._replace(progress=at) for at in (self.progress, self.saved.progress)]
            self.lost_seconds += self.unsaved_seconds
            self.unsaved_seconds = 0.0
            self.progress, self.updates, self.samples, num_made = self.saved
            del self.made[num_made:]

    def _save(self) -> None:
        self.saved = _Saved(self.progress, self.updates, self.samples, len(self.made))
        self.unsaved_seconds = 0.0

    def _wait(self, seconds: float) -> float:
        if self.prices is not None and self.cost is not None:
            self.cost += self.cores * self.prices.cost(self.seconds, seconds)
        self.seconds += seconds
        self.device_seconds += seconds * self.cores
        return seconds

    def _run_for(self, left: float) -> float:
        """Make steps while time remains, up to the goal; returns the remaining time."""
        where = {"cores": self.cores, "minibatch_size": self.minibatch_size, "machines": self.machines}
        times = self.profile.times(**where)
        while not self.is_done:
            until_next = self._decide()
            size, number = self.rows.popleft()
            worth = gain(size, ref_batchsize=self.ref_batchsize, noise_scale=self.noise(self.progress, size))
            depth = depth_of(size, self.minibatch_size, self.cores)
            seconds = times.step(depth)
            wanted = min(number, until_next, max(1, math.ceil((self.goal - self.progress) / worth - 1e-9)))
            if self.most_samples is not None:
                wanted = min(wanted, -(-(self.most_samples - self.samples) // size))
            if self.checkpoint_seconds is not None:
                wanted = min(wanted, max(1, math.ceil((self.checkpoint_seconds - self.unsaved_seconds) / seconds)))
            made = wanted if wanted * seconds <= left else int(left / seconds)
            if made:
                self.basis = max(self.basis, self.profile.basis(**where), key=BASES.index)
                if not self.moments or self.moments[-1][1:3] != (self.cores, size):
                    self.moments.append(Moment(self.seconds, self.cores, size, self.progress))
                self.made.append((size, made))
                self.timing.note_steps(size, self.cores, seconds, depth=depth, number=made)
                self.noise_size = size if size > self.minibatch_size else self.noise_size
                self._wait(made * seconds)
                self.updates += made
                self.samples += made * size
                self.progress += made * worth
                if self.goal - self.progress < 1e-9 * worth:  # a sum may be below it by a rounding error
                    self.progress = max(self.progress, self.goal)
                self.unsaved_seconds += made * seconds
                if self.unsaved_seconds >= (self.checkpoint_seconds or 0.0):
                    self._save()
            left -= made * seconds
            if made < number:
                self.rows.appendleft((size, number - made))
            if made < wanted:
                break
        return left

    def rented(self, rental: Rental) -> Iterator[Span]:
        """The cores that are rented, each span until the next choice."""
        if self.prices is None:
            raise ValueError(f"{type(rental).__name__} needs a price, to choose the number of cores")
        cheapest = min(self.prices.prices)
        if rental.max_price is not None and rental.max_price < cheapest:
            raise ValueError(f"`max_price` must be at least {cheapest:g}, the lowest price, got {rental.max_price:g}")
        now = idle = 0.0
        period = sum(span.seconds for span in self.availability.spans)
        most_idle = 100 * (period + self.prices.times[-1])  # infinite if one of them does not change
        for span in self.availability:
            left = span.seconds
            while left > 0:
                price, lasts = self.prices.at(now)
                cores, is_cheap = 0, rental.max_price is None or price <= rental.max_price
                if span.cores and is_cheap:
                    assert self.cost is not None
                    offers = self._offers(rental, span.cores, price)
                    cores = rental.choose(offers, seconds=now, spent=self.cost, cores=self.cores)
                if cores != self.cores <= span.cores:  # by choice, so that there is time to save
                    self._save()
                seconds = min(left, lasts, rental.review_seconds if cores else math.inf)
                idle = 0.0 if cores else idle + seconds
                if idle > most_idle:
                    rule = f"no cores are available at a price of at most {rental.max_price:g}, the `max_price`"
                    raise ValueError(f"{self.availability.name}: {rule}")
                yield Span(cores, seconds)
                now, left = now + seconds, left - seconds

    def _offers(self, rental: Rental, most: int, price: float) -> list[Offer]:
        """The numbers of cores for which the policy has a batch size and the profile has times."""
        sizes: dict[str, Any] = {"minibatch_size": self.minibatch_size, "ref_batchsize": self.ref_batchsize}
        noise = self.noise(self.progress, self.noise_size or self.ref_batchsize)
        offers, refusal = [], None
        for cores in range(1, most + 1):
            machines, bounds = self.availability.machines(cores, self.profile), rental.policy.bounds
            try:
                allowed = bounds.minibatches(Situation(cores=cores, capacity=self.capacity, **sizes))
                times = self.profile.times(cores=cores, minibatch_size=self.minibatch_size, machines=machines)
            except ValueError as error:
                refusal = error
                continue
            if bounds.min_batch_size is None:  # not below the reference batch size, like Autoscale
                first = max(allowed.start, -(-self.ref_batchsize // self.minibatch_size))
                allowed = range(min(first, allowed[-1]), allowed.stop)
            goodput = Goodput(cores=cores, noise_scale=noise, **sizes, **times._asdict())
            restart = self.restart_seconds if self.is_started and cores != self.cores else self.restart_left
            seconds = restart + (self.goal - self.progress) / goodput(goodput.best(allowed))
            offers.append(Offer(cores, seconds, price * cores * seconds / 3600))
        if refusal is not None and not offers:
            raise refusal
        return offers

    def _decide(self) -> int:
        """Let the policy decide rows if due; returns the number of steps until the next decision."""
        ahead = sum(number for _, number in self.rows)
        while number := self.timing.num_rows(ahead):
            situation = Situation(
                cores=self.cores,
                machines=self.machines,
                minibatch_size=self.minibatch_size,
                ref_batchsize=self.ref_batchsize,
                noise_scale=None if self.noise_size is None else self.noise(self.progress, self.noise_size),
                steps_done=self.updates,
                samples_done=self.samples,
                progress=self.progress,
                capacity=self.capacity,
            )
            self.rows.append((self.timing.answer(situation).batch_size, number))
            ahead += number
        return ahead - self.timing.policy.lead
