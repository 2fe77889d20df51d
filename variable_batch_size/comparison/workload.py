"""Workload: what a comparison trains, found by name or by ``module:function``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import variable_batch_size.comparison.builtin_workloads as builtin
from variable_batch_size.checks import check_positive


def load_function(name: str) -> Callable[[], Any]:
    """The function of that name; its module is looked for in the working directory first."""
    module_name, _, function_name = name.rpartition(":")
    function = getattr(load_module(module_name), function_name, None)
    if not callable(function):
        raise ValueError(f"{module_name} has no function {function_name!r}")
    return function  # type: ignore[no-any-return]


def load_module(name: str) -> Any:
    """A module by its name, or the one that a file is."""
    if not name.endswith(".py"):
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # a command, unlike a script, does not look there by itself
        return importlib.import_module(name)
    if not Path(name).exists():
        raise ValueError(f"there is no file {name}")
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where classes of the module look for it
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its data, its loss and the metric by which rules are compared.

    Args:
        model: makes a model; called once for each run, right after the random generator was given the run's seed.
        train: the training data, pairs of an input and a target.
        test: the test data, likewise.
        loss: of outputs and targets, the mean over a minibatch.
        metric: of outputs and targets, the mean over a minibatch.
        optimizer: makes the optimizer of a model's parameters, with settings that are right at `ref_batchsize`.
        minibatch_size: samples that one core runs at once.
        ref_batchsize: batch size at which the settings of the optimizer are right, and that of the yardstick.
        num_samples: how many samples the yardstick trains on; and all other runs, unless a trace is shorter.
        schedule: what the learning rate is multiplied by at a fraction of the training, from 0 to 1; always 1 if None.
        metric_name: as it is written beside the numbers.
        unit: as it is written behind them.
        is_higher_better: whether a larger metric is the better one.
    """

    model: Callable[[], torch.nn.Module]
    train: Dataset[Any]
    test: Dataset[Any]
    loss: Callable[[Any, Any], torch.Tensor]
    metric: Callable[[Any, Any], torch.Tensor]
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
    minibatch_size: int
    ref_batchsize: int
    num_samples: int
    schedule: Callable[[float], float] | None = None
    metric_name: str = "accuracy"
    unit: str = " %"
    is_higher_better: bool = True

    def __post_init__(self) -> None:
        for name in ("model", "loss", "metric", "optimizer"):
            if not callable(getattr(self, name)):
                raise ValueError(f"`{name}` must be a function, got {getattr(self, name)!r}")
        for name in ("minibatch_size", "ref_batchsize", "num_samples"):
            check_positive(**{name: getattr(self, name)})


BUILT_IN: dict[str, Callable[[Path | None], dict[str, Any]]] = {
    "digits": builtin.digits,
    "mnist": builtin.mnist,
    "cifar10": builtin.cifar10,
}


def load_workload(name: str, datadir: str | None) -> Workload:
    """A workload by its name: ``digits``, ``mnist``, ``cifar10``, ``module:function`` or ``file.py:function``.

    A function of the user's takes no arguments and returns a :class:`Workload`; its module is looked for in the
    working directory first.
    """
    if name in BUILT_IN:
        return Workload(**BUILT_IN[name](Path(datadir) if datadir is not None else None))
    if ":" not in name:
        raise ValueError(f"`workload` must be {', '.join(BUILT_IN)} or module:function, got {name!r}")
    workload = load_function(name)()
    if not isinstance(workload, Workload):
        raise ValueError(f"{name} must return a Workload, got {type(workload).__name__}")
    return workload


def source_of(name: str) -> str | None:
    """The SHA-256 of the file that a user's workload is in; None for those of the library."""
    if name in BUILT_IN:
        return None
    path = load_module(name.rpartition(":")[0]).__file__
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
