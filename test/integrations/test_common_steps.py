"""Steps: the minibatches of a step in one group, for the remaining steps of the epoch."""

import pytest

import variable_batch_size as vbs
from variable_batch_size.integrations.common import Steps, extent_of_epochs, extent_of_steps


def steps_of(rank=0, num_replicas=1, **options):
    settings = {"dataset_size": 8, "trace": [4, 2, 2], "minibatch_size": 2, "shuffle": False}
    sampler = vbs.CustomSampler(rank=rank, num_replicas=num_replicas, **settings, **options)
    return Steps(sampler, sampler)


def test_a_step_has_all_minibatches_of_its_core():
    steps = steps_of()
    assert len(steps) == 3
    assert [list(step) for step in steps] == [[[0, 1], [2, 3]], [[4, 5]], [[6, 7]]]


def test_idle_core_has_one_minibatch():
    assert [list(step) for step in steps_of(rank=1, num_replicas=2)] == [[[2, 3]], [[4, 5]], [[6, 7]]]


def test_in_lockstep_each_core_has_all_rounds():
    of_cores = [[len(list(step)) for step in steps_of(rank, 3, lockstep=True)] for rank in range(3)]
    assert of_cores == [[1, 1, 1]] * 3


def test_epoch_can_start_in_its_middle():
    steps = steps_of()
    steps.sampler.set_epoch(0, 1)
    assert len(steps) == 2
    assert [list(step) for step in steps] == [[[4, 5]], [[6, 7]]]


def test_incomplete_step_raises():
    steps = iter(steps_of())
    next(next(steps))
    with pytest.raises(RuntimeError, match="step 0 of the run ended before all of its minibatches were consumed"):
        next(steps)


def test_the_length_of_a_run_in_epochs_and_in_steps():
    schedule = vbs.Schedule(vbs.Trace.of([4, 4, 2, 2, 2]), dataset_size=8, minibatch_size=2)
    assert extent_of_epochs(schedule, 2) == (2, 5, 3)
    assert extent_of_epochs(schedule, 1.5) == (2, 4, 3)
    assert extent_of_steps(schedule, 4) == (2, 4, 3)
