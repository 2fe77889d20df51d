"""A cluster of Ray nodes on this machine, in separate processes, without those that no test uses."""

from contextlib import contextmanager

from documents import ROOT

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # idle processes, often without the environment that is asked for
    "RAY_worker_niceness": "0",  # instead of 15, with which they wait for minutes until other tests leave a core idle
}


@contextmanager
def ray_cluster(monkeypatch, num_cpus):
    """Starts one node; further ones with ``add_node(include_log_monitor=False)``."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    from ray.cluster_utils import Cluster

    unused = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": num_cpus, **unused})
    try:
        yield cluster
    finally:
        cluster.shutdown()
