"""Checkpoint files: names, order, retention, and round trip."""

import re
import resource
import zipfile
from collections import OrderedDict
from pathlib import PurePath

import numpy as np
import pytest
import torch

from variable_batch_size.runs import state_file

FOREIGN = "is not a checkpoint: Unsupported global: GLOBAL pathlib.PurePosixPath was not an allowed global by default"


def touch(directory, *names):
    for name in names:
        (directory / name).touch()


def names_of(directory):
    return [path.name for path in state_file.checkpoints(directory)]


# --------------------------------------------------------------------------------------------------- names and numbers


def test_files_and_directories_are_named_after_their_step(tmp_path):
    assert state_file.path_of(tmp_path, 7) == tmp_path / "step-000000007.pt"
    assert state_file.path_of(tmp_path, 7, 2) == tmp_path / "step-000000007-2"
    assert state_file.REST == "run.pt"


def test_checkpoints_are_in_the_order_of_their_steps_and_numbers(tmp_path):
    of_7 = ["step-000000007.pt", "step-000000007-1", "step-000000007-2", "step-000000007-10"]
    expected = ["step-000000002-1", *of_7, "step-1234567890.pt"]
    touch(tmp_path, *sorted(expected))
    touch(tmp_path, "step-12.pt", "step-000000009.pt.tmp", "my-step-000000009.pt", "step-000000009", "executed.csv")
    assert names_of(tmp_path) == expected


def test_missing_directory_has_no_checkpoints(tmp_path):
    assert state_file.checkpoints(tmp_path / "nowhere") == []


def test_the_next_directory_of_a_step_has_the_next_number(tmp_path):
    assert state_file.free_number(tmp_path, 7) == 1
    touch(tmp_path, "step-000000007.pt", "step-000000008-12")
    assert state_file.free_number(tmp_path, 7) == 1
    touch(tmp_path, "step-000000007-1", "step-000000007-10")
    assert state_file.free_number(tmp_path, 7) == 11


# ------------------------------------------------------------------------------------------------------- what stays


def test_directory_is_created_with_its_parents_and_left_empty(tmp_path):
    for _ in range(2):  # also if it exists
        state_file.prepare(tmp_path / "some" / "run")
        assert list((tmp_path / "some" / "run").iterdir()) == []


