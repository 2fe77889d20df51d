"""AdaScale implementations of other packages for benchmarks; from `.peers` (made by `make bench`) or installed."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

FOLDER = Path(__file__).parent.parent / ".peers"


def fairscale_adascale(path: str | None = None) -> Any:
    """FairScale's AdaScale, or None if it is not installed; loaded from its single file if given."""
    if path is None:
        return getattr(_import("fairscale.optim"), "AdaScale", None)
    spec = importlib.util.spec_from_file_location("fairscale_adascale", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.AdaScale


class AdaptDL:
    """AdaptDL's AdaScale with a given number of minibatches per step, which it would otherwise choose itself.

    It is part of a DistributedDataParallel and of a loader. This class calls the helper of that loader directly, and
    initializes a process group with this process only.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, minibatch_size: int, num_minibatches: int) -> None:
        adaptdl = importlib.import_module("adaptdl.torch")
        data = importlib.import_module("adaptdl.torch.data")
        port = importlib.import_module("portpicker").pick_unused_port()
        adaptdl.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=1, rank=0)
        self.model = adaptdl.AdaptiveDataParallel(model, optimizer)
        self.optimizer = optimizer
        self.loader = data.AdaptiveDataLoaderHelper(minibatch_size * num_minibatches)
        self.loader._state.current_local_bsz = minibatch_size
        self.loader._state.accumulation_steps = num_minibatches - 1
        self.loader.train()
        self._loop = self.loader.context()
        self._loop.__enter__()  # exited when the process ends

    def run(self, losses: list[Callable[[nn.Module], Any]]) -> None:
        """One update, with the loop of AdaptDL's documentation."""
        for loss in losses:
            with self.loader.profile(commit=True):
                self.optimizer.zero_grad()
                loss(self.model).backward()
                self.optimizer.step()


def has_adaptdl() -> bool:
    return _import("adaptdl.torch") is not None


def _import(name: str) -> Any:
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # last: installed packages take precedence
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # packages from 2023 with deprecated imports
            return importlib.import_module(name)
    except ModuleNotFoundError:
        return None
