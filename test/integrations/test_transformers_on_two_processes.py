"""Accelerate and Transformers' Trainer on two processes, started once: the weights are those of one process."""

import os

import pytest
import torch
from fresh_process import quick_searches_for_garbage
from torch.testing import assert_close

TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}


def all_runs(folder):
    """The results of each process."""
    rank = str(torch.distributed.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="localhost")  # as torchrun sets them
    import accelerate_runs
    import trainer_runs

    with quick_searches_for_garbage():
        return {
            "accelerate": accelerate_runs.all_runs(folder / "accelerate"),
            "trainer": trainer_runs.all_runs(folder / "trainer"),
        }


@pytest.fixture(scope="module")
def found(on_new_cores, tmp_path_factory):
    return on_new_cores(2, all_runs, tmp_path_factory.mktemp("two"), imports=["accelerate_runs", "trainer_runs"])


def test_accelerate_loop_on_two_processes_equals_one_process(found):
    import accelerate_runs

    expected = {rule: accelerate_runs.by_own_loop(rule) for rule in accelerate_runs.RULES}
    for rule, run in (pair for process in found for pair in process["accelerate"][0]):
        assert_close(run["weights"], expected[rule]["weights"], **TOLERANCE)
        assert run["steps"] == run["scheduler"] == len(accelerate_runs.TRACE)


def test_optimizer_that_was_made_before_accelerate_has_sharded_the_model_raises(found):
    for process in found:
        rule = "with FSDP2 the model must be sharded before the optimizer is made"
        assert process["accelerate"][1] == f"{rule}: model, inner = shard(accelerator, model, inner)"


def test_trainer_on_two_processes_equals_one_process(found):
    import trainer_runs

    expected = {rule: trainer_runs.by_own_loop(rule) for rule in trainer_runs.RULES}
    for runs, resumed, in_shards in (process["trainer"] for process in found):
        for rule, run in runs.items():
            assert_close(run["weights"], expected[rule]["weights"], **TOLERANCE)
            assert run["steps"] == len(trainer_runs.TRACE)
        assert_close(resumed["weights"], expected["adascale"]["weights"], **TOLERANCE)
        for weights, history in in_shards:
            assert_close(weights, expected["adascale"]["weights"], **TOLERANCE)
            if history:  # of rank 0
                trainer_runs.check_history(history, expected["adascale"]["records"])
    for rule, run in found[0]["trainer"][0].items():
        trainer_runs.check_history(run["history"], expected[rule]["records"])
