"""Sharded checkpoints: resumed with any sharding, atomic, limited in number, and written during training."""

import shutil

import pytest
import sharded_models
import torch
from held import Hold
from sharded_models import Normed, Transformer, go, in_one_block, largest_difference
from standing_cores import StandingCores

import variable_batch_size as vbs
from variable_batch_size.runs import state_file

STOP_AFTER = 2


def save_all(root):
    """On 4 processes: synchronously and asynchronously, with and without sharded tensors."""
    names = [
        go(root / "sharded", "sharded", Transformer, "adam", until=STOP_AFTER, format="sharded"),
        go(root / "later", "sharded", Normed, "adascale", until=STOP_AFTER, format="sharded", asynchronous=True),
        go(root / "both", "sharded_and_split", in_one_block, "adascale", until=STOP_AFTER, format="sharded"),
        go(root / "whole", "sharded", Transformer, "adam", until=STOP_AFTER),
    ]
    return len(names)


SAVED = {
    "sharded": (Transformer, "adam"),
    "later": (Normed, "adascale"),
    "both": (in_one_block, "adascale"),
    "whole": (Transformer, "adam"),
}
# name of the checkpoint to resume from, number of processes, sharding, and format of later checkpoints
RESUMED = [
    ("sharded", 1, "plain", {}),
    ("sharded", 2, "sharded", {"format": "sharded", "asynchronous": True}),
    ("later", 1, "plain", {"format": "sharded"}),
    ("later", 2, "sharded", {}),
    ("both", 2, "split", {"format": "sharded"}),
    ("whole", 2, "sharded", {"format": "sharded"}),
]


def go_all(cases):
    return [go(directory, way, kind, name, **how) for directory, way, kind, name, how in cases]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, on_cores):
    root = tmp_path_factory.mktemp("saved")
    on_cores(4, save_all, root)
    return root


@pytest.fixture(scope="module")
def resumed(saved, tmp_path_factory, on_cores):
    root, found = tmp_path_factory.mktemp("resumed"), {}
    for cores in (1, 2):
        own = [case for case in RESUMED if case[1] == cores]
        cases = []
        for key, _, way, how in own:
            shutil.copytree(saved / key, root / f"{key}-{cores}")
            cases.append((root / f"{key}-{cores}", way, *SAVED[key], how))
        results = [go_all(cases)] if cores == 1 else on_cores(cores, go_all, cases)
        for place, (key, *_) in enumerate(own):
            found[key, cores] = [core[place] for core in results], root / f"{key}-{cores}"
    return found


@pytest.mark.parametrize("case", RESUMED, ids=str)
def test_run_resumes_as_if_never_stopped(resumed, case):
    key, cores, _, how = case
    expected = go(None, "plain", *SAVED[key])
    states, directory = resumed[key, cores]
    for state in states:
        assert largest_difference(state, expected) < 1e-5
    *_, before, last = state_file.checkpoints(directory)
    assert last.is_dir() == (how.get("format") == "sharded")
    assert len(state_file.checkpoints(directory)) == 2
    assert before != last


def test_sharded_tensors_are_in_shards_and_the_rest_loads_with_weights_only(saved):
    (*_, path) = state_file.checkpoints(saved / "sharded")
    assert path.name == f"step-{STOP_AFTER:09d}-1"
    assert len(list(path.glob("*.distcp"))) == 4
    state = state_file.load(path)
    assert state["optimizer"]["variable_batch_size"]["steps_done"] == STOP_AFTER
    tensors = [value for value in state["model"].values() if isinstance(value, torch.Tensor)]
    assert not tensors


def test_incomplete_directory_is_removed_and_the_run_resumes_from_the_previous_one(saved, tmp_path):
    shutil.copytree(saved / "sharded", tmp_path / "run")
    (*_, path) = state_file.checkpoints(tmp_path / "run")
    unfinished = path.with_name("step-000000003-1.tmp")
    shutil.copytree(path, unfinished)
    (unfinished / state_file.REST).unlink()
    state = go(tmp_path / "run", "plain", Transformer, "adam")
    assert not unfinished.exists()
    assert largest_difference(state, go(None, "plain", Transformer, "adam")) < 1e-5


@pytest.mark.parametrize(
    ("format", "suffix", "number"),
    [
        ("file", "step-000000002.pt.tmp", 1),
        ("sharded", "run.pt.tmp", 2),  # before the shards
        ("sharded", ".metadata.tmp", 2),  # after them
        ("sharded", "step-000000002-1.tmp", 1),  # after all files
    ],
)
def test_run_killed_while_writing_resumes_from_the_previous_checkpoint(tmp_path, format, suffix, number):
    """Kills both processes before a file or directory of the second checkpoint has its name."""
    directory, hold = tmp_path / "run", Hold(tmp_path / "hold")
    cores = StandingCores(2, tmp_path)
    cores.give(save_each_step, directory, format, hold, suffix, number)
    hold.wait(lambda: str(cores.answer()) if cores.have_answered() else None)
    cores.kill()
    assert list(directory.glob("*.tmp"))
    (path,) = state_file.checkpoints(directory)
    assert path.name == ("step-000000001-1" if format == "sharded" else "step-000000001.pt")
    state = go(directory, "plain", Transformer, "adam")
    assert largest_difference(state, go(None, "plain", Transformer, "adam")) < 1e-5
    assert not list(directory.glob("*.tmp"))


def save_each_step(directory, format, hold, suffix, number):
    hold.at_rename(suffix, number=number)
    model, more = sharded_models.sharded(sharded_models.model_of(Transformer))
    sampler = vbs.CustomSampler(dataset_size=48, trace=sharded_models.SIZES, minibatch_size=4, **more)
    inner = sharded_models.adamw(list(model.parameters()))
    optimizer = vbs.AdamRuleOptimizer(inner, sampler, ref_batchsize=8, model=model)
    checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer, format=format)
    x, y = sharded_models.data()
    for _ in checkpoint.epochs(1):
        for indices in sampler:
            sharded_models.loss_of(model, x[indices], y[indices]).backward()
            if optimizer.step():
                checkpoint.save()


def test_unknown_format_raises(tmp_path):
    with pytest.raises(ValueError, match="`format` must be one of 'file', 'sharded', got 'parts'"):
        go(tmp_path, "plain", Transformer, "adam", format="parts")
    with pytest.raises(ValueError, match='`format` must be "file" with a URL, got "sharded" for memory://run'):
        go("memory://run", "plain", Transformer, "adam", format="sharded")


def test_partially_deleted_directory_is_not_a_checkpoint(tmp_path, monkeypatch):
    def crash(path):
        raise KeyboardInterrupt

    paths = [state_file.path_of(tmp_path, steps, 1) for steps in (1, 2)]
    for path in paths:
        path.mkdir()
    monkeypatch.setattr(shutil, "rmtree", crash)
    with pytest.raises(KeyboardInterrupt):
        state_file.keep_only(tmp_path, 1)
    assert state_file.checkpoints(tmp_path) == paths[1:]
    monkeypatch.undo()
    state_file.prepare(tmp_path)
    assert list(tmp_path.iterdir()) == paths[1:]
