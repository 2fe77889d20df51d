"""StepTimes: the times of accumulating and updating minibatches from step times, by number of cores."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from variable_batch_size.policies.timing import StepTimes

CORES = 4


def add(times, depth, seconds, number=5, cores=CORES):
    for _ in range(number):
        times.add(cores, depth, seconds)


def times_of(seconds, cores=CORES, times=None):
    times = StepTimes() if times is None else times
    for depth, found in seconds.items():
        for value in found:
            times.add(cores, depth, value)
    return times


def num_kept(times):
    return {(cores, depth): len(found) for cores, depth, *_, found in times.state_dict()["rows"]}


def test_two_depths_give_both_times():
    assert times_of({1: [4.0] * 5}).seconds(CORES) is None
    assert times_of({1: [4.0] * 5, 3: [6.0] * 4}).seconds(CORES) is None
    assert times_of({1: [4.0] * 5, 3: [6.0] * 5}).seconds(CORES) == (1.0, 4.0)
    many = times_of({2: [5.0] * 5, 4: [7.0] * 5, 8: [11.0] * 9})
    assert many.seconds(CORES) == (pytest.approx(1.0), pytest.approx(4.0))
    assert many.depths(CORES) == (2, 4, 8)


def test_one_depth_is_enough_on_one_core_that_times_its_updates():
    times = StepTimes()
    for seconds in (4.0, 4.0, 90.0, 4.0):
        times.add(1, 1, seconds, 3.0)
    assert times.seconds(1) is None
    times.add(1, 1, 4.0, 3.0)
    assert times.seconds(1) == times.seconds(2) == (1.0, 4.0)  # of two cores, before these are timed
    again = StepTimes()
    again.load_state_dict(times.state_dict(), cores=1)
    assert again.seconds(1) == (1.0, 4.0)
    add(again, 3, 7.0, cores=1)  # a line through two depths is that of whole steps
    assert again.seconds(1) == (1.5, 4.0)
    times.clear()
    add(times, 1, 4.0, cores=1)
    assert times.seconds(1) is None


def test_update_of_a_deeper_step_is_divided_from_all_its_minibatches():
    times = StepTimes()
    for _ in range(5):
        times.add(1, 4, 11.0, 3.0)
    assert times.seconds(1) == (2.0, 5.0)


@pytest.mark.parametrize("update", [-1.0, 4.0, 9.0])
def test_update_that_is_not_a_part_of_its_step_is_ignored(update):
    times = StepTimes()
    for _ in range(5):
        times.add(1, 1, 4.0, update)
    assert times.seconds(1) is None  # not that accumulating takes no time
    times.load_state_dict({**times.state_dict(), "overheads": [9.0] * 5}, cores=1)
    assert times.seconds(1) is None


def test_clock_that_does_not_advance_in_updates_gives_no_time_for_them():
    times = StepTimes()
    for _ in range(5):
        times.add(1, 1, 4.0, 0.0)
    assert times.seconds(1) is None


def test_outliers_do_not_count():
    times = times_of({1: [90.0, 4.0, 4.0, 4.0, 4.0], 2: [5.0, 5.0, 60.0, 5.0, 5.0, 5.0]})
    assert times.seconds(CORES) == (1.0, 4.0)


def test_only_the_latest_steps_count():
    times = times_of({1: [40.0] * 100 + [4.0] * 40, 2: [5.0] * 5})
    assert times.seconds(CORES) == (1.0, 4.0)
    assert num_kept(times) == {(CORES, 1): 40, (CORES, 2): 5}


def test_only_the_latest_depths_are_kept():
    times = times_of({depth: [4.0 + depth] * 5 for depth in range(1, 30)})
    assert times.depths(CORES) == tuple(range(22, 30))


def test_times_are_not_negative_and_an_update_is_not_faster_than_a_minibatch():
    assert times_of({1: [4.0] * 5, 2: [3.0] * 5}).seconds(CORES) == (0.0, 3.5)
    assert times_of({1: [1.0] * 5, 2: [9.0] * 5}).seconds(CORES) == (8.0, 8.0)


def test_times_are_saved_and_cleared():
    times, other = times_of({1: [4.0] * 5, 2: [5.0] * 5}), StepTimes()
    add(times, 3, 2.0, cores=1)
    other.load_state_dict(times.state_dict(), cores=7)
    assert other.state_dict() == times.state_dict()
    assert other.seconds(CORES) == (1.0, 4.0)
    assert other.depths(1) == (3,)
    other.clear()
    assert other.seconds(CORES) is None
    assert other.depths(CORES) == ()


def test_times_that_earlier_versions_saved_are_those_of_the_cores_then():
    times = StepTimes()
    times.load_state_dict({"seconds": {1: [4.0] * 5, 2: [5.0] * 5}, "before": [3.0, 7.0]}, cores=2)
    assert times.seconds(2) == (1.0, 4.0)
    assert times.depths(3) == ()


def test_times_are_kept_for_each_number_of_cores():
    times = times_of({1: [4.0] * 5, 2: [5.0] * 5}, cores=2)
    times_of({1: [8.0] * 5, 3: [12.0] * 5}, cores=3, times=times)
    assert times.seconds(2) == (1.0, 4.0)
    assert times.seconds(3) == (2.0, 8.0)


def test_cores_with_one_depth_have_the_time_of_a_minibatch_of_the_others():
    times = times_of({1: [4.0] * 5, 2: [5.0] * 5}, cores=2)
    times_of({1: [9.0] * 5, 2: [11.0] * 5}, cores=8, times=times)
    add(times, 3, 9.0, cores=4)
    assert times.seconds(4) == (1.5, 6.0)  # both count as much
    add(times, 4, 4.0, cores=6)
    assert times.seconds(6) == (1.0, 1.0)  # no longer than the whole step


def test_cores_without_times_have_the_overhead_between_those_of_the_others():
    times = times_of({1: [4.0] * 5, 2: [5.0] * 5}, cores=2)
    assert times.seconds(16) == (1.0, 4.0)
    assert times.seconds(1) == (1.0, 1.0)  # a core alone does not communicate
    add(times, 2, 10.0, cores=6)
    assert times.seconds(6) == (1.0, 9.0)
    assert times.seconds(3) == (1.0, 5.25)
    assert times.seconds(100) == (1.0, 9.0)
    assert times.seconds(1) == (1.0, 1.0)


def test_old_times_count_half_after_a_thousand_steps():
    times = times_of({1: [4.0] * 5, 3: [8.0] * 5})
    add(times, 2, 6.0, 1000)
    weights = [1, 1, 0.5, 0.5]  # of the depths below
    times_of({4: [13.0] * 5, 5: [15.0] * 5}, times=times)
    depths, seconds = [4, 5, 1, 3], [13.0, 15.0, 4.0, 8.0]
    found = times.seconds(CORES)

    def error(slope):
        """The weighted squares around the line of this slope, whose offset is the best one."""
        points = [(2, 6.0, 1.0), *zip(depths, seconds, weights, strict=True)]
        offset = sum(w * (s - slope * d) for d, s, w in points) / sum(w for *_, w in points)
        return sum(w * (s - slope * d - offset) ** 2 for d, s, w in points)

    assert found[0] == pytest.approx(min((slope / 1000 for slope in range(3000)), key=error), abs=0.01)


def test_a_depth_that_comes_back_after_a_thousand_steps_is_measured_anew():
    times = times_of({1: [4.0] * 40, 2: [5.0] * 1001})
    add(times, 1, 4.5, 4)
    assert times.seconds(CORES) == (1.0, 4.0)
    add(times, 1, 4.5, 1)
    assert times.seconds(CORES) == (0.5, 4.5)
    assert num_kept(times)[CORES, 1] == 5


@pytest.mark.parametrize("factor", [10.0, 1.3, 1 / 1.3, 0.01])
def test_a_machine_that_becomes_slower_or_faster_is_noticed_at_one_depth(factor):
    times = times_of({1: [4.0] * 9, 2: [5.0] * 9})
    add(times, 2, 5.0 * factor, 4)
    assert times.depths(CORES) == (1, 2)  # these may be outliers
    add(times, 2, 5.0 * factor, 1)
    assert times.depths(CORES) == (2,)
    assert times.seconds(CORES) is None  # until it is measured again
    add(times, 1, 4.0 * factor)
    assert times.seconds(CORES) == (pytest.approx(factor), pytest.approx(4 * factor))


def test_a_machine_that_was_slow_for_a_while_leaves_nothing_behind():
    times = times_of({1: [4.0] * 40, 2: [5.0] * 40})
    for seconds in ({2: [50.0] * 60, 1: [40.0] * 60}, {1: [4.0] * 5, 2: [5.0] * 5}):
        times_of(seconds, times=times)
    assert times.seconds(CORES) == (1.0, 4.0)


def test_on_other_machines_the_times_of_all_numbers_of_cores_are_forgotten():
    times = times_of({1: [4.0] * 9, 2: [5.0] * 9}, cores=2)
    times_of({1: [6.0] * 9, 2: [7.0] * 9}, cores=3, times=times)
    add(times, 1, 60.0, cores=3)
    assert times.depths(2) == ()
    assert times.seconds(2) is None
    add(times, 2, 70.0, cores=3)
    assert times.seconds(2) == (10.0, 60.0)


def test_a_machine_is_not_slower_if_one_of_its_steps_is_as_fast_as_before():
    times = times_of({1: [4.0] * 9, 2: [5.0] * 9})
    times_of({2: [50.0, 50.0, 50.0, 50.0, 5.0] * 2}, times=times)
    assert times.depths(CORES) == (1, 2)


def test_more_time_on_more_cores_is_not_a_slower_machine():
    times = times_of({1: [4.0] * 9, 2: [5.0] * 9}, cores=1)
    add(times, 1, 400.0, 9, cores=2)
    assert times.seconds(1) == (1.0, 4.0)
    assert times.seconds(2) == (1.0, 400.0)


def test_another_speed_is_noticed_at_a_depth_that_was_not_timed_before():
    times = times_of({1: [4.0] * 5, 2: [5.0] * 5})
    add(times, 4, 10.0)  # 7 expected
    assert times.depths(CORES) == (1, 2, 4)
    times = times_of({1: [4.0] * 5, 2: [5.0] * 5})
    add(times, 4, 10.5)
    assert times.depths(CORES) == (4,)


def test_times_after_a_resume_on_faster_machines_replace_the_saved_ones():
    times = StepTimes()
    times.load_state_dict(times_of({1: [4.0] * 40, 5: [8.0] * 40}).state_dict(), cores=CORES)
    add(times, 5, 0.8)
    assert times.depths(CORES) == (5,)
    add(times, 1, 0.4)
    assert times.seconds(CORES) == (pytest.approx(0.1), pytest.approx(0.4))


def test_another_speed_is_noticed_after_a_thousand_steps_as_well():
    times = times_of({1: [4.0] * 40, 2: [5.0] * 1001})
    add(times, 1, 40.0)
    assert times.depths(CORES) == (1,)


def test_steps_that_always_vary_as_much_are_not_those_of_another_machine():
    times = times_of({1: [4.0] * 9, 2: [5.0, 10.0] * 20})
    add(times, 2, 10.0)
    assert times.depths(CORES) == (1, 2)
    add(times, 2, 20.0)
    assert times.depths(CORES) == (2,)


def test_steps_that_vary_by_less_change_nothing():
    assert num_kept(times_of({1: [4.0] * 9, 2: [5.0, 6.9] * 9})) == {(CORES, 1): 9, (CORES, 2): 18}


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 12), st.floats(0, 100)), max_size=120),
    repeated=st.integers(1, 7),
)
def test_any_steps_give_times_that_are_possible(steps, repeated):
    times = StepTimes()
    for cores, depth, seconds in steps:
        add(times, depth, seconds, repeated, cores)
    for cores in range(1, 7):
        found = times.seconds(cores)
        assert found is None or 0 <= found[0] <= found[1] < float("inf")
    other = StepTimes()
    other.load_state_dict(times.state_dict(), cores=1)
    assert [other.seconds(cores) for cores in range(1, 7)] == [times.seconds(cores) for cores in range(1, 7)]
