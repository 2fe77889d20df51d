"""Remove machines from a torchrun run and add them again: it must end like an uninterrupted run.

PYTHONPATH=test/support python tools/elastic.py --directory DIRECTORY    # some minutes

Two agents on this machine represent two machines. Their store is a separate process (deploy/store.py). One agent is
killed with its workers, and the run continues with one core. It returns and receives SIGTERM. It returns again, and
the other agent, which has been running from the start, is killed. The run must end with the weights of the
uninterrupted one: within 1e-5, and to the last bit in exact mode.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import stoppable_run
import torch
from stoppable_run import Settings

import variable_batch_size as vbs

DEPLOY = Path(__file__).parents[1] / "deploy"
SCRIPT = Path(stoppable_run.__file__)
MOST_SECONDS = 900
LARGEST_DIFFERENCE = 1e-5

SETTINGS = {
    "plain": Settings(seconds_per_minibatch=0.05, repeats=8, every_steps=1),
    "exact": Settings(seconds_per_minibatch=0.05, repeats=8, every_steps=1, options={"exact": True}),
}


class Machines:
    """A store and the agents of a run."""

    def __init__(self, root, settings):
        self.root, self.settings = root, settings
        self.agents = {}
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            self.port = listening.getsockname()[1]
        self.store = subprocess.Popen([sys.executable, str(DEPLOY / "store.py"), str(self.port)])
        self._wait(self._store_answers)

    def _store_answers(self):
        with socket.socket() as asking:
            return asking.connect_ex(("127.0.0.1", self.port)) == 0

    def join(self, name):
        """Start an agent, as on a new machine."""
        waits = "is_host=0,last_call_timeout=2,keep_alive_interval=1"
        command = [
            *(sys.executable, DEPLOY / "elastic.py", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=100"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-conf={waits}", "--rdzv-id=run"),
            *(SCRIPT, self.root / "checkpoints", "--diary", self.root / "diary", "--session", "run"),
            *("--result", self.root / "weights.pt", "--settings", json.dumps(asdict(self.settings))),
        ]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with open(self.root / f"output-{name}.txt", "a") as output:
            self.agents[name] = subprocess.Popen(
                [str(part) for part in command],
                env=variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self, name):
        """Simulate a lost machine: kill the agent and its descendants at once."""
        agent = self.agents.pop(name)
        for pid in _below(agent.pid) if agent.poll() is None else []:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    def leave(self, name):
        """Simulate a preempted machine: send SIGTERM; returns the exit code."""
        agent = self.agents.pop(name)
        agent.terminate()
        return agent.wait(MOST_SECONDS)

    def wait_for_steps(self, number, *, cores):
        """Wait until a number of steps were made on a number of cores from now on."""
        before = len(self._diary())

        def is_so():
            entries = self._diary()[before:]
            starts = [i for i, entry in enumerate(entries) if "pid" in entry]
            began = starts[-1] if starts else None
            now = entries[began]["cores"] if began is not None else self._cores_before(before)
            return now == cores and len(entries[(began or 0) :]) > number

        self._wait(is_so)

    def _cores_before(self, number):
        return [entry["cores"] for entry in self._diary()[:number] if "pid" in entry][-1] if number else None

    def _diary(self):
        return stoppable_run.read_diary(self.root / "diary" / "run-0.jsonl")

    def finish(self):
        return [agent.wait(MOST_SECONDS) for agent in self.agents.values()]

    def output(self, name):
        return (self.root / f"output-{name}.txt").read_text()

    def end(self):
        for name in list(self.agents):
            self.kill(name)
        self.store.kill()
        self.store.wait()

    def _wait(self, is_so):
        deadline = time.monotonic() + MOST_SECONDS
        while not is_so():
            assert time.monotonic() < deadline, f"nothing has happened for {MOST_SECONDS} s, see {self.root}"
            time.sleep(0.05)


def _below(pid):
    """A process and all its descendants."""
    children = [
        int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    ]
    return [pid, *(found for child in children for found in _below(child))]


def disturbed(root, settings):
    """The weights of a run with machines that come and go."""
    machines = Machines(root, settings)
    try:
        machines.join("a")
        machines.join("b")
        machines.wait_for_steps(3, cores=2)
        machines.kill("b")
        machines.wait_for_steps(3, cores=1)
        machines.join("b")
        machines.wait_for_steps(3, cores=2)
        assert machines.leave("b") == vbs.EXIT_STOPPED
        assert "this machine leaves the run" in machines.output("b")
        assert "SignalException" not in machines.output("b")
        machines.wait_for_steps(3, cores=1)
        machines.join("b")
        machines.wait_for_steps(3, cores=2)
        machines.kill("a")
        assert machines.finish() == [0], machines.output("b")
    finally:
        machines.end()
    return torch.load(root / "weights.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="for checkpoints and outputs; a temporary one by default")
    directory = parser.parse_args().directory or Path(tempfile.mkdtemp())
    for name, settings in SETTINGS.items():
        root = directory / f"elastic-{name}"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        started_at = time.monotonic()
        weights = disturbed(root, settings)
        preserve_rng = Settings(**{**asdict(settings), "seconds_per_minibatch": 0.0})
        expected = stoppable_run.run(root / "whole", preserve_rng)["model"]
        difference = stoppable_run.largest_difference(weights, expected)
        print(f"{name}: the weights differ by {difference:.2g}, {time.monotonic() - started_at:.0f} s")
        assert difference == 0 if name == "exact" else difference < LARGEST_DIFFERENCE


if __name__ == "__main__":
    main()
