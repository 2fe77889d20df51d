"""Train in a gloo group on TorchTPU's device: sums travel over the host, in place of the links between TPUs.

python test/support/torch_tpu_staged.py RANK WORLD_SIZE STORE NAME…
"""

# ruff: noqa: E402 (the device must be registered before torch is imported)

import torch_tpu_on_cpu

torch_tpu_on_cpu.start()

import json
import sys

import torch
import torch.distributed as dist
import torch_tpu_runs as runs


def stage(name):
    """Let a collective of gloo take tensors on the device; returns the list of those that it took."""
    original, taken = getattr(dist, name), []

    def call(tensor, *args, async_op=False, **options):
        if tensor.device.type != "tpu":
            return original(tensor, *args, async_op=async_op, **options)
        taken.append(tensor.numel())
        on_host = tensor.cpu()
        original(on_host, *args, **options)
        tensor.copy_(on_host)
        return None

    setattr(dist, name, call)
    return taken


if __name__ == "__main__":
    rank, world_size, store, *names = sys.argv[1:]
    torch.ones(1, device="tpu").cpu()  # starts TorchTPU's runtime, which would otherwise wait for links to all ranks
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world_size))
    reduced, _ = stage("all_reduce"), stage("broadcast")
    for name in names:
        reduced.clear()
        result = runs.train("tpu", *runs.FUSED[name])
        weights = {key: value.tolist() for key, value in result["state"].items()}
        print("RESULT", json.dumps({"programs": result["programs"], "weights": weights, "num_reduced": len(reduced)}))
