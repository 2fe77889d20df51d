"""Ray Train: the unchanged example, with a lost and a preempted worker."""

import importlib.util
import os
import subprocess
import sys

import torch
from documents import ROOT
from torch.testing import assert_close

EXAMPLE = ROOT / "examples" / "ray_train.py"


def example():
    spec = importlib.util.spec_from_file_location("ray_train", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_killed_or_preempted_workers_resume_to_the_weights_of_one_process(tmp_path):
    directory = tmp_path / "ray"
    directory.mkdir()
    command = [sys.executable, str(EXAMPLE), "--directory", str(directory), "--kill-at", "12", "--stop-at", "20"]
    settings = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2", "RAY_TRAIN_METRICS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    settings |= {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300", "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {**os.environ, **settings, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "30 updates" in done.stdout
    assert (directory / "killed").exists()
    assert (directory / "stopped").exists()
    expected = example().train({"directory": str(tmp_path / "one")})
    assert_close(torch.load(directory / "weights.pt"), dict(expected), rtol=1e-6, atol=1e-6)
