"""RankCoordinator: all cores decide the same, by the clock of core 0 and by whoever was told, about once a second."""

import os
import signal
import time

import pytest
import torch

import variable_batch_size as vbs
from variable_batch_size.cores import signals
from variable_batch_size.cores.detect import communicator_for
from variable_batch_size.runs.coordination import Decision, RankCoordinator

CPU = torch.device("cpu")


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

    agreement = Counting(communicator, CPU, every_seconds=None)
    begin = time.monotonic()
    for _ in range(500):
        time.sleep(0.004)
        agreement.after_minibatches(1)
    found["questions"], found["seconds"] = agreement.times, time.monotonic() - begin

    with signals.listening():
        if not is_first:
            os.kill(os.getpid(), signal.SIGTERM)
        found["told on core 1"] = agreement.ask()
        signals.obey()
    return found


@pytest.fixture(scope="module")
def cores():
    return vbs.launch(agree_on_two_cores, cores=2, backend="gloo")


def test_the_clock_is_that_of_core_0(cores):
    for core in cores:
        assert core["late on core 0"] == Decision(is_late=True, is_told=False)
        assert core["late on core 1"] == Decision(is_late=False, is_told=False)


def test_all_stop_if_one_was_told(cores):
    for core in cores:
        assert core["told on core 1"] == Decision(is_late=False, is_told=True)


def test_they_come_together_about_once_a_second(cores):
    assert cores[0]["questions"] == cores[1]["questions"]
    for core in cores:
        assert 2 <= core["questions"] <= 3 + 2 * core["seconds"]


def test_a_core_alone_asks_after_every_step():
    agreement = RankCoordinator(communicator_for([]), CPU, every_seconds=0.01)
    assert agreement.after_minibatches(1) == Decision(is_late=False, is_told=False)
    time.sleep(0.02)
    assert agreement.after_minibatches(1) == Decision(is_late=True, is_told=False)
    agreement.note_saved()
    assert agreement.after_minibatches(1) == Decision(is_late=False, is_told=False)
