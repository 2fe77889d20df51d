"""Damaged checkpoints: the run resumes from the one before, on all cores, and says so."""

import logging
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from sharded_models import Transformer, go, largest_difference
from small_runs import sgd, weights_of
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.runs import state_file

SIZES = [8, 16, 8, 24, 8, 16]


def run(directory, *, until=None, **options):
    """A run that saves after every step, up to a step; returns the number of steps with which it began, and weights."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 6), torch.randn(40, 1)
    model = nn.Linear(6, 1)
    loader = vbs.DataLoader(torch.utils.data.TensorDataset(x, y), trace=SIZES, minibatch_size=4)
    optimizer = vbs.Optimizer(sgd(model, lr=0.01, momentum=0.9), loader, rule="linear", ref_batchsize=16, model=model)
    checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer, every_steps=1, **options)
    first = optimizer.steps_done
    for _ in checkpoint.epochs():
        for x, y in loader:
            (model(x) - y).square().mean().backward()
            if optimizer.step():
                checkpoint.step()
                if optimizer.steps_done == until:
                    return first, weights_of(model)
    return first, weights_of(model)


def flip(path, *, at=None):
    """Flip a bit: by default in the middle of the largest tensor's content."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 4
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-30])


def empty(path):
    path.write_bytes(b"")


def names_in(directory):
    return sorted(path.name for path in directory.iterdir() if "step-" in path.name)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The checkpoints of a run that was killed after 4 steps."""
    directory = tmp_path_factory.mktemp("stopped")
    run(directory, until=4, keep=3)
    return directory


@pytest.fixture
def directory(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("damage", [flip, truncate, empty])
def test_run_resumes_from_the_checkpoint_before_as_if_never_stopped(directory, damage, caplog):
    damage(directory / "step-000000004.pt")
    first, weights = run(directory, keep=3)
    assert first == 3
    path = directory / "step-000000004.pt"
    said = f"{path} is damaged, truncated or not a checkpoint: .*; resuming from step-000000003.pt instead"
    warning, *_ = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert re.fullmatch(said, warning.getMessage())
    assert torch.equal(weights, run(None)[1])
    assert (directory / "executed.csv").read_text().splitlines()[2:] == [f"{n},{s}" for n, s in enumerate(SIZES)]


def test_a_damaged_file_is_not_read_as_another_state(directory):
    """Without the check, the flipped bit is in the weights."""
    path = directory / "step-000000004.pt"
    weight = torch.load(path, weights_only=True)["model"]["weight"].numpy().tobytes()
    flip(path, at=path.read_bytes().index(weight) + 3)
    assert torch.load(path, weights_only=True)["model"]["weight"].numpy().tobytes() != weight
    assert run(directory)[0] == 3


def test_several_damaged_checkpoints_are_passed_over(directory, caplog):
    for steps in (3, 4):
        flip(directory / f"step-{steps:09d}.pt")
    assert run(directory)[0] == 2
    found = [record.getMessage() for record in caplog.records if "instead" in record.getMessage()]
    assert [message.rpartition("; ")[2] for message in found] == [
        "resuming from step-000000003.pt instead",
        "resuming from step-000000002.pt instead",
    ]


def test_without_an_intact_checkpoint_it_raises_and_changes_nothing(directory):
    for path in directory.glob("step-*"):
        flip(path)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    names = "step-000000004.pt, step-000000003.pt, step-000000002.pt"
    said = f"no older checkpoint is left: move {names} away to start from the beginning$"
    with pytest.raises(ValueError, match=f"step-000000002.pt is damaged, truncated .*; {said}"):
        run(directory)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


def test_damaged_files_are_kept_under_another_name_and_do_not_count_toward_keep(directory):
    """Otherwise a run with keep=1 would keep the damaged one, and remove the only one that is good."""
    flip(directory / "step-000000004.pt")
    content = (directory / "step-000000004.pt").read_bytes()
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    loader = vbs.DataLoader(torch.ones(40, 6), trace=SIZES, minibatch_size=4)
    optimizer = vbs.Optimizer(sgd(model, lr=0.01, momentum=0.9), loader, rule="linear", ref_batchsize=16, model=model)
    checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer, keep=1)
    assert names_in(directory) == [
        f"step-{steps:09d}.pt" for steps in (2, 3, 4)
    ]  # a run that only looks changes nothing
    checkpoint.save()
    assert names_in(directory) == ["damaged-step-000000004.pt", "step-000000003.pt"]
    assert (directory / "damaged-step-000000004.pt").read_bytes() == content
    assert run(directory)[0] == 3


# ------------------------------------------------------------------------------------------------------------- shards

REGIONS = ["__0_0.distcp", "__1_0.distcp", ".metadata", state_file.REST]


def save_two(directory):
    """On two processes, the sharded checkpoints of two steps."""
    torch.manual_seed(0)
    go(directory, "sharded", Transformer, "adam", until=1, format="sharded")
    dist.barrier()
    go(directory, "sharded", Transformer, "adam", until=2, format="sharded")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, on_cores):
    directory = tmp_path_factory.mktemp("sharded") / "run"
    on_cores(2, save_two, directory)
    return directory


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_damaged_shard_is_named_and_the_run_resumes_from_the_directory_before(sharded, tmp_path, name, damage, caplog):
    shutil.copytree(sharded, tmp_path / "run")
    *_, before, path = state_file.checkpoints(tmp_path / "run")
    damage(path / name)
    state = go(tmp_path / "run", "plain", Transformer, "adam")
    assert largest_difference(state, go(None, "plain", Transformer, "adam")) < 1e-5
    warning = next(record.getMessage() for record in caplog.records if "instead" in record.getMessage())
    assert warning.startswith(f"{path / name} is ")
    assert warning.endswith(f"; resuming from {before.name} instead")
    assert (tmp_path / "run" / f"damaged-{path.name}").is_dir()


def resume_on_two(directory):
    """What each of two cores logs, and the steps with which they begin."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("variable_batch_size")
    logger.addHandler(handler)
    try:
        state = go(directory, "sharded", Transformer, "adam")
    finally:
        logger.removeHandler(handler)
    return [message for message in messages if "instead" in message], state


