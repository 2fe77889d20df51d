"""Workloads are found by their names, and images in the files that people have of them."""

import numpy as np
import pytest
import torch
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.comparison.workload import load_workload


def test_digits_are_split_the_same_way_each_time_and_all_are_used():
    workload = load_workload("digits", None)
    assert (len(workload.train), len(workload.test)) == (1440, 357)
    pixels = torch.cat([workload.train.tensors[0], workload.test.tensors[0]])
    assert pixels.max() == 1
    from sklearn.datasets import load_digits

    assert sorted(pixels.sum(1).tolist()) == sorted((load_digits().data / 16).sum(1).astype(np.float32).tolist())


@pytest.mark.parametrize(
    ("name", "shape", "channels"), [("mnist", (28, 28), (1, 28, 28)), ("cifar10", (32, 32, 3), (3, 32, 32))]
)
@pytest.mark.parametrize("is_named", [True, False])
def test_images_come_from_an_npz_file(tmp_path, name, shape, channels, is_named):
    rng = np.random.RandomState(0)
    arrays = {
        "x_train": rng.randint(0, 256, (8, *shape)).astype(np.uint8),
        "y_train": rng.randint(0, 10, 8),
        "x_test": rng.randint(0, 256, (4, *shape)).astype(np.uint8),
        "y_test": rng.randint(0, 10, (4, 1)),  # as Keras has CIFAR's
    }
    path = tmp_path / ("mine.npz" if is_named else f"{name}.npz")
    np.savez(path, **arrays)
    workload = load_workload(name, str(path if is_named else tmp_path))
    images, labels = workload.train[:]
    assert images.shape == (8, *channels)
    assert images[3, 0, 5, 7] == arrays["x_train"][3, 5, 7].reshape(-1)[0]
    assert labels.tolist() == arrays["y_train"].tolist()
    assert workload.test[:][1].tolist() == arrays["y_test"].reshape(-1).tolist()
    torch.manual_seed(0)
    outputs = workload.model()(images)
    assert outputs.shape == (8, 10)
    assert 0 <= workload.metric(outputs, labels) <= 100


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


def test_missing_images_are_said(tmp_path):
    with pytest.raises(ValueError, match=r"holds neither torchvision's files of cifar10 nor cifar10\.npz"):
        load_workload("cifar10", str(tmp_path))
    np.savez(tmp_path / "mnist.npz", x_train=np.zeros(3))
    with pytest.raises(ValueError, match=r"mnist\.npz must hold x_train, y_train, x_test and y_test, got x_train"):
        load_workload("mnist", str(tmp_path))


def test_a_function_may_be_in_a_file(tmp_path):
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
def test_a_wrong_workload_is_refused(wrong, message):
    right = {"model": nn.Identity, "train": [], "test": [], "loss": max, "metric": max, "optimizer": torch.optim.SGD}
    sizes = {"minibatch_size": 8, "ref_batchsize": 8, "num_samples": 80}
    with pytest.raises(ValueError, match=message):
        vbs.Workload(**{**right, **sizes, **wrong})
