"""Workloads are found by name, and images in the files of torchvision."""

import numpy as np
import pytest
import torch
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.lab.comparison.workload import load_workload


def test_digits_have_a_fixed_split_that_uses_all_samples():
    workload = load_workload("digits", None)
    assert (len(workload.train), len(workload.test)) == (1440, 357)
    pixels = torch.cat([workload.train.tensors[0], workload.test.tensors[0]])
    assert pixels.max() == 1
    from sklearn.datasets import load_digits

    assert sorted(pixels.sum(1).tolist()) == sorted((load_digits().data / 16).sum(1).astype(np.float32).tolist())


def test_images_come_from_the_files_of_torchvision(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    images = np.random.RandomState(0).randint(0, 256, (5, 28, 28)).astype(np.uint8)
    for part in ("train", "t10k"):
        header = np.array([0x803, 5, 28, 28], dtype=">i4").tobytes()
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = np.array([0x801, 5], dtype=">i4").tobytes()
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(header + bytes(range(5)))
    workload = load_workload("mnist", str(tmp_path))
    assert torch.equal(workload.train[:][0], torch.from_numpy(images).unsqueeze(1))
    assert workload.test[:][1].tolist() == [0, 1, 2, 3, 4]
    torch.manual_seed(0)
    outputs = workload.model()(workload.train[:][0])
    assert outputs.shape == (5, 10)
    assert 0 <= workload.metric(outputs, workload.train[:][1]) <= 100


def test_missing_images_are_reported(tmp_path):
    with pytest.raises(ValueError, match=r"does not contain torchvision's files of mnist$"):
        load_workload("mnist", str(tmp_path))


def test_workload_function_can_be_in_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from comparisons import line\n\n\ndef other():\n    return line()\n")
    assert load_workload(f"{path}:other", None).metric_name == "error"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"minibatch_size": 0}, "`minibatch_size` must be a positive integer, got 0"),
        ({"num_samples": 1.5}, r"`num_samples` must be a positive integer, got 1\.5"),
        ({"model": nn.Linear(1, 1).weight}, "`model` must be a function, got Parameter"),
    ],
)
def test_invalid_workload_raises(wrong, message):
    right = {"model": nn.Identity, "train": [], "test": [], "loss": max, "metric": max, "optimizer": torch.optim.SGD}
    sizes = {"minibatch_size": 8, "ref_batchsize": 8, "num_samples": 80}
    with pytest.raises(ValueError, match=message):
        vbs.Workload(**{**right, **sizes, **wrong})
