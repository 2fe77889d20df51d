"""Bounds: which batch sizes a policy may choose."""

import math

import pytest

from variable_batch_size.policies.policy import Bounds, Situation


def situation(**numbers):
    return Situation(**{"cores": 4, "minibatch_size": 32, "ref_batchsize": 128, **numbers})


def test_allowed_numbers_of_minibatches_by_hand():
    assert Bounds().minibatches(situation(capacity=1000)) == range(1, 32)
    assert Bounds(min_batch_size=100, max_batch_size=1000).minibatches(situation()) == range(4, 32)
    assert Bounds(min_per_core=33, max_per_core=100).minibatches(situation()) == range(8, 13)
    assert Bounds(max_batch_size=1000).minibatches(situation(capacity=200)) == range(1, 7)


def test_bounds_per_core_hold_for_the_least_and_most_busy_cores():
    allowed = Bounds(min_per_core=64, max_per_core=96).minibatches(situation(cores=3))
    for n in range(1, 20):
        shares = [32 * len(range(rank, n, 3)) for rank in range(3)]
        assert (n in allowed) == (min(shares) >= 64 and max(shares) <= 96)


def test_contradicting_bounds_raise_with_their_values():
    bounds = Bounds(min_per_core=100, max_batch_size=1000)
    assert bounds.minibatches(situation(cores=7, minibatch_size=10)) == range(70, 101)
    message = (
        "no batch size satisfies all bounds on 11 cores with minibatches of 10: at least 100 per core, at most 1000"
    )
    with pytest.raises(ValueError, match=f"^{message} in total$"):
        bounds.minibatches(situation(cores=11, minibatch_size=10))
    with pytest.raises(ValueError, match="at least 64 in total, at most 40 per core, at most 50 in an epoch"):
        Bounds(min_batch_size=64, max_per_core=40).minibatches(situation(cores=1, capacity=50))


def test_growth_is_limited_unless_another_bound_requires_more():
    bounds = Bounds(max_growth=1.5, min_per_core=32)
    assert bounds.reachable(situation(batch_size=320, capacity=10_000)) == range(4, 16)
    assert bounds.reachable(situation(batch_size=32, capacity=10_000)) == range(4, 5)
    assert bounds.reachable(situation(capacity=10_000)) == range(4, 313)
    assert Bounds(max_growth=1.1).reachable(situation(batch_size=320, capacity=10_000)) == range(1, 12)


def test_after_a_restart_no_core_is_idle_and_sizes_that_were_run_before_may_return():
    bounds, known = Bounds(max_growth=2.0), {"batch_size": 32, "capacity": 10_000}
    assert bounds.reachable(situation(**known)) == range(1, 3)
    assert bounds.reachable(situation(is_fresh=True, **known)) == range(1, 5)
    assert bounds.reachable(situation(is_fresh=True, largest_batch_size=640, **known)) == range(1, 21)
    assert bounds.reachable(situation(largest_batch_size=640, **known)) == range(1, 3)


@pytest.mark.parametrize(("wish", "size"), [(1, 32), (47, 32), (48, 64), (100.0, 96), (math.inf, 992), (10**30, 992)])
def test_size_is_rounded_to_the_nearest_allowed_one(wish, size):
    assert Bounds(max_batch_size=1000).nearest(wish, situation()) == size


@pytest.mark.parametrize("wish", [0, -32, math.nan, None, "64", True])
def test_invalid_batch_size_is_rejected(wish):
    with pytest.raises(ValueError, match="a policy must return a positive batch size, got"):
        Bounds().nearest(wish, situation())


def test_a_change_must_reach_the_threshold_in_either_direction():
    bounds = Bounds(threshold=1.25)
    assert [bounds.is_worth_it(worth, 100.0) for worth in (70, 80, 81, 100, 124, 125, 200)] == [
        *(True, True),
        *(False, False, False),
        *(True, True),
    ]
    assert Bounds().is_worth_it(101.0, 100.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_batch_size": 0}, "`min_batch_size` must be a positive integer, got 0"),
        ({"max_per_core": 1.5}, "`max_per_core` must be a positive integer, got 1.5"),
        (
            {"min_batch_size": 64, "max_batch_size": 32},
            "`min_batch_size` must be at most `max_batch_size`, which is 32",
        ),
        (
            {"min_per_core": 64, "max_per_core": 32},
            "`min_per_core` must be at most `max_per_core`, which is 32, got 64",
        ),
        ({"max_growth": 1.0}, "`max_growth` must be above 1, got 1.0"),
        ({"max_growth": math.nan}, "`max_growth` must be above 1, got nan"),
        ({"threshold": 0.9}, "`threshold` must be finite and at least 1, got 0.9"),
        ({"threshold": math.inf}, "`threshold` must be finite and at least 1, got inf"),
    ],
)
def test_invalid_bounds_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        Bounds(**options)