@pytest.mark.parametrize("name", REGIONS)
def test_all_cores_resume_from_the_same_directory_even_if_one_has_found_the_damage(sharded, tmp_path, on_cores, name):
    shutil.copytree(sharded, tmp_path / "run")
    *_, before, path = state_file.checkpoints(tmp_path / "run")
    flip(path / name)
    found = on_cores(2, resume_on_two, tmp_path / "run")
    (message,) = [message for messages, _ in found for message in messages]
    assert message.startswith(f"{path / name} is damaged")
    assert message.endswith(f"; resuming from {before.name} instead")
    for _, state in found:
        assert largest_difference(state, go(None, "plain", Transformer, "adam")) < 1e-5


def refused_on_two(directory):
    try:
        go(directory, "sharded", Transformer, "adam")
    except ValueError as error:
        return str(error)
    return None


def test_all_cores_raise_if_one_has_found_damage_in_the_only_directory(sharded, tmp_path, on_cores):
    *_, path = state_file.checkpoints(sharded)
    shutil.copytree(path, tmp_path / "run" / path.name)
    flip(tmp_path / "run" / path.name / "__1_0.distcp")
    end = f"no older checkpoint is left: move {path.name} away to start from the beginning"
    texts = on_cores(2, refused_on_two, tmp_path / "run")
    assert sorted(text.endswith(end) for text in texts) == [True, True]
    assert (
        sum("__1_0.distcp is damaged: its CRC is not the one with which it was written" in text for text in texts) == 1
    )
    assert sum(f"{path.name} cannot be read on rank" in text for text in texts) == 1


def test_a_directory_without_checksums_is_still_read(sharded, tmp_path):
    """Of a version that wrote none."""
    shutil.copytree(sharded, tmp_path / "run")
    for path in state_file.checkpoints(tmp_path / "run"):
        rest = torch.load(path / state_file.REST, weights_only=True)
        assert sorted(rest.pop("crcs")) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
        torch.save(rest, path / state_file.REST)
    state = go(tmp_path / "run", "plain", Transformer, "adam")
    assert largest_difference(state, go(None, "plain", Transformer, "adam")) < 1e-5
