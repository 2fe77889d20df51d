import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from variable_batch_size import Schedule, Trace
from variable_batch_size.schedules.schedule import ON_END

ROWS = st.lists(st.integers(1, 9), min_size=1, max_size=200)


def schedule_of(trace, on_end):
    return Schedule(trace, dataset_size=None, minibatch_size=1, on_end=on_end)


def written_out(rows, on_end, num_steps):
    """The batch sizes of that many steps, one by one."""
    then = {"stop": [], "hold": itertools.repeat(rows[-1]), "cycle": itertools.cycle(rows)}[on_end]
    return list(itertools.islice(itertools.chain(rows, then), num_steps))


@settings(deadline=None)
@given(rows=ROWS, on_end=st.sampled_from(ON_END), data=st.data())
def test_lookups_equal_those_of_an_explicit_list(rows, on_end, data):
    schedule = schedule_of(Trace.from_sequence(rows), on_end)
    expected = written_out(rows, on_end, 3 * len(rows) + 5)
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    part = expected[start:stop]
    assert schedule._batch_sizes(range(start, stop)).tolist() == part
    assert [schedule.batch_size(step) for step in range(start, stop)] == part
    assert schedule.samples_before(start) == sum(expected[:start])
    distinct, counts = schedule.size_counts(range(start, stop))
    assert dict(zip(distinct.tolist(), counts.tolist(), strict=True)) == {size: part.count(size) for size in {*part}}
    assert distinct.tolist() == sorted({*part})
    each, times = schedule._runs(stop)
    assert np.repeat(each, times).tolist() == expected[:stop]
    assert all(np.diff(each) != 0)


@settings(deadline=None)
@given(rows=ROWS, on_end=st.sampled_from(ON_END), data=st.data())
def test_step_at_inverts_samples_before(rows, on_end, data):
    schedule = schedule_of(Trace.from_sequence(rows), on_end)
    expected = written_out(rows, on_end, 3 * len(rows))
    step = data.draw(st.integers(0, len(expected) - 1))
    more = data.draw(st.integers(0, expected[step] - 1))
    assert schedule._step_at(sum(expected[:step]) + more) == step


@pytest.mark.parametrize(("on_end", "samples"), [("hold", 10**12 + 3), ("cycle", 2 * 10**12)])
def test_lookups_at_a_trillion_steps(on_end, samples):
    schedule = schedule_of(Trace.from_sequence([2, 3, 1]), on_end)
    distinct, counts = schedule.size_counts(range(10**12))
    assert distinct @ counts == samples
    assert schedule.samples_before(10**12) == samples
    if on_end == "hold":
        assert [found.tolist() for found in schedule._runs(10**12)] == [[2, 3, 1], [1, 1, 10**12 - 2]]
    assert schedule._step_at(samples) == 10**12


def test_constant_trace_always_holds():
    assert schedule_of(Trace.constant(64), "cycle").on_end == "hold"


def test_error_names_the_first_row_that_breaks_a_rule():
    trace = Trace.from_sequence([*[64] * 9000, 96, 32])
    with pytest.raises(ValueError, match=r"^trace\[9000\]: batchsize must be a multiple of 64 .*, got 96$"):
        Schedule(trace, dataset_size=1000, minibatch_size=64)
