"""Membership: what a core does about collectives that fail, cores that are elsewhere, and cores that hang."""

import threading
import time

import live_runs
import pytest
import torch

from variable_batch_size.cores import live


class Work:
    """A collective that ends after its waits have timed out this many times, with an error if there is one."""

    def __init__(self, waits, error=None):
        self.waits, self.error = waits, error

    def is_completed(self):
        return self.waits <= 0

    def wait(self, timeout):
        self.waits -= 1
        if self.waits >= 0:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True


class Group:
    """A process group with another core, which adds numbers of its own."""

    def __init__(self, others, work=None):
        self.others, self.work = others, work or Work(0)

    def allreduce(self, tensors):
        tensors[0] += torch.tensor(self.others)
        return self.work


@pytest.fixture
def pair():
    """The membership of this process, with another core that others may play."""
    with live_runs.alone() as membership:
        membership.join(lambda: torch.zeros(1, dtype=torch.uint8), lambda state: None)
        membership.members = [membership.core, 99]
        yield membership
        membership.members, membership._group = [membership.core], None


def test_cores_at_different_steps_raise_before_they_update(pair):
    pair._group = Group([0, 7])
    pair.commit(7)
    with pytest.raises(RuntimeError, match=r"this one is at step 8 and others are not: let optimizer\.epochs"):
        pair.commit(8)


def test_a_core_that_waits_to_join_is_seen_by_all(pair):
    pair._group = Group([1, 0])
    pair.commit()
    assert pair.pending


@pytest.mark.parametrize("waits", [0, 1, 2])
def test_a_collective_that_ends_when_a_wait_gives_up_is_complete(pair, waits):
    pair._group = Group([0, 0], Work(waits))
    pair.commit()


def test_a_collective_that_has_failed_is_left(pair):
    pair._group = Group([0, 0], Work(1, "Connection closed by peer"))
    with pytest.raises(live._BrokenGroup):
        pair.commit()


def test_a_collective_is_left_when_a_core_dies_that_it_waits_for(pair):
    pair._group = Group([0, 0], Work(10**9))
    pair._monitor.watch(0, pair.members)
    live.report_death(pair._store, 99)
    with pytest.raises(live._BrokenGroup):
        pair.commit()
    pair._is_stuck = False  # there is no group whose destructor would wait


def test_a_core_whose_heartbeat_stops_is_dead_for_all_and_not_admitted_again():
    with live_runs.alone(timeout=0.4) as membership:
        store = membership._store
        membership.join(lambda: torch.zeros(1, dtype=torch.uint8), lambda state: None)
        membership._monitor.watch(membership._generation, [membership.core, 99])  # which has no heartbeat
        store.append("requests", "99,")
        while not membership._monitor.is_over(membership._generation):
            time.sleep(0.01)
        assert store.check(["dead/99"])
        membership.reform(is_between_steps=True)
        assert membership.members == [membership.core]


def test_a_core_that_was_removed_while_it_waited_to_join_ends():
    with live_runs.alone(first=2) as membership:
        threading.Timer(0.1, live.report_death, (membership._store, membership.core)).start()
        with pytest.raises(live.LeftRunError, match="was removed from the run: it did not respond for 10 seconds"):
            membership.join(lambda: torch.zeros(1), lambda state: None)


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        ("dead/99", RuntimeError, "all cores of the run have died: resume from a checkpoint"),
        ("finished", live.LeftRunError, "the run has ended"),
    ],
)
def test_a_core_that_comes_too_late_raises_only_if_the_run_is_lost(key, error, message):
    with live_runs.alone() as membership:
        membership._store.set("0/decision", "[[99], [], 0, null, false, 0]")
        membership._store.set(key, "")
        live.report_death(membership._store, 99)
        with pytest.raises(error, match=message):
            membership.join(lambda: torch.zeros(1), lambda state: None)
