"""Several jobs on one pool, simulated: recorded times and noise, or the hints of real runs, instead of training.

An application is a folder with the files of the Pollux artifact (Qiao et al. 2021): ``placements.csv`` and
``scalability.csv`` have step times, ``validation-B.csv`` the gradient noise of a run at batch size B, a row per epoch.
Progress is counted in steps at the smallest of these batch sizes. An optional ``limits.csv`` has other limits. An
application may also be a folder with the ``hints.json`` of a run.
"""

import csv
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

import numpy as np

from variable_batch_size.checks import check_not_negative_number, check_one_of, check_positive_number, refuse
from variable_batch_size.experimental.cluster.allocation import ALLOCATIONS, Allocation, Job, check_fits, place, slots
from variable_batch_size.files import numbered_lines
from variable_batch_size.lab.planning.profile import Measured, Profile
from variable_batch_size.lab.planning.simulate import NoiseCurve, NoiseCurves
from variable_batch_size.policies.autoscale import gain
from variable_batch_size.policies.hints import EXPLORED, HINTS, Hints

_SECONDS_OF_NOISE = 10.0  # for which a simulated run keeps one noise scale
_MOST_DEPTH = 64


class Submitted(NamedTuple):
    """A row of a file of jobs."""

    name: str
    time: float  # of its arrival, in seconds
    application: str
    num_replicas: int  # cores that its user has asked for
    batch_size: int  # that its user has chosen; used by policies that do not choose one


def read_jobs(path: str | os.PathLike[str]) -> list[Submitted]:
    """Read a CSV file with the columns name, time, application, num_replicas and batch_size, as in the artifact."""
    name, found = os.fspath(path), list[Submitted]()
    for line, row in _rows(Path(path), Submitted._fields):
        try:
            job = Submitted(row[0], float(row[1]), row[2], int(row[3]), int(row[4]))
        except ValueError:
            refuse(f"{name}:{line}", "a job must have a time in seconds and two integers as its counts", ",".join(row))
        if not 0 <= job.time < math.inf or job.num_replicas < 1 or job.batch_size < 1:
            refuse(f"{name}:{line}", "times must not be negative, and counts positive", ",".join(row))
        if any(job.name == other.name for other in found):
            refuse(f"{name}:{line}", "every job must have a name of its own", job.name)
        found.append(job)
    return sorted(found, key=lambda job: job.time)


def _rows(path: Path, needed: Sequence[str]) -> list[tuple[int, list[str]]]:
    """The numbered rows of a CSV file, with these columns only; the file may have others."""
    kept = numbered_lines(path)
    head = [cell.strip() for cell in kept[0][1].split(",")] if kept else []
    if not set(needed) <= set(head):
        rule = f"the columns must be {','.join(needed)}"
        refuse(f"{path}:{kept[0][0] if kept else 1}", rule, ",".join(head) or "none")
    rows = []
    for number, line in kept[1:]:
        cells = [cell.strip() for cell in next(csv.reader([line]))]
        if len(cells) != len(head):
            refuse(f"{path}:{number}", f"a row must have {len(head)} values", line)
        rows.append((number, [cells[head.index(column)] for column in needed]))
    if not rows:
        refuse(str(path), "a table must have a row", "none")
    return rows


def _numbers(path: Path, needed: Sequence[str]) -> list[list[float]]:
    """The rows as positive numbers."""
    found = []
    for line, row in _rows(path, needed):
        try:
            values = [float(cell) for cell in row]
        except ValueError:
            values = []
        if not values or not all(0 < value < math.inf for value in values):
            refuse(f"{path}:{line}", "all values must be positive numbers", ",".join(row))
        found.append(values)
    return found


# ------------------------------------------------------------------------------------------------------ applications


class Limits(NamedTuple):
    """What bounds an application: a row of ``limits.csv``."""

    ref_batchsize: int
    max_batch_size: int
    max_minibatch_size: int
    max_cores: int


