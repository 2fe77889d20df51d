"""A run that is saved on the CPU resumes on TorchTPU's device, and the other way round, with its random numbers."""

import pytest
import scenarios
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_tpu_runs import largest_difference

import variable_batch_size as vbs
from variable_batch_size.cores import devices
from variable_batch_size.optim.attachments import Follower

MINIBATCH = 8
SIZES = [MINIBATCH * n for n in (3, 1, 5, 2, 7, 1, 4, 6, 2, 3)]
NUM_SAMPLES = 160  # two epochs


def train(device, directory, *, stop_after=None, dropout=0.0, **options):
    """Train to the end, or stop; returns the weights, or None if it was stopped."""
    torch.manual_seed(0)
    model = nn.Sequential(scenarios.Net(), nn.Dropout(dropout)).to(device)
    x, y = scenarios.data()
    data = TensorDataset(x[:NUM_SAMPLES], y[:NUM_SAMPLES])
    sampler = vbs.CustomSampler(data, trace=SIZES, minibatch_size=MINIBATCH)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, fused=True)  # the gain is not late on a device
    optimizer = vbs.AdaScaleOptimizer(inner, sampler, ref_batchsize=16, model=model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    settings = {"schedulers": [scheduler], "every_steps": 1} | options
    checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer, **settings)
    for _ in checkpoint.epochs(2):
        for one, other in DataLoader(data, batch_sampler=sampler):
            nn.functional.cross_entropy(model(one.to(device)), other.to(device)).backward()
            if optimizer.step():
                Follower.checked(scheduler, "samples", 16).follow(optimizer.run)
            checkpoint.step()
            if stop_after and optimizer.steps_done == stop_after and not optimizer.is_accumulating:
                return None
    return scenarios.state_of(model)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return train("cpu", tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(("first", "second"), [("cpu", "tpu"), ("tpu", "cpu"), ("tpu", "tpu")])
@pytest.mark.parametrize("stop_after", [4, 7])
def test_run_resumes_on_another_device(expected, tmp_path, first, second, stop_after):
    assert train(first, tmp_path, stop_after=stop_after) is None
    assert largest_difference(train(second, tmp_path), expected) < 1e-5


def test_asynchronous_checkpoint_resumes(expected, tmp_path):
    train("tpu", tmp_path, stop_after=5, asynchronous=True)
    assert largest_difference(train("tpu", tmp_path, asynchronous=True), expected) < 1e-5


def test_checkpoint_holds_tensors_of_the_host_only(tmp_path):
    train("tpu", tmp_path, stop_after=3)
    state = torch.load(sorted(tmp_path.glob("*.pt"))[-1], weights_only=True)
    found = []
    torch.utils._pytree.tree_map_only(torch.Tensor, found.append, state)
    assert {tensor.device.type for tensor in found} == {"cpu"}
    assert "tpu" in state["random"]


def test_dropout_continues_with_the_same_random_numbers(eager_mode, tmp_path):
    undisturbed = train("tpu", tmp_path / "undisturbed", dropout=0.5)
    train("tpu", tmp_path / "stopped", dropout=0.5, stop_after=6)
    assert largest_difference(train("tpu", tmp_path / "stopped", dropout=0.5), undisturbed) == 0


def test_random_state_is_saved_and_restored():
    states = devices.capture(torch.device("tpu"))
    drawn = torch.rand(5, device="tpu").cpu()
    assert not torch.equal(torch.rand(5, device="tpu").cpu(), drawn)
    devices.restore(states, torch.device("tpu"))
    assert torch.equal(torch.rand(5, device="tpu").cpu(), drawn)


def test_seed_sets_the_generator_of_the_device():
    devices.set_random_seed(7, torch.device("tpu"))
    drawn = torch.rand(5, device="tpu").cpu()
    devices.set_random_seed(7, torch.device("tpu"))
    assert torch.equal(torch.rand(5, device="tpu").cpu(), drawn)
