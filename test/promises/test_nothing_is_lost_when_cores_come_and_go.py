"""Cores are killed, added and stopped while a run trains: it ends as if nothing had happened, with each sample once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import live_runs

STEPS = {"steps": 60, "seconds": 0.05}  # until all has happened; then without a wait
RUNS = [
    {
        "settings": {**STEPS, "exact": True, "ddp": True, "num_workers": 1},
        "cores": 3,
        "seed": 0,
        "events": ["kill", "add", "kill all but one"],
    },
    {
        "settings": {**STEPS, "rule": "adamw", "stream": True, "weighted": True},
        "cores": 2,
        "seed": 1,
        "events": ["add", "kill", "stop"],
        "timeout": 3.0,  # a core that waits for the processor must not be removed
    },
]


def test_killed_added_and_stopped_cores_change_nothing():
    # in a process that forks the cores; weights, samples and what was run again are checked there
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    program = [sys.executable, live_runs.__file__, json.dumps(RUNS)]
    done = subprocess.run(program, env=variables, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["kills"] >= 2
    assert first["joins"] == 1
    assert (second["kills"], second["joins"], second["removed"]) == (1, 1, 1)
