"""Steps: the minibatches of a step together, as many steps as the epoch has left."""

import pytest

import variable_batch_size as vbs
from variable_batch_size.integrations.common import Steps


def steps_of(rank=0, num_replicas=1, **options):
    settings = {"dataset_size": 8, "trace": [4, 2, 2], "minibatch_size": 2, "shuffle": False}
    sampler = vbs.CustomSampler(rank=rank, num_replicas=num_replicas, **settings, **options)
    return Steps(sampler, sampler)


def test_a_step_has_all_minibatches_of_its_core():
    steps = steps_of()
    assert len(steps) == 3
    assert [list(step) for step in steps] == [[[0, 1], [2, 3]], [[4, 5]], [[6, 7]]]


def test_an_idle_core_has_one_too():
    assert [list(step) for step in steps_of(rank=1, num_replicas=2)] == [[[2, 3]], [[4, 5]], [[6, 7]]]


def test_so_has_each_core_in_lockstep():
    of_cores = [[len(list(step)) for step in steps_of(rank, 3, lockstep=True)] for rank in range(3)]
    assert of_cores == [[1, 1, 1]] * 3


def test_an_epoch_may_be_entered_in_its_middle():
    steps = steps_of()
    steps.sampler.set_epoch(0, 1)
    assert len(steps) == 2
    assert [list(step) for step in steps] == [[[4, 5]], [[6, 7]]]


def test_a_step_that_was_not_run_to_its_end_is_refused():
    steps = iter(steps_of())
    next(next(steps))
    with pytest.raises(RuntimeError, match="step 0 of the run was left before all its minibatches were run"):
        next(steps)
