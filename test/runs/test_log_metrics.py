"""Metrics: exact sums over all cores, for any number of additions on each core."""

import pytest
import stoppable_run
import torch

import variable_batch_size as vbs

BACKENDS = ["gloo", pytest.param("xla", marks=pytest.mark.xla)]
NOTHING = {"loss": 0.0, "correct": 0.0, "seen": 0.0}


def test_sums_of_tensors_and_numbers_on_one_core():
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
def test_sums_over_two_cores_if_one_adds_nothing(long_runs_on, backend, where):
    for result in long_runs_on(backend)[0]:
        counted = result[where]
        assert counted["before"] == NOTHING
        assert counted["first"] == counted["second"] == {"loss": 3.0, "correct": 8.0, "seen": 12.0}
        assert counted["after"] == NOTHING


@pytest.mark.parametrize("backend", BACKENDS)
def test_buffers_are_broadcast_from_core_0(long_runs_on, backend):
    for result in long_runs_on(backend)[0]:
        assert result["buffers"]["running_mean"].tolist() == [7.0] * 3
        assert result["buffers"]["num_batches_tracked"].item() == 5


def test_buffers_on_one_core_are_unchanged():
    assert stoppable_run.shared_buffers(torch.device("cpu"))["running_mean"].tolist() == [7.0] * 3


@pytest.mark.parametrize("names", [(), ("loss", "loss")])
def test_names_are_checked(names):
    with pytest.raises(ValueError, match="`names` must be one or more different names, got"):
        vbs.Metrics(*names, device="cpu")


def test_values_are_checked():
    metrics = vbs.Metrics("loss", "seen", device="cpu")
    with pytest.raises(ValueError, match="'lost' must be one of 'loss', 'seen'"):
        metrics.add(lost=1)
    with pytest.raises(ValueError, match=r"'loss' must be one number, got a tensor of the shape \(2,\)"):
        metrics.add(loss=torch.ones(2))


def test_sums_continue_after_being_read():
    metrics, other = (vbs.Metrics("loss", "seen", device="cpu") for _ in range(2))
    metrics.add(loss=torch.tensor(0.5), seen=2**40 + 1)
    other.add(seen=7)
    other.restore(metrics.read())
    other.add(seen=1)
    assert other.read() == {"loss": 0.5, "seen": 2**40 + 2}
    with pytest.raises(ValueError, match="the sums must be of loss, seen, got seen"):
        other.restore({"seen": 1.0})


def trained(directory, *, stop_after=None, metrics=True):
    """An epoch of eight steps with counted samples; returns the sums, or None if it stopped."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    sampler = vbs.CustomSampler(dataset_size=64, trace=8, minibatch_size=8)
    optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler, ref_batchsize=8)
    sums = vbs.Metrics("loss", "seen", device="cpu")
    options = {"metrics": [sums] if metrics else []}
    checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer, every_steps=1, **options)
    inputs = torch.randn(64, 3)
    for _ in checkpoint.epochs(1):
        for indices in sampler:
            loss = model(inputs[indices]).square().mean()
            loss.backward()
            optimizer.step()
            sums.add(loss=loss, seen=len(indices))
            checkpoint.step()
            if optimizer.steps_done == stop_after:
                return None
    return sums.read()


def test_sums_of_an_epoch_are_restored_after_a_stop_in_its_middle(tmp_path):
    whole = trained(tmp_path / "whole")
    trained(tmp_path / "stopped", stop_after=3)
    found = trained(tmp_path / "stopped")
    assert found["seen"] == whole["seen"] == 64
    assert found["loss"] == pytest.approx(whole["loss"], rel=1e-12)


def test_run_with_other_metrics_is_a_different_run(tmp_path):
    trained(tmp_path, stop_after=3)
    with pytest.raises(ValueError, match="was saved by another run: metrics were 1 and are 0"):
        trained(tmp_path, metrics=False)
