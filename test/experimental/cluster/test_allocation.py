"""Allocation: properties of any pool, the integer program against a search, and hand-computed numbers."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from variable_batch_size.experimental.cluster import allocation
from variable_batch_size.experimental.cluster.allocation import (
    ALLOCATIONS,
    Job,
    allocate,
    check_fits,
    equal_shares,
    first_come,
    place,
    shortest_first,
    slots,
    suggest_nodes,
)

curves = st.lists(st.floats(0.05, 1.5), min_size=1, max_size=12).map(lambda steps: tuple(itertools.accumulate(steps)))


@st.composite
def job_lists(draw, most=6):
    found = []
    for number in range(draw(st.integers(1, most))):
        speeds = draw(curves)
        found.append(
            Job(
                name=f"job {number}",
                speeds=speeds,
                min_cores=draw(st.integers(1, len(speeds))),
                cores=draw(st.integers(0, len(speeds))),
                work=draw(st.one_of(st.none(), st.floats(0, 1e4))),
                restart_seconds=draw(st.floats(0, 1000)),
            )
        )
    return found


pools = st.lists(st.integers(1, 8), min_size=1, max_size=4)
powers = st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0])


@settings(max_examples=30, deadline=None)
@given(jobs=job_lists(), nodes=pools, power=powers, name=st.sampled_from(["greedy", *ALLOCATIONS]))
def test_never_more_cores_than_there_are_never_below_a_minimum_and_always_placeable(jobs, nodes, power, name):
    if name == "greedy":
        found = allocate(jobs, nodes, power=power, exact=False)
    else:
        found = ALLOCATIONS[name](jobs, nodes, power=power)
    assert sum(found.cores.values()) <= sum(nodes)
    of = {job.name: job for job in jobs}
    assert all(of[name].min_cores <= cores <= of[name].max_cores for name, cores in found.cores.items())
    placed = place(found.cores, nodes, None, found.kinds)
    used = Counter()
    for job, where in placed.items():
        assert sum(where.values()) == found.cores[job]
        used.update(where)
    assert all(used[node] <= nodes[node] for node in used)
    for node in used:  # at most one job that spans nodes
        assert sum(len(where) > 1 and node in where for where in placed.values()) <= 1


def test_a_job_spans_small_nodes_if_others_need_the_large_one():
    placed = place({"a": 2, "b": 1, "c": 3, "d": 4}, [1, 2, 2, 5])
    assert placed == {"d": {1: 2, 2: 2}, "c": {3: 3}, "a": {3: 2}, "b": {0: 1}}


def test_many_jobs_have_a_place_on_nodes_of_many_sizes():
    nodes = [2, 2, 6, 6, 2, 1, 2, 4, 4, 3, 3, 8, 3, 4, 8, 5, 4, 3, 8, 5, 1, 1, 4]
    cores = [8, 6, 2, 5, 4, 3, 4, 1, 4, 8, 6, 4, 4, 6, 8, 8, 5, 3]
    kinds = [8, 3, 1, 5, 4, 6, 8, 1, 4, 2, 6, 8, 4, 3, 8, 4, 5, 6]  # of an integer program, and no core is free
    used = Counter()
    for where in place(dict(enumerate(cores)), nodes, None, dict(enumerate(kinds))).values():
        used.update(where)
    assert [used[node] for node in range(len(nodes))] == nodes


def test_a_program_without_a_solution_in_time_is_allocated_step_by_step(monkeypatch):
    monkeypatch.setattr(allocation, "_SECONDS_TO_SOLVE", 0.0)
    jobs = [Job(name=str(number), speeds=[c ** (0.5 + number / 40) for c in range(1, 9)]) for number in range(8)]
    found = allocate(jobs, [8, 8, 8])
    assert len(found.cores) == 8 and sum(found.cores.values()) <= 24 and 0 <= found.gap < 1


@settings(max_examples=20, deadline=None)
@given(jobs=job_lists(most=8), data=st.data(), power=powers)
def test_a_larger_pool_is_worth_as_much_or_more(jobs, data, power):
    """In pools with at most one core for each job, where an equal share is the same."""
    small = data.draw(st.integers(1, len(jobs)))
    large = data.draw(st.integers(small, len(jobs)))
    worth = [allocate(jobs, [cores], power=power).value for cores in (small, large)]
    assert worth[1] >= worth[0] - 1e-6


@settings(max_examples=20, deadline=None)
@given(jobs=job_lists(most=3), nodes=st.lists(st.integers(1, 4), min_size=1, max_size=2), power=powers)
def test_the_integer_program_finds_what_a_search_finds_and_the_greedy_gap_is_true(jobs, nodes, power):
    share = max(1.0, sum(nodes) / len(jobs))

    def restart_share(job, cores):
        left = math.inf if job.work is None else job.restart_seconds + job.work / job.speed(cores)
        return job.restart_seconds and job.restart_seconds / max(job.restart_seconds, min(600.0, left))

    def value(job, cores):
        fair = job.speed(max(share, job.min_cores))
        least = 0.0 if power > 0 else 0.5 * min(job.speeds[job.min_cores - 1 :]) / fair
        speedup = job.speed(cores) / fair
        if job.cores and cores != job.cores:
            speedup *= 1 - restart_share(job, cores)
        f = math.log if power == 0 else lambda s: (s**power - 1) / power
        kept = 1 + restart_share(job, job.cores) if job.cores else 1.0
        return kept * (f(max(speedup, least)) - f(least))

    sizes = {number for node in set(nodes) for number in slots(node, Counter(nodes)[node])}
    best = 0.0
    for chosen in itertools.product(*([0, *range(job.min_cores, job.max_cores + 1)] for job in jobs)):
        taken = [next((s for s in sorted(sizes) if s >= c), None) if c else 0 for c in chosen]
        if None in taken or sum(chosen) > sum(nodes):
            continue
        if len(set(nodes)) > 1 or len(nodes) == 1 or sum(taken) <= sum(nodes):
            try:
                place({job.name: t for job, t in zip(jobs, taken, strict=True) if t}, nodes)
            except ValueError:
                continue
            best = max(best, sum(value(job, c) for job, c in zip(jobs, chosen, strict=True) if c))
    exact = allocate(jobs, nodes, power=power, short_first=0.0)
    assert exact.gap == 0.0
    assert exact.value == pytest.approx(best, rel=1e-6, abs=1e-6)
    greedy = allocate(jobs, nodes, power=power, short_first=0.0, exact=False)
    assert greedy.value <= exact.value + 1e-6
    assert greedy.value >= (1 - greedy.gap) * exact.value - 1e-6


def test_a_core_goes_where_it_brings_most():
    # an equal share is 2: speed-ups 1.9/1.9 and 1.1/1.1; 3 and 1: 2.7/1.9 and 1/1.1, the sum of inverses is smaller
    jobs = [Job(name="scales", speeds=(1.0, 1.9, 2.7, 3.4)), Job(name="does not", speeds=(1.0, 1.1, 1.1, 1.1))]
    found = allocate(jobs, [4], short_first=0.0)
    assert found.cores == {"scales": 3, "does not": 1}
    assert found.why["scales"] == "speed-up 1.42 over an equal share, +26 % with one more"
    assert found.value == pytest.approx((2 / (1 / 1.9) - 1.9 / 2.7) + (2 * 1.1 - 1.1))


def test_fairer_powers_leave_no_job_waiting():
    jobs = [Job(name="large", speeds=(10.0, 20.0)), Job(name="small", speeds=(1.0, 1.0))]
    assert allocate(jobs, [2], power=-1.0).cores == {"large": 1, "small": 1}
    poor = [Job(name="scales", speeds=(1.0, 2.5)), Job(name="other", speeds=(1.0,))]
    assert allocate(poor, [2], power=1.0).cores == {"scales": 2}


def test_of_choices_that_are_equally_good_short_jobs_and_those_of_unknown_length_come_first():
    long = Job(name="long", speeds=(1.0, 1.5), work=1000.0, cores=1)
    short, unknown = Job(name="short", speeds=(1.0, 1.5), work=10.0), Job(name="unknown", speeds=(1.0,))
    assert allocate([long, short, unknown], [2]).cores == {"short": 1, "unknown": 1}
    assert allocate([long, short], [1]).cores == {"short": 1}
    assert allocate([short], [2]).cores == {"short": 2}


def test_a_job_that_is_about_to_end_is_not_stopped_for_one_of_unknown_length():
    ending = Job(name="ending", speeds=(1.0, 1.5), work=5.0, cores=1, restart_seconds=10.0)
    assert allocate([Job(name="unknown", speeds=(1.0, 1.5)), ending], [1]).cores == {"ending": 1}


def test_a_job_that_slows_down_on_more_cores_is_worth_no_more_than_others():
    slows, scales = Job(name="slows", speeds=(1.0, 0.2), work=500.0), Job(name="scales", speeds=(1.0, 1.9), work=100.0)
    assert allocate([slows, scales], [1]).cores == {"scales": 1}
    assert allocate([slows], [2]).cores == {"slows": 1}


def test_the_pool_that_pays_off_most_is_suggested():
    jobs = [Job(name="a", speeds=(1.0, 1.9, 2.6, 3.0)), Job(name="b", speeds=(1.0, 1.2))]
    # one more core brings 1, 1, 0.9, 0.7, 0.4, 0.2
    for price, number in ((0.95, 2), (0.8, 3), (0.5, 4), (0.1, 6), (2.0, 0)):
        assert suggest_nodes(jobs, 1, price=price, worth=1.0, max_nodes=8)[0] == number
    # with nodes of two cores: 2, 3.1, 4.2, as no job can have three cores
    assert suggest_nodes(jobs, 2, price=0.5, worth=1.0, max_nodes=8) == (
        3,
        "one more brings 0.00 an hour and costs 1.00",
    )
    assert suggest_nodes(jobs, 1, price=0.1, worth=1.0, max_nodes=3)[0] == 3
    assert suggest_nodes([], 4, price=0.5, worth=1.0, max_nodes=3) == (0, "there are no jobs")


def test_a_restart_must_pay_off_within_the_horizon():
    jobs = [Job(name="a", speeds=(1.0, 1.5), cores=1, restart_seconds=100.0)]
    assert [allocate(jobs, [2], horizon_seconds=horizon).cores["a"] for horizon in (250.0, 350.0)] == [1, 2]
    # 30 s more on one core; on two, 10 s for the restart and then 20 s
    for work, cores in ((29.0, 1), (31.0, 2)):
        job = Job(name="a", speeds=(1.0, 1.5), cores=1, restart_seconds=10.0, work=work)
        assert allocate([job], [2]).cores == {"a": cores}
    # 1.5 times as fast pays for 10 s within 30 s; after 30 s, a job is expected to last 30 s more
    for since, cores in ((29.0, 1), (31.0, 2)):
        job = Job(name="a", speeds=(1.0, 1.5), cores=1, since=since, restart_seconds=10.0)
        assert allocate([job], [2]).cores == {"a": cores}


def test_on_several_nodes_a_job_has_a_part_of_one_or_whole_ones():
    jobs = [Job(name="a", speeds=tuple(range(1, 12)), min_cores=5), Job(name="b", speeds=(1.0, 2.0, 3.0))]
    found = allocate(jobs, [4, 4, 4], power=1.0)
    assert found.cores == {"a": 8, "b": 3}  # in a slot of 4


def test_many_jobs_are_allocated_step_by_step_with_the_gap():
    jobs = [Job(name=str(number), speeds=tuple(c**0.7 for c in range(1, 65))) for number in range(150)]
    found = allocate(jobs, [4] * 60)
    assert sum(found.cores.values()) == 240 and 0 <= found.gap < 0.01


def test_jobs_that_wait_and_jobs_that_want_a_number():
    jobs = [
        Job(name="long", speeds=(1, 2, 3, 4), work=400.0, wanted=3),
        Job(name="wide", speeds=(1, 2, 3, 4), min_cores=2, work=40.0),
        Job(name="short", speeds=(1, 1, 1, 1), work=4.0, wanted=1),
    ]
    assert first_come(jobs, [4]).cores == {"long": 3}  # the wide one waits, and so does the short one
    assert shortest_first(jobs, [4]).cores == {"short": 1, "wide": 3}
    assert equal_shares(jobs, [4]).cores == {"long": 2, "wide": 2}
    assert equal_shares(jobs, [6]).cores == {"long": 2, "wide": 2, "short": 2}


def test_jobs_stay_where_they_are_unless_others_would_not_fit():
    present = {"a": {0: 2}, "b": {1: 2}}
    assert place({"a": 2, "b": 2, "c": 2}, [4, 4], present) == {**present, "c": {0: 2}}
    moved = place({"a": 2, "b": 2, "c": 4}, [4, 4], present)
    assert sorted(moved) == ["a", "b", "c"] and len(moved["c"]) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: check_fits([Job(name="a", speeds=(1, 2, 3), min_cores=3)], [2]),
            "job a needs at least 3 cores, but the pool has 2 cores on 1 node$",
        ),
        (
            lambda: check_fits([Job(name="a", speeds=(1,) * 9, min_cores=9)], [4, 4]),
            "at least 9 cores, but the pool has 8 cores on 2 nodes",
        ),
        (lambda: allocate([], [2], power=1.5), "`power` must be a number from -10 to 1, got 1.5"),
        (lambda: allocate([Job(name="a", speeds=(1,))] * 2, [2]), "jobs must have different names, got 'a' twice"),
        (lambda: Job(name="a", speeds=(0.0, 0.0)), "job a: `speeds` must be non-negative and not all 0"),
        (lambda: Job(name="a", speeds=(1.0,), min_cores=2), "job a: `min_cores` must be at most 1, got 2"),
    ],
)
def test_bad_input_is_refused_with_the_job(call, message):
    with pytest.raises(ValueError, match=message):
        call()
