"""Kill the workers of a pool at random, and check that nothing is lost.

PYTHONPATH=test/support python tools/cluster_soak.py --kills 50 [--ray] [--seed 0]

Three jobs on two cores are killed with SIGKILL, either one process or all of a job, at any time: while they start,
train, save or stop. All must end with the weights that their executed trace alone gives.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cluster_job
import torch

import variable_batch_size as vbs
from variable_batch_size.experimental.cluster.processes import LocalPool
from variable_batch_size.experimental.cluster.run import ClusterRun

SCRIPT = Path(cluster_job.__file__)
NAMES = ("a", "b", "c")


def jobs_file(folder: Path) -> Path:
    text = "[pool]\ninterval_seconds = 5\nhorizon_seconds = 30\nfailures = 3\n"
    for name in NAMES:
        text += f'[[job]]\nname = "{name}"\nscript = "{SCRIPT}"\ncheckpoint = "{name}"\n'
        text += 'args = ["--checkpoint", "{checkpoint}", "--progress", "3000", "--pause", "0.002"]\n'
    path = folder / "jobs.toml"
    path.write_text(text)
    return path


def kill_some(run: ClusterRun, draws: random.Random) -> bool:
    """Kill one process, or all, of a job: mostly of one that has trained since its start, sometimes of any."""
    running = [job for job in run.jobs if job.group is not None]
    if draws.random() < 0.9:
        running = [job for job in running if job.newest() != job.mark]
    if not running:
        return False
    group: Any = draws.choice(running).group
    try:
        pids = group.pids() if hasattr(group, "pids") else group.worker_pids()
    except Exception:  # its actor has gone
        return False
    chosen = pids if draws.random() < 0.5 else pids[:1]
    for pid in chosen:
        os.kill(pid, signal.SIGKILL)
    return bool(chosen)


def check(folder: Path, name: str) -> str:
    """What is wrong with a job; empty if nothing is."""
    sizes = list(vbs.Trace.read(folder / name / "executed.csv"))
    alone = folder / "alone" / name
    options = cluster_job.parser.parse_args(
        ["--checkpoint", str(alone), "--trace", str(folder / name / "executed.csv")]
    )
    cluster_job.main(options)
    one, other = (torch.load(where / "weights.pt") for where in (folder / name, alone))
    difference = max((one[key] - other[key]).abs().max().item() for key in one)
    print(f"{name}: {len(sizes)} steps, weights differ from those of its executed trace alone by {difference:.1e}")
    return "" if difference < 1e-9 else f"{name} has other weights"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ray", action="store_true", help="on a local Ray cluster")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draws, killed = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        if options.ray:
            from variable_batch_size.experimental.cluster.ray import RayPool

            pool: Any = RayPool(cores=2)
        else:
            pool = LocalPool(2)
        run = ClusterRun(jobs_file(folder), pool, folder / "out")
        due = time.monotonic() + draws.uniform(1, 8)
        while not all(job.state in ("done", "failed") for job in run.jobs):
            run.tick()
            if killed < options.kills and time.monotonic() >= due:
                killed += kill_some(run, draws)
                due = time.monotonic() + draws.uniform(0, 2)
            time.sleep(0.1)
        pool.close()
        seen = sum(job.kills for job in run.jobs)
        problems = [f"{job.spec.name} was given up: {job.problem}" for job in run.jobs if job.state == "failed"]
        problems += [found for job in run.jobs if job.state == "done" and (found := check(folder, job.spec.name))]
        print(f"{killed} kills, {seen} of them noticed as such, {sum(job.starts for job in run.jobs)} starts")
    print("\n".join(problems) or "nothing was lost")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