def test_leftovers_of_a_crash_are_removed(tmp_path):
    touch(tmp_path, "step-000000001.pt.tmp", "step-000000002.pt", "tmp")
    (tmp_path / "step-000000003-1.tmp").mkdir()
    touch(tmp_path / "step-000000003-1.tmp", "run.pt")
    state_file.prepare(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000002.pt", "tmp"]


def test_directory_that_cannot_be_created_is_named_with_the_reason(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    message = f"`directory` must be writable, got {tmp_path / 'link'}: [Errno 17] File exists"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as caught:
        state_file.prepare(tmp_path / "link")
    assert isinstance(caught.value.__cause__, FileExistsError)


@pytest.mark.parametrize("name", ["file", "file/run", "file/a/b"])
def test_directory_in_the_place_of_a_file_is_refused(tmp_path, name):
    touch(tmp_path, "file")
    message = f"`directory` must be a directory, got {tmp_path / name}, but {tmp_path / 'file'} is a file: pass another"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        state_file.prepare(tmp_path / name)


def test_latest_checkpoints_are_kept(tmp_path):
    touch(tmp_path, "step-000000001.pt", "step-000000003.pt", "step-000000004.pt")
    (tmp_path / "step-000000002-1").mkdir()
    touch(tmp_path / "step-000000002-1", "run.pt")
    state_file.keep_only(tmp_path, 4)
    assert len(names_of(tmp_path)) == 4
    state_file.keep_only(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000003.pt", "step-000000004.pt"]


# ------------------------------------------------------------------------------------------------- written and read


def test_checkpoint_round_trip(tmp_path):
    modules = OrderedDict(weight=torch.ones(2, requires_grad=True))
    modules._metadata = OrderedDict({"": {"version": 2}})
    primitives = [None, True, 7, 0.5, "text", b"bytes", 1j, torch.float16, torch.device("cpu"), (1, [2, (3,)])]
    state = {
        "modules": modules,
        "primitives": primitives,
        "keys": {1: "int", (2, "b"): "tuple"},
        "ordered": OrderedDict(a=1),
    }
    state_file.save(tmp_path / "file.pt", state)
    found = state_file.load(tmp_path / "file.pt")
    weight = found["modules"].pop("weight")
    assert (weight.tolist(), weight.requires_grad) == ([1, 1], False)
    assert (type(found["modules"]), found["modules"]._metadata) == (OrderedDict, modules._metadata)
    assert found["primitives"] == primitives
    assert [*map(type, found["primitives"])] == [*map(type, primitives)]
    assert (found["keys"], type(found["keys"])) == (state["keys"], dict)
    assert (found["ordered"], type(found["ordered"])) == (state["ordered"], OrderedDict)
    assert (found["format"], found["version"]) == ("variable_batch_size checkpoint", 1)


def test_numpy_numbers_are_converted(tmp_path):
    state_file.save(
        tmp_path / "file.pt", {"numbers": [np.float64(0.5), np.int32(3), np.bool_(True)], np.str_("key"): 1}
    )
    found = state_file.load(tmp_path / "file.pt")
    assert [(type(number), number) for number in found["numbers"]] == [(float, 0.5), (int, 3), (bool, True)]
    assert {type(key) for key in found} == {str}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": [1, ({2},)]}, "got set at state['a'][1][0]"),
        ({"a": OrderedDict({7: object()})}, "got object at state['a'][7]"),
        ({"a": {"b": {object(): 1}}}, "got object at state['a']['b']"),
    ],
)
def test_object_that_would_not_load_again_raises_and_names_its_place(tmp_path, state, said):
    message = f"a checkpoint holds tensors and primitives only, {said}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        state_file.save(tmp_path / "file.pt", state)
    assert list(tmp_path.iterdir()) == []


def test_module_versions_raise_and_name_their_place(tmp_path):
    modules = OrderedDict()
    modules._metadata = {"": object()}
    with pytest.raises(ValueError, match=re.escape("got object at state['a']['']") + "$"):
        state_file.save(tmp_path / "file.pt", {"a": modules})


def test_unwritable_file_is_named_with_the_reason(tmp_path):
    path = tmp_path / "nowhere" / "file.pt"
    message = f"{path} could not be written: [Errno 2] No such file or directory: '{path}.tmp'"
    with pytest.raises(OSError, match=f"^{re.escape(message)}$") as caught:
        state_file.save(path, {})
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_full_disk_is_the_reported_reason_instead_of_the_error_of_torch(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"file\.pt could not be written: \[Errno 27\] File too large$"):
            state_file.save(tmp_path / "file.pt", {"tensor": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_the_rest_of_a_checkpoint_in_a_directory_is_read_from_there(tmp_path):
    state_file.save(tmp_path / state_file.REST, {"number": 3})
    assert state_file.load(tmp_path)["number"] == 3


def test_checkpoint_of_a_gpu_loads_without_a_gpu(tmp_path):
    path, of_gpu = tmp_path / "file.pt", tmp_path / "of_gpu.pt"
    state_file.save(path, {"tensor": torch.arange(3)})
    with zipfile.ZipFile(path) as here, zipfile.ZipFile(of_gpu, "w") as there:
        for name in here.namelist():
            content = here.read(name)
            if name.endswith("data.pkl"):  # it contains the device of each tensor
                assert content.count(b"\x03\0\0\0cpu") == 1
                content = content.replace(b"\x03\0\0\0cpu", b"\x06\0\0\0cuda:0")
            there.writestr(name, content)
    tensor = state_file.load(of_gpu)["tensor"]
    assert (tensor.tolist(), tensor.device.type) == ([0, 1, 2], "cpu")


def test_other_objects_are_not_loaded_even_if_torch_allows_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({1: PurePath("a")}, tmp_path / "file.pt")
    with pytest.raises(
        ValueError,
        match=f"{FOREIGN}$",
    ):
        state_file.load(tmp_path / "file.pt")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is damaged, truncated or not a checkpoint: File is not a zip file"),
        (
            {1: PurePath("a")},
            FOREIGN,
        ),
        ({"format": "another"}, "is not a checkpoint of variable_batch_size"),
        ({}, "is not a checkpoint of variable_batch_size"),
        ([1], "is not a checkpoint of variable_batch_size"),
        ({"format": "variable_batch_size checkpoint", "version": 0}, "has version 0 of the format, expected 1"),
    ],
)
def test_foreign_file_raises_with_the_reason(tmp_path, content, said):
    path = tmp_path / "file.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} {said}$"):
        state_file.load(path)
