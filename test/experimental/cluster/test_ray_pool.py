"""A pool of Ray nodes: a job over two nodes, a killed worker, a node that leaves; and goodput for Ray Tune."""

import json
import os
import signal
import time
from types import SimpleNamespace

import cluster_job
import pytest
import ray
import torch
from documents import ROOT
from held import Hold
from ray_cluster import ray_cluster
from torch.testing import assert_close

import variable_batch_size as vbs
from variable_batch_size.experimental.cluster.ray import RayPool, goodput_allocation
from variable_batch_size.experimental.cluster.run import ClusterRun

SCRIPT = ROOT / "test" / "support" / "cluster_job.py"


@pytest.fixture
def cluster(monkeypatch):
    """Two nodes of one core each."""
    with ray_cluster(monkeypatch, num_cpus=1) as found:
        found.second_node = found.add_node(num_cpus=1, include_log_monitor=False)
        try:
            ray.init(address=found.address, log_to_driver=False)
            yield found
        finally:
            ray.shutdown()


def resources(*bundles):
    # imports for a second, which only the process that runs these tests has to spend
    from ray.tune.execution.placement_groups import PlacementGroupFactory

    return PlacementGroupFactory(list(bundles))


def trial(name, cores, hints=None):
    factory = resources({"CPU": cores})
    return SimpleNamespace(trial_id=name, placement_group_factory=factory, last_result={"hints": hints})


@pytest.mark.filterwarnings("ignore")
def test_trials_of_tune_share_cores_by_goodput(monkeypatch):
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0}}, {"Alive": False, "Resources": {"CPU": 4.0}}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    known = {"cores": 1, "min_cores": 1, "max_cores": 8, "restart_seconds": 1.0}
    good, poor = ((1.0, 1.9, 2.7, 3.4, 4.0, 4.5, 5.0, 5.5), (1.0,) * 8)
    scales, does_not = (vbs.policies.Hints(**known, goodput=row, throughput=row).as_dict() for row in (good, poor))
    trials = [trial("a", 1, scales), trial("b", 1, does_not)]
    controller = SimpleNamespace(get_live_trials=lambda: trials)
    assert goodput_allocation(controller, trials[0], {"hints": scales}, None).required_resources == {"CPU": 3}
    assert goodput_allocation(controller, trials[1], {"hints": does_not}, None) is None
    assert goodput_allocation(controller, trials[1], {}, None) is None
    trials[0].placement_group_factory = resources({"CPU": 1, "GPU": 1})
    assert goodput_allocation(controller, trials[0], {"hints": scales}, None).bundles == [{"CPU": 3, "GPU": 1}]
    trials[0].placement_group_factory = resources({"CPU": 1}, {"GPU": 1})
    assert goodput_allocation(controller, trials[0], {"hints": scales}, None) is None
    with pytest.raises(ValueError, match="hints of trial a: max_cores: must be a positive integer, got null"):
        goodput_allocation(controller, trials[0], {"hints": {**scales, "max_cores": None}}, None)
    trials[0] = trial("a", 1, scales)
    trials.pop()
    assert goodput_allocation(controller, trials[0], {"hints": scales}, None).required_resources == {"CPU": 4}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of Ray and its dependencies
def test_a_job_over_two_nodes_survives_a_killed_worker_and_a_node_that_leaves(cluster, tmp_path):
    text = f'[pool]\ninterval_seconds = 5\n[[job]]\nname = "a"\nscript = "{SCRIPT}"\ncheckpoint = "a"\n'
    hold = Hold(tmp_path / "hold")  # so that the job does not end before the node leaves
    options = ["--checkpoint", "{checkpoint}", "--pause", "0.02", "--progress", "200", "--hold", str(hold.folder)]
    text += f"args = {json.dumps(options)}\n"
    (tmp_path / "jobs.toml").write_text(text)
    pool = RayPool()
    run = ClusterRun(tmp_path / "jobs.toml", pool, tmp_path / "out")
    (job,) = run.jobs
    assert list(pool.nodes().values()) == [1, 1]
    steps, end, sizes = iter(("kill", "leave")), time.monotonic() + 600, []
    while job.state not in ("done", "failed") and time.monotonic() < end:
        run.tick()
        if job.state == "running" and job.newest() != job.mark:
            sizes.append(len(job.where))
            step = next(steps, None)
            if step == "kill":
                os.kill(job.group.worker_pids()[0], signal.SIGKILL)
            elif step == "leave":
                cluster.remove_node(cluster.second_node, allow_graceful=False)
                hold.release()
        time.sleep(0.1)
    assert job.state == "done" and job.kills >= 2
    assert sizes[0] == 2 and sizes[-1] == 1
    assert list(pool.nodes().values()) == [1]
    trace = str(tmp_path / "a" / "executed.csv")
    cluster_job.main(cluster_job.parser.parse_args(["--checkpoint", str(tmp_path / "alone"), "--trace", trace]))
    assert_close(*(torch.load(tmp_path / where / "weights.pt") for where in ("a", "alone")), rtol=0.0, atol=1e-12)
