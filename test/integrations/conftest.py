"""How the frameworks are to be imported, here and in processes that are started from here."""

import os

import pytest
import torch.distributed as dist

os.environ["USE_TORCH_XLA"] = "0"  # else Accelerate and Transformers take XLA wherever torch_xla is installed
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["KERAS_BACKEND"] = "torch"


@pytest.fixture(autouse=True)
def _no_group_is_left():
    """Lightning leaves the process group of a strategy behind, and other tests make their own."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
