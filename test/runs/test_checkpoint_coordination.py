"""RankCoordinator: all cores decide the same, by the clock of core 0 and by any stop request, about once a second."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch

from variable_batch_size.cores import signals
from variable_batch_size.cores.detect import communicator_for
from variable_batch_size.runs import checkpoint
from variable_batch_size.runs.checkpoint import CheckpointSignal, RankCoordinator

CPU = torch.device("cpu")
SECONDS_PER_MINIBATCH, NUM_MINIBATCHES = 1 / 256, 2_600  # on core 0; 10 s of its time


class Clock:
    """A clock that the test advances, instead of the module's clock."""

    def __init__(self):
        self.now = 0.0
        self.time = SimpleNamespace(monotonic=lambda: self.now)


class Counting(RankCoordinator):
    """Counts the synchronizations of the cores."""

    times = 0

    def all_reduce(self, numbers):
        self.times += 1
        return super().all_reduce(numbers)


def agree_on_two_cores():
    communicator = communicator_for([])
    is_first = communicator.rank == 0
    found = {}
    for of_first in (True, False):
        every_seconds = 1e-9 if is_first == of_first else 1e9
        found["late on core 0" if of_first else "late on core 1"] = RankCoordinator(
            communicator, CPU, every_seconds=every_seconds
        ).poll()

    clock = Clock()
    checkpoint.time = clock.time
    agreement = Counting(communicator, CPU, every_seconds=None)
    for _ in range(NUM_MINIBATCHES):
        clock.now += SECONDS_PER_MINIBATCH if is_first else 1.0
        agreement.after_minibatches(1)
    found["questions"] = agreement.times

    with signals.listening():
        if not is_first:
            os.kill(os.getpid(), signal.SIGTERM)
        found["told on core 1"] = agreement.poll()
        signals.acknowledge()
    return found


@pytest.fixture(scope="module")
def cores(on_new_cores):
    return on_new_cores(2, agree_on_two_cores)


def test_the_clock_is_that_of_core_0(cores):
    for core in cores:
        assert core["late on core 0"] == CheckpointSignal(save_due=True, stop_requested=False)
        assert core["late on core 1"] == CheckpointSignal(save_due=False, stop_requested=False)


def test_all_cores_stop_if_one_received_the_signal(cores):
    for core in cores:
        assert core["told on core 1"] == CheckpointSignal(save_due=False, stop_requested=True)


def test_cores_synchronize_about_once_a_second(cores):
    # after the first minibatch, which gives the time of one, and then once a second
    assert [core["questions"] for core in cores] == [1 + 10] * 2


def test_single_core_checks_after_every_step(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(checkpoint, "time", clock.time)
    agreement = RankCoordinator(communicator_for([]), CPU, every_seconds=0.01)
    assert agreement.after_minibatches(1) == CheckpointSignal(save_due=False, stop_requested=False)
    clock.now += 0.02
    assert agreement.after_minibatches(1) == CheckpointSignal(save_due=True, stop_requested=False)
    agreement.mark_saved()
    assert agreement.after_minibatches(1) == CheckpointSignal(save_due=False, stop_requested=False)
