"""How the frameworks are to be imported, here and in processes that are started from here."""

import os
import sys

import pytest
import torch.distributed as dist

os.environ["USE_TORCH_XLA"] = "0"  # else Accelerate and Transformers take XLA wherever torch_xla is installed
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["KERAS_BACKEND"] = "torch"


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """Of what tests share: the process group of Lightning's strategy, and what all accelerators of a process know."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(True)  # and whether there is a group
        state.GradientState._reset_state()
