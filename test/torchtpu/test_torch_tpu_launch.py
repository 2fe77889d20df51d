"""Process groups: that of TorchTPU with a single process, as several need the links of real TPUs; and two over gloo."""

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
REFUSED = "expected exactly one TPU device per PyTorch process"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]


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
    if process.returncode and REFUSED in text:
        pytest.xfail(f"TorchTPU over the CPU plugin: {REFUSED}")
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
    "arguments", [(SCRIPT, "tpu_dist"), (SCRIPT, "tpu_dist", 1), (*TORCHRUN, SCRIPT, "default")], ids=str
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
