"""A device that is not available here is used by the capabilities of its torch module."""

import json
import os
import socket
import types
from datetime import timedelta

import forked
import pytest
import torch
import torch.distributed as dist

import variable_batch_size as vbs
from variable_batch_size.cores import devices, xla

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


def test_the_device_of_this_core_is_that_of_its_local_rank_among_the_visible_ones(made_up, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert vbs.device() == torch.device("hpu", 1)
    monkeypatch.setenv("LOCAL_RANK", "4")
    assert vbs.device() == torch.device("hpu", 0)


def test_without_a_local_rank_it_is_the_current_device_and_the_cpu_without_an_accelerator(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert vbs.device() == torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu").device


def device_type_in_a_process_with_an_accelerator():
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda: DEVICE
    return vbs.device().type


def test_in_a_process_group_for_cpus_it_is_the_cpu():
    with forked.launches():
        found = vbs.launch(device_type_in_a_process_with_an_accelerator, cores=2, backend="gloo")
    assert found == ["cpu", "cpu"]


@pytest.fixture
def without_pjrt(monkeypatch):
    monkeypatch.setattr(xla, "is_installed", lambda: True)
    monkeypatch.setattr(xla, "has_tpu", lambda: False)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)


def test_xla_is_the_default_only_with_torch_xla_and_a_tpu_or_pjrt_device(without_pjrt, monkeypatch):
    assert not xla.is_default()
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert xla.is_default()
    monkeypatch.delenv("PJRT_DEVICE")
    monkeypatch.setattr(xla, "has_tpu", lambda: True)
    assert xla.is_default()
    monkeypatch.setattr(xla, "is_installed", lambda: False)
    assert not xla.is_default()


@pytest.mark.parametrize(
    ("vendor", "device", "is_tpu"),
    [("0x1ae0", "0x0063", True), ("0x1ae0", "0x0042", False), ("0x10de", "0x0063", False)],
    ids=["TPU v5e", "network card of Google Cloud", "another vendor"],
)
def test_a_tpu_is_found_by_vendor_and_device(vendor, device, is_tpu, tmp_path):
    assert not xla.has_tpu(tmp_path)
    for number, (one, other) in enumerate([("0x8086", "0x1237"), (vendor, device)]):
        place = tmp_path / f"0000:00:0{number}.0"
        place.mkdir()
        (place / "vendor").write_text(one + "\n")
        (place / "device").write_text(other + "\n")
    assert xla.has_tpu(tmp_path) == is_tpu


def xla_device_of_this_core():
    import torch_xla

    return str(vbs.device()), vbs.device() == torch_xla.device()


@pytest.mark.xla
@pytest.mark.parametrize("spmd", [False, True])
def test_on_xla_cores_it_is_their_xla_device(on_xla, spmd):
    found = on_xla(2, xla_device_of_this_core, spmd=spmd)
    assert all(is_same for _, is_same in found)
    assert len({name for name, _ in found}) == (1 if spmd else 2)


def test_default_backend_is_that_of_the_accelerator_or_gloo():
    num_gpus = torch.cuda.device_count()
    assert devices.default_backend() == ("nccl" if num_gpus else "gloo")
    assert devices.num_devices("nccl") == num_gpus


@pytest.mark.parametrize(
    ("device", "compiles"), [("cpu", False), ("cuda:1", False), ("mps", True), ("xla:0", True), ("meta", True)]
)
def test_only_hosts_and_cuda_are_known_to_run_any_shape_without_compiling(device, compiles):
    assert devices.compiles_for_shapes(torch.device(device)) == compiles


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


@pytest.fixture
def on_one_of_two_hosts(monkeypatch):
    """Variables of torchrun."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")


def test_torch_tpu_on_several_hosts_needs_its_ports_before_torchrun(on_one_of_two_hosts):
    rule = "TORCH_TPU_SLICEBUILDER_ADDRESSES must be set before torchrun starts 8 processes on several hosts"
    with pytest.raises(RuntimeError, match=rule), devices.completed_environment("tpu_dist"):
        pass


@pytest.mark.parametrize(("backend", "ports"), [("gloo", None), ("tpu_dist", "one:8070,other:8070")])
def test_an_environment_that_is_complete_is_left_as_it_is(on_one_of_two_hosts, monkeypatch, backend, ports):
    if ports:
        monkeypatch.setenv("TORCH_TPU_SLICEBUILDER_ADDRESSES", ports)
    before = dict(os.environ)
    with devices.completed_environment(backend):
        assert dict(os.environ) == before


def test_rank_0_serves_the_ports_of_torch_tpu_until_the_process_group_has_started(made_up_tpu, monkeypatch):
    """Without torchrun's own store, as in jobs of `vbs cluster`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    variables = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    monkeypatch.setattr(os, "environ", os.environ | {name: str(value) for name, value in variables.items()})
    ports = {"TORCH_TPU_SLICEBUILDER_ADDRESSES": "localhost:8000", "TORCH_TPU_TOPOLOGY": "2,2,1"}
    with devices.completed_environment("tpu_dist"):
        assert ports.items() <= os.environ.items()
        late = dist.TCPStore("localhost", port, timeout=timedelta(seconds=10))
        assert json.loads(late.get("TORCH_TPU_SLICEBUILDER_ADDRESSES")) == ports


def test_processes_of_other_backends_need_nothing_and_torch_tpu_must_be_installed(monkeypatch):
    monkeypatch.delattr(torch, "tpu", raising=False)
    assert devices.process_environments("gloo", 2) == [{}, {}]
    with pytest.raises(ValueError, match='backend="tpu_dist" needs a TPU and TorchTPU: pip install torch_tpu'):
        devices.process_environments("tpu_dist", 2)