@dataclass(frozen=True)
class Application:
    """Recorded times and gradient noise of a training that ends at a progress.

    Each goodput is for the best minibatch size and accumulation depth, as in a job with Autoscale.
    """

    name: str
    profile: Profile
    noise: NoiseCurves
    limits: Limits
    goal: float  # in steps at the reference batch size
    restart_seconds: float | None = None  # None for that of the simulation
    min_cores: ClassVar[int] = 1

    @classmethod
    def read(cls, folder: Path) -> "Application":
        """Read a folder of the artifact."""
        columns = ("step_time", "sync_time")
        measured = []
        for placement, size, step, sync in _numbers(folder / "placements.csv", ("placement", "local_bsz", *columns)):
            digits = [int(digit) for digit in str(int(placement))]
            measured.append(Measured(len(digits), sum(digits), int(size), step - sync, step))
        if (folder / "scalability.csv").exists():
            names = ("num_nodes", "num_replicas", "local_bsz", *columns)
            for nodes, cores, size, step, sync in _numbers(folder / "scalability.csv", names):
                measured.append(Measured(int(nodes), int(cores), int(size), step - sync, step))
        runs = {int(path.stem.partition("-")[2]): path for path in sorted(folder.glob("validation-*.csv"))}
        if not runs:
            raise FileNotFoundError(f"{folder} has no validation-*.csv, which has the noise of a run")
        limits = Limits(min(runs), max(runs), max(row.minibatch_size for row in measured), 2**31)
        if (folder / "limits.csv").exists():
            limits = Limits(*map(int, _numbers(folder / "limits.csv", Limits._fields)[0]))
        tables = {size: _numbers(path, ("progress", "grad_sqr", "grad_var")) for size, path in runs.items()}
        curves = []
        for size, rows in tables.items():
            scales = [limits.ref_batchsize * var / sqr for _, sqr, var in rows]
            curves.append(NoiseCurve([row[0] for row in rows], scales, [size] * len(rows)))
        goal = min(rows[min(map(len, tables.values())) - 1][0] for rows in tables.values())
        return cls(folder.name, Profile(_mean_rows(measured), str(folder), True), NoiseCurves(curves), limits, goal)

    @cached_property
    def _tables(self) -> dict[tuple[int, ...], tuple[Any, Any, Any]]:
        return {}

    def _table(self, sizes: tuple[int, ...], node_cores: int) -> tuple[Any, Any, Any]:
        """Batch sizes and seconds of all splits on these numbers of cores, and where each number begins."""
        key = (*sizes, node_cores)
        if key not in self._tables:
            batches, seconds, starts = list[int](), list[float](), list[int]()
            for cores in sizes:
                starts.append(len(batches))
                for size, depth in self._splits(cores):
                    batches.append(cores * size * depth)
                    seconds.append(self._seconds(cores, size, depth, node_cores))
            self._tables[key] = np.array(batches, float), np.array(seconds), starts
        return self._tables[key]

    def _splits(self, cores: int) -> list[tuple[int, int]]:
        """Minibatch sizes and depths within the limits, from the reference batch size on."""
        limits = self.limits
        measured = {min(row.minibatch_size, limits.max_minibatch_size) for row in self.profile.rows}
        found = []
        for size in sorted({*measured, min(limits.max_minibatch_size, max(1, limits.max_batch_size // (2 * cores)))}):
            most = limits.max_batch_size // (cores * size)
            depths = {depth for depth in (*range(1, 9), 12, 16, 24, 32, 48, _MOST_DEPTH) if depth <= most}
            found += [(size, depth) for depth in depths if cores * size * depth >= limits.ref_batchsize]
        least = -(-limits.ref_batchsize // cores)
        # one minibatch alone gives no estimate of the noise
        found = [split for split in found if cores * split[1] > 1 or split[0] <= limits.ref_batchsize]
        return found or [(min(least, limits.max_minibatch_size), -(-least // limits.max_minibatch_size))]

    def _seconds(self, cores: int, minibatch_size: int, depth: int, node_cores: int) -> float:
        key = (cores, minibatch_size, depth, node_cores)
        if key not in self._known_seconds:
            machines = -(-cores // node_cores)
            times = self.profile.times(cores=cores, minibatch_size=minibatch_size, machines=machines)
            self._known_seconds[key] = times.step(depth)
        return self._known_seconds[key]

    @cached_property
    def _known_seconds(self) -> dict[tuple[int, ...], float]:
        return {}

    def best(self, sizes: tuple[int, ...], noise_scale: float, node_cores: int) -> tuple[list[float], list[int]]:
        """The largest goodput on each of these numbers of cores, and its batch size."""
        batches, seconds, starts = self._table(sizes, node_cores)
        goodputs = gain(batches, ref_batchsize=self.limits.ref_batchsize, noise_scale=noise_scale) / seconds
        tops = [int(np.argmax(part)) for part in np.split(goodputs, starts[1:])]
        places = [start + top for start, top in zip(starts, tops, strict=True)]
        return goodputs[places].tolist(), batches[places].astype(int).tolist()

    def fixed(self, cores: int, batch_size: int, noise_scale: float, node_cores: int) -> float:
        """Goodput at a batch size."""
        share = -(-batch_size // cores)
        depth = -(-share // self.limits.max_minibatch_size)
        seconds = self._seconds(cores, -(-share // depth), depth, node_cores)
        return float(gain(batch_size, ref_batchsize=self.limits.ref_batchsize, noise_scale=noise_scale) / seconds)

    def noise_scale(self, progress: float, batch_size: float) -> float:
        return self.noise(progress, batch_size)


def _mean_rows(rows: Iterable[Measured]) -> tuple[Measured, ...]:
    """The rows, with the means of those that have the same machines, cores and minibatch size."""
    found: dict[tuple[int, int, int], list[Measured]] = {}
    for row in rows:
        found.setdefault(row[:3], []).append(row)
    return tuple(Measured(*key, *(fmean(row[i] for row in same) for i in (3, 4))) for key, same in found.items())


@dataclass(frozen=True)
class Hinted:
    """A run that is known by its hints: it runs from its beginning to its end at its mean speed."""

    name: str
    hints: Hints

    @classmethod
    def read(cls, folder: Path) -> "Hinted":
        hints = Hints.read(folder / HINTS)
        if hints.goodput is None or hints.seconds_left(hints.cores) is None:
            raise ValueError(f"{folder / HINTS} must have a goodput and the end of its run, to simulate it")
        return cls(folder.name, hints)

    @property
    def goal(self) -> float:
        hints = self.hints
        end = hints.progress_goal if hints.progress_goal is not None else hints.samples_goal
        assert end is not None
        return float(end)

    @property
    def restart_seconds(self) -> float | None:
        return self.hints.restart_seconds

    @property
    def min_cores(self) -> int:
        return self.hints.min_cores

    @property
    def limits(self) -> Limits:
        return Limits(1, 1, 1, self.hints.max_cores)

    def best(self, sizes: tuple[int, ...], noise_scale: float, node_cores: int) -> tuple[list[float], list[int]]:
        return [self.hints.mean_speed(cores) for cores in sizes], [1] * len(sizes)

    def fixed(self, cores: int, batch_size: int, noise_scale: float, node_cores: int) -> float:
        return self.hints.mean_speed(cores)

    def noise_scale(self, progress: float, batch_size: float) -> float:
        return 1.0


def read_applications(folder: str | os.PathLike[str], names: Iterable[str]) -> dict[str, Application | Hinted]:
    """Read the applications with these names, each from its folder."""
    found: dict[str, Application | Hinted] = {}
    for name in sorted(set(names)):
        place = Path(folder) / name
        if not place.is_dir():
            raise FileNotFoundError(f"{place} must be the folder of the application {name}, but does not exist")
        found[name] = Hinted.read(place) if (place / HINTS).exists() else Application.read(place)
    return found


# -------------------------------------------------------------------------------------------------------- simulation


@dataclass
class Run:
    """A job of a simulated pool."""

    submitted: Submitted
    application: Application | Hinted
    node_cores: int
    is_fixed: bool  # whether it has the batch size of its user
    progress: float = 0.0
    cores: int = 0
    since: float = 0.0  # when it was given these
    explored: int = 1  # the most cores that it has run on
    batch_size: float = 1.0
    restart_left: float = 0.0
    restarts: int = 0
    service: float = 0.0  # core-seconds
    ended: float | None = None
    spans: list[tuple[float, float, int]] = field(default_factory=list)  # begin, end and cores

    def __post_init__(self) -> None:
        limits = self.application.limits
        self.batch_size = self.submitted.batch_size if self.is_fixed else limits.ref_batchsize

    @property
    def noise_scale(self) -> float:
        return self.application.noise_scale(self.progress, self.batch_size)

    @property
    def left(self) -> float:
        return self.application.goal - self.progress

    def as_job(self, sizes: Sequence[int], now: float, restart_seconds: float, explores: bool) -> Job:
        """What an allocation sees; with `explores`, up to twice the cores it ran on, but no speeds before it ran."""
        limits, least = self.application.limits, self.application.min_cores
        is_known = bool(self.progress) or not explores
        most = min(limits.max_cores, sizes[-1], EXPLORED * max(self.explored, least) if explores else sizes[-1])
        fewest, noise = next((size for size in sizes if size >= least), least), self.noise_scale
        known = tuple(size for size in (*sizes, *{fewest} - {*sizes}) if size <= max(most, fewest))
        if not is_known:
            speeds = [size**0.5 for size in known]
        elif self.is_fixed:
            speeds = [self._fixed(size, noise) for size in known]
        else:
            speeds = self.application.best(known, noise, self.node_cores)[0]
        every = np.interp(np.arange(1, known[-1] + 1), known, speeds)
        return Job(
            name=self.submitted.name,
            speeds=tuple(every.tolist()),
            min_cores=least,
            cores=self.cores,
            since=now - self.since,
            wanted=min(self.submitted.num_replicas, known[-1]),
            work=self.left if is_known else None,
            restart_seconds=self._restart(restart_seconds),
        )

    def _fixed(self, cores: int, noise_scale: float) -> float:
        return self.application.fixed(cores, self.submitted.batch_size, noise_scale, self.node_cores)

    def _restart(self, restart_seconds: float) -> float:
        own = self.application.restart_seconds
        return restart_seconds if own is None else own

    def resize(self, cores: int, now: float, restart_seconds: float) -> None:
        """Continue on this many cores, after a restart."""
        if cores:
            self.restart_left = self._restart(restart_seconds)
            self.restarts += bool(self.service)
            self.explored = max(self.explored, cores)
        self.cores, self.since = cores, now

    def advance(self, now: float, seconds: float) -> None:
        """Run for some seconds, or to the end."""
        if not self.cores:
            return
        end = now + seconds
        delay = min(self.restart_left, seconds)
        self.restart_left -= delay
        at = now + delay
        while at < end and self.ended is None:
            if self.is_fixed:
                speed = self._fixed(self.cores, self.noise_scale)
            else:
                (speed,), (size,) = self.application.best((self.cores,), self.noise_scale, self.node_cores)
                self.batch_size = size
            part = min(_SECONDS_OF_NOISE, end - at)
            if speed * part >= self.left:
                part = self.left / speed
                self.ended = at + part
            self.progress += speed * part
            at += part
        end = end if self.ended is None else self.ended
        self.service += self.cores * (end - now)
        if self.spans and self.spans[-1][1] == now and self.spans[-1][2] == self.cores:
            self.spans[-1] = (self.spans[-1][0], end, self.cores)
        else:
            self.spans.append((now, end, self.cores))


@dataclass(frozen=True)
class Outcome:
    """A simulated pool under one policy."""

    policy: str
    runs: Sequence[Run]
    num_cores: int
    alone: Sequence[float]  # seconds of each job with an equal share of the pool while it was there

    @property
    def completion_seconds(self) -> list[float]:
        """From the arrival of each job to its end."""
        return [(run.ended or math.nan) - run.submitted.time for run in self.runs]

    @property
    def mean(self) -> float:
        return fmean(self.completion_seconds)

    @property
    def percentile_99(self) -> float:
        return float(np.percentile(self.completion_seconds, 99))

    @property
    def makespan(self) -> float:
        """From the first arrival to the last end."""
        return max(run.ended or 0.0 for run in self.runs) - min(run.submitted.time for run in self.runs)

    @property
    def utilisation(self) -> float:
        """Core-seconds of jobs, including restarts, over those of the pool until the last end."""
        return sum(run.service for run in self.runs) / (self.num_cores * self.makespan)

    @property
    def unfairness(self) -> float:
        """The worst finish-time ratio: completion time over that with an equal share; 1 or less is fair."""
        return max(found / alone for found, alone in zip(self.completion_seconds, self.alone, strict=True))


def tiresias(jobs: Sequence[Job], nodes: Sequence[int], *, service: Mapping[str, float], **_: Any) -> Allocation:
    """Jobs with the cores that their users asked for, those below 16 core-hours first (Gu et al. 2019)."""
    free, cores = sum(nodes), {}
    for job in sorted(jobs, key=lambda job: service[job.name] >= 16 * 3600):
        wanted = job.wanted or job.max_cores
        if wanted <= free:
            cores[job.name] = wanted
            free -= wanted
    return Allocation(cores)


def optimus(jobs: Sequence[Job], nodes: Sequence[int], **_: Any) -> Allocation:
    """One core for each job, then each further core where it saves the most remaining time (Peng et al. 2018)."""
    cores = {job.name: 1 for job in jobs[: sum(nodes)]}
    free = sum(nodes) - len(cores)
    while free > 0:
        saved = {
            job.name: (job.work or 0.0) * (1 / job.speed(cores[job.name]) - 1 / job.speed(cores[job.name] + 1))
            for job in jobs
            if job.name in cores and cores[job.name] < job.max_cores
        }
        best = max(saved, key=lambda name: saved[name], default=None)
        if best is None or saved[best] <= 0:
            break
        cores[best] += 1
        free -= 1
    return Allocation(cores)


_FIXED = {"tiresias": tiresias, "optimus": optimus}  # jobs with the batch sizes of their users, without moves
POLICIES: dict[str, Callable[..., Allocation]] = {**ALLOCATIONS, **_FIXED}


def simulate_cluster(
    jobs: Sequence[Submitted],
    applications: Mapping[str, Application | Hinted],
    nodes: Sequence[int],
    *,
    policy: str = "goodput",
    interval_seconds: float = 60.0,
    restart_seconds: float = 30.0,
    horizon_seconds: float | None = None,
    power: float = -1.0,
    seconds_at_most: float = 1e8,
) -> Outcome:
    """Simulate a pool: every interval, the policy decides the cores of all jobs that have arrived.

    Args:
        jobs: that arrive.
        applications: of these jobs, by name.
        nodes: the cores of each node, all the same.
        policy: one of goodput, fifo, equal, shortest, tiresias and optimus.
        interval_seconds: between two decisions.
        restart_seconds: duration of a restart on other cores, unless the hints of a job have another.
        horizon_seconds: within which a restart must pay off; None for ten intervals, or ten restarts if that is longer.
        power: the exponent of the speed-ups, for goodput.
        seconds_at_most: simulated seconds after which it raises.
    """
    check_positive_number(interval_seconds=interval_seconds, seconds_at_most=seconds_at_most)
    check_not_negative_number(restart_seconds=restart_seconds)
    check_one_of(POLICIES, policy=policy)
    if len(set(nodes)) != 1:
        raise ValueError(f"`nodes` must all have the same number of cores, got {list(nodes)}")
    sizes = list(range(1, sum(nodes) + 1)) if policy in _FIXED else slots(nodes[0], len(nodes))
    runs = [Run(job, applications[job.application], nodes[0], policy in _FIXED) for job in jobs]
    explores = policy == "goodput"
    horizon = horizon_seconds or 10 * max(interval_seconds, restart_seconds)
    options: dict[str, Any] = {"power": power, "horizon_seconds": horizon}
    now, shares = math.floor(jobs[0].time / interval_seconds) * interval_seconds, _Shares(nodes, sizes)
    present: dict[str, dict[int, int]] = {}
    while any(run.ended is None for run in runs):
        here = [run for run in runs if run.submitted.time <= now and run.ended is None]
        seen = [run.as_job(sizes, now, restart_seconds, explores) for run in here]
        check_fits(seen, nodes)
        if policy == "tiresias":
            options["service"] = {run.submitted.name: run.service for run in here}
        found = POLICIES[policy](seen, nodes, **options) if here else Allocation({})
        cores = found.cores
        before, present = present, {} if policy in _FIXED else place(cores, nodes, present, found.kinds)
        for run in here:
            name = run.submitted.name
            if cores.get(name, 0) != run.cores or before.get(name) != present.get(name):
                run.resize(cores.get(name, 0), now, restart_seconds)
            run.advance(now, interval_seconds)
        shares.note(here, interval_seconds)
        now += interval_seconds
        if now > seconds_at_most:
            raise ValueError(f"jobs have not ended after {seconds_at_most:g} seconds with the policy {policy}")
    return Outcome(policy, runs, sum(nodes), [shares.seconds(run) for run in runs])


class _Shares:
    """How long each job would take with an equal share of the pool, given the mean number of jobs in its time."""

    def __init__(self, nodes: Sequence[int], sizes: Sequence[int]) -> None:
        self._num_cores, self._sizes = sum(nodes), sizes
        self._seconds: dict[str, float] = {}
        self._jobs: dict[str, float] = {}  # seconds times jobs that were there

    def note(self, here: Sequence[Run], seconds: float) -> None:
        for run in here:
            name = run.submitted.name
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            self._jobs[name] = self._jobs.get(name, 0.0) + seconds * len(here)

    def seconds(self, run: Run) -> float:
        """The time of the whole training, with the noise scale in each tenth of it."""
        name, total = run.submitted.name, 0.0
        share = max(1.0, self._num_cores * self._seconds[name] / self._jobs[name])
        application = run.application
        least = [max((size for size in self._sizes if size <= share), default=1)]
        sizes = tuple(max(application.min_cores, min(size, application.limits.max_cores)) for size in least)
        for tenth in range(10):
            noise = application.noise_scale((tenth + 0.5) / 10 * application.goal, application.limits.ref_batchsize)
            total += application.goal / 10 / application.best(sizes, noise, run.node_cores)[0][0]
        return total
