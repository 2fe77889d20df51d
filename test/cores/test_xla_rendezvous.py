"""ThreadRendezvous: threads wait for each other, and receive the values of all."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from variable_batch_size.cores.xla import ThreadRendezvous


def test_every_thread_receives_the_values_of_all_threads():
    local = threading.local()
    meeting = ThreadRendezvous(4, lambda: local.rank)

    def run(rank):
        local.rank = rank
        return [meeting.rendezvous(f"round {number}", bytes([rank, number])) for number in range(200)]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, range(4)))
    expected = [[bytes([rank, number]) for rank in range(4)] for number in range(200)]
    assert results == [expected] * 4


def test_all_replicas_are_allowed_and_a_subset_raises():
    meeting = ThreadRendezvous(1, lambda: 0)
    assert meeting.rendezvous("all", b"x", [0]) == [b"x"]
    with pytest.raises(ValueError, match=r"^`replicas` must be empty or all 1 cores, got \[1\] \('some'\)$"):
        meeting.rendezvous("some", replicas=[1])
