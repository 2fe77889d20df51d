"""Workload: what a comparison trains; the built-in ones, and those of users as ``module:function``."""

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from variable_batch_size.checks import check_positive, import_extra


def load_function(name: str) -> Callable[..., Any]:
    """The function ``module:function`` or ``file.py:function``; modules are searched in the working directory first."""
    module_name, _, function_name = name.rpartition(":")
    function = getattr(load_module(module_name), function_name, None)
    if not callable(function):
        raise ValueError(f"{module_name} has no function {function_name!r}")
    return function  # type: ignore[no-any-return]


def load_module(name: str) -> Any:
    if not name.endswith(".py"):
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # unlike for a script, Python does not add it for a command
        return importlib.import_module(name)
    if not Path(name).exists():
        raise ValueError(f"there is no file {name}")
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # classes of the module are looked up there
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its data, its loss and the metric by which rules are compared."""

    model: Callable[[], torch.nn.Module]  # creates the model of a run, after the random generators are seeded
    train: Dataset[Any]  # the training data, pairs of an input and a target
    test: Dataset[Any]  # the test data, pairs of an input and a target
    loss: Callable[[Any, Any], torch.Tensor]  # function of outputs and targets that returns the mean over a minibatch
    metric: Callable[[Any, Any], torch.Tensor]  # function of outputs and targets that returns the mean over a minibatch
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]  # of parameters, set for `ref_batchsize`
    minibatch_size: int  # samples per forward and backward pass of one core
    ref_batchsize: int  # the batch size of the yardstick, for which the optimizer's settings were chosen
    num_samples: int  # samples of the yardstick, and of all other runs unless a trace is shorter
    schedule: Callable[[float], float] | None = None  # lr factor by the fraction of the training, 0 to 1; None for 1
    metric_name: str = "accuracy"  # the name of the metric in tables and figures
    unit: str = " %"  # written after the values of the metric
    is_higher_better: bool = True  # whether larger values of the metric are better

    def __post_init__(self) -> None:
        for name in ("model", "loss", "metric", "optimizer"):
            if not callable(getattr(self, name)):
                raise ValueError(f"`{name}` must be a function, got {getattr(self, name)!r}")
        check_positive(**{name: getattr(self, name) for name in ("minibatch_size", "ref_batchsize", "num_samples")})


def load_workload(name: str, datadir: str | None) -> Workload:
    """A built-in workload by its name, or the one that ``module:function`` or ``file.py:function`` returns."""
    if name in BUILT_IN:
        return BUILT_IN[name](Path(datadir) if datadir is not None else None)
    if ":" not in name:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f": did you mean {near[0]}?" if near else ""
        raise ValueError(f"`workload` must be {', '.join(BUILT_IN)} or module:function, got {name!r}{hint}")
    workload = load_function(name)()
    if not isinstance(workload, Workload):
        raise ValueError(f"{name} must return a Workload, got {type(workload).__name__}")
    return workload


def source_of(name: str) -> str | None:
    """The SHA-256 of the file with a user's workload; None for a built-in one."""
    if name in BUILT_IN:
        return None
    return hashlib.sha256(Path(load_module(name.rpartition(":")[0]).__file__).read_bytes()).hexdigest()


def _digits(datadir: Path | None) -> Workload:
    """scikit-learn's 1,797 digits of 8 × 8 pixels, and a network with one hidden layer."""
    datasets = import_extra("sklearn.datasets", "the digits need scikit-learn", "compare")
    pixels, labels = datasets.load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(labels))
    images, targets = torch.tensor(pixels[order] / 16, dtype=torch.float32), torch.tensor(labels[order])
    return Workload(
        **_classification([TensorDataset(images[part], targets[part]) for part in (slice(1440), slice(1440, None))]),
        model=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        minibatch_size=16,
        ref_batchsize=16,
        num_samples=10 * 1440,
    )


def _classification(data: Sequence[TensorDataset]) -> dict[str, Any]:
    return {"train": data[0], "test": data[1], "loss": nn.functional.cross_entropy, "metric": accuracy}


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The percentage of samples whose class has the largest output."""
    return 100 * (outputs.argmax(1) == targets).float().mean()


def _mnist(datadir: Path | None) -> Workload:
    """MNIST from the files of torchvision, and a small convolutional network."""
    if datadir is None:
        raise ValueError("mnist needs --datadir, the directory of its files")
    datasets = import_extra("torchvision.datasets", "mnist needs torchvision", "mnist")
    try:
        parts = [datasets.MNIST(datadir, train=is_train) for is_train in (True, False)]
    except RuntimeError:
        raise ValueError(f"{datadir} does not contain torchvision's files of mnist") from None
    return Workload(
        **_classification([TensorDataset(part.data.unsqueeze(1), part.targets) for part in parts]),
        model=_MnistNetwork,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0075, momentum=0.5),
        minibatch_size=32,
        ref_batchsize=128,
        num_samples=5 * 60_000,
    )


class _MnistNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        convolution1 = (nn.Conv2d(1, 10, kernel_size=5), nn.MaxPool2d(2), nn.BatchNorm2d(10), nn.ReLU())
        convolution2 = (nn.Conv2d(10, 20, kernel_size=5), nn.MaxPool2d(2), nn.BatchNorm2d(20), nn.ReLU())
        linear = (nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10))
        self.layers = nn.Sequential(*convolution1, *convolution2, *linear)

    def forward(self, images: torch.Tensor) -> Any:
        return self.layers((images.float() / 255 - 0.1307) / 0.3081)


BUILT_IN = {"digits": _digits, "mnist": _mnist}
