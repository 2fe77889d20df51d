"""launch(backend="tpu_dist") and torchrun with a single process; several need the interconnect of real TPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_tpu_runs as runs

SCRIPT = Path(runs.__file__).with_name("torch_tpu_launch.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]


def run(*arguments):
    root = SCRIPT.parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{SCRIPT.parent}", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    found = [json.loads(line.split(" ", 1)[1]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, done.stderr[-4000:]
    return found


@pytest.mark.xfail(reason="over the CPU plugin: 'expected exactly one TPU device per PyTorch process'", strict=False)
@pytest.mark.parametrize(
    "arguments", [(SCRIPT, "tpu_dist"), (SCRIPT, "tpu_dist", 1), (*TORCHRUN, SCRIPT, "default")], ids=str
)
def test_one_process_trains_in_a_process_group_of_torch_tpu(arguments):
    (result,) = run(*arguments)
    assert result["backend"] in ("tpu_dist", "tpu")
    assert result["world"] == 1
    assert result["total"] == [1, 1, 1]
    assert (result["environment"]["RANK"], result["environment"]["WORLD_SIZE"]) == ("0", "1")
    for name, programs in result["programs"].items():
        assert sum(programs[runs.WARM_UP :]) == 0, programs
        expected = runs.train("cpu", *runs.RUNS[name])["state"]
        found = {key: torch.tensor(value) for key, value in result["weights"][name].items()}
        assert runs.largest_difference(found, expected) < 1e-5
