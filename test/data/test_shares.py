"""Shares: which minibatches of a step a core runs."""

import pytest
import torch
import torch.distributed as dist

from variable_batch_size import Schedule
from variable_batch_size.cores import devices
from variable_batch_size.data.cursor import Cursor
from variable_batch_size.data.shares import AsFree, BySpeed, share_by_speed


def schedule_of(*sizes):
    return Schedule(list(sizes), dataset_size=1000, minibatch_size=8, num_replicas=2)


def as_free(schedule, cores=2):
    """The shares of cores that have one store, in one process."""
    store, found = dist.HashStore(), [AsFree(rank) for rank in range(cores)]
    for one in found:
        one._counter.run, one._counter.store = "run", store
        one._pace = devices.Pace(torch.device("cpu"))
        one.begin(schedule, 0, 0)
    return found


def test_a_core_that_is_ready_more_often_gets_more_minibatches_of_the_step():
    schedule = schedule_of(64, 16)
    fast, slow = (Cursor(schedule, rank, shares) for rank, shares in enumerate(as_free(schedule)))
    while not fast.advance().is_last:  # the slow core has begun its first one
        pass
    assert (fast.num_own, fast.plan.step) == (7, 0)
    assert slow.advance().is_last
    assert slow.num_own == 1


def test_a_core_whose_next_minibatch_is_beyond_a_step_is_idle_there():
    schedule = schedule_of(8, 8, 24)
    first, second = (Cursor(schedule, rank, shares) for rank, shares in enumerate(as_free(schedule)))
    plans = [first.advance(), first.advance(), first.advance()]
    assert [(plan.step, plan.is_idle) for plan in plans] == [(0, False), (1, True), (2, False)]
    plans = [second.advance(), second.advance(), second.advance()]
    assert [(plan.step, plan.is_idle) for plan in plans] == [(0, True), (1, False), (2, False)]


def test_the_number_of_a_minibatch_in_the_epoch_follows_from_its_place():
    schedule = schedule_of(16, 32)
    cursors = [Cursor(schedule, rank, shares) for rank, shares in enumerate(as_free(schedule))]
    found = []
    for cursor in (cursors[1], cursors[0], cursors[1], cursors[0], cursors[0], cursors[1]):
        found.append(cursor.next_minibatch)
        cursor.advance()
    assert sorted(found) == [0, 1, 2, 3, 4, 5]


def test_only_the_core_with_the_first_minibatch_of_a_step_has_first():
    schedule = schedule_of(16, 32)
    plans = [Cursor(schedule, rank, shares).plan for rank, shares in enumerate(as_free(schedule))]
    assert [plan.has_first for plan in plans] == [True, False]


def test_nothing_is_assigned_before_there_is_an_optimizer():
    shares = AsFree(0)
    shares.begin(schedule_of(16), 0, 0)
    with pytest.raises(RuntimeError, match="make the optimizer before reading the sampler"):
        shares.place(0, 0)


class Table:
    """A communicator whose other core sends a time."""

    num_replicas, rank = 2, 0

    def __init__(self, seconds):
        self.seconds = seconds

    def flush(self):
        pass

    def total(self, numbers):
        numbers[:, 1] = torch.tensor([self.seconds, 4.0])  # which has read minibatches of four further steps
        self.on_total()
        return numbers

    def on_total(self):
        pass


def test_shares_by_speed_change_where_no_loader_has_read_yet():
    schedule = schedule_of(*[64] * 20)
    shares = BySpeed(0)
    shares.connect(Table(0.3), torch.device("cpu"))
    shares.begin(schedule, 0, 0)
    shares._timed = [0.1, 0.1, 9.0]
    shares.after_step(7)
    numbers = [sum(shares.place(step, number) is not None for number in range(9)) for step in range(14)]
    assert numbers == [4] * 12 + [6] * 2  # after the step, and four


def by_speed(seconds, num_steps=20):
    """The shares of a core that takes a tenth of a second, next to a core that takes longer."""
    shares = BySpeed(0)
    shares.connect(Table(seconds), torch.device("cpu"))
    shares.begin(schedule_of(*[64] * num_steps), 0, 0)
    shares._timed = [0.1]
    return shares


def test_shares_by_speed_hold_for_what_this_core_has_read_itself():
    shares = by_speed(0.3)
    before = [shares.place(step, 3) for step in range(15)]
    shares.after_step(7)
    assert [shares.place(step, 3) for step in range(15)] == before == [6] * 15
    assert shares.place(15, 5) is not None


def test_shares_by_speed_refuse_a_loader_that_is_read_in_another_thread_while_they_change():
    shares = by_speed(0.3)
    shares._communicator.on_total = lambda: shares.place(12, 0)
    with pytest.raises(RuntimeError, match="needs a loader that is read by the loop itself"):
        shares.after_step(7)


def test_a_core_without_a_share_is_measured_by_its_padding():
    shares = by_speed(0.001)
    shares.after_step(7)
    assert shares.place(19, 0) is None  # the other one is a hundred times as fast
    for _ in range(3):
        shares.begin_minibatch()
        shares.end_minibatch(is_padding=True)
    assert shares.num_run == 0
    shares._communicator.seconds = sorted(shares._timed)[1]  # now they are equal
    shares.begin(schedule_of(*[64] * 40), 0, 0)
    shares.after_step(15)
    assert shares.place(39, 3) is not None


def test_shares_by_speed_take_the_least_time():
    assert share_by_speed(7, (1.0, 1.0, 1.0)) == [0, 1, 2, 0, 1, 2, 0]
    assert share_by_speed(8, (1.0, 3.0)).count(1) == 2
    assert share_by_speed(1, (2.0, 1.0)) == [1]
