"""Three real jobs on two cores: mean completion times by goodput, first come first served and equal shares.

python bench/cluster.py [--mnist DIR] [--local] [--scale 0.1]

Two trainings on digits and one on MNIST, which is longer and comes first, all with Autoscale; on a local Ray cluster,
or without Ray. Then the executed trace of each job is repeated alone, and must give the same weights. Then the times of
the other two policies predict those by goodput, in a simulation.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from variable_batch_size.cluster.processes import LocalPool
from variable_batch_size.cluster.run import ClusterRun, read_state
from variable_batch_size.planning.cluster import Hinted, Submitted, simulate_cluster
from variable_batch_size.policies import Hints

SCRIPT = Path(__file__).parents[1] / "examples" / "cluster_job.py"
POLICIES = ("fifo", "equal", "goodput")
INTERVAL, HORIZON = 10.0, 300.0
GOALS = {"mnist": 6000.0, "digits-1": 2000.0, "digits-2": 2000.0}


def jobs_file(folder: Path, policy: str, mnist: str | None) -> Path:
    text = f'[pool]\npolicy = "{policy}"\ninterval_seconds = {INTERVAL}\nhorizon_seconds = {HORIZON}\n'
    for number, (name, goal) in enumerate(GOALS.items()):
        args = ["--checkpoint", "{checkpoint}", "--progress", str(goal), "--seed", str(number), "--every-seconds", "20"]
        if name == "mnist":
            args += ["--mnist", mnist] if mnist else ["--hidden", "512"]
        text += f'[[job]]\nname = "{name}"\nscript = "{SCRIPT}"\ncheckpoint = "{policy}/{name}"\n'
        text += f"args = {json.dumps(args)}\n"
    path = folder / f"{policy}.toml"
    path.write_text(text)
    return path


def run(folder: Path, policy: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The jobs after they have ended."""
    if options.local:
        pool: Any = LocalPool(2)
    else:
        from variable_batch_size.integrations.ray import RayPool

        pool = RayPool(cores=2)
    out = folder / f"out-{policy}"
    assert ClusterRun(jobs_file(folder, policy, options.mnist), pool, out).run(), f"see {out}/logs"
    pool.close()
    found: list[dict[str, Any]] = read_state(out)["jobs"]
    return found


def mean(jobs: list[dict[str, Any]]) -> float:
    return sum(job["ended"] - job["arrived"] for job in jobs) / len(jobs)


def replayed(folder: Path, policy: str, name: str, mnist: str | None) -> float:
    """The largest difference between the weights of a job and those of its executed trace alone, on one core."""
    there, alone = folder / policy / name, folder / "alone" / policy / name
    number = list(GOALS).index(name)
    command = [sys.executable, str(SCRIPT), "--checkpoint", str(alone), "--trace", str(there / "executed.csv")]
    command += ["--seed", str(number)]
    if name == "mnist":
        command += ["--mnist", mnist] if mnist else ["--hidden", "512"]
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    subprocess.run(
        command, check=True, env={**os.environ, **variables, "TORCHELASTIC_RUN_ID": "alone"}, capture_output=True
    )
    one, other = (torch.load(where / "weights.pt") for where in (there, alone))
    return max((one[key] - other[key]).abs().max().item() for key in one)


def speeds(name: str, found: dict[str, list[dict[str, Any]]], restart: float) -> tuple[float, float]:
    """Progress per second on one and on two cores, of the runs by the other two policies."""
    fifo, equal = (next(job for job in found[policy] if job["name"] == name) for policy in ("fifo", "equal"))
    seconds = {
        cores: [
            sum(max(end - begin - restart, 0.1) for begin, end, c in job["spans"] if c == cores)
            for job in (fifo, equal)
        ]
        for cores in (1, 2)
    }
    on_two = GOALS[name] / seconds[2][0]
    return max(GOALS[name] - on_two * seconds[2][1], 0.0) / seconds[1][1], on_two


def predicted(found: dict[str, list[dict[str, Any]]]) -> float:
    """The mean completion time by goodput in a simulation."""
    applications, jobs = {}, []
    for job in found["fifo"]:
        name = job["name"]
        restarts = [one["hints"]["restart_seconds"] for jobs_ in found.values() for one in jobs_ if one["name"] == name]
        restart = sum(restarts) / len(restarts)
        known = speeds(name, found, restart)
        hints = Hints(
            cores=1,
            min_cores=1,
            max_cores=2,
            goodput=known,
            throughput=known,
            progress_goal=GOALS[name],
            restart_seconds=restart,
        )
        applications[name] = Hinted(name, hints)
        jobs.append(Submitted(name, 0.0, name, 2, 1))
    return simulate_cluster(jobs, applications, [2], interval_seconds=INTERVAL, horizon_seconds=HORIZON).mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mnist", metavar="DIR", help="of MNIST (default: a larger network on digits in its place)")
    parser.add_argument("--local", action="store_true", help="without Ray")
    parser.add_argument("--scale", type=float, default=1.0, help="of the lengths of the jobs, for a slow machine")
    options = parser.parse_args()
    for name in GOALS:
        GOALS[name] *= options.scale
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        found = {policy: run(folder, policy, options) for policy in POLICIES}
        for policy, jobs in found.items():
            each = ", ".join(f"{job['name']} {job['ended'] - job['arrived']:.0f} s" for job in jobs)
            starts = sum(job["starts"] for job in jobs)
            print(f"{policy:8} mean {mean(jobs):6.1f} s ({each}; {starts} starts)", flush=True)
        for name in GOALS:
            difference = replayed(folder, "goodput", name, options.mnist)
            print(f"{name}: weights differ from its executed trace alone by {difference:.1e}", flush=True)
        simulated = predicted(found)
        error = 100 * (simulated / mean(found["goodput"]) - 1)
        print(f"simulated mean by goodput {simulated:.1f} s, {error:+.0f} % of the real one")


if __name__ == "__main__":
    main()
