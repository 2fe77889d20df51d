"""A checkpoint holds the full state for any sharding of the model, and resumes with any other sharding or none."""

import shutil

import pytest
import sharded_models
import torch
from sharded_models import Normed, Transformer, go, in_one_block, largest_difference
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.runs import state_file


def go_all(cases):
    return [go(directory, way, kind, name, until=until) for directory, way, kind, name, until in cases]


# name of the checkpoint, number of processes, sharding, run, and completed steps of 4
SAVED = {
    "sharded": (4, "sharded", Transformer, "adam", 2),
    "normed": (4, "sharded", Normed, "adascale", 3),
    "both": (4, "sharded_and_split", in_one_block, "adascale", 2),
    "wrapped": (4, "wrapped", Transformer, "adascale", 3),
    "zero": (4, "plain", Transformer, "zero", 1),
    "plain": (1, "plain", Transformer, "adam", 3),
}
# name of the checkpoint to resume from, number of processes, sharding
RESUMED = [
    ("sharded", 1, "plain"),
    ("sharded", 2, "sharded"),
    ("sharded", 2, "wrapped"),
    ("normed", 1, "plain"),
    ("normed", 2, "sharded"),
    ("both", 1, "plain"),
    ("both", 2, "split"),
    ("wrapped", 1, "plain"),
    ("wrapped", 2, "sharded"),
    ("zero", 1, "plain"),
    ("zero", 2, "plain"),
    ("plain", 2, "sharded"),
    ("plain", 2, "wrapped"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, on_cores):
    root = tmp_path_factory.mktemp("saved")
    for cores in (1, 4):
        cases = [(root / key, *how) for key, (number, *how) in SAVED.items() if number == cores]
        go_all(cases) if cores == 1 else on_cores(cores, go_all, cases)
    return root


@pytest.fixture(scope="module")
def resumed(saved, tmp_path_factory, on_cores):
    root = tmp_path_factory.mktemp("resumed")
    found = {}
    for cores in (1, 2):
        own = [case for case in RESUMED if case[1] == cores]
        cases = []
        for key, _, way in own:
            directory = root / f"{key}-{cores}-{way}"
            shutil.copytree(saved / key, directory)
            cases.append((directory, way, *SAVED[key][2:4], None))
        results = [go_all(cases)] if cores == 1 else on_cores(cores, go_all, cases)
        found |= {case: [core[place] for core in results] for place, case in enumerate(own)}
    return found


@pytest.fixture(scope="module")
def uninterrupted():
    return {key: go(None, "plain", *how[2:4]) for key, how in SAVED.items()}


@pytest.mark.parametrize("case", RESUMED, ids=str)
def test_run_resumes_with_another_sharding_as_if_never_stopped(resumed, uninterrupted, case):
    for state in resumed[case]:
        assert largest_difference(state, uninterrupted[case[0]]) < 1e-5


@pytest.mark.parametrize("key", ["sharded", "wrapped", "zero"])
def test_missing_momentum_would_change_the_run(saved, uninterrupted, tmp_path, key):
    shutil.copytree(saved / key, tmp_path / key)
    state = go(tmp_path / key, "plain", *SAVED[key][2:4], forget=True)
    assert largest_difference(state, uninterrupted[key]) > 1e-4


@pytest.mark.parametrize("key", SAVED)
def test_file_contains_full_tensors_under_the_names_of_the_plain_model(saved, key):
    (*_, path) = state_file.checkpoints(saved / key)
    state = state_file.load(path)
    plain = sharded_models.model_of(SAVED[key][2]).state_dict()
    assert {name: value.shape for name, value in state["model"].items()} == {
        name: value.shape for name, value in plain.items()
    }
    parameters = list(sharded_models.model_of(SAVED[key][2]).parameters())
    for number, values in state["optimizer"]["state"].items():
        shapes = {value.shape for value in values.values() if isinstance(value, torch.Tensor) and value.dim()}
        assert shapes <= {parameters[number].shape}


def test_a_compiled_model_is_saved_under_the_names_of_the_plain_one(tmp_path):
    model = torch.compile(nn.Linear(2, 2), backend="eager")  # importing the default one takes seconds
    sampler = vbs.CustomSampler(dataset_size=8, trace=[4], minibatch_size=4)
    optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler, ref_batchsize=4)
    vbs.Checkpoint(tmp_path, model=model, optimizer=optimizer).save()
    assert set(state_file.load(state_file.checkpoints(tmp_path)[-1])["model"]) == {"weight", "bias"}
