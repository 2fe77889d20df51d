"""Agreement: all cores decide the same, by the clock of core 0 and by whoever was told, about once a second."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch

from variable_batch_size.cores import signals
from variable_batch_size.cores.detect import communicator_for
from variable_batch_size.runs import coordination
from variable_batch_size.runs.coordination import Decision, RankCoordinator

CPU = torch.device("cpu")
SECONDS_PER_MINIBATCH, NUM_MINIBATCHES = 1 / 256, 2_600  # on core 0; 10 s of its time


class Clock:
    """Seconds that pass when the test says so, in place of those of the module's clock."""

    def __init__(self):
        self.now = 0.0
        self.time = SimpleNamespace(monotonic=lambda: self.now)


class Counting(RankCoordinator):
    """Counts how often the cores come together."""

    times = 0

    def sums(self, numbers):
        self.times += 1
        return super().sums(numbers)


def agree_on_two_cores():
    communicator = communicator_for([])
    is_first = communicator.rank == 0
    found = {}
    for of_first in (True, False):
        every_seconds = 1e-9 if is_first == of_first else 1e9
        found["late on core 0" if of_first else "late on core 1"] = RankCoordinator(
            communicator, CPU, every_seconds=every_seconds
        ).ask()

    clock = Clock()
    coordination.time = clock.time
    agreement = Counting(communicator, CPU, every_seconds=None)
    for _ in range(NUM_MINIBATCHES):
        clock.now += SECONDS_PER_MINIBATCH if is_first else 1.0
        agreement.after_minibatches(1)
    found["questions"] = agreement.times

    with signals.listening():
        if not is_first:
            os.kill(os.getpid(), signal.SIGTERM)
        found["told on core 1"] = agreement.ask()
        signals.obey()
    return found


@pytest.fixture(scope="module")
def cores(on_new_cores):
    return on_new_cores(2, agree_on_two_cores)


def test_the_clock_is_that_of_core_0(cores):
    for core in cores:
        assert core["late on core 0"] == Decision(is_late=True, is_told=False)
        assert core["late on core 1"] == Decision(is_late=False, is_told=False)


def test_all_stop_if_one_was_told(cores):
    for core in cores:
        assert core["told on core 1"] == Decision(is_late=False, is_told=True)


def test_they_come_together_about_once_a_second(cores):
    # after the first minibatch, which shows how long one takes, and after each second from then on
    assert [core["questions"] for core in cores] == [1 + 10] * 2


def test_a_core_alone_asks_after_every_step(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(coordination, "time", clock.time)
    agreement = RankCoordinator(communicator_for([]), CPU, every_seconds=0.01)
    assert agreement.after_minibatches(1) == Decision(is_late=False, is_told=False)
    clock.now += 0.02
    assert agreement.after_minibatches(1) == Decision(is_late=True, is_told=False)
    agreement.note_saved()
    assert agreement.after_minibatches(1) == Decision(is_late=False, is_told=False)
