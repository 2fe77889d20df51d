"""Three real jobs on two cores: mean completion times under goodput, first come first served and equal shares.

python bench/cluster.py [--mnist DIR] [--local] [--exact] [--scale 2]

A training on MNIST, which comes first and is longer, and two on digits, all with Autoscale; on a local Ray cluster, or
without Ray. Then each job of the goodput pool is repeated alone from its executed trace, and must have the same
weights: with `--exact` bit for bit; otherwise rounding errors, which differ with the number of cores, may have grown.
Last, a simulation from what the jobs have measured under the other two policies predicts all three means.
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

from variable_batch_size.experimental.cluster.processes import LocalPool
from variable_batch_size.experimental.cluster.run import ClusterRun, read_state
from variable_batch_size.experimental.cluster.simulate import Hinted, Submitted, simulate_cluster
from variable_batch_size.policies import Hints

SCRIPT = Path(__file__).parents[1] / "examples" / "cluster_job.py"
POLICIES = ("fifo", "equal", "goodput")
INTERVAL, HORIZON = 5.0, 60.0  # for jobs of about a minute
GOALS = {"mnist": 800.0, "digits-1": 1000.0, "digits-2": 1000.0}
HIDDEN = {"mnist": 1024, "digits-1": 512, "digits-2": 512}


def arguments(name: str, options: argparse.Namespace) -> list[str]:
    found = ["--hidden", str(HIDDEN[name]), "--seed", str(list(GOALS).index(name)), "--every-seconds", "20"]
    found += ["--ref-batchsize", "128"]  # a step is 8 minibatches or more, so that MNIST is faster on two cores
    found += ["--exact"] if options.exact else []
    return found + (["--mnist", options.mnist] if name == "mnist" and options.mnist else [])


def jobs_file(folder: Path, policy: str, options: argparse.Namespace) -> Path:
    text = f'[pool]\npolicy = "{policy}"\ninterval_seconds = {INTERVAL}\nhorizon_seconds = {HORIZON}\n'
    for name, goal in GOALS.items():
        args = ["--checkpoint", "{checkpoint}", "--progress", str(goal), *arguments(name, options)]
        text += f'[[job]]\nname = "{name}"\nscript = "{SCRIPT}"\ncheckpoint = "{policy}/{name}"\n'
        text += f"args = {json.dumps(args)}\n"
    path = folder / f"{policy}.toml"
    path.write_text(text)
    return path


def run(folder: Path, policy: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The jobs after they have ended."""
    if options.local:
        pool: Any = LocalPool(2)
    else:
        from variable_batch_size.experimental.cluster.ray import RayPool

        pool = RayPool(cores=2)
    out = folder / f"out-{policy}"
    assert ClusterRun(jobs_file(folder, policy, options), pool, out).run(), f"see {out}/logs"
    pool.close()
    return {job["name"]: job for job in read_state(out)["jobs"]}


def seconds(job: dict[str, Any]) -> float:
    return float(job["ended"] - job["arrived"])


def mean(jobs: dict[str, dict[str, Any]]) -> float:
    return sum(map(seconds, jobs.values())) / len(jobs)


def replayed(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """The largest difference between the weights of each job and of its executed trace run alone, on one core."""
    running = []
    for number, name in enumerate(GOALS):
        command = [sys.executable, str(SCRIPT), "--checkpoint", str(folder / "alone" / name)]
        command += ["--trace", str(folder / "goodput" / name / "executed.csv"), *arguments(name, options)]
        variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "alone"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29511 + number)}
        running.append(subprocess.Popen(command, env={**os.environ, **variables}, stdout=subprocess.DEVNULL))
    assert not any(process.wait() for process in running)
    found = {}
    for name in GOALS:
        one, other = (torch.load(folder / where / name / "weights.pt") for where in ("goodput", "alone"))
        found[name] = max((one[key] - other[key]).abs().max().item() for key in one)
    return found


def start_seconds(job: dict[str, Any]) -> float:
    """The mean time for which a start holds cores without running steps: imports, loading, saving, process exit."""
    return float(sum(end - begin for begin, end, _ in job["spans"]) - sum(job["hints"]["seconds"])) / job["starts"]


def measured(name: str, found: dict[str, dict[str, dict[str, Any]]]) -> Hinted:
    """The speeds of a job on one core, measured under equal shares, and on two, under first come first served."""
    of = {policy: Hints.of(found[policy][name]["hints"]) for policy in ("equal", "fifo")}
    speeds = of["equal"].mean_speed(1), of["fifo"].mean_speed(2)
    restart = sum(start_seconds(found[policy][name]) for policy in of) / len(of)
    known: dict[str, Any] = {"goodput": speeds, "throughput": speeds, "restart_seconds": restart}
    return Hinted(name, Hints(cores=1, min_cores=1, max_cores=2, progress_goal=GOALS[name], **known))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--mnist",
        metavar="DIR",
        type=os.path.abspath,
        help="directory of MNIST (default: a larger network on digits instead)",
    )
    parser.add_argument("--local", action="store_true", help="without Ray")
    parser.add_argument("--exact", action="store_true", help="in exact mode, which takes longer")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the lengths of the jobs")
    options = parser.parse_args()
    for name in GOALS:
        GOALS[name] *= options.scale
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        found = {policy: run(folder, policy, options) for policy in POLICIES}
        applications = {name: measured(name, found) for name in GOALS}
        for name, job in applications.items():
            one, two = (job.hints.speed(cores) for cores in (1, 2))
            print(f"{name}: {GOALS[name] / one:.0f} s on one core, {two / one:.2f} times as fast on two,", end=" ")
            print(f"{job.hints.restart_seconds:.1f} s to start")
        jobs = [Submitted(name, 0.0, name, 2, 1) for name in GOALS]
        how: dict[str, Any] = {"interval_seconds": 1.0, "horizon_seconds": HORIZON}
        print(f"{'policy':8} {'mean':>8} {'simulated':>16}   jobs")
        for policy, ended in found.items():
            simulated = simulate_cluster(jobs, applications, [2], policy=policy, **how).mean
            each = ", ".join(f"{name} {seconds(job):.0f} s in {job['starts']}" for name, job in ended.items())
            error = 100 * (simulated / mean(ended) - 1)
            print(f"{policy:8} {mean(ended):6.1f} s {simulated:6.1f} s, {error:+3.0f} %   {each} starts", flush=True)
        for name, difference in replayed(folder, options).items():
            print(f"{name}: weights differ from its executed trace alone by {difference:.1e}", flush=True)


if __name__ == "__main__":
    main()
