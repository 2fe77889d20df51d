"""run: keeps the jobs of a pool running, each on the cores that the allocation gives it.

A job is resized by the signal that saves (exit code 75) and is started again on its new cores, from its checkpoint. A
job that fails is started again after a while, and is given up when it fails repeatedly without a new checkpoint.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from variable_batch_size.cluster.jobs import JobSpec, read_cluster
from variable_batch_size.cluster.processes import Command, Group, Polled, Pool, kill_quietly
from variable_batch_size.files import write_text
from variable_batch_size.planning.cluster_report import state_page
from variable_batch_size.policies.allocation import ALLOCATIONS, Allocation, Job, check_fits, slots, suggest_nodes
from variable_batch_size.policies.hints import HINTS, Hints

logger = logging.getLogger(__name__)

STATE = "state.json"
EXPECTED, WAITING, RUNNING, STOPPING, DONE, FAILED = "expected", "waiting", "running", "stopping", "done", "failed"
_STOPPED = 75  # vbs.EXIT_STOPPED, which imports torch
_SIGTERM = -15  # before the script listens for it
_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_TO_STOP = 120.0
_MOST_SHOWN = 100
_KILLS_OF_A_FAILURE = 10  # the fault of a machine, more often than that of a script
_RESTART_SECONDS = 10.0  # until it is measured


@dataclass
class Managed:
    """A job of the pool."""

    spec: JobSpec
    state: str = EXPECTED
    cores: int = 0
    arrived: float | None = None  # seconds after the start of the pool, like all times here
    ended: float | None = None
    not_before: float = 0.0  # of the next start, after a failure
    stop_by: float = 0.0
    failures: int = 0  # in a row
    starts: int = 0
    kills: int = 0  # ends by a signal, or with a lost worker
    why: str = ""  # of its cores
    problem: str = ""  # the latest
    hints: Hints | None = None
    group: Group | None = None
    mark: str = ""  # the checkpoint from which it was started
    spans: list[list[float]] = field(default_factory=list)  # begin, end and cores

    @property
    def is_open(self) -> bool:
        return self.state in (WAITING, RUNNING, STOPPING)

    def newest(self) -> str:
        """The name of its newest checkpoint."""
        names = [path.name for path in Path(self.spec.checkpoint).glob("step-*") if not path.name.endswith(".tmp")]
        return max(names, default="")

    def read_hints(self) -> None:
        path = Path(self.spec.checkpoint) / HINTS
        try:
            if path.exists():
                self.hints = Hints.read(path)
        except ValueError as error:  # the run writes them again
            self.problem = str(error)

    def as_job(self, num_cores: int, *, explores: bool) -> Job:
        """What the allocation sees: with `explores`, only the numbers of cores that its hints know something about."""
        spec, hints = self.spec, self.hints
        most = min(spec.max_cores or num_cores, max(num_cores, spec.min_cores))
        if hints is not None and hints.goodput is not None and hints.speed(hints.max_cores) > 0:
            most = min(most, hints.max_cores) if explores else most
            least = max(spec.min_cores, hints.min_cores)
            speeds = [hints.speed(cores) for cores in range(1, max(most, least) + 1)]
        else:
            has_no_policy = hints is None and self.newest() != ""
            most = most if has_no_policy or not explores else spec.min_cores
            least, speeds = spec.min_cores, [cores**0.5 for cores in range(1, most + 1)]
            hints = None
        return Job(
            name=spec.name,
            speeds=speeds,
            min_cores=least,
            cores=self.cores if self.state == RUNNING else 0,
            work=None if hints is None else hints.work_left,
            restart_seconds=(hints and hints.restart_seconds) or _RESTART_SECONDS,
        )


class ClusterRun:
    """Runs the jobs of a file on a pool until all have ended; jobs that are added to the file arrive."""

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
        self._wanted: Mapping[str, int] = {}
        self._nodes = pool.nodes()
        for job in self.jobs:
            self._check(job.spec)
        (out / "logs").mkdir(parents=True, exist_ok=True)

    @property
    def now(self) -> float:
        return self._clock() - self._began

    def run(self) -> bool:
        """Until all jobs have ended; whether all have completed."""
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
        """Let all jobs save and exit; the same file resumes them."""
        for job in self.jobs:
            self._request_stop(job, "the pool is stopped")
        while any(job.group is not None for job in self.jobs):
            self._look()
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def tick(self) -> None:
        """Look after all jobs, decide if it is time, and start and stop jobs."""
        self._read_again()
        for job in self.jobs:
            if job.state == EXPECTED and self.now >= job.spec.arrives:
                job.state, job.arrived, self._is_due = WAITING, self.now, True
        self._look()
        if self._is_due or self.now - self._decided_at >= self.spec.interval_seconds:
            self._decide()
        for job in self.jobs:
            if job.state == RUNNING and self._wanted.get(job.spec.name, 0) != job.cores:
                self._request_stop(job, job.why)
        for job in self.jobs:
            if job.state == WAITING and self._wanted.get(job.spec.name, 0) and self.now >= job.not_before:
                self._start(job, self._wanted[job.spec.name])

    def _read_again(self) -> None:
        """Add the jobs that the file has now in addition; a mistake in it is logged and changes nothing."""
        version = self.path.stat().st_mtime_ns if self.path.exists() else self._version
        if version == self._version:
            return
        self._version = version
        try:
            _, specs = read_cluster(self.path)
            known = {job.spec.name for job in self.jobs}
            added = [spec for spec in specs if spec.name not in known]
            for spec in added:
                self._check(spec)
            self.jobs += [Managed(spec) for spec in added]
        except ValueError as error:
            logger.warning("no jobs were added: %s", error)

    def _check(self, spec: JobSpec) -> None:
        """Reject a job that needs more cores than there are."""
        check_fits([Job(name=spec.name, speeds=[1.0] * spec.min_cores, min_cores=spec.min_cores)], self.pool.nodes())

    # ------------------------------------------------------------------------------------------------------ decisions

    def _decide(self) -> None:
        self._decided_at, self._is_due = self.now, False
        self._nodes = nodes = self.pool.nodes()
        here = [job for job in self.jobs if job.is_open]
        for job in here:
            job.read_hints()
        explores = self.spec.policy == "goodput"
        seen = [job.as_job(sum(nodes), explores=explores) for job in here]
        fitting = [job for job in seen if _fits(job, nodes)]
        options = {"power": self.spec.power, "horizon_seconds": self.spec.horizon_seconds}
        found = ALLOCATIONS[self.spec.policy](fitting, nodes, **options) if fitting else Allocation({})
        self._wanted = found.cores
        for job in here:
            job.why = found.why.get(job.spec.name, "" if explores else self.spec.policy)
        before = {job.spec.name: job.cores for job in here if job.cores}
        if before != dict(found.cores):
            record = {"time": self.now, "cores": dict(found.cores), "why": dict(found.why), "gap": found.gap}
            self.decisions.append(record)
        self._suggest(here, nodes)
        self._write()

    def _suggest(self, here: Sequence[Managed], nodes: Sequence[int]) -> None:
        """The size of the pool that pays off most, which may be larger than it is."""
        price, worth, most = self.spec.price_per_core_hour, self.spec.worth_per_core_hour, self.spec.max_nodes
        if price is None or worth is None or not nodes:
            return
        jobs = [job.as_job(most * max(nodes), explores=True) for job in here]
        number, why = suggest_nodes(jobs, max(nodes), price=price, worth=worth, max_nodes=most)
        if self.suggestion is None or self.suggestion["nodes"] != number:
            logger.info("suggested size of the pool: %d nodes, %s", number, why)
        self.suggestion = {"nodes": number, "why": why}
        if self.spec.request_nodes:
            self.pool.request(number, max(nodes))

    # ------------------------------------------------------------------------------------------------ starts and ends

    def _start(self, job: Managed, cores: int) -> None:
        nodes, used = self._nodes, sum(other.cores for other in self.jobs)
        if used + cores > sum(nodes):
            return  # others have not ended yet
        size = min((node for node in nodes if node >= cores), default=max(nodes, default=1))
        command = Command(job.spec.arguments(cores), str(Path(job.spec.script).parent), job.spec.environment)
        group = self.pool.start(command, cores=cores, num_nodes=-(-cores // size))
        if group is None:
            return
        job.group, job.cores, job.state, job.mark = group, cores, RUNNING, job.newest()
        job.starts += 1
        job.spans.append([self.now, self.now, cores])
        self._log(job, f"--- start {job.starts} on {cores} cores ({job.why})\n".encode())
        self._write()

    def _request_stop(self, job: Managed, why: str) -> None:
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
            if polled.codes is not None or polled.is_lost:
                self._end(job, polled)
            elif job.state == STOPPING and self.now > job.stop_by:
                self._end(job, Polled(None, is_lost=True), f"has not stopped within {_SECONDS_TO_STOP:g} s")

    def _end(self, job: Managed, polled: Polled, problem: str = "") -> None:
        """What follows from how its processes ended; with a problem they are killed."""
        assert job.group is not None
        kill_quietly(job.group)
        codes, was_stopping = polled.codes or (), job.state == STOPPING
        job.group, job.cores, self._is_due = None, 0, True
        if codes and not polled.is_lost and not any(codes):
            job.state, job.ended = DONE, self.now
            job.read_hints()
        elif not polled.is_lost and all(code in (0, _STOPPED, _SIGTERM) for code in codes):
            job.state = WAITING
        else:
            self._fail(job, polled, was_stopping, problem)
        self._write()

    def _fail(self, job: Managed, polled: Polled, was_stopping: bool, problem: str) -> None:
        codes = polled.codes or ()
        is_killed = polled.is_lost or all(code <= 0 for code in codes)
        job.kills += is_killed
        found = "its worker was lost" if polled.is_lost else f"exit codes {', '.join(map(str, codes))}"
        job.problem = problem or found
        if job.newest() != job.mark:
            job.failures = 0
        job.failures += not (is_killed and was_stopping)
        self._log(job, f"--- {job.problem}\n".encode())
        if job.failures > self.spec.failures * (_KILLS_OF_A_FAILURE if is_killed else 1):
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
        """All that status and the page show."""
        names = ("state", "cores", "arrived", "ended", "failures", "starts", "kills", "why", "problem", "spans")
        return {
            "file": str(self.path),
            "command": self.command,
            "seconds": self.now,
            "policy": self.spec.policy,
            "nodes": self._nodes,
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
        write_text(self.out / STATE, json.dumps(state) + "\n")
        write_text(self.out / "index.html", state_page(state))


def _fits(job: Job, nodes: Sequence[int]) -> bool:
    """Whether the nodes that are there now have room for it: one may have left."""
    sizes = [size for node, number in Counter(nodes).items() for size in slots(node, number)]
    return max(sizes, default=0) >= job.min_cores


def read_state(out: Path) -> dict[str, Any]:
    """The state that a pool has written."""
    path = out / STATE
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: pass the --out of vbs cluster run")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(found["jobs"], list)
    except (ValueError, TypeError, KeyError, AssertionError):
        raise ValueError(f"{path} must be the state that vbs cluster run has written, got something else") from None
    return dict(found)
