"""Tests on TorchTPU's device, over XLA's CPU plugin, in a separate environment: make torchtpu."""

import pytest


def pytest_itemcollected(item):
    item.add_marker(pytest.mark.torch_tpu)
    item.add_marker(pytest.mark.filterwarnings("ignore:.*<TorchTpu"))  # most of its functions warn that they may change


@pytest.fixture(scope="session", autouse=True)
def torch_tpu():
    import torch_tpu_on_cpu

    torch_tpu_on_cpu.start()


@pytest.fixture(params=["DEFER_NEVER", "DEFER_AND_FUSE"])
def eager_mode(request):
    """Both ways in which TorchTPU runs operations: each by itself, or as many as possible in one program."""
    import torch

    with torch.tpu.set_eager_mode(getattr(torch.tpu.EagerMode, request.param)):
        yield request.param
