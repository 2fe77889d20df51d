"""Ray: a pool of its nodes for ``vbs cluster run``, and goodput as a resource allocation function for Ray Tune."""

import time
from collections.abc import Mapping
from typing import Any

from variable_batch_size.checks import imported_extra
from variable_batch_size.experimental.cluster.allocation import Job, allocate
from variable_batch_size.experimental.cluster.processes import SECONDS_TO_END, STOPPED, Command, Polled, Processes
from variable_batch_size.policies.hints import Hints

with imported_extra("ray", f"{__name__} needs ray", "cluster"):
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_SECONDS_TO_ANSWER = 60.0


class RayPool:
    """The CPUs of a Ray cluster: the one at an address, or a new local one."""

    def __init__(self, address: str | None = None, *, cores: int | None = None) -> None:
        self._is_own = not ray.is_initialized()
        if self._is_own:
            where: dict[str, Any] = {"address": address} if address else {"num_cpus": cores, "address": "local"}
            ray.init(log_to_driver=False, include_dashboard=None if address else False, **where)

    def nodes(self) -> dict[str, int]:
        found = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]}
        return {name: cores for name, cores in found.items() if cores}

    def start(self, command: Command, where: Mapping[str, int]) -> "RayGroup":
        """An actor on each node, which starts the processes there as soon as Ray has room for it."""
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        return RayGroup(command, where, hosts[next(iter(where))])

    def request(self, num_nodes: int, node_cores: int) -> None:
        """Pass a size to Ray's autoscaler, which starts or ends nodes where it runs."""
        from ray.autoscaler.sdk import request_resources

        request_resources(bundles=[{"CPU": node_cores}] * num_nodes)

    def close(self) -> None:
        if self._is_own:
            ray.shutdown()


class RayGroup:
    """A job on Ray: an actor for each of its nodes."""

    def __init__(self, command: Command, where: Mapping[str, int], host: str) -> None:
        remote, first = ray.remote(Processes), 0
        self._actors = [
            remote.options(
                num_cpus=cores, max_restarts=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote()
            for node, cores in where.items()
        ]
        port = self._actors[0].free_port.remote()  # each actor waits for it, and this process does not
        for actor, cores in zip(self._actors, where.values(), strict=True):
            given = {"cores": cores, "first_rank": first, "world_size": sum(where.values()), "host": host, "port": port}
            actor.start.remote(command, **given)
            first += cores
        self._asked_at, self._has_answered = 0.0, False
        self._ask()

    def _ask(self) -> None:
        self._asked_at, self._answers = time.monotonic(), [actor.poll.remote() for actor in self._actors]

    def poll(self) -> Polled:
        """The latest answers of all actors; those that wait for room have not answered yet."""
        try:
            ready, waiting = ray.wait(self._answers, num_returns=len(self._answers), timeout=0)
            found = [Polled(*one) for one in ray.get(ready)]
        except ray.exceptions.RayError:  # an actor, its worker or its node has gone
            return Polled(None, is_lost=True)
        if waiting:
            is_late = self._has_answered and time.monotonic() - self._asked_at > _SECONDS_TO_ANSWER
            return Polled(None, is_lost=is_late)
        self._has_answered = True
        self._ask()
        output = b"".join(one.output for one in found)
        codes = tuple(code for one in found for code in one.codes or ())
        # after an error the other nodes would wait for those that have gone
        has_failed = any(code not in (0, STOPPED) for code in codes)
        return Polled(codes if has_failed or all(one.codes is not None for one in found) else None, output)

    def stop(self) -> None:
        for actor in self._actors:
            actor.stop.remote()

    def kill(self) -> None:
        if self._has_answered:  # all have started their processes
            ended = [actor.kill.remote() for actor in self._actors]
            ray.wait(ended, num_returns=len(ended), timeout=3 * SECONDS_TO_END)
        for actor in self._actors:
            ray.kill(actor)  # its processes end with it

    def worker_pids(self) -> list[int]:
        """The training processes, for tests that kill them."""
        return [pid for pids in ray.get([actor.pids.remote() for actor in self._actors]) for pid in pids]


def goodput_allocation(tune_controller: Any, trial: Any, result: dict[str, Any], scheduler: Any) -> Any:
    """For Tune's ``ResourceChangingScheduler``: the CPUs of a trial, by what they are worth to all trials.

        scheduler = ResourceChangingScheduler(resources_allocation_function=goodput_allocation)

    Trials report ``{"hints": optimizer.hints(), …}``. Those without hints keep their resources.
    """
    from ray.tune.execution.placement_groups import PlacementGroupFactory

    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    jobs = [
        _as_job(other, (result if other is trial else other.last_result or {}).get("hints"), max(nodes, default=1))
        for other in tune_controller.get_live_trials()
    ]
    cores = allocate(jobs, [cores for cores in nodes if cores]).cores.get(trial.trial_id)
    factory = trial.placement_group_factory
    if cores is None or len(factory.bundles) > 1 or cores == _cores_of(trial):
        return None
    return PlacementGroupFactory([{**factory.bundles[0], "CPU": cores}])


def _cores_of(trial: Any) -> int:
    return int(trial.placement_group_factory.required_resources.get("CPU", 1)) or 1


def _as_job(trial: Any, found: Any, node_cores: int) -> Job:
    """What an allocation sees of a trial, which does not span nodes; without hints it keeps its cores."""
    now = _cores_of(trial)
    if isinstance(found, dict) and found.get("goodput"):
        hints = Hints.of(found, f"hints of trial {trial.trial_id}")
        speeds = [hints.speed(cores) for cores in range(1, max(hints.min_cores, min(hints.max_cores, node_cores)) + 1)]
        if any(speeds):
            given: dict[str, Any] = {"min_cores": hints.min_cores, "work": hints.work_left, "cores": now}
            return Job(name=trial.trial_id, speeds=speeds, restart_seconds=hints.restart_seconds or 0.0, **given)
    return Job(name=trial.trial_id, speeds=[0.0] * (now - 1) + [1.0], min_cores=now, cores=now)
