"""A kind of device that nobody here has is used by what its module of torch can do."""

import types

import pytest
import torch
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.cores import devices

DEVICE = torch.device("hpu")


@pytest.fixture
def made_up(monkeypatch):
    """A module with a generator of its own and two devices, in the place where torch has those of devices."""
    generator = torch.Generator()
    used = []
    module = types.SimpleNamespace(
        get_rng_state=lambda device: generator.get_state(),
        set_rng_state=lambda state, device: generator.set_state(state),
        manual_seed_all=generator.manual_seed,
        device_count=lambda: 2,
        set_device=used.append,
        generator=generator,
        used=used,
    )
    monkeypatch.setattr(torch, "hpu", module, raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: DEVICE)
    return module


def test_the_generator_of_a_device_is_saved_and_goes_on(made_up):
    states = devices.capture(DEVICE)
    assert "hpu" in states
    drawn = torch.rand(3, generator=made_up.generator)
    devices.restore(states, DEVICE)
    assert torch.equal(torch.rand(3, generator=made_up.generator), drawn)


def test_a_seed_is_that_of_the_device_too(made_up):
    devices.set_random_seed(7, DEVICE)
    assert made_up.generator.initial_seed() == 7


def test_a_backend_for_devices_counts_and_chooses_them_and_one_for_the_host_does_not(made_up):
    assert (devices.num_devices("tpu_dist"), devices.num_devices("gloo")) == (2, 0)
    devices.use_device(1, "tpu_dist")
    devices.use_device(0, "gloo")
    assert made_up.used == [1]


def test_the_backend_is_that_of_the_accelerator_and_gloo_without_one():
    num_gpus = torch.cuda.device_count()
    assert devices.default_backend() == ("nccl" if num_gpus else "gloo")
    assert devices.num_devices("nccl") == num_gpus


def train(kinds):
    before = devices.COMPILING
    devices.COMPILING = before.union(kinds)
    try:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        data = torch.randn(48, 3)
        sampler = vbs.CustomSampler(dataset_size=48, trace=[12, 4, 16], minibatch_size=4)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = vbs.AdaScaleOptimizer(inner, sampler, ref_batchsize=4, clip_grad_norm=0.5)
        for indices in sampler:
            model(data[indices]).square().mean().backward()
            optimizer.step()
        return type(optimizer._accumulator).__name__, model.weight.detach().tolist(), optimizer.gain()
    finally:
        devices.COMPILING = before


def test_where_numbers_are_compiled_in_gradients_are_summed_in_a_tensor_each_with_the_same_result(on_cores):
    _, weight, gain = train(())
    for kind, found, found_gain in on_cores(2, train, ("cpu",)):
        assert kind == "TracedAccumulator"
        torch.testing.assert_close(torch.tensor(found), torch.tensor(weight), rtol=0, atol=1e-6)
        assert found_gain == pytest.approx(gain, rel=1e-4)
