"""Process groups: TorchTPU's own with one process, as the plugin has no links between processes; and two over gloo."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch_tpu_runs as runs

SCRIPT = Path(runs.__file__).with_name("torch_tpu_launch.py")
STAGED = SCRIPT.with_name("torch_tpu_staged.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]


def start(*arguments):
    root = SCRIPT.parents[2]
    path = os.pathsep.join([str(root), str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, *map(str, arguments)]
    output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read later; a full pipe would stop the process)
    return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT), output


def results_of(process, output):
    process.wait(timeout=600)
    output.seek(0)
    lines = output.read().splitlines()
    output.close()
    text = "\n".join(lines)
    assert process.returncode == 0, text[-4000:]
    return [json.loads(line.split(" ", 1)[1]) for line in lines if line.startswith("RESULT ")]


def check(weights, run):
    expected = runs.train("cpu", *run)["state"]
    found = {key: torch.tensor(value) for key, value in weights.items()}
    assert runs.largest_difference(found, expected) < 1e-5


def test_two_processes_have_the_weights_of_one_and_a_sum_a_step(tmp_path):
    """Over gloo and the host, in place of TorchTPU's process group."""
    names = ["linear", "adascale", "adam"]
    processes = [start(STAGED, rank, 2, tmp_path / "store", *names) for rank in range(2)]
    for results in [results_of(*process) for process in processes]:
        for name, result in zip(names, results, strict=True):
            check(result["weights"], runs.FUSED[name])
            assert sum(result["programs"][runs.WARM_UP :]) == 0, result["programs"]
            assert result["num_reduced"] <= runs.NUM_STEPS + 2  # at the start, settings and weights are compared


@pytest.mark.parametrize(
    "arguments",
    [(SCRIPT, "tpu_dist"), (SCRIPT, "tpu_dist", 1), (*TORCHRUN, "--nproc-per-node=1", SCRIPT, "default")],
    ids=["launch", "launch on one core", "torchrun"],
)
def test_one_process_trains_in_a_process_group_of_torch_tpu(arguments):
    (result,) = results_of(*start(*arguments))
    assert result["backend"] in ("tpu_dist", "tpu")
    assert result["world"] == 1
    assert result["total"] == [1, 1, 1]
    assert (result["environment"]["RANK"], result["environment"]["WORLD_SIZE"]) == ("0", "1")
    for name, programs in result["programs"].items():
        assert sum(programs[runs.WARM_UP :]) == 0, programs
        check(result["weights"][name], runs.RUNS[name])


def test_processes_of_torchrun_agree_on_a_port_for_each():
    """In a group, several of them would need a device that knows the others, which the plugin has not."""
    one, other = results_of(*start(*TORCHRUN, "--nproc-per-node=2", SCRIPT, "environment"))
    assert one == other
    addresses = one["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")
    assert len(set(addresses)) == 2
    assert all(address.startswith("localhost:") for address in addresses)
