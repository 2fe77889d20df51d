"""A schedule that continues the history of another one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs

SIZES = st.lists(st.integers(1, 10).map(lambda number: 4 * number), min_size=1, max_size=30)


def schedule_of(trace, **options):
    return vbs.Schedule(vbs.Trace.of(trace), **{"dataset_size": 43, "minibatch_size": 4, **options})


def epochs_of(schedule, number):
    return [schedule.steps(epoch) for epoch in range(number)]


@given(SIZES, SIZES, st.sampled_from(["stop", "hold", "cycle"]), st.data())
def test_schedule_after_its_own_history_is_the_same(rows, more, on_end, data):
    short = schedule_of(rows, on_end=on_end)
    num_epochs = short.num_epochs or 5
    epoch = data.draw(st.integers(0, num_epochs - 1))
    past = short.past(epoch, data.draw(st.integers(0, len(short.steps(epoch)))))
    assert past.rows().tolist() == [short.batch_size(step) for step in range(past.num_rows)]
    assert past.has_ended == (on_end == "stop" and past.num_rows == len(rows))
    again = short.after(past)
    assert again.trace == short.trace
    assert epochs_of(again, num_epochs) == epochs_of(short, num_epochs)
    if on_end == "stop":
        longer = schedule_of(rows + more)
        assert epochs_of(longer.after(past), longer.num_epochs) == epochs_of(longer, longer.num_epochs)
        assert longer.after(past).trace == longer.trace


@given(SIZES, SIZES, st.sampled_from(["stop", "hold"]), st.data())
def test_after_another_history_the_next_step_is_the_next_row(rows, others, on_end, data):
    first, second = schedule_of(rows), schedule_of(others, on_end=on_end)
    epoch = data.draw(st.integers(0, first.num_epochs - 1))
    step = data.draw(st.integers(0, len(first.steps(epoch))))
    past = first.past(epoch, step)
    if on_end == "stop" and past.num_rows > len(others):
        with pytest.raises(ValueError, match=r"^trace has \d+ rows?, but the run has already completed \d+ steps?$"):
            second.after(past)
        return
    schedule = second.after(past)
    assert epochs_of(schedule, epoch) == epochs_of(first, epoch)
    # where the other trace ends just there, the epoch may have no step left
    assert past.num_rows == len(others) or schedule.steps(epoch)[:step] == first.steps(epoch)[:step]
    assert [schedule.batch_size(row) for row in range(past.num_rows)] == rows[: past.num_rows]
    for row in range(past.num_rows, past.num_rows + 5):
        if on_end == "hold" or row < len(others):
            assert schedule.batch_size(row) == second.batch_size(row)


@given(SIZES, st.sampled_from([1, 2, 4]), st.data())
def test_with_another_minibatch_size_later_epochs_fit_their_capacity(rows, minibatch_size, data):
    first = schedule_of(rows)
    epoch = data.draw(st.integers(0, first.num_epochs - 1))
    past = first.past(epoch, data.draw(st.integers(0, len(first.steps(epoch)))))
    schedule = schedule_of(rows, minibatch_size=minibatch_size).after(past)
    for number in range(schedule.num_epochs):
        steps = schedule.steps(number)
        assert schedule.samples_before(steps.stop) - schedule.samples_before(steps.start) <= schedule.capacity


def test_epoch_over_its_new_capacity_ends():
    rows = [20, 16, 4, 16, 8]
    past = schedule_of(rows).past(0, 2)
    assert epochs_of(schedule_of(rows, dataset_size=30).after(past), 2) == [range(2), range(2, 5)]


@pytest.mark.parametrize(("first_step", "steps"), [(1, "1 step"), (2, "2 steps")])
def test_cycled_trace_must_begin_with_the_completed_steps(first_step, steps):
    past = schedule_of([8, 16, 8]).past(0, first_step)
    message = f'^trace must begin with the {steps} that the run has completed, because on_end="cycle" repeats them$'
    with pytest.raises(ValueError, match=message):
        schedule_of([16, 8, 8], on_end="cycle").after(past)


def test_history_of_a_constant_trace_takes_no_memory():
    schedule = schedule_of(8)
    past = schedule.past(10**5, 3)
    assert (past.sizes.tolist(), past.counts.tolist()) == ([8], [5 * 10**5 + 3])
    assert schedule.after(past).trace is schedule.trace
