"""Environment for importing the frameworks, here and in child processes."""

import gc
import os
import sys
from functools import partial

import pytest
import torch.distributed as dist

os.environ["USE_TORCH_XLA"] = "0"  # otherwise Accelerate and Transformers use XLA whenever torch_xla is installed
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["KERAS_BACKEND"] = "torch"


@pytest.fixture(autouse=True)
def _quick_searches_for_garbage(monkeypatch):
    """Let the frameworks collect only new objects: they collect at each run, and a full collection takes a second."""
    monkeypatch.setattr(gc, "collect", partial(gc.collect, 1))


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """Reset state shared between tests: the process group of Lightning's strategy, and that of all accelerators."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(True)  # and whether there is a process group
        state.GradientState._reset_state()
