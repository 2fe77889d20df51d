"""Promise: copies and pickles of a model, its optimizer and its loader train like the original, on the same cores."""

import copy
import pickle

import copied_runs
import live_runs
import pytest
import torch

import variable_batch_size as vbs

ALONE = [name for name in copied_runs.CASES if name != "ddp"]


@pytest.mark.parametrize("how", copied_runs.COPIES)
@pytest.mark.parametrize("name", ALONE)
def test_copies_in_one_process_end_with_the_same_weights(name, how):
    assert copied_runs.largest_differences(how, **copied_runs.CASES[name]) == [0.0] * 4


@pytest.mark.parametrize("cores", [2, 3])
def test_copies_on_several_cores_end_with_the_same_weights(on_cores, cores):
    for found in on_cores(cores, copied_runs.run_all):
        assert found == dict.fromkeys(found, [0.0] * 4)


@pytest.mark.xla
def test_copies_on_xla_cores_end_with_the_same_weights(on_xla):
    for found in on_xla(2, copied_runs.on_xla_cores):
        assert found == [[0.0] * 4] * 2


@pytest.fixture(scope="module")
def refused(on_cores):
    return on_cores(2, copied_runs.refusals)


def test_a_group_of_its_own_is_not_pickled(refused):
    for errors, _ in refused:
        for error in errors[:2]:
            assert error == (
                "a loader or an optimizer with a process group of its own cannot be pickled: use copy.deepcopy, pass a "
                "DeviceMesh as `process_group`, or pickle the state_dict()s"
            )


def test_what_another_core_has_pickled_is_refused(refused):
    advice = "let each core load its own, or use a vbs.Checkpoint to resume on other cores"
    for rank, (errors, _) in enumerate(refused):
        assert errors[2] == f"what rank {1 - rank} of 2 has pickled was loaded by rank {rank} of 2: {advice}"
    with pytest.raises(
        RuntimeError, match="what rank 1 of 2 has pickled was loaded by rank 0 of 1: let each core load"
    ):
        pickle.loads(refused[0][1])


@pytest.mark.parametrize("how", copied_runs.COPIES)
def test_an_optimizer_whose_cores_come_and_go_is_not_copied(how):
    with live_runs.alone() as membership:
        model = torch.nn.Linear(4, 3)
        loader = vbs.DataLoader(copied_runs.dataset(), [8], minibatch_size=8)
        optimizer = vbs.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), loader, rule="linear", ref_batchsize=8)
        with pytest.raises(
            RuntimeError, match=r"may join and leave cannot be copied or pickled, .*: copy the model, or"
        ):
            copied_runs.COPIES[how](optimizer)
        assert copy.deepcopy(model) and membership
