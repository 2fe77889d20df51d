"""A script that launches on TorchTPU's device over XLA's CPU plugin; a spawned process imports it, too.

python test/support/torch_tpu_launch.py BACKEND [CORES]

Under torchrun, "environment" as the backend prints TorchTPU's variables as launch() completes them, and trains nothing.
"""

# ruff: noqa: E402 (the device must be registered before torch is imported)

import torch_tpu_on_cpu

torch_tpu_on_cpu.start()

import json
import os
import sys

import torch
import torch.distributed as dist
import torch_tpu_runs as runs

import variable_batch_size as vbs
from variable_batch_size.cores import devices


def train(expected_backend):
    """One run in a process group of TorchTPU."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCH_TPU_TOPOLOGY")
    reduced = []
    original = dist.all_reduce

    def counted(tensor, *args, **options):
        reduced.append(tensor.device.type)
        return original(tensor, *args, **options)

    dist.all_reduce = counted
    results = {name: runs.train("tpu", *runs.RUNS[name]) for name in ("linear", "adascale")}
    total = torch.ones(3, device="tpu")
    dist.all_reduce(total)
    return {
        "backend": dist.get_backend(),
        "world": dist.get_world_size(),
        "environment": {name: os.environ.get(name) for name in names},
        "total": total.tolist(),
        "reduced": len(reduced),
        "programs": {name: result["programs"] for name, result in results.items()},
        "weights": {
            name: {key: value.tolist() for key, value in result["state"].items()} for name, result in results.items()
        },
    }


if __name__ == "__main__":
    if sys.argv[1] == "environment":
        with devices.completed_environment("tpu_dist"):
            found = {name: value for name, value in os.environ.items() if name.startswith("TORCH_TPU_")}
        print("RESULT", json.dumps(found))
        sys.exit()
    backend = None if sys.argv[1] == "default" else sys.argv[1]
    cores = int(sys.argv[2]) if len(sys.argv) > 2 else None
    for result in vbs.launch(train, (backend,), cores=cores, backend=backend):
        print("RESULT", json.dumps(result))
