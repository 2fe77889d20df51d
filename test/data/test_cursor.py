"""Cursor: a core's position in its steps, minibatch by minibatch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from variable_batch_size import Schedule, Trace
from variable_batch_size.data.cursor import Cursor


def position_of(rank, *, trace=(64, 96, 32, 256, 32), num_replicas=4, dataset_size=1000):
    schedule = Schedule(Trace.of(list(trace)), dataset_size=dataset_size, minibatch_size=32, num_replicas=num_replicas)
    return Cursor(schedule, rank)


def is_idle_next(position):
    return position.next is not None and position.next.is_idle


def is_next_padding(position):
    return position.next is not None and position.next.is_padding


def is_last_next(position):
    return position.next is None or position.next.is_last


def test_one_core_iterates_over_the_minibatches_of_every_step():
    position = position_of(0, trace=(64, 96), num_replicas=1)
    seen = []
    for _ in range(5):
        position.advance()
        seen.append((position.plan.step, position.epoch_step, position.plan.is_last, position.is_accumulating))
    assert seen == [
        (0, 0, False, True),
        (0, 1, True, False),
        (1, 1, False, True),
        (1, 1, False, True),
        (1, 2, True, False),
    ]


def test_initial_position():
    position = position_of(0, trace=(64, 96), num_replicas=1)
    assert (position.epoch, position.plan.step, position.epoch_step) == (0, 0, 0)
    assert not position.plan.is_last
    assert not position.is_accumulating
    assert (position.plan.batch_size, str(position)) == (64, "epoch 0, step 0/2")


def test_core_without_a_minibatch_in_a_step_is_idle():
    for rank, expected in ((1, [False, False, True, False, True]), (3, [True, True, True, False, True])):
        position = position_of(rank)
        idle = [position.plan.is_idle]
        idle_next = [is_idle_next(position)]
        while position.epoch_step < 5:
            position.advance()
            if position.plan.is_last:
                idle_next.append(is_idle_next(position))
                idle.append(position.plan.is_idle)
        assert idle == expected[:1] + expected
        # after the last step of the epoch, nothing is next
        assert idle_next == [*expected, False]


def test_idle_core_has_one_padding_minibatch():
    position = position_of(3)
    position.advance()
    assert (position.plan.step, position.plan.is_last, position.is_accumulating) == (0, True, False)
    position.advance()
    assert (position.plan.step, position.plan.is_last) == (1, True)


def test_in_lockstep_padding_may_follow_a_minibatch_of_the_same_step():
    # 5, 2 and 8 minibatches on 4 cores: core 1 has one of the 5, and a padding minibatch during core 0's second
    schedule = Schedule(Trace.of([160, 64, 256]), dataset_size=1000, minibatch_size=32, num_replicas=4, lockstep=True)
    position = Cursor(schedule, 1)
    seen = [("next", is_next_padding(position))]
    for _ in range(5):
        position.advance()
        seen.append((position.plan.step, position.plan.is_padding, position.plan.is_last, is_next_padding(position)))
    assert seen == [
        ("next", False),
        (0, False, False, True),
        (0, True, True, False),
        (1, False, True, False),
        (2, False, False, False),
        (2, False, True, False),
    ]
    assert not position.plan.is_idle


def test_second_epoch_starts_where_the_first_ended():
    position = position_of(0, trace=(64, 96, 32, 256), num_replicas=1, dataset_size=300)
    position.move(1)
    assert (position.epoch, position.plan.step, position.epoch_step) == (1, 3, 0)
    assert str(position) == "epoch 1, step 0/1"
    assert (position.plan.batch_size, is_idle_next(position)) == (256, False)


def test_epoch_may_start_at_any_of_its_steps_and_at_its_end():
    position = position_of(0, trace=(64, 96, 32), num_replicas=1)
    position.move(0, 1)
    assert (position.plan.step, position.epoch_step, position.plan.batch_size) == (1, 1, 96)
    assert not position.is_accumulating
    position.advance()
    assert (position.plan.step, position.is_accumulating) == (1, True)
    position.move(0, 3)
    assert (position.plan.step, position.epoch_step, position.plan.is_last) == (2, 3, True)
    with pytest.raises(RuntimeError, match="epoch 0 has 3 steps and all are done"):
        position.advance()


@pytest.mark.parametrize("first_step", [-1, 4, 1.0])
def test_first_step_beyond_the_epoch_raises_and_changes_nothing(first_step):
    position = position_of(0, trace=(64, 96, 32), num_replicas=1)
    with pytest.raises(ValueError, match=f"^`first_step` must be an integer from 0 to 3, got {first_step}$"):
        position.move(0, first_step)
    assert (position.epoch_step, position.plan.step) == (0, 0)


def test_more_minibatches_than_the_epoch_has_raise():
    position = position_of(0, trace=(32,), num_replicas=1)
    position.advance()
    message = r"^epoch 0 has 1 steps and all are done: call set_epoch\(\) before the next pass over the loader$"
    with pytest.raises(RuntimeError, match=message):
        position.advance()


def test_description_of_a_position():
    position = position_of(0, trace=(32, 32), dataset_size=None)
    position.advance()
    assert str(position) == "epoch 0, step 1/2"
    endless = Cursor(Schedule(Trace.of(32), dataset_size=None, minibatch_size=32), 0)
    endless.advance()
    assert str(endless) == "epoch 0, step 1"


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=6), num_replicas=st.integers(1, 4), lockstep=st.booleans()
)
def test_whether_the_next_minibatch_completes_its_step(counts, num_replicas, lockstep):
    trace = Trace.of([32 * count for count in counts])
    schedule = Schedule(trace, dataset_size=10_000, minibatch_size=32, num_replicas=num_replicas, lockstep=lockstep)
    for rank in range(num_replicas):
        position = Cursor(schedule, rank)
        while position.epoch_step < len(counts):
            was_last_next = is_last_next(position)
            position.advance()
            assert was_last_next == position.plan.is_last
        assert is_last_next(position)  # nothing is next


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    num_replicas=st.integers(1, 6),
    capacity=st.integers(9, 30),
    data=st.data(),
)
def test_index_of_the_next_minibatch_equals_a_count(counts, num_replicas, capacity, data):
    trace = [32 * count for count in counts]
    schedule = Schedule(Trace.of(trace), dataset_size=32 * capacity, minibatch_size=32, num_replicas=num_replicas)
    epoch = data.draw(st.integers(0, schedule.num_epochs - 1))
    of_steps = [counts[step] for step in schedule.steps(epoch)]
    first_step = data.draw(st.integers(0, len(of_steps)))
    rank = data.draw(st.integers(0, num_replicas - 1))
    expected = []
    for number, count in enumerate(of_steps[first_step:], start=first_step):
        before = sum(of_steps[:number])
        expected += [before + place for place in range(rank, count, num_replicas)] or [before + rank % count]
    position = Cursor(schedule, rank)
    position.move(epoch, first_step)
    found = []
    for _ in expected:
        found.append(position.next_minibatch)
        assert position.next_minibatch == found[-1]
        assert isinstance(position.next_minibatch, int)
        position.advance()
    assert found == expected
    assert isinstance(position.next_minibatch, int)
    assert position.next_minibatch == sum(of_steps)  # after the last, for random numbers of an evaluation
    offsets = schedule.offsets(epoch, rank, at_once=5, first_step=first_step)
    assert found == [int(offset) // 32 for part in offsets for offset in part.starts]


def test_another_schedule_starts_at_its_beginning():
    position = position_of(0, trace=(64, 96), num_replicas=1)
    position.advance()
    position.schedule = Schedule(Trace.of([32, 64]), dataset_size=1000, minibatch_size=32)
    position.move(0)
    assert (position.plan.step, position.plan.batch_size, position.next_minibatch) == (0, 32, 0)


def test_after_a_core_has_left_its_minibatches_follow_in_the_same_step_and_then_those_of_the_new_rank():
    position = position_of(2, trace=(96, 128), num_replicas=3)  # of ranks 0, 1 and 2, the first one leaves
    assert position.advance().is_last
    position.schedule.num_replicas = 2
    position.reassign(1, 0, [0])
    assert not position.plan.is_last
    assert (position.next_minibatch, position.is_accumulating, position.epoch_step) == (0, True, 0)
    assert position.advance()[:4] == (3, True, False, False)
    assert position.epoch_step == 1
    places = []
    for _ in range(2):
        places.append(position.next_minibatch - 3)
        position.advance()
    assert places == [1, 3]
    assert position.plan.is_last
    assert position.next is None


def test_minibatches_of_a_step_that_others_have_begun_are_those_of_the_ranks_before():
    position = position_of(0, trace=(32, 128), num_replicas=2)
    position.advance()
    position.reassign(0, 1, [0, 2, 3])
    assert [position.next_minibatch - 1] + [
        position.advance().is_last or position.next_minibatch - 1 for _ in range(3)
    ] == [0, 2, 3, True]


def test_before_the_first_step_of_a_pass_a_rank_changes_without_a_trace_of_the_old_one():
    position = position_of(3, trace=(96, 128), num_replicas=4)
    assert position.next.is_idle
    position.schedule.num_replicas = 3
    position.reassign(2, 0, [])
    assert not position.next.is_padding
    assert position.next_minibatch == 2
