"""Forecast: the rest of a run, simulated with the times and the noise that its files have so far.

A step with d minibatches on the busiest core takes (d − 1)·a + u seconds, by the medians of the run's own records.
This is multiplied by the mean ratio of the recorded times to it, so checkpoints and slow steps count as often as they
occurred.
"""

import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from variable_batch_size.checks import check_one_of, refuse
from variable_batch_size.files import LOG, RUN
from variable_batch_size.lab.planning.profile import EXTRAPOLATED, Measured, Profile, t_quantile
from variable_batch_size.lab.planning.rental import RENTALS, Rental
from variable_batch_size.lab.planning.simulate import Availability, Moment, NoiseCurve, Resumed, Simulation, simulate
from variable_batch_size.policies.autoscale import gain
from variable_batch_size.policies.builtin import POLICIES, parse_named, parse_policy
from variable_batch_size.policies.policy import Policy, Situation, depth_of
from variable_batch_size.policies.timing import StepTimes, Times
from variable_batch_size.schedules.schedule import Schedule
from variable_batch_size.traces.trace import Rows, Trace
from variable_batch_size.urls import read_bytes

_MOST_RECORDS = 20_000  # the latest, which are enough for a forecast
_NUM_BLOCKS = 10  # of records; their spread is taken as that of the times
_NUM_TIMED = 5  # steps of each kind that a policy needs, to estimate the times
_ENDLESS = 1e15  # steps
_INTEGERS = {"step": 0, "samples": 0, "batch_size": 1, "cores": 1}  # of a record, and their least values
_NUMBERS = {"progress", "samples_per_second", "weight", "seconds_accumulating", "seconds_updating"}
_NUMBERS |= {"noise_scale", "noise_scale_low", "noise_scale_high"}
_LARGEST = 1e30  # larger numbers in a record are ignored

Forecasts = list[tuple[str, Simulation]]
PolicyFunction = Callable[[Situation], float]


