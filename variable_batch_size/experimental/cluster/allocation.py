"""Allocation: which job gets how many cores of a pool, by what another core is worth to each.

The speed-up of a job is its speed on its cores, divided by its speed on an equal share of the pool. The allocation
maximizes the mean of all speed-ups with the power p (Qiao et al. 2021): p = 1 for the most work, −1 for fairer shares.

    maximize Σ_j f(s_j),   f(s) = (s^p − 1)/p,   log(s) for p = 0,   s = speed(cores) / speed(equal share)

A change of cores costs a restart, so its speed-up is multiplied by 1 − restart/window. The window ends with the job or
at the horizon. It is also no longer than the job has had its cores, because a change can be expected to last that long:
if measured speeds vary by a fraction x, jobs lose at most about x of their time to restarts, however often the pool
decides.

On several nodes, a job has a part of one node, or several full nodes. So a job that spans nodes shares none of them.
Because the sizes of parts divide each other, jobs that fit into all nodes of a size together can also be placed on the
single nodes. This makes it an integer program with one choice per job.

If there are not enough cores for all jobs, many choices are about equally good. So the worth of a job is multiplied by
1 + short_first / (1 + its seconds left / horizon), which prefers the choice that lets jobs end first. A job of unknown
length counts as short; its length is known soon.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from variable_batch_size.checks import (
    check_not_negative_number,
    check_positive,
    check_positive_number,
    import_extra,
    is_number,
)

Placement = Mapping[int, int]  # the cores of a job on each node
_MOST_EXACT = 100  # jobs in an integer program
_SECONDS_TO_SOLVE = 10.0
_LEAST_POWER = -10
_MOST_TRIES = 1_000  # to put jobs on nodes


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as an allocation sees it.

    >>> job = Job(name="a", speeds=(1.0, 1.8, 2.4))
    >>> job.max_cores, job.speed(2), job.speed(8), job.seconds(2)
    (3, 1.8, 2.4, None)
    """

    name: str
    speeds: Sequence[float]  # on 1, 2, … cores, such as goodput
    min_cores: int = 1
    cores: int = 0  # that it has now
    since: float = math.inf  # the seconds for which it has had them
    wanted: int | None = None  # cores that its user has asked for; None for the most that it can use
    work: float | None = None  # left to do, in units of speed · seconds; None if not known
    restart_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_positive(min_cores=self.min_cores)
        if not self.speeds or not all(0 <= speed < math.inf for speed in self.speeds) or not max(self.speeds):
            raise ValueError(f"job {self.name}: `speeds` must be non-negative and not all 0, got {self.speeds!r}")
        if self.min_cores > len(self.speeds):
            raise ValueError(f"job {self.name}: `min_cores` must be at most {len(self.speeds)}, got {self.min_cores}")

    @property
    def max_cores(self) -> int:
        return len(self.speeds)

    def speed(self, cores: float) -> float:
        """The speed on this many cores: linear between numbers of cores, and constant beyond the most cores."""
        if cores >= self.max_cores:
            return self.speeds[-1]
        below = math.floor(cores)
        low, high = 0.0 if below == 0 else self.speeds[below - 1], self.speeds[below]
        return low + (cores - below) * (high - low)

    def seconds(self, cores: int) -> float | None:
        """The seconds until its end on this many cores."""
        return None if self.work is None else math.inf if not self.speed(cores) else self.work / self.speed(cores)


@dataclass(frozen=True)
class Allocation:
    """The cores of each job that has some."""

    cores: Mapping[str, int]
    gap: float = 0.0  # at most this fraction below the best; 0 if it is the best
    value: float = 0.0  # of the jobs' worth above that of an idle pool
    why: Mapping[str, str] = field(default_factory=dict)  # a reason for each job
    kinds: Mapping[str, int] = field(default_factory=dict)  # the cores of a node of the kind on which each job fits


class _Option(NamedTuple):
    kind: int  # cores of a node of the kind that it is on
    slot: int  # cores that it takes
    cores: int  # cores that the job uses
    gain: float = 0.0  # over waiting


