"""Sessions of `stoppable_run.py` as separate processes, to be observed, signalled and killed."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import forked
import stoppable_run
import torch

SCRIPT = Path(stoppable_run.__file__)
MARK = "STOPPABLE_RUN"  # an environment variable that identifies all processes of a session
MOST_SECONDS = 900  # timeout of a session or an event in it; longer is a hang


class Place:
    """The files of a run.

    Attributes:
        checkpoints: the directory of the run.
        diary: the directory of the diaries of its cores.
        weights: the file of the final weights.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkpoints = root / "checkpoints"
        self.diary = root / "diary"
        self.weights = root / "weights.pt"
        self.diary.mkdir(parents=True, exist_ok=True)

    def read_weights(self):
        return torch.load(self.weights, weights_only=True)


class SessionProcess:
    """One session: a process group whose leader is the script, a launch of it, or torchrun.

    Args:
        place: of the run.
        settings: of the run.
        launcher: "alone", "forked" for the same without importing torch again, "launch" for ``vbs.launch``, which also
            forks its processes, "torchrun", or "forked torchrun", whose agent and cores do not import torch again.
        cores: how many.
        backend: of the launch.
        restarts: the number of restarts of torchrun.
        name: of the session in the diary; that of torchrun's attempt if there may be several.
    """

    def __init__(self, place, settings=None, *, launcher="launch", cores=1, backend="gloo", restarts=0, name="0"):
        self.place = place
        self.launcher = launcher
        self.cores = cores
        self.name = name
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        self._output = place.root / f"output-{name}.txt"
        script = [
            *(str(SCRIPT), str(place.checkpoints), "--diary", str(place.diary), "--result", str(place.weights)),
            *("--backend", "none" if launcher in ("alone", "forked") else backend, "--cores", str(cores)),
            *("--settings", json.dumps(dataclasses.asdict(settings or stoppable_run.Settings()))),
            *([] if restarts else ["--session", name]),
        ]
        # into a file: a pipe without a reader would fill up after some tracebacks, and block its writers
        with open(self._output, "w") as output:
            if launcher not in ("alone", "torchrun"):
                work = [forked.torchrun, _torchrun_flags(cores, restarts), *script]
                work = work if launcher == "forked torchrun" else [_run, script]
                self._process = forked.Leader(*work, environment=self._environment(), output=output.fileno())
                return
            self._process = subprocess.Popen(
                [sys.executable, *(_torchrun(cores, restarts) if launcher == "torchrun" else []), *script],
                env=self._environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # also if tests run in the background
                start_new_session=True,
            )

    def _environment(self):
        name, value = self._mark.split("=")
        # otherwise torchrun lets a restarted group use the store of the previous one and find stale addresses
        # there (https://github.com/pytorch/pytorch/issues/135712)
        return {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", name: value}

    @property
    def output(self):
        return self._output.read_text()

    @property
    def has_ended(self):
        return self._process.poll() is not None

    def diary(self, rank=0, name=None):
        return stoppable_run.read_diary(self.place.diary / f"{name or self.name}-{rank}.jsonl")

    def steps_done(self, name=None):
        """The steps of core 0 according to its diary."""
        return max((entry.get("steps_done", 0) for entry in self.diary(0, name)), default=0)

    def pid_of_core(self, rank, name=None):
        return self.diary(rank, name)[0]["pid"]

    def wait_until(self, is_so, *, seconds=MOST_SECONDS, pause=0.02):
        """Poll with pauses, in which the session has the processor."""
        end = time.monotonic() + seconds
        while not is_so():
            assert not self.has_ended, self.output
            assert time.monotonic() < end, f"nothing has happened for {seconds} s\n{self.output}"
            time.sleep(pause)

    def wait_for_steps(self, number=1, name=None, *, or_end=False):
        """Wait until every core runs and core 0 has made some steps in this session, or until it has ended."""

        def is_so():
            diaries = [self.diary(rank, name) for rank in range(self.cores)]
            return (or_end and self.has_ended) or (all(diaries) and len(diaries[0]) > number)

        self.wait_until(is_so)

    def wait_for_hold(self, name=None):
        """Wait until core 0 is held, according to the settings; returns the hold."""
        hold = stoppable_run.hold_of(self.place.diary, name or self.name)
        hold.wait(lambda: self.output if self.has_ended else None)
        return hold

    def signal(self, number):
        self._process.send_signal(number)

    def signal_group(self, number):
        os.killpg(self._process.pid, number)

    def finish(self, seconds=MOST_SECONDS):
        """Wait for the end; returns the exit code of the leader."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.destroy()
            raise AssertionError(f"the session hangs\n{self.output}") from None

    def left_behind(self, seconds=MOST_SECONDS):
        """The processes of the session that still exist after its leader has ended, after a grace period.

        Loader workers check every 5 s whether their parent is alive.
        """
        end = time.monotonic() + seconds
        while (found := self._processes()) and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def destroy(self):
        """Kill all processes of the session."""
        for pid in self._processes():
            os.kill(pid, signal.SIGKILL)

    def _processes(self):
        """The processes of the leader's session, or with its mark in their environment, by pid."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                state, _, _, leader = (path / "stat").read_text().rpartition(")")[2].split()[:4]
                is_ours = int(leader) == self._process.pid or self._mark.encode() in (path / "environ").read_bytes()
                if is_ours and state != "Z":
                    found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has just exited
                continue
        return found


def _run(arguments):
    sys.argv = arguments
    stoppable_run.main()


def _torchrun(cores, restarts):
    return ["-m", "torch.distributed.run", *_torchrun_flags(cores, restarts)]


def _torchrun_flags(cores, restarts):
    return ["--standalone", f"--nproc-per-node={cores}", f"--max-restarts={restarts}"]
