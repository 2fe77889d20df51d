"""Metrics: exact sums over all cores, however often each of them adds."""

import pytest
import stoppable_run
import torch

import variable_batch_size as vbs

BACKENDS = ["gloo", pytest.param("xla", marks=pytest.mark.xla)]
NOTHING = {"loss": 0.0, "correct": 0.0, "seen": 0.0}


def test_sums_of_tensors_and_numbers_alone():
    metrics = vbs.Metrics("loss", "seen", device="cpu")
    metrics.add(loss=torch.tensor(0.5), seen=3)
    metrics.add(loss=torch.tensor([1.25], requires_grad=True))
    metrics.add(loss=2, seen=4)
    assert metrics.read() == {"loss": 3.75, "seen": 7.0}


def test_counts_beyond_float32_are_exact():
    metrics = vbs.Metrics("seen", device="cpu")
    metrics.add(seen=torch.tensor(2**24))
    metrics.add(seen=torch.tensor(1))
    metrics.add(seen=2**40)
    assert metrics.read()["seen"] == 2**40 + 2**24 + 1


@pytest.mark.parametrize("where", ["metrics", "metrics on the host"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_over_two_cores_of_which_one_adds_nothing(long_runs_on, backend, where):
    for result in long_runs_on(backend)[0]:
        counted = result[where]
        assert counted["before"] == NOTHING
        assert counted["first"] == counted["second"] == {"loss": 3.0, "correct": 8.0, "seen": 12.0}
        assert counted["after"] == NOTHING


@pytest.mark.parametrize("backend", BACKENDS)
def test_buffers_become_those_of_core_0(long_runs_on, backend):
    for result in long_runs_on(backend)[0]:
        assert result["buffers"]["running_mean"].tolist() == [7.0] * 3
        assert result["buffers"]["num_batches_tracked"].item() == 5


def test_buffers_alone_stay():
    assert stoppable_run.shared_buffers(torch.device("cpu"))["running_mean"].tolist() == [7.0] * 3


@pytest.mark.parametrize("names", [(), ("loss", "loss")])
def test_names_are_checked(names):
    with pytest.raises(ValueError, match="`names` must be one name or more, each of them once, got"):
        vbs.Metrics(*names, device="cpu")


def test_values_are_checked():
    metrics = vbs.Metrics("loss", "seen", device="cpu")
    with pytest.raises(ValueError, match="'lost' must be one of 'loss', 'seen'"):
        metrics.add(lost=1)
    with pytest.raises(ValueError, match=r"'loss' must be one number, got a tensor of the shape \(2,\)"):
        metrics.add(loss=torch.ones(2))
