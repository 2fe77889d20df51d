"""PolicySchedule: rows decided during the run make the same epochs as a trace of them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import variable_batch_size as vbs
from variable_batch_size.schedules.policy_schedule import PolicySchedule


def live(rows=(), *, dataset_size=300, cores=4, lead=16):
    schedule = PolicySchedule(
        vbs.policies.PerCore(lead=lead), dataset_size=dataset_size, minibatch_size=32, num_replicas=cores
    )
    for size in rows:
        schedule.append(size, number=1)
    return schedule


def fixed(rows, *, dataset_size=300, cores=4):
    return vbs.Schedule(vbs.Trace.of(rows), dataset_size=dataset_size, minibatch_size=32, num_replicas=cores)


sizes = st.lists(st.integers(1, 9).map(lambda n: 32 * n), min_size=1, max_size=60)


@settings(deadline=None)
@given(sizes, st.integers(1, 5))
def test_decided_rows_make_the_epochs_of_a_trace(rows, cores):
    # one more row, which may open an epoch, so that all before it are known to be over
    rows = [*rows, 288]
    schedule, expected = live(rows, cores=cores), fixed(rows, cores=cores)
    assert schedule.trace == expected.trace
    for epoch in range(expected.num_epochs - 1):
        assert schedule.steps(epoch) == expected.steps(epoch)
        for rank in range(cores):
            assert schedule.num_minibatches_for(epoch, rank) == expected.num_minibatches_for(epoch, rank)
            found, wanted = (
                np.concatenate([part.starts for part in one.offsets(epoch, rank, at_once=7)])
                for one in (schedule, expected)
            )
            np.testing.assert_array_equal(found, wanted)


@settings(deadline=None)
@given(sizes, st.integers(1, 4), st.integers(0, 10))
def test_offsets_may_be_read_while_rows_are_decided(rows, cores, first_step):
    rows = [*rows, 288, 288]
    expected = fixed(rows, cores=cores)
    first_step = min(first_step, len(expected.steps(0)))
    schedule = live(rows[:first_step], cores=cores)
    to_come = iter(rows[first_step:])
    schedule.append(next(to_come), number=1)
    reading, found = schedule.offsets(0, 1 % cores, at_once=3, first_step=first_step), []
    for part in reading:
        found += part.starts.tolist()
        for size in itertools.islice(to_come, 1):
            schedule.append(size, number=1)
    expected_offsets = expected.offsets(0, 1 % cores, at_once=3, first_step=first_step)
    assert found == list(itertools.chain.from_iterable(part.starts.tolist() for part in expected_offsets))


def test_reading_undecided_rows_raises():
    schedule = live(lead=5)
    with pytest.raises(
        RuntimeError, match="no batch size is decided yet: create the optimizer before iterating over the sampler"
    ):
        schedule.batch_size(0)
    schedule.append(64, number=2)
    reading = schedule.offsets(0, 0, at_once=100)
    assert next(reading).starts.tolist() == [0, 64]
    with pytest.raises(
        RuntimeError, match="step 2 was read before its batch size was decided: the policy's `lead` must be"
    ):
        next(reading)
    with pytest.raises(RuntimeError, match=r"DataLoader's num_workers \* prefetch_factor, got 5"):
        schedule.batch_size(2)


def test_end_of_the_current_epoch_is_estimated_with_the_last_size():
    schedule = live([32, 64])
    assert schedule.steps(0) == range(5)  # 96 of 288 are used, 3 more of 64 fit
    assert schedule.steps(1) == range(2, 6)
    assert schedule.num_minibatches_for(0, rank=3) == 5
    assert schedule.num_epochs is None
    schedule.append(256, number=1)
    assert schedule.steps(0) == range(2)
    assert schedule.steps(1) == range(2, 3)


def test_full_epoch_ends_before_the_next_row_is_decided():
    schedule = live([256, 32])
    assert [part.starts.tolist() for part in schedule.offsets(0, 0, at_once=100)] == [[0, 128, 256]]


def test_rows_that_were_not_executed_are_cut():
    schedule = live([64, 64, 32, 32])
    schedule.note_done(1)
    assert (schedule.num_ahead, schedule.latest) == (2, 64)
    schedule.cut()
    assert list(schedule.trace) == [64, 64]
    assert schedule.num_ahead == 0
    schedule.append(160, number=2)
    assert schedule.steps(0) == range(3)


def test_row_that_ended_an_epoch_is_not_cut():
    schedule = live([128, 128, 256, 256])
    schedule.note_done(1)
    assert schedule.steps(0) == range(2)
    schedule.cut()
    assert list(schedule.trace) == [128, 128, 256]
    schedule.append(32, number=1)  # would have fitted into epoch 0
    assert schedule.steps(0) == range(2) == fixed(list(schedule.trace)).steps(0)


def test_cut_before_the_first_step_drops_everything():
    schedule = live([128, 128])
    schedule.cut()
    assert schedule.num_ahead == 0
    assert schedule.latest is None


def test_epoch_left_early_ends_there():
    schedule = live([32] * 6)
    schedule.note_done(2)
    schedule.begin_epoch(1)
    assert schedule.steps(0) == range(3)
    assert schedule.steps(1) == range(3, 12)  # with three of 32 more than are decided
    assert schedule.ended_early(0, 3)
    assert not schedule.ended_early(1, 3)
    schedule.begin_epoch(1)
    assert schedule.steps(1).start == 3


def test_full_epoch_has_not_ended_early():
    schedule = live([256, 32])
    schedule.note_done(1)
    schedule.begin_epoch(1)
    assert not schedule.ended_early(0, 2)


def test_state_contains_the_epochs():
    schedule, other = live([32] * 20), live()
    schedule.note_done(2)
    schedule.begin_epoch(1)
    other.load_state_dict(schedule.state_dict())
    assert [other.steps(epoch) for epoch in range(3)] == [schedule.steps(epoch) for epoch in range(3)]
    assert (other.num_done, other.num_ahead, other.ended_early(0, 3)) == (3, 17, True)
    schedule.append(64, number=3)
    other.append(64, number=3)
    assert other.state_dict() == schedule.state_dict()


def test_in_lockstep_all_cores_run_as_many_minibatches_as_the_busiest():
    sizes = [96, 32, 128]
    schedules = [live(sizes, cores=2), live(sizes, cores=2)]
    schedules[1].lockstep = True
    for schedule in schedules:
        schedule.note_done(2)
    apart, together = ([s.rounds_for(step, rank) for rank in range(2) for step in range(3)] for s in schedules)
    assert (apart, together) == ([2, 1, 2, 1, 1, 2], [2, 1, 2, 2, 1, 2])
    assert [next(s.offsets(0, 1, at_once=99)).starts.tolist() for s in schedules] == [
        [32, 96, 160, 224],
        [32, 0, 96, 160, 224],
    ]


def test_rows_ahead_move_to_the_next_epoch_if_this_one_ends_early():
    schedule = PolicySchedule(vbs.policies.PerCore(), dataset_size=64, minibatch_size=16)
    schedule.append(16, number=6)  # 4 in the first epoch
    schedule.note_done(1)
    assert schedule.past(1, 0).starts == (0, 2)
    schedule.begin_epoch(1)
    assert (schedule.steps(0), schedule.steps(1), schedule.num_ahead) == (range(2), range(2, 6), 4)
    assert schedule.ended_early(0, 2)
