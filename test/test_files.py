"""Files are complete or absent, even after a power failure."""

import os

import pytest
import torch

import variable_batch_size as vbs
from variable_batch_size import files


@pytest.fixture
def calls(monkeypatch):
    """The calls of fsync and rename, in order: inodes with their size, and names."""
    found = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor):
        fsync(descriptor)
        status = os.fstat(descriptor)
        found.append(("on disk", status.st_ino, status.st_size))

    def record_replace(source, target):
        status = os.stat(source)
        replace(source, target)
        found.append(("named", status.st_ino, status.st_size, os.path.basename(target)))

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    return found


def check_order(calls, path):
    """The complete content was on disk before the rename, and the rename before the call returned."""
    status = path.stat()
    name_at = calls.index(("named", status.st_ino, status.st_size, path.name))
    assert ("on disk", status.st_ino, status.st_size) in calls[:name_at]
    assert path.parent.stat().st_ino in [inode for what, inode, *_ in calls[name_at:] if what == "on disk"]


def test_file_is_on_disk_before_it_is_renamed(tmp_path, calls):
    files.write_text(tmp_path / "text.txt", "whole")
    check_order(calls, tmp_path / "text.txt")


def test_checkpoint_is_on_disk_before_it_is_renamed(tmp_path, calls):
    model = torch.nn.Linear(2, 1)
    sampler = vbs.CustomSampler(dataset_size=4, trace=2, minibatch_size=2)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler)
    vbs.Checkpoint(tmp_path, model=model, optimizer=optimizer).save()
    check_order(calls, tmp_path / "step-000000000.pt")


def test_failed_write_leaves_only_the_old_file(tmp_path):
    path = tmp_path / "text.txt"
    files.write_text(path, "old")

    def fill_in_part(temporary):
        temporary.write_text("ne")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        files.write(path, fill_in_part)
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("text.txt", "old")]
