"""Ray: a pool of its nodes for ``vbs cluster run``, and goodput as resource allocation function of Ray Tune."""

from collections.abc import Sequence
from typing import Any

from variable_batch_size.checks import imported_extra
from variable_batch_size.cluster.processes import Command, Polled, Processes
from variable_batch_size.policies.allocation import Job, allocate
from variable_batch_size.policies.hints import FORMAT, Hints

with imported_extra("ray", f"{__name__} needs ray", "cluster"):
    import ray
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_SECONDS_TO_PLACE = 5.0
_SECONDS_TO_ANSWER = 60.0


class RayPool:
    """The CPUs of a Ray cluster: that at an address, or a new local one."""

    def __init__(self, address: str | None = None, *, cores: int | None = None) -> None:
        self._is_own = not ray.is_initialized()
        if self._is_own:
            where: dict[str, Any] = {"address": address} if address else {"num_cpus": cores, "address": "local"}
            ray.init(log_to_driver=False, include_dashboard=None if address else False, **where)

    def nodes(self) -> list[int]:
        found = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        return [cores for cores in found if cores]

    def start(self, command: Command, *, cores: int, num_nodes: int) -> "RayGroup | None":
        """An actor on each node, which starts the processes there; None if Ray has no room for them yet."""
        shares = [len(range(node, cores, num_nodes)) for node in range(num_nodes)]
        strategy = "STRICT_SPREAD" if num_nodes > 1 else "STRICT_PACK"
        group = placement_group([{"CPU": share} for share in shares], strategy=strategy)
        if not group.wait(_SECONDS_TO_PLACE):
            remove_placement_group(group)
            return None
        try:
            return RayGroup(group, command, shares)
        except ray.exceptions.RayError:  # the node has left since
            remove_placement_group(group)
            return None

    def request(self, num_nodes: int, node_cores: int) -> None:
        """Pass a size to Ray's autoscaler, which starts or ends nodes where it runs."""
        from ray.autoscaler.sdk import request_resources

        request_resources(bundles=[{"CPU": node_cores}] * num_nodes)

    def close(self) -> None:
        if self._is_own:
            ray.shutdown()


class RayGroup:
    """A job on Ray: an actor for each of its nodes."""

    def __init__(self, group: PlacementGroup, command: Command, shares: Sequence[int]) -> None:
        self._group = group
        remote = ray.remote(Processes)
        self._actors = [
            remote.options(
                num_cpus=share,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote()
            for index, share in enumerate(shares)
        ]
        master = ray.get(self._actors[0].address.remote())
        starts, first = [], 0
        for actor, share in zip(self._actors, shares, strict=True):
            given = {"cores": share, "first_rank": first, "world_size": sum(shares), "master": master}
            starts.append(actor.start.remote(command, **given))
            first += share
        ray.get(starts)

    def poll(self) -> Polled:
        try:
            answers = [actor.poll.remote() for actor in self._actors]
            found = [Polled(*one) for one in ray.get(answers, timeout=_SECONDS_TO_ANSWER)]
        except ray.exceptions.RayError:  # an actor, its worker or its node has gone
            return Polled(None, is_lost=True)
        output = b"".join(one.output for one in found)
        codes = [code for one in found for code in one.codes or ()]
        if any(code not in (0, 75) for code in codes):  # the other nodes would wait for those that have gone
            self.kill()
            return Polled(tuple(codes), output)
        return Polled(None if any(one.codes is None for one in found) else tuple(codes), output)

    def stop(self) -> None:
        for actor in self._actors:
            actor.stop.remote()

    def kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)  # its processes end with it
        remove_placement_group(self._group)

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
    jobs = []
    for other in tune_controller.get_live_trials():
        found = (result if other is trial else other.last_result or {}).get("hints")
        now = int(other.placement_group_factory.required_resources.get("CPU", 1)) or 1
        if isinstance(found, dict) and found.get("format") == FORMAT and found.get("goodput"):
            given = {name: found[name] for name in Hints.__dataclass_fields__ if name in found}
            hints = Hints(**given)
            most = max(hints.min_cores, min(hints.max_cores, max(nodes, default=1)))  # a trial does not span nodes
            speeds = [hints.speed(cores) for cores in range(1, most + 1)]
            restart = hints.restart_seconds or 0.0
            given = {"min_cores": hints.min_cores, "cores": now, "work": hints.work_left, "restart_seconds": restart}
            jobs.append(Job(name=other.trial_id, speeds=speeds, **given))
        else:
            speeds = [0.0] * (now - 1) + [1.0]
            jobs.append(Job(name=other.trial_id, speeds=speeds, min_cores=now, cores=now))
    cores = allocate(jobs, [cores for cores in nodes if cores]).cores.get(trial.trial_id)
    now = int(trial.placement_group_factory.required_resources.get("CPU", 1))
    return None if cores is None or cores == now else PlacementGroupFactory([{"CPU": cores}])
