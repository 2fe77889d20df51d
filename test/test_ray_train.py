"""Ray Train: the unchanged example with a lost and a preempted worker, also while nodes join and leave."""

import importlib.util
import subprocess
import sys
import time

import pytest
import torch
from documents import ROOT
from ray_cluster import ray_cluster
from torch.testing import assert_close

EXAMPLE = ROOT / "examples" / "ray_train.py"
SETTINGS = {
    "PYTHONWARNINGS": "ignore",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process for each group of workers, which nothing here uses
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}
# Ray looks for nodes that have joined or left every 20 s; this makes it look whenever it gets a line
LOOK_FOR_NODES = """
import sys, ray
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import get_or_create_autoscaling_coordinator
ray.init(sys.argv[1], log_to_driver=False)
for line in sys.stdin:
    ray.get(get_or_create_autoscaling_coordinator().get_reserved_resources.remote("", recompute=True))
"""


def example():
    spec = importlib.util.spec_from_file_location("ray_train", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)


def assert_trained_like_one_process(directory, folder):
    assert (directory / "killed").exists()
    assert (directory / "stopped").exists()
    expected = example().train({"directory": str(folder)})
    assert_close(torch.load(directory / "weights.pt"), dict(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # of Ray and its dependencies
def test_lost_and_preempted_workers_resume_to_the_weights_of_one_process(tmp_path, monkeypatch, capsys):
    directory = tmp_path / "ray"
    directory.mkdir()
    with ray_cluster(monkeypatch, num_cpus=2) as cluster:
        options = ["--directory", str(directory), "--address", cluster.address, "--kill-at", "12", "--stop-at", "20"]
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *options])
        example().main()  # in this process, which has imported torch
    assert "30 updates on 2, 2, 2 workers" in capsys.readouterr().out
    assert_trained_like_one_process(directory, tmp_path / "one")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of Ray and its dependencies
def test_workers_that_join_leave_are_killed_or_preempted_resume_to_the_weights_of_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "10")  # with a worker on a node that has left
    directory = tmp_path / "ray"
    directory.mkdir()
    with ray_cluster(monkeypatch, num_cpus=1) as cluster:
        output = output_with_nodes_that_come_and_go(directory, cluster)
    assert "30 updates on 1, 2, 2, 2, 1 workers" in output
    assert_trained_like_one_process(directory, tmp_path / "one")


def output_with_nodes_that_come_and_go(directory, cluster):
    options = ["--directory", str(directory), "--address", cluster.address, "--workers", "1", "2"]
    options += ["--resize-interval", "0", "--wait-at", "5", "25", "--kill-at", "12", "--stop-at", "20"]
    running = subprocess.Popen([sys.executable, str(EXAMPLE), *options], stdout=subprocess.PIPE, text=True)
    command = [sys.executable, "-c", LOOK_FOR_NODES, cluster.address]
    looking = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)

    def wait_for(mark=None):
        # one check may come too early: it takes a while until a node is known, or known to be gone
        while running.poll() is None and not (mark and (directory / mark).exists()):
            print(file=looking.stdin, flush=True)
            time.sleep(1)

    try:
        wait_for("waiting-5")
        node = cluster.add_node(num_cpus=1, include_log_monitor=False)
        wait_for("waiting-25")
        cluster.remove_node(node, allow_graceful=False)
        wait_for()
        output, _ = running.communicate()
    finally:
        running.kill()
        looking.kill()
        looking.communicate()  # closes its pipe
    assert running.returncode == 0
    return output
