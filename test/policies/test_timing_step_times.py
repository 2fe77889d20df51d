"""StepTimes: the times of accumulating and updating minibatches from step times."""

import pytest

from variable_batch_size.policies.timing import StepTimes


def times_of(seconds):
    times = StepTimes()
    for depth, found in seconds.items():
        for value in found:
            times.add(depth, value)
    return times


def test_two_depths_give_both_times():
    assert times_of({1: [4.0] * 5}).seconds is None
    assert times_of({1: [4.0] * 5, 3: [6.0] * 4}).seconds is None
    assert times_of({1: [4.0] * 5, 3: [6.0] * 5}).seconds == (1.0, 4.0)
    assert times_of({2: [5.0] * 5, 4: [7.0] * 5, 8: [11.0] * 9}).seconds == (pytest.approx(1.0), pytest.approx(4.0))


def test_outliers_do_not_count():
    assert times_of({1: [90.0, 4.0, 4.0, 4.0, 4.0], 2: [5.0, 5.0, 60.0, 5.0, 5.0, 5.0]}).seconds == (1.0, 4.0)


def test_only_the_latest_steps_count():
    times = times_of({1: [40.0] * 100 + [4.0] * 40, 2: [5.0] * 5})
    assert times.seconds == (1.0, 4.0)
    assert {depth: len(found) for depth, found in times.state_dict()["seconds"].items()} == {1: 40, 2: 5}


def test_times_are_not_negative_and_an_update_is_not_faster_than_a_minibatch():
    assert times_of({1: [4.0] * 5, 2: [3.0] * 5}).seconds == (0.0, 3.5)
    assert times_of({1: [1.0] * 5, 2: [9.0] * 5}).seconds == (8.0, 8.0)


def test_times_are_saved_and_cleared():
    times, other = times_of({1: [4.0] * 5, 2: [5.0] * 5}), StepTimes()
    other.load_state_dict(times.state_dict())
    assert other.seconds == (1.0, 4.0)
    assert not other.is_empty
    other.restart(on_same_minibatches=False)
    assert other.seconds is None
    assert other.is_empty


def test_on_other_cores_one_depth_is_enough():
    times = times_of({1: [4.0] * 5, 2: [5.0] * 5})
    for _ in range(2):
        times.restart()
        assert times.is_empty
        assert times.seconds == (1.0, 4.0)  # until a step was timed
    for _ in range(5):
        times.add(3, 9.0)
    assert times.seconds == (1.0, 7.0)
    saved = StepTimes()
    saved.load_state_dict(times.state_dict())
    assert saved.seconds == (1.0, 7.0)
    for _ in range(5):
        times.add(5, 15.0)
    assert times.seconds == (3.0, 3.0)
    times.restart()
    for _ in range(5):
        times.add(2, 3.0)  # faster machines
    assert times.seconds == (1.5, 1.5)


def test_a_machine_that_becomes_slower_or_faster_is_noticed_at_one_depth():
    times = times_of({1: [4.0] * 9, 2: [5.0] * 9})
    for _ in range(2):
        times.add(2, 50.0)
    assert times.seconds == (1.0, 4.0)  # these may be outliers
    times.add(2, 50.0)
    assert times.seconds == (pytest.approx(10.0), pytest.approx(40.0))  # ten times as slow, as the other depth will be
    for _ in range(60):
        times.add(2, 50.0)
    for _ in range(5):
        times.add(1, 39.0)
    assert times.seconds == (pytest.approx(11.0), pytest.approx(39.0))  # measured again
    for _ in range(5):
        times.add(1, 4.0)
    assert times.seconds[1] == pytest.approx(4.0)
    assert times.seconds[0] == pytest.approx(11.0 * 4 / 39)


def test_another_speed_is_noticed_at_a_depth_that_was_not_timed_before():
    times = times_of({1: [4.0] * 5, 2: [5.0] * 5})
    for _ in range(5):
        times.add(4, 70.0)  # 7 expected
    assert times.seconds == (pytest.approx(10.0), pytest.approx(40.0))


def test_times_after_a_resume_on_faster_machines_replace_the_saved_ones():
    times = StepTimes()
    times.load_state_dict(times_of({1: [4.0] * 40, 5: [8.0] * 40}).state_dict())
    for _ in range(5):
        times.add(5, 0.8)
    assert times.seconds == (pytest.approx(0.1), pytest.approx(0.4))


def test_steps_that_vary_by_less_change_nothing():
    times = times_of({1: [4.0] * 9, 2: [5.0, 6.9] * 9})
    assert {depth: len(found) for depth, found in times.state_dict()["seconds"].items()} == {1: 9, 2: 18}