def slots(node_cores: int, num_nodes: int) -> list[int]:
    """The numbers of cores that a job can have on this many nodes of one size.

    >>> slots(4, 3), slots(6, 2), slots(3, 1)
    ([1, 2, 4, 8, 12], [1, 3, 6, 12], [1, 2, 3])
    """
    if num_nodes == 1:
        return list(range(1, node_cores + 1))
    parts = [node_cores]
    while parts[0] > 1:
        parts.insert(0, parts[0] // next(number for number in range(2, parts[0] + 1) if parts[0] % number == 0))
    return parts + [node_cores * number for number in range(2, num_nodes + 1)]


def _options(job: Job, kinds: Mapping[int, int]) -> list[_Option]:
    """Each number of cores that the job can use or has now, in the smallest slot of each kind of node."""
    found = []
    for node_cores, num_nodes in kinds.items():
        largest = 0
        for slot in slots(node_cores, num_nodes):
            for cores in sorted({min(slot, job.max_cores), min(job.cores, slot)}):
                if largest < cores <= job.max_cores and cores >= job.min_cores:
                    found.append(_Option(node_cores, slot, cores))
            largest = min(slot, job.max_cores)
    return found


def check_fits(jobs: Iterable[Job], nodes: Sequence[int]) -> None:
    """ValueError for a job that needs more cores than there are."""
    for job in jobs:
        if not _options(job, Counter(nodes)):
            has = f"{sum(nodes)} cores on {len(nodes)} node{'s' if len(nodes) > 1 else ''}"
            raise ValueError(f"job {job.name} needs at least {job.min_cores} cores, but the pool has {has}")


def allocate(
    jobs: Sequence[Job],
    nodes: Sequence[int],
    *,
    power: float = -1.0,
    horizon_seconds: float = 600.0,
    short_first: float = 0.25,
    exact: bool = True,
) -> Allocation:
    """The cores of each job for the largest power mean of speed-ups, net of restarts.

    Args:
        jobs: all that run or wait; those for which there is no room wait.
        nodes: the cores of each node.
        power: p, from -10 to 1; smaller values are fairer. For p ≤ 0, a waiting job counts as if it ran at half the
            speed of its fewest cores.
        horizon_seconds: the time in which a restart must pay off.
        short_first: how much more a job is worth if it is about to end; 0 for the mean of speed-ups alone.
        exact: if there are at most 100 jobs, solve the integer program for at most 10 seconds; otherwise allocate step
            by step. A result that might not be the best has its `gap`.

    >>> jobs = [Job(name="a", speeds=(1.0, 1.9, 2.7, 3.4)), Job(name="b", speeds=(1.0, 1.1, 1.1, 1.1))]
    >>> allocate(jobs, [4]).cores
    {'a': 3, 'b': 1}
    """
    check_positive_number(horizon_seconds=horizon_seconds)
    check_not_negative_number(short_first=short_first)
    check_power(power)
    names = Counter(job.name for job in jobs)
    if names and max(names.values()) > 1:
        raise ValueError(f"jobs must have different names, got {names.most_common(1)[0][0]!r} twice")
    kinds = Counter(nodes)
    share = max(1.0, sum(nodes) / max(len(jobs), 1))
    choices = {}
    for job in jobs:
        weight = 1 + short_first / (1 + (job.seconds(job.min_cores) or 0.0) / horizon_seconds)
        if job.cores:  # waiting would cost a restart later
            weight *= 1 + _restart_share(job, job.cores, horizon_seconds)
        options = _worth(job, _options(job, kinds), share, power, horizon_seconds)
        choices[job.name] = [option._replace(gain=weight * option.gain) for option in options]
    solve = _integer_program if exact and len(jobs) <= _MOST_EXACT else _step_by_step
    taken, gap = solve(choices, kinds)
    cores = {name: option.cores for name, option in taken.items()}
    why = {job.name: _reason(job, cores.get(job.name, 0), share) for job in jobs}
    worth, on = sum(option.gain for option in taken.values()), {name: option.kind for name, option in taken.items()}
    return Allocation(cores, gap, worth, why, on)


def check_power(power: float) -> None:
    """ValueError for a power of speed-ups that is out of range."""
    if not (is_number(power) and _LEAST_POWER <= power <= 1):
        raise ValueError(f"`power` must be a number from {_LEAST_POWER} to 1, got {power!r}")


def _worth(job: Job, options: list[_Option], share: float, power: float, horizon: float) -> list[_Option]:
    """The options with their gains over waiting; those without a gain are left out."""
    fair = job.speed(max(share, job.min_cores)) or max(job.speeds)
    fewest = next((speed for speed in job.speeds[job.min_cores - 1 :] if speed > 0), 0.0)
    waiting = 0.0 if power > 0 else 0.5 * fewest / fair

    def value(speedup: float) -> float:
        return math.log(speedup) if power == 0 else (speedup**power - 1) / power

    found = []
    for option in options:
        speedup = job.speed(option.cores) / fair
        if job.cores and option.cores != job.cores:
            speedup *= 1 - _restart_share(job, option.cores, min(horizon, job.since))
        if speedup > waiting:
            found.append(option._replace(gain=value(speedup) - value(waiting)))
    return found


def _restart_share(job: Job, cores: int, horizon: float) -> float:
    """A restart as a fraction of the time in which it must pay off: until the horizon, or the end of the job."""
    restart, left = job.restart_seconds, job.seconds(cores)
    return restart and restart / max(restart, min(horizon, math.inf if left is None else restart + left))


def _reason(job: Job, cores: int, share: float) -> str:
    if not cores:
        return "waits: its cores are worth more to others"
    speedup = job.speed(cores) / (job.speed(max(share, job.min_cores)) or max(job.speeds))
    if cores >= job.max_cores:
        return f"speed-up {speedup:.2f} over an equal share"
    more = 100 * (job.speed(cores + 1) / job.speed(cores) - 1)
    return f"speed-up {speedup:.2f} over an equal share, {more:+.0f} % with one more"


def _integer_program(
    choices: Mapping[str, list[_Option]], kinds: Mapping[int, int]
) -> tuple[dict[str, _Option], float]:
    """Choose at most one option of each job, within the cores of each kind of node."""
    flat = [(name, option) for name, options in choices.items() for option in options]
    if not flat:
        return {}, 0.0
    optimize = import_extra("scipy.optimize", "an exact allocation needs scipy", "cluster")
    sparse = import_extra("scipy.sparse", "an exact allocation needs scipy", "cluster")
    rows = {name: row for row, name in enumerate([*choices, *kinds])}
    cells = [(rows[name], column, 1) for column, (name, _) in enumerate(flat)]
    cells += [(rows[option.kind], column, option.slot) for column, (_, option) in enumerate(flat)]
    row, column, values = zip(*cells, strict=True)
    table = sparse.csr_array((values, (row, column)), shape=(len(rows), len(flat)))
    limits = [1] * len(choices) + [node_cores * number for node_cores, number in kinds.items()]
    result = optimize.milp(
        [-option.gain for _, option in flat],
        constraints=optimize.LinearConstraint(table, ub=limits),
        integrality=[1] * len(flat),
        bounds=optimize.Bounds(0, 1),
        options={"mip_rel_gap": 0.0, "time_limit": _SECONDS_TO_SOLVE},
    )
    if result.x is None:  # not even a first solution in this time
        return _step_by_step(choices, kinds)
    gap = 0.0 if result.success else float(result.mip_gap)
    return {name: option for (name, option), taken in zip(flat, result.x, strict=True) if taken > 0.5}, gap


def suggest_nodes(
    jobs: Sequence[Job], node_cores: int, *, price: float, worth: float, max_nodes: int
) -> tuple[int, str]:
    """The number of nodes with the largest worth net of their price, and why.

    An hour of a job at its speed on one core is worth `worth`; a core costs `price` an hour.

    >>> jobs = [Job(name="a", speeds=[1.0, 1.9, 2.6, 3.0])]
    >>> suggest_nodes(jobs, 1, price=0.5, worth=1.0, max_nodes=8)
    (3, 'one more brings 0.40 an hour and costs 0.50')
    """
    check_positive_number(price=price, worth=worth)
    check_positive(node_cores=node_cores, max_nodes=max_nodes)
    if not jobs:
        return 0, "there are no jobs"
    at_once = [_work_per_second(jobs, node_cores, number) for number in range(max_nodes + 1)]
    cost = price * node_cores
    number = max(range(max_nodes + 1), key=lambda n: (worth * at_once[n] - n * cost, n))
    if number == max_nodes:
        brings = worth * (at_once[number] - at_once[number - 1])
        return number, f"the last one brings {brings:.2f} an hour and costs {cost:.2f}"
    brings = worth * (at_once[number + 1] - at_once[number])
    return number, f"one more brings {brings:.2f} an hour and costs {cost:.2f}"


def _work_per_second(jobs: Sequence[Job], node_cores: int, num_nodes: int) -> float:
    """What all jobs do, in seconds of work on one core."""
    fitting = [job for job in jobs if num_nodes and _options(job, {node_cores: num_nodes})]
    if not fitting:
        return 0.0
    cores = allocate(fitting, [node_cores] * num_nodes, power=1.0).cores
    return sum(job.speed(cores.get(job.name, 0)) / (job.speeds[0] or max(job.speeds)) for job in fitting)


def _step_by_step(choices: Mapping[str, list[_Option]], kinds: Mapping[int, int]) -> tuple[dict[str, _Option], float]:
    """The largest gain per core first, along the concave hull of each job; and how far below the best this may be.

    If steps could be made in part, the best would be reached when the pool is full: an upper bound.
    """
    steps = []
    for name, options in choices.items():
        before = _Option(0, 0, 0)
        for option in _hull(options):
            steps.append(((option.gain - before.gain) / (option.slot - before.slot), name, before, option))
            before = option
    steps.sort(key=lambda step: -step[0])
    free, taken = {kind: kind * number for kind, number in kinds.items()}, dict[str, _Option]()
    total, bound = sum(free.values()), 0.0
    for rate, name, before, option in steps:
        part = min(option.slot - before.slot, total)
        total, bound = total - part, bound + rate * part
        if taken.get(name, _Option(0, 0, 0)) != before:
            continue  # an earlier step of the job did not fit
        for other in sorted((o for o in choices[name] if o.cores == option.cores), key=lambda o: free[o.kind]):
            returned = before.slot if before.slot and before.kind == other.kind else 0
            if other.slot - returned <= free[other.kind]:
                if before.slot:
                    free[before.kind] += before.slot
                free[other.kind] -= other.slot
                taken[name] = other
                break
    value = sum(option.gain for option in taken.values())
    return taken, 0.0 if bound <= 0 else max(0.0, 1 - value / bound)


def _hull(options: Iterable[_Option]) -> list[_Option]:
    """The options on the concave hull of gains over slots, from the smallest on."""
    hull = [_Option(0, 0, 0)]
    for option in sorted(options, key=lambda option: (option.slot, -option.gain)):
        while len(hull) > 1 and _rate(hull[-2], hull[-1]) <= _rate(hull[-2], option):
            hull.pop()
        if option.slot > hull[-1].slot and option.gain > hull[-1].gain:
            hull.append(option)
    return hull[1:]


def _rate(first: _Option, second: _Option) -> float:
    return (second.gain - first.gain) / (second.slot - first.slot) if second.slot > first.slot else -math.inf


# ------------------------------------------------------------------------------------------ policies for comparison


def first_come(jobs: Sequence[Job], nodes: Sequence[int], **_: Any) -> Allocation:
    """Each job in turn gets what it wants; if one must wait, all after it wait."""
    return _in_turn(jobs, nodes, lambda job: job.wanted or job.max_cores, is_strict=True)


def shortest_first(jobs: Sequence[Job], nodes: Sequence[int], **_: Any) -> Allocation:
    """The job that would end first gets what it wants, then the next; those of unknown length are last."""

    def seconds(job: Job) -> float:
        left = job.seconds(job.wanted or job.max_cores)
        return math.inf if left is None else left

    return _in_turn(sorted(jobs, key=seconds), nodes, lambda job: job.wanted or job.max_cores)


def equal_shares(jobs: Sequence[Job], nodes: Sequence[int], **_: Any) -> Allocation:
    """Every job gets the same number of cores; the remaining cores go to the first jobs."""
    each, rest = divmod(sum(nodes), max(len(jobs), 1))
    shares = {job.name: each + (number < rest) for number, job in enumerate(jobs)}
    return _in_turn(jobs, nodes, lambda job: max(shares[job.name], job.min_cores))


ALLOCATIONS: dict[str, Callable[..., Allocation]] = {
    "goodput": allocate,
    "fifo": first_come,
    "equal": equal_shares,
    "shortest": shortest_first,
}


def _in_turn(
    jobs: Sequence[Job], nodes: Sequence[int], wanted: Callable[[Job], int], *, is_strict: bool = False
) -> Allocation:
    """Give each job the largest number of cores, up to what it wants, that is free."""
    free, kinds = {kind: kind * number for kind, number in Counter(nodes).items()}, Counter(nodes)
    cores, on = dict[str, int](), dict[str, int]()
    for job in jobs:
        fitting = [o for o in _options(job, kinds) if o.slot <= free[o.kind]]
        at_most = [o for o in fitting if o.cores <= max(wanted(job), job.min_cores)]
        if at_most:
            best = max(at_most, key=lambda option: (option.cores, -option.slot, -free[option.kind]))
            cores[job.name], on[job.name] = best.cores, best.kind
            free[best.kind] -= best.slot
        elif is_strict:
            break
    return Allocation(cores, kinds=on)


def place(
    cores: Mapping[str, int],
    nodes: Sequence[int],
    present: Mapping[str, Placement] | None = None,
    kinds: Mapping[str, int] | None = None,
) -> dict[str, dict[int, int]]:
    """Put the jobs of an allocation on nodes; jobs whose number of cores has not changed stay where they are.

    They move only if others would not fit otherwise: the smallest ones first. With the `kinds` of the allocation, there
    is always room.

    >>> place({"a": 2, "b": 4, "c": 1}, [4, 4], {"c": {1: 1}})
    {'c': {1: 1}, 'b': {0: 4}, 'a': {1: 2}}
    """
    kept = {name: dict(where) for name, where in (present or {}).items() if sum(where.values()) == cores.get(name)}
    while True:
        free = list(nodes)
        for where in kept.values():
            for node, number in where.items():
                free[node] -= number
        found = dict(kept)
        rest = sorted((name for name in cores if name not in kept), key=lambda name: -cores[name])
        if min(free, default=0) >= 0 and _put(rest, cores, free, nodes, found, [_MOST_TRIES]):
            return found
        if not kept:
            break
        del kept[min(kept, key=lambda name: cores[name])]
    found = {}
    if kinds is None or not _put(rest, cores, list(nodes), nodes, found, [_MOST_TRIES], kinds):
        raise ValueError(f"the nodes with {list(nodes)} cores have no room for jobs of {sorted(cores.values())}")
    return found


def _put(
    names: Sequence[str],
    cores: Mapping[str, int],
    free: list[int],
    nodes: Sequence[int],
    found: dict[str, dict[int, int]],
    left: list[int],
    kinds: Mapping[str, int] | None = None,
) -> bool:
    """Put jobs on nodes, each in the first way that lets all others fit, within the number of tries `left`."""
    if not names:
        return True
    for where in _ways(cores[names[0]], free, nodes, None if kinds is None else kinds[names[0]]):
        left[0] -= 1
        if left[0] < 0:
            return False
        before = list(free)
        for node, number in where.items():
            free[node] = 0 if len(where) > 1 else free[node] - number  # a job that spans nodes shares none
        found[names[0]] = where
        if _put(names[1:], cores, free, nodes, found, left, kinds):
            return True
        free[:] = before
        del found[names[0]]
    return False


def _ways(number: int, free: Sequence[int], nodes: Sequence[int], kind: int | None) -> Iterator[dict[int, int]]:
    """Where a job may be put: a node with room, the fullest first, or empty nodes of one size; of a `kind` if given."""
    kinds = {*nodes} if kind is None else {kind}
    rooms = {
        (left, nodes[node]): node
        for node, left in reversed([*enumerate(free)])
        if left >= number and nodes[node] in kinds
    }
    for _, node in sorted(rooms.items()):
        yield {node: number}
    for size in sorted(kinds, reverse=True):
        empty = [node for node, left in enumerate(free) if left == nodes[node] == size]
        if size < number <= len(empty) * size:
            own = empty[: -(-number // size)]
            yield {node: min(size, number - index * size) for index, node in enumerate(own)}
