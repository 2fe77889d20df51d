"""run: keeps the jobs of a pool running, each on the cores that the allocation gives it.

To resize a job, a signal makes it save and exit (exit code 75), and it is started again on its new cores, from its
checkpoint. A job that fails is started again after a while, and is given up when it fails repeatedly without a new
checkpoint. Kills are counted apart from errors: most are the fault of a machine, and a job may have many more of them.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from variable_batch_size.experimental.cluster.allocation import (
    ALLOCATIONS,
    Allocation,
    Job,
    check_fits,
    place,
    slots,
    suggest_nodes,
)
from variable_batch_size.experimental.cluster.jobs import JobSpec, read_cluster
from variable_batch_size.experimental.cluster.processes import STOPPED, Command, Group, Polled, Pool, kill_quietly
from variable_batch_size.experimental.cluster.report import state_page
from variable_batch_size.files import read_json, write_json, write_text
from variable_batch_size.policies.hints import EXPLORED, HINTS, Hints
from variable_batch_size.urls import file_names, is_url

logger = logging.getLogger(__name__)

STATE = "state.json"
EXPECTED, WAITING, RUNNING, STOPPING, DONE, FAILED = "expected", "waiting", "running", "stopping", "done", "failed"
_SIGTERM = -15  # the exit code if the script does not handle the signal yet
_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_TO_STOP = 120.0
_MOST_SHOWN = 100
_KILLS_OF_A_FAILURE = 10  # times as many kills as errors, after which a job is given up
_RESTART_SECONDS = 10.0  # until it is measured


@dataclass
class Managed:
    """A job of the pool."""

    spec: JobSpec
    state: str = EXPECTED
    where: dict[str, int] = field(default_factory=dict)  # its cores on each node
    arrived: float | None = None  # seconds after the start of the pool, like all times here
    ended: float | None = None
    not_before: float = 0.0  # of the next start, after a failure
    stop_by: float = 0.0
    failures: int = 0  # errors in a row, without a new checkpoint
    starts: int = 0
    kills: int = 0  # ends by a signal, or with a lost worker
    kills_in_a_row: int = 0  # likewise, without those while it was asked to stop
    why: str = ""  # the reason for its cores
    problem: str = ""  # the latest
    hints: Hints | None = None
    group: Group | None = None
    mark: str = ""  # the checkpoint from which it was started
    spans: list[list[float]] = field(default_factory=list)  # begin, end and cores

    @property
    def cores(self) -> int:
        return sum(self.where.values())

    @property
    def is_open(self) -> bool:
        return self.state in (WAITING, RUNNING, STOPPING)

    @property
    def is_measured(self) -> bool:
        return self.hints is not None and self.hints.goodput is not None

    def newest(self) -> str:
        """The name of its newest checkpoint; if the directory cannot be read, the one that it was started from."""
        try:
            names = file_names(self.spec.checkpoint)
        except OSError as error:
            self.problem = str(error)
            return self.mark
        return max((name for name in names if name.startswith("step-") and not name.endswith(".tmp")), default="")

    def read_hints(self) -> None:
        try:
            if HINTS in file_names(self.spec.checkpoint):
                found = Hints.read(f"{self.spec.checkpoint}/{HINTS}")
                if found.goodput is not None or not self.is_measured:  # otherwise keep what is known
                    self.hints = found
        except (OSError, ValueError) as error:  # the run writes them again
            self.problem = str(error)

    def as_job(self, num_cores: int, now: float, *, explores: bool) -> Job:
        """What the allocation sees: with `explores`, only the numbers of cores that its hints cover."""
        spec, hints = self.spec, self.hints if self.is_measured else None
        most = min(spec.max_cores or num_cores, max(num_cores, spec.min_cores))
        least, speeds = spec.min_cores, list[float]()
        if hints is not None:
            least = max(least, min(hints.min_cores, spec.max_cores or hints.min_cores))
            most = min(most, hints.max_cores) if explores else most
            speeds = [hints.speed(cores) for cores in range(1, max(most, least) + 1)]
        if not any(speeds):
            has_no_policy = self.hints is None and self.newest() != ""
            least, hints = spec.min_cores, None
            most = most if has_no_policy or not explores else min(most, EXPLORED * least)
            speeds = [cores**0.5 for cores in range(1, most + 1)]
        return Job(
            name=spec.name,
            speeds=speeds,
            min_cores=least,
            cores=self.cores if self.state == RUNNING else 0,
            since=now - self.spans[-1][0] if self.spans else 0.0,
            work=None if hints is None else hints.work_left,
            restart_seconds=(hints and hints.restart_seconds) or _RESTART_SECONDS,
        )


class ClusterRun:
    """Runs the jobs of a file on a pool until all have ended; jobs that are added to the file are run as well."""

    def __init__(
        self, path: Path, pool: Pool, out: Path, *, clock: Callable[[], float] = time.monotonic, command: str = ""
    ) -> None:
        self.path, self.pool, self.out, self.command = path, pool, out, command
        self.spec, specs = read_cluster(path)
        self.jobs = [Managed(spec) for spec in specs]
        self.decisions: list[dict[str, Any]] = []
        self.suggestion: dict[str, Any] | None = None
        self._clock, self._began = clock, clock()
        self._version = path.stat().st_mtime_ns
        self._decided_at = -float("inf")
        self._is_due = True  # whether something has happened that changes the decision
        self._wanted: dict[str, dict[str, int]] = {}  # the cores on each node
        self._nodes = pool.nodes()
        for job in self.jobs:
            self._check(job.spec)
        (out / "logs").mkdir(parents=True, exist_ok=True)

    @property
    def now(self) -> float:
        return self._clock() - self._began

    def run(self) -> bool:
        """Run until all jobs have ended, and return whether all have completed."""
        try:
            while not all(job.state in (DONE, FAILED) for job in self.jobs):
                self.tick()
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        except KeyboardInterrupt:
            self.stop()
            raise
        finally:
            for job in self.jobs:
                if job.group is not None:
                    kill_quietly(job.group)
            self._write()
        return all(job.state == DONE for job in self.jobs)

    def stop(self) -> None:
        """Let all jobs save and exit; a run of the same file resumes them."""
        for job in self.jobs:
            self._request_stop(job)
        while any(job.group is not None for job in self.jobs):
            self._look()
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def tick(self) -> None:
        """Poll all jobs, decide if it is time, and start and stop jobs."""
        self._read_again()
        for job in self.jobs:
            if job.state == EXPECTED and self.now >= job.spec.arrives:
                job.state, job.arrived, self._is_due = WAITING, self.now, True
        self._look()
        if self._is_due or self.now - self._decided_at >= self.spec.interval_seconds:
            self._decide()
        for job in self.jobs:
            if job.state == RUNNING and self._wanted.get(job.spec.name) != job.where:
                self._request_stop(job)
        for job in self.jobs:
            if job.state == WAITING and job.spec.name in self._wanted and self.now >= job.not_before:
                self._start(job, self._wanted[job.spec.name])

    def _read_again(self) -> None:
        """Add the jobs that are new in the file; a mistake in the file is logged and changes nothing."""
        try:
            version = self.path.stat().st_mtime_ns
            if version == self._version:
                return
            self._version = version
            _, specs = read_cluster(self.path)
            known = {job.spec.name: job.spec for job in self.jobs}
            added = [spec for spec in specs if spec.name not in known]
            for spec in added:
                self._check(spec)
            self.jobs += [Managed(spec) for spec in added]
            for spec in specs:
                if spec != known.get(spec.name, spec):
                    logger.warning("job %s keeps the settings that it arrived with", spec.name)
        except (OSError, ValueError) as error:
            if not isinstance(error, FileNotFoundError):  # an editor may be about to replace it
                logger.warning("no jobs were added: %s", error)

    def _check(self, spec: JobSpec) -> None:
        """Reject a job that needs more cores than there are, or has the checkpoint of a job that has not ended."""
        job = Job(name=spec.name, speeds=[1.0] * spec.min_cores, min_cores=spec.min_cores)
        check_fits([job], list(self.pool.nodes().values()))
        for other in (one for one in self.jobs if one.spec is not spec and one.state not in (DONE, FAILED)):
            if other.spec.checkpoint == spec.checkpoint:
                raise ValueError(f"job {spec.name} must have its own checkpoint, got that of job {other.spec.name}")

    # ------------------------------------------------------------------------------------------------------ decisions

    def _decide(self) -> None:
        self._decided_at, self._is_due = self.now, False
        self._nodes = self.pool.nodes()
        sizes = list(self._nodes.values())
        here = [job for job in self.jobs if job.is_open]
        for job in here:
            job.read_hints()
        explores = self.spec.policy == "goodput"
        seen = [job.as_job(sum(sizes), self.now, explores=explores) for job in here]
        fitting = [job for job in seen if _fits(job, sizes)]
        options = {"power": self.spec.power, "horizon_seconds": self.spec.horizon_seconds}
        found = ALLOCATIONS[self.spec.policy](fitting, sizes, **options) if fitting else Allocation({})
        for job, one in zip(here, seen, strict=True):
            missing = f"waits: it needs at least {one.min_cores} cores, which no nodes have now"
            job.why = found.why.get(one.name, "" if explores else self.spec.policy) if one in fitting else missing
        self._place(here, found)
        before = {job.spec.name: job.cores for job in here if job.cores}
        if before != dict(found.cores):
            record = {"time": self.now, "cores": dict(found.cores), "why": dict(found.why), "gap": found.gap}
            self.decisions.append(record)
        self._suggest(here, sizes)
        self._write()

    def _place(self, here: Sequence[Managed], found: Allocation) -> None:
        """Choose nodes for the cores of each job; jobs stay where they are if the others still fit."""
        names = list(self._nodes)
        present = {
            job.spec.name: {names.index(node): number for node, number in job.where.items()}
            for job in here
            if job.state == RUNNING and job.where.keys() <= self._nodes.keys()
        }
        placed = place(found.cores, list(self._nodes.values()), present, found.kinds)
        self._wanted = {job: {names[node]: number for node, number in where.items()} for job, where in placed.items()}

    def _suggest(self, here: Sequence[Managed], nodes: Sequence[int]) -> None:
        """Suggest the size of the pool that pays off most, which may be larger than the present one."""
        price, worth, most = self.spec.price_per_core_hour, self.spec.worth_per_core_hour, self.spec.max_nodes
        if price is None or worth is None or not nodes:
            return
        jobs = [job.as_job(most * max(nodes), self.now, explores=True) for job in here]
        number, why = suggest_nodes(jobs, max(nodes), price=price, worth=worth, max_nodes=most)
        if self.suggestion is None or self.suggestion["nodes"] != number:
            logger.info("suggested size of the pool: %d nodes, %s", number, why)
        self.suggestion = {"nodes": number, "why": why}
        if self.spec.request_nodes:
            self.pool.request(number, max(nodes))

    # ------------------------------------------------------------------------------------------------ starts and ends

    def _start(self, job: Managed, where: dict[str, int]) -> None:
        cores = sum(where.values())
        for node, number in where.items():
            if sum(other.where.get(node, 0) for other in self.jobs) + number > self._nodes[node]:
                return  # others have not ended yet
        command = Command(job.spec.arguments(cores), str(Path(job.spec.script).parent), job.spec.environment)
        job.mark = job.newest()
        job.group, job.where, job.state = self.pool.start(command, where), where, RUNNING
        job.starts += 1
        job.spans.append([self.now, self.now, cores])
        self._log(job, f"--- start {job.starts} on {cores} cores ({job.why})\n".encode())
        self._write()

    def _request_stop(self, job: Managed) -> None:
        if job.state == RUNNING and job.group is not None:
            job.group.stop()
            job.state, job.stop_by = STOPPING, self.now + _SECONDS_TO_STOP

    def _look(self) -> None:
        for job in self.jobs:
            if job.group is None:
                continue
            polled = job.group.poll()
            self._log(job, polled.output)
            job.spans[-1][1] = self.now
            if not job.is_measured and not is_url(job.spec.checkpoint):
                job.read_hints()
                self._is_due |= job.is_measured  # its goodput is known from now on
            if polled.codes is not None or polled.is_lost:
                self._end(job, polled)
            elif job.state == STOPPING and self.now > job.stop_by:
                self._end(job, Polled(None, is_lost=True), f"did not stop within {_SECONDS_TO_STOP:g} s")

    def _end(self, job: Managed, polled: Polled, problem: str = "") -> None:
        """Set the state of a job by how its processes ended; kill those that still run."""
        assert job.group is not None
        kill_quietly(job.group)
        codes, was_stopping = polled.codes or (), job.state == STOPPING
        job.group, job.where, self._is_due = None, {}, True
        if codes and not polled.is_lost and not any(codes):
            job.state, job.ended = DONE, self.now
            job.read_hints()
        elif was_stopping and not polled.is_lost and all(code in (0, STOPPED, _SIGTERM) for code in codes):
            job.state = WAITING
        else:
            self._fail(job, polled, was_stopping, problem)
        self._write()

    def _fail(self, job: Managed, polled: Polled, was_stopping: bool, problem: str) -> None:
        codes = polled.codes or ()
        is_killed = polled.is_lost or any(code < 0 or code == STOPPED for code in codes)  # then the others fail
        job.kills += is_killed
        found = "its worker was lost" if polled.is_lost else f"exit codes {', '.join(map(str, codes))}"
        job.problem = problem or found
        if job.newest() != job.mark:
            job.failures = job.kills_in_a_row = 0
        job.failures += not is_killed
        job.kills_in_a_row += is_killed and not was_stopping
        self._log(job, f"--- {job.problem}\n".encode())
        most = self.spec.failures
        if job.failures >= most or job.kills_in_a_row >= _KILLS_OF_A_FAILURE * most:
            job.state, job.ended = FAILED, self.now
            logger.warning("job %s is given up: %s, see %s", job.spec.name, job.problem, self._log_of(job))
            return
        delay = 0.0 if is_killed else self.spec.backoff_seconds * 2 ** (job.failures - 1)
        job.state, job.not_before = WAITING, self.now + delay

    # ---------------------------------------------------------------------------------------------------------- files

    def _log_of(self, job: Managed) -> Path:
        return self.out / "logs" / f"{job.spec.name}.log"

    def _log(self, job: Managed, output: bytes) -> None:
        if output:
            with open(self._log_of(job), "ab") as file:
                file.write(output)

    def state(self) -> dict[str, Any]:
        """Everything that ``vbs cluster status`` and the page show."""
        names = ("state", "cores", "arrived", "ended", "failures", "starts", "kills", "why", "problem", "spans")
        return {
            "file": str(self.path),
            "command": self.command,
            "seconds": self.now,
            "policy": self.spec.policy,
            "nodes": list(self._nodes.values()),
            "suggestion": self.suggestion,
            "decisions": self.decisions[-_MOST_SHOWN:],
            "jobs": [
                {
                    "name": job.spec.name,
                    **{name: getattr(job, name) for name in names},
                    "log": str(self._log_of(job)),
                    "hints": None if job.hints is None else job.hints.as_dict(),
                }
                for job in self.jobs
            ],
        }

    def _write(self) -> None:
        state = self.state()
        write_json(self.out / STATE, state)
        write_text(self.out / "index.html", state_page(state))


def _fits(job: Job, nodes: Sequence[int]) -> bool:
    """Whether the present nodes have room for it: a node may have left."""
    sizes = [size for node, number in Counter(nodes).items() for size in slots(node, number)]
    return max(sizes, default=0) >= job.min_cores


def read_state(out: Path) -> dict[str, Any]:
    """The state that a pool has written."""
    path = out / STATE
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: pass the --out of vbs cluster run")
    try:
        found = read_json(path)
        assert isinstance(found["jobs"], list)
    except (ValueError, TypeError, KeyError, AssertionError):
        raise ValueError(f"{path} must be the state that vbs cluster run has written, got something else") from None
    return dict(found)
