"""Ray Train: the plain loop on workers that may exit at any time; the run resumes from its latest checkpoint.

python examples/ray_train.py
python examples/ray_train.py --kill-at 12 --stop-at 20    # simulates a lost machine and a preemption notice
python examples/ray_train.py --address auto --workers 1 4  # as many workers as the cluster has room for at the time
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import variable_batch_size as vbs

TRACE = [32, 64, 16, 96, 48, 128, 64, 32, 160, 64] * 3


def train(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The training loop of each worker, independent of Ray. Returns the weights."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    dataset = TensorDataset(torch.randn(512, 20, generator=generator), torch.randint(0, 5, (512,), generator=generator))
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5))

    loader = vbs.DataLoader(dataset, trace=TRACE, minibatch_size=16)
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = vbs.Optimizer(inner, loader, rule="adascale", ref_batchsize=32, model=model)
    # a directory that all workers share
    optimizer.attach(vbs.Checkpoint(options["directory"], model=model, optimizer=optimizer, every_steps=5))
    if loader.sampler.rank == 0:
        with (Path(options["directory"]) / "workers.txt").open("a") as file:
            print(loader.sampler.num_replicas, file=file)

    for _ in optimizer.epochs():
        for data, target in loader:
            nn.functional.cross_entropy(model(data), target).backward()
            optimizer.step()
            disturb(options, optimizer)
    if loader.sampler.rank == 0:
        torch.save(model.state_dict(), Path(options["directory"]) / "weights.pt")
    return model.state_dict()


def disturb(options: dict[str, Any], optimizer: vbs.Optimizer) -> None:
    """Simulate a spot market: the second worker is lost after one step, and a preemption is announced after another."""
    if not optimizer.updated:
        return
    where, directory = (optimizer.sampler.rank, optimizer.steps_done), Path(options["directory"])
    if where == (1, options.get("kill_at")) and is_first_time(directory / "killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if where == (0, options.get("stop_at")) and is_first_time(directory / "stopped"):
        vbs.request_stop()  # saves at the end of a step and exits the worker, and Ray restarts it
    if where[0] == 0 and where[1] in options.get("wait_at", ()) and is_first_time(directory / f"waiting-{where[1]}"):
        time.sleep(600)  # Ray kills this worker when it starts a different number of workers


def is_first_time(mark: Path) -> bool:
    if mark.exists():
        return False
    mark.touch()
    return True


def run(options: dict[str, Any], *, workers: list[int], address: str) -> None:
    """Train on several workers; if one is lost, Ray restarts all of them, up to ten times.

    With a range of workers, Ray also restarts them when machines have joined the cluster.
    """
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def work(options: dict[str, Any]) -> None:
        train(options)  # the weights would have to be transferred

    local = {"num_cpus": workers[-1], "include_dashboard": False} if address == "local" else {}
    ray.init(address, log_to_driver=False, **local)
    trainer = TorchTrainer(
        work,
        train_loop_config=options,
        torch_config=TorchConfig(backend="gloo"),  # "nccl" on GPUs
        scaling_config=ScalingConfig(
            num_workers=(workers[0], workers[-1]) if len(workers) > 1 else workers[0],
            resources_per_worker={"CPU": 1},
            elastic_resize_monitor_interval_s=options.get("resize_interval", 60.0),
        ),
        run_config=RunConfig(storage_path=f"{options['directory']}/ray", failure_config=FailureConfig(max_failures=10)),
    )
    trainer.fit()
    ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description="train on Ray workers that may exit at any time")
    parser.add_argument("--workers", type=int, nargs="+", default=[2], metavar="N", help="how many, or min and max")
    parser.add_argument("--address", default="local", help="of a Ray cluster (default: start one on this machine)")
    parser.add_argument("--resize-interval", type=float, default=60.0, metavar="SECONDS", help="between room checks")
    parser.add_argument(
        "--kill-at", type=int, metavar="STEP", help="the step after which the second worker is lost, once"
    )
    parser.add_argument(
        "--stop-at", type=int, metavar="STEP", help="the step after which the first worker is preempted, once"
    )
    parser.add_argument(
        "--wait-at", type=int, nargs="+", default=[], metavar="STEP", help="wait after these steps for a resize"
    )
    parser.add_argument(
        "--directory", help="for the checkpoints, shared by all workers (default: a temporary directory)"
    )
    settings = vars(parser.parse_args())
    workers, address = settings.pop("workers"), settings.pop("address")
    with tempfile.TemporaryDirectory() as temporary:
        settings["directory"] = directory = settings["directory"] or temporary
        run(settings, workers=workers, address=address)
        executed = (Path(directory) / "executed.csv").read_text().splitlines()
        groups = (Path(directory) / "workers.txt").read_text().split()
        print(f"{sum(not line.startswith('#') for line in executed) - 1} updates on {', '.join(groups)} workers")


if __name__ == "__main__":
    main()
