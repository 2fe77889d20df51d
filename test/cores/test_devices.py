"""A device that is not available here is used by the capabilities of its torch module."""

import types

import pytest
import torch
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.cores import devices

DEVICE = torch.device("hpu")


@pytest.fixture
def made_up(monkeypatch):
    """A fake device module with a generator and two devices, registered in torch."""
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


def test_generator_state_of_a_device_is_saved_and_restored(made_up):
    states = devices.capture(DEVICE)
    assert "hpu" in states
    drawn = torch.rand(3, generator=made_up.generator)
    devices.restore(states, DEVICE)
    assert torch.equal(torch.rand(3, generator=made_up.generator), drawn)


def test_seeding_includes_the_generator_of_the_device(made_up):
    devices.set_random_seed(7, DEVICE)
    assert made_up.generator.initial_seed() == 7


def test_device_backends_count_and_select_devices_and_host_backends_do_not(made_up):
    assert (devices.num_devices("tpu_dist"), devices.num_devices("gloo")) == (2, 0)
    devices.use_device(1, "tpu_dist")
    devices.use_device(0, "gloo")
    assert made_up.used == [1]


def test_default_backend_is_that_of_the_accelerator_or_gloo():
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


def test_devices_that_compile_constants_sum_gradients_in_separate_tensors(on_cores):
    _, weight, gain = train(())
    for kind, found, found_gain in on_cores(2, train, ("cpu",)):
        assert kind == "TracedAccumulator"
        torch.testing.assert_close(torch.tensor(found), torch.tensor(weight), rtol=0, atol=1e-6)
        assert found_gain == pytest.approx(gain, rel=1e-4)