@dataclass(frozen=True, kw_only=True)
class RunSoFar:
    """A run up to now, from its files, for a forecast."""

    name: str
    step: int
    samples: int
    progress: float
    batch_size: int
    cores: int
    minibatch_size: int
    ref_batchsize: int
    capacity: int | None  # the most samples in a step, None if not known
    times: Sequence[tuple[int, int, float]]  # cores, minibatches of the busiest core, and mean seconds of a step
    measured: Mapping[int, Times]  # a and u on each number of cores on which a policy has measured them
    noise: Sequence[tuple[float, float, float]]  # progress, noise scale in samples, batch size
    noise_interval: tuple[float, float]  # of the latest noise scale, as factors of it
    policy: str | None  # with its settings, as for vbs simulate; None if it had a trace
    trace: str | None  # the fingerprint of its trace; None if it had a policy

    @classmethod
    def read(cls, directory: str, *, minibatch_size: int | None = None, ref_batchsize: int | None = None) -> "RunSoFar":
        """Read the log and the settings of a run, at a path or a URL. An incomplete line of the log is skipped.

        Args:
            directory: of the run.
            minibatch_size: samples per forward and backward pass, by default that of the run.
            ref_batchsize: the batch size of a unit of progress, by default that of the run.
        """
        records = _records(directory)
        described = _described(directory)
        settings, policy = described["settings"], described["policy"]
        # earlier records are of other minibatches
        changed_at = [change["steps_done"] for change in described["changes"] if "minibatch_size" in change["settings"]]
        steps_on_minibatch = [record for record in records if record["step"] > max(changed_at, default=0)]
        given = {"minibatch_size": minibatch_size, "ref_batchsize": ref_batchsize}
        sizes = {name: value or settings.get(name) for name, value in given.items()}
        for name, size in sizes.items():
            if size is None:
                raise ValueError(f"`{name}` must be given, as there is no {directory}/{RUN} that has it")
        minibatch, reference = int(sizes["minibatch_size"] or 0), int(sizes["ref_batchsize"] or 0)
        last = records[-1]
        dataset = settings.get("dataset_size")
        return cls(
            name=directory,
            step=last["step"],
            samples=last["samples"],
            progress=last["progress"],
            batch_size=last["batch_size"],
            cores=last["cores"],
            minibatch_size=minibatch,
            ref_batchsize=reference,
            capacity=None if dataset is None else dataset // minibatch * minibatch,
            times=_times(steps_on_minibatch, minibatch),
            measured=_measured(steps_on_minibatch),
            noise=_noise(records),
            noise_interval=_interval(records),
            policy=None if policy is None else _policy(**policy),
            trace=described["trace"],
        )

    @cached_property
    def seconds(self) -> dict[int, Times]:
        """a and u on each number of cores that the run had."""
        found: dict[int, Times] = {}
        for cores in sorted({cores for cores, _, _ in self.times}):
            if cores in self.measured:
                found[cores] = self.measured[cores]
                continue
            steps = StepTimes()
            own = [time for time in self.times if time[0] == cores]
            for time in own:
                steps.add(*time)
            depths = sorted({depth for _, depth, _ in own})
            # one depth alone does not separate the two times: assume that the all-reduce and the update take none
            median = statistics.median(seconds for _, _, seconds in own) / depths[0]
            found[cores] = steps.seconds(cores) or Times(median, median)
        return found

    @cached_property
    def spread(self) -> tuple[float, float]:
        """The ratio of the times of the latest records to those by a and u, and its 95 % interval as a factor."""
        latest = self.times[len(self.times) // 2 :]  # the machines may have changed before
        ratios = [seconds / self.seconds[cores].step(depth) for cores, depth, seconds in latest]
        blocks = [block.mean() for block in np.array_split(ratios, min(_NUM_BLOCKS, len(ratios)))]
        mean = statistics.fmean(blocks)
        if len(blocks) < 3:
            return mean, math.inf
        # the errors of the mean so far and of the mean of the rest, as if the rest were as long
        return mean, 1 + t_quantile(len(blocks) - 1) * statistics.stdev(blocks) / mean * math.sqrt(2 / len(blocks))

    def profile(self, cores: int, others: Profile | None = None, *, factor: float = 1.0) -> Profile:
        """The times of the run, times a factor, and those of other numbers of cores.

        Without the latter, minibatches and all-reduce take as long as on the nearest number of cores that the run had.
        """
        mean, _ = self.spread
        times = dict(self.seconds)
        if others is None:
            times.setdefault(cores, times[min(times, key=lambda number: abs(number - cores))])
        more = [] if others is None else [row for row in others.rows if row.cores not in times]
        rows = [
            Measured(1, number, self.minibatch_size, *(factor * mean * seconds for seconds in own))
            for number, own in times.items()
        ]
        return Profile((*rows, *more), name=self.name, extrapolates=True)

    def noise_curve(self, factor: float = 1.0) -> NoiseCurve:
        """The noise scale over progress, times a factor; without measured noise, a step is worth its samples."""
        if not self.noise:
            return NoiseCurve([0.0], [math.inf])
        progress, scales, sizes = map(list, zip(*self.noise, strict=True))
        return NoiseCurve(progress, [factor * scale for scale in scales], sizes)

    @cached_property
    def resumed(self) -> Resumed:
        """Where a simulation of the rest begins."""
        where: dict[str, Any] = {"progress": self.progress, "updates": self.step, "samples": self.samples}
        depths = (1, 2, depth_of(self.batch_size, self.minibatch_size, self.cores))
        times = [
            (cores, depth, seconds.step(depth))
            for cores, seconds in self.seconds.items()
            for depth in dict.fromkeys(depths)
            for _ in range(_NUM_TIMED)
        ]
        return Resumed(**where, cores=self.cores, batch_size=self.batch_size, times=times)

    @property
    def choice(self) -> str:
        """The policy that it has, or the batch size of its latest step."""
        return self.policy or str(self.batch_size)


def forecast(
    run: RunSoFar,
    policies: Mapping[str, Policy | Rental | PolicyFunction],
    *,
    cores: Sequence[int] = (),
    samples: int | None = None,
    trace: Trace | None = None,
    price: float | None = None,
    profile: Profile | None = None,
    restart_seconds: float = 0.0,
) -> Forecasts:
    """Simulate the rest of a run, unchanged and under other policies, each on some numbers of cores.

    The unchanged run has the rest of its trace, if that is given, else its policy, else its latest batch size. All end
    at the progress that the unchanged run reaches, on its cores, after `samples`. The `ends` of each result are the
    fastest and the slowest run within the 95 % intervals of its times and its noise.

    Args:
        run: so far.
        policies: other policies than its own, by their names in the result.
        cores: numbers of cores; none for the run's own.
        samples: of the whole run, at which it ends if unchanged; None for the end of the trace.
        trace: of the run; None if it had a policy, or if the latest batch size is to be kept.
        price: of a device-hour; None for no costs.
        profile: the times on other numbers of cores; otherwise they are assumed to be as fast as the run's own.
        restart_seconds: duration of a restart on another number of cores than its own.
    """
    if samples is None and trace is None:
        raise ValueError("`samples` must be given, at which the run ends if unchanged, unless there is a trace")
    if samples is not None and samples <= run.samples:
        raise ValueError(f"`samples` must be above the {run.samples} that the run has done, got {samples}")
    own = named_policy(run.choice) if trace is None else _rows_left(run, trace, samples)
    given: dict[str, Any] = {"price": price, "others": profile, "restart_seconds": restart_seconds}
    end = {"progress": _ENDLESS, "most_samples": samples}
    goal = _rest(run, own, profile=run.profile(run.cores), noise=run.noise_curve(), cores=run.cores, **end).progress
    name = run.choice if trace is None else trace.name
    chosen = {name: own, **{other: policy for other, policy in policies.items() if other != name}}
    return [
        (label, _with_ends(run, policy, cores=number, progress=goal, **given))
        for label, policy in chosen.items()
        for number in cores or (run.cores,)
    ]


def _rows_left(run: RunSoFar, trace: Trace, samples: int | None) -> Rows:
    """The batch sizes of a trace after the steps of the run, up to so many samples."""
    if run.trace is not None and run.trace != (found := Schedule.fingerprint(trace)):
        raise ValueError(f"{trace.name} must be the trace of {run.name}, which has {run.trace}, got {found}")
    left, last = trace.sizes[run.step :], int(trace.sizes[-1])
    if samples is not None and (trace.is_open or trace.is_endless):  # the last batch size lasts
        left = np.append(left, np.full(-(-(samples - run.samples) // last), last))
    if not len(left):
        raise ValueError(f"{trace.name} must have more than the {run.step} steps that the run has done")
    if samples is None:
        return left
    number = int(np.searchsorted(np.cumsum(left), samples - run.samples)) + 1
    if number > len(left):
        raise ValueError(f"{trace.name} must have the {samples} samples of the whole run, got {trace.sizes.sum()}")
    return left[:number]


def with_largest(run: RunSoFar, max_batch_size: int) -> str:
    """The policy of a run with another largest batch size; Autoscale if the run has no policy."""
    name, _, settings = (run.policy or "autoscale").partition(":")
    kept = [setting for setting in settings.split(",") if setting and not setting.startswith("max_batch_size=")]
    return f"{name}:{','.join([*kept, f'max_batch_size={max_batch_size}'])}"


def basis_of(run: RunSoFar) -> str:
    """What the forecast of a run is based on, in a few sentences."""
    _, spread = run.spread
    cores = f"{run.cores} core{'s' * (run.cores > 1)}"
    text = f"{run.name} is at step {run.step:,}, after {run.samples:,} samples, on {cores}."
    if math.isfinite(spread):
        text += f" The times of its steps vary by ± {100 * (spread - 1):.0f} % in the mean (95 % interval)."
    if not run.measured and len({depth for cores, depth, _ in run.times if cores == run.cores}) == 1:
        text += " All of them had equally many minibatches, so all-reduce and update are assumed to take no time."
    if not run.noise:
        return f"{text} It measures no noise: progress is counted in samples."
    return f"{text} Its noise scale is {run.noise[-1][1]:,.4g} samples."


def named_policy(text: str) -> Policy | Rental:
    """A policy or rental from text, as for ``vbs simulate``."""
    name = text.partition(":")[0]
    if not text.isdecimal():
        check_one_of([*POLICIES, *RENTALS], policy=name)
    return parse_named(text, RENTALS) if name in RENTALS else parse_policy(text)


def _rest(
    run: RunSoFar,
    policy: Policy | Rental | PolicyFunction | Rows,
    *,
    profile: Profile,
    noise: NoiseCurve,
    cores: int,
    **options: Any,
) -> Simulation:
    """The rest of a run with a policy, or with the rows of a trace."""
    if isinstance(policy, np.ndarray):
        restart = 0.0 if cores == run.cores else options.get("restart_seconds", 0.0)
        return _rest_of_trace(run, policy, profile, noise, cores, price=options.get("price"), restart_seconds=restart)
    sizes = {"minibatch_size": run.minibatch_size, "ref_batchsize": run.ref_batchsize, "capacity": run.capacity}
    where = Availability.constant(cores)
    given: dict[str, Any] = {**sizes, **options, "resumed": run.resumed}
    return simulate(policy, profile=profile, noise=noise, availability=where, **given)


def _with_ends(
    run: RunSoFar, policy: Policy | Rental | PolicyFunction | Rows, *, others: Profile | None, **options: Any
) -> Simulation:
    """The rest of a run, and the fastest and slowest one within the intervals of its measurements."""
    _, spread = run.spread
    slow, cores = spread if math.isfinite(spread) else 1.0, options["cores"]
    middle = _rest(run, policy, profile=run.profile(cores, others), noise=run.noise_curve(), **options)
    if others is None and cores not in run.seconds:
        middle.basis = EXTRAPOLATED
    ends = [
        _rest(run, policy, profile=run.profile(cores, others, factor=factor), noise=run.noise_curve(noise), **options)
        for factor in (1 / slow, slow)
        for noise in run.noise_interval
    ]
    times = [one.seconds for one in (middle, *ends)]
    if max(times) > min(times):
        order = sorted((middle, *ends), key=lambda one: one.seconds)
        middle.ends = order[0], order[-1]
    return middle


def _rest_of_trace(
    run: RunSoFar,
    rows: Rows,
    profile: Profile,
    noise: NoiseCurve,
    cores: int,
    *,
    price: float | None,
    restart_seconds: float,
) -> Simulation:
    """Steps of given batch sizes, after a restart if they are on other cores."""
    where: dict[str, Any] = {"cores": cores, "minibatch_size": run.minibatch_size}
    times = profile.times(**where)
    seconds = restart_seconds + float(times.step(depth_of(rows, run.minibatch_size, cores)).sum())
    progress, made = run.progress, [(int(size), len(list(group))) for size, group in itertools.groupby(rows.tolist())]
    moments = []
    at = restart_seconds
    for size, number in made:
        moments.append(Moment(at, cores, size, progress))
        worth = gain(size, ref_batchsize=run.ref_batchsize, noise_scale=noise(progress, size))
        progress += number * worth
        at += number * times.step(depth_of(size, run.minibatch_size, cores))
    moments.append(Moment(seconds, cores, made[-1][0], progress))
    cost = None if price is None else cores * seconds * price / 3600
    counts: dict[str, Any] = {"updates": len(rows), "samples": int(rows.sum()), "progress": progress, "cost": cost}
    spent: dict[str, Any] = {"seconds": seconds, "device_seconds": cores * seconds, "basis": profile.basis(**where)}
    return Simulation(**counts, **spent, made=made, moments=moments, restarts=int(cores != run.cores))


def _records(directory: str) -> list[dict[str, Any]]:
    """The latest records of steps in the log; ValueError with the line of a record that has a wrong value."""
    lines = read_bytes(f"{directory.rstrip('/')}/{LOG}").split(b"\n")[:-1]
    of_steps = []
    for number, line in list(enumerate(lines, start=1))[-_MOST_RECORDS:]:
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and {*_INTEGERS, "progress", "samples_per_second"} <= record.keys():
                of_steps.append((number, record))
    if len(of_steps) < 3:
        raise ValueError(f"{directory}/{LOG} must have at least 3 records of steps, with cores, got {len(of_steps)}")
    return [_checked(record, f"{directory}/{LOG}:{number}") for number, record in of_steps]


def _checked(record: dict[str, Any], place: str) -> dict[str, Any]:
    """A record whose numbers are of the right kind; those that are not finite, except the position, are None."""
    for name, least in _INTEGERS.items():
        if type(record[name]) is not int or not least <= record[name] < 2**63:
            refuse(place, f"`{name}` must be an integer of at least {least}", repr(record[name])[:40])
    for name in _NUMBERS & record.keys():
        value = record[name]
        if value is not None and type(value) not in (int, float):
            refuse(place, f"`{name}` must be a number", repr(value)[:40])
        record[name] = value if value is not None and abs(value) <= _LARGEST else None
    if record["progress"] is None or record["progress"] < 0:
        refuse(place, "`progress` must be a number of at least 0", repr(record["progress"]))
    return record


def _described(directory: str) -> dict[str, Any]:
    """What the checkpoint of a run has written of its settings; none if it has no checkpoint."""
    place = f"{directory.rstrip('/')}/{RUN}"
    described: dict[str, Any] = {"settings": {}, "trace": None, "policy": None, "changes": []}
    try:
        text = read_bytes(place).decode(errors="replace")
    except OSError:
        return described
    with suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict) and found.keys() >= described.keys():
            return found
    raise ValueError(f"{place} must be as a Checkpoint writes it, got {text[:40]!r}")


def _policy(name: str, settings: Mapping[str, Any]) -> str | None:
    """A policy as text for :func:`named_policy`; None if it is not one of this library."""
    names = {kind.__name__: name for name, kind in POLICIES.items()}
    numbers = [f"{key}={value}" for key, value in settings.items() if type(value) in (int, float)]
    return f"{names[name]}:{','.join(numbers)}" if name in names else None


def _times(records: Sequence[Mapping[str, Any]], minibatch_size: int) -> list[tuple[int, int, float]]:
    """Cores, minibatches of the busiest core and seconds of a step, between two records with the same batch size."""
    found = []
    for before, record in itertools.pairwise(records):
        size, rate = record["batch_size"], record["samples_per_second"]
        made, steps = record["samples"] - before["samples"], record["step"] - before["step"]
        if rate and rate > 0 and steps > 0 and made == steps * size:
            cores = record["cores"]
            found.append((cores, depth_of(size, minibatch_size, cores), size / rate))
    if not found:
        raise ValueError("the log must have two consecutive records with the same batch size, got none")
    return found


def _measured(records: Sequence[Mapping[str, Any]]) -> dict[int, Times]:
    """The latest times that a policy has measured on each number of cores."""
    found: dict[int, Times] = {}
    for record in records:
        accumulating, updating = record.get("seconds_accumulating"), record.get("seconds_updating")
        if accumulating and updating and min(accumulating, updating) > 0:
            found[record["cores"]] = Times(accumulating, updating)
    return found


def _noise(records: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, float]]:
    found: dict[float, tuple[float, float]] = {}
    for record in records:
        scale = record.get("noise_scale")
        if scale is not None and 0 < scale < math.inf:
            per = record["samples"] / record["weight"] if record.get("weight") else 1.0
            found[record["progress"]] = (scale * per, record["batch_size"])
    return [(progress, *found[progress]) for progress in sorted(found)]


def _interval(records: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """The ends of the 95 % interval of the latest noise scale, as factors of it."""
    for record in reversed(records):
        scale, low, high = map(record.get, ("noise_scale", "noise_scale_low", "noise_scale_high"))
        if scale and low and high and 0 < low <= scale <= high:
            return low / scale, high / scale
    return 1.0, 1.0
