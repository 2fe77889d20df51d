"""A device that is not available here is used by the capabilities of its torch module."""

import os
import types

import pytest
import torch

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
        set_device=used.append,
        generator=generator,
        used=used,
    )
    monkeypatch.setattr(torch, "hpu", module, raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: DEVICE)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
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
    assert (devices.num_devices("hccl"), devices.num_devices("gloo")) == (2, 0)
    devices.use_device(1, "hccl")
    devices.use_device(0, "gloo")
    assert made_up.used == [1]


def test_default_backend_is_that_of_the_accelerator_or_gloo():
    num_gpus = torch.cuda.device_count()
    assert devices.default_backend() == ("nccl" if num_gpus else "gloo")
    assert devices.num_devices("nccl") == num_gpus


@pytest.fixture
def made_up_tpu(monkeypatch):
    """A fake TorchTPU of one host: what may only be called by torch is missing."""
    generators = [torch.Generator(), torch.Generator()]

    def set_tpu_launch_env(*, nproc_per_node):
        ports = ",".join(f"localhost:{8000 + number}" for number in range(nproc_per_node))
        os.environ.setdefault("TORCH_TPU_SLICEBUILDER_ADDRESSES", ports)
        os.environ.setdefault("TORCH_TPU_TOPOLOGY", "2,2,1")

    distributed = types.SimpleNamespace(set_tpu_launch_env=set_tpu_launch_env)
    module = types.SimpleNamespace(default_generators=generators, distributed=distributed)
    monkeypatch.setattr(torch, "tpu", module, raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: types.SimpleNamespace(type="tpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    return module


def test_generator_of_torch_tpu_is_saved_and_restored(made_up_tpu):
    device = types.SimpleNamespace(type="tpu", index=1)
    states = devices.capture(device)
    drawn = torch.rand(3, generator=made_up_tpu.default_generators[1])
    devices.restore(states, device)
    assert torch.equal(torch.rand(3, generator=made_up_tpu.default_generators[1]), drawn)


def test_processes_of_torch_tpu_have_its_ports_and_their_ranks_and_choose_their_device(made_up_tpu):
    before = dict(os.environ)
    assert devices.num_devices("tpu_dist") == 4
    devices.use_device(1, "tpu_dist")
    found = devices.process_environments("tpu_dist", 4)
    assert [(one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) for one in found] == [(n, n, "4") for n in "0123"]
    assert {one["TORCH_TPU_SLICEBUILDER_ADDRESSES"].count(":") for one in found} == {4}
    assert {one["TORCH_TPU_TOPOLOGY"] for one in found} == {"2,2,1"}
    assert dict(os.environ) == before


def test_ports_of_torch_tpu_for_another_number_of_processes_raise(made_up_tpu, monkeypatch):
    monkeypatch.setenv("TORCH_TPU_SLICEBUILDER_ADDRESSES", "localhost:8000,localhost:8001")
    with pytest.raises(
        RuntimeError, match="ports for 2 processes, of an earlier launch or of other hosts, but `cores`"
    ):
        devices.process_environments("tpu_dist", 4)


def test_processes_of_other_backends_need_nothing_and_torch_tpu_must_be_installed(monkeypatch):
    monkeypatch.delattr(torch, "tpu", raising=False)
    assert devices.process_environments("gloo", 2) == [{}, {}]
    with pytest.raises(ValueError, match='backend="tpu_dist" needs a TPU and TorchTPU: pip install torch_tpu'):
        devices.process_environments("tpu_dist", 2)
