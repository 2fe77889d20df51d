"""Replaced rows give the epochs that the executed rows give as a trace."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from variable_batch_size import Schedule
from variable_batch_size.schedules.watched import WatchedSchedule
from variable_batch_size.traces import Trace, WatchedTrace

SIZES = st.lists(st.integers(1, 5).map(lambda number: 8 * number), min_size=30, max_size=60)


@settings(max_examples=40)
@given(first=SIZES, edits=st.dictionaries(st.integers(1, 40), SIZES, max_size=6), every=st.integers(1, 5))
def test_minibatches_are_those_of_the_executed_rows(tmp_path_factory, first, edits, every):
    path = tmp_path_factory.mktemp("watched") / "trace.csv"
    Trace.from_sequence(first).write(path)
    how = {"dataset_size": 100, "minibatch_size": 8, "num_replicas": 2}
    schedule = WatchedSchedule(WatchedTrace(path, every=every, lead=2), on_end="hold", **how)
    done, read = [], []
    for epoch in range(12):
        schedule.begin_epoch(epoch)
        read.append([])
        for step in schedule.steps_from(epoch, 0):
            assert step == len(done)
            done.append(schedule.batch_size(step))
            read[-1].append(step)
            if schedule.num_fixed - len(done) <= 2:
                if edits and min(edits) <= len(done):
                    schedule.replace_rows(np.array(edits.pop(min(edits))))
                schedule.fix_after(len(done))
    replayed = Schedule(done, on_end="hold", **how)
    assert [list(replayed.steps(epoch)) for epoch in range(11)] == read[:11]
    assert [schedule.steps(epoch) for epoch in range(11)] == [replayed.steps(epoch) for epoch in range(11)]
