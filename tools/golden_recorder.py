"""Record a run through the public API only: digests of every step, collectives and host synchronizations."""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import importlib
import inspect
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import variable_batch_size as vbs

SUBMODULES = ("rules", "policies", "traces", "planning", "schedules", "cores", "data", "optim", "runs")

# options and methods that were renamed in later versions; the available one is used
NEW_NAMES = {
    "keep_gradients": "gradient_as_bucket_view",
    "reduce_once": "reduce_scatter_once",
    "every": "interval_steps",
    "lead": "lead_steps",
    "accept": "allow_changes",
    "keep_gradient_norm": "record_grad_norm",
    "tell": "report_metric",
}

# settings of a parameter group that the inner optimizer reads in its step
SETTINGS = ("lr", "betas", "eps", "momentum", "weight_decay", "dampening")


# ----------------------------------------------------------------------------------------------- names old and new


def public(name: str) -> Any:
    """A public object of the library or one of its submodules."""
    if hasattr(vbs, name):
        return getattr(vbs, name)
    for folder in SUBMODULES:
        with contextlib.suppress(ModuleNotFoundError, AttributeError):
            return getattr(importlib.import_module(f"{vbs.__name__}.{folder}"), name)
    raise AttributeError(f"{vbs.__name__} has no public {name}, neither at the top nor in {', '.join(SUBMODULES)}")


def make(name: str, *args: Any, **options: Any) -> Any:
    """An object of a public class, with each option under its old or new name."""
    kind = public(name)
    makers = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
    return kind(*args, **_under_present_names(options, *makers))


def call(thing: Any, name: str, *args: Any, **options: Any) -> Any:
    """Call a method and its options under their old or new names."""
    found = getattr(thing, name) if hasattr(thing, name) else getattr(thing, NEW_NAMES[name])
    return found(*args, **_under_present_names(options, found))


def _under_present_names(options: dict[str, Any], *functions: Callable[..., Any]) -> dict[str, Any]:
    accepted = {name for function in functions for name in inspect.signature(function).parameters}
    news = {option: NEW_NAMES.get(option, option) for option in options}
    return {news[option] if news[option] in accepted else option: value for option, value in options.items()}


# ----------------------------------------------------------------------------------------------------------- digests


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """The first 16 digits of the SHA-256 of types, shapes and bytes; for a sharded tensor, of the local shard."""
    found = hashlib.sha256()
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        local = local.detach() if local.device.type == "cpu" else local.detach().cpu()
        if local.is_sparse:
            local = local.coalesce()
            found.update(digest([local.indices(), local.values()]).encode())
            continue
        found.update(f"{local.dtype}{tuple(local.shape)}".encode())
        found.update((local.view(torch.int16) if local.dtype is torch.bfloat16 else local).numpy().tobytes())
    return found.hexdigest()[:16]


def flattened(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested dictionaries and lists, each under its path; tensors as digests."""
    if isinstance(value, Mapping):
        leaves = [flattened(item, f"{path}.{key}") for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        leaves = [flattened(item, f"{path}.{number}") for number, item in enumerate(value)]
    else:
        return {path[1:]: plain(value)}
    return {key: item for part in leaves for key, item in part.items()} or {path[1:]: f"empty {type(value).__name__}"}


def plain(value: Any) -> Any:
    """A value for JSON, without rounding."""
    if isinstance(value, torch.Tensor):
        return digest([value])
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


# ------------------------------------------------------------------------------------------------------------ counts


class Counts(TorchDispatchMode):
    """Counts collectives with their bytes, and reads of single numbers, including those inside wrappers of torch.

    Attributes:
        collectives: how many calls of each operation there were, and the bytes of all tensors in them.
        waits: how often the host has read values of a tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = False
        self.reset()

    def reset(self) -> None:
        self.collectives: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
        self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its own operations on local tensors follow
        if not self.is_paused:
            if "c10d" in func.namespace and "wait" not in func.__name__:
                tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
                counted = self.collectives[func.__name__.partition(".")[0]]
                counted[0] += 1
                counted[1] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.waits += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))

    def summary(self) -> dict[str, Any]:
        return {"collectives": {name: self.collectives[name] for name in sorted(self.collectives)}, "waits": self.waits}

    def total(self) -> list[int]:
        """Calls, bytes and waits."""
        columns = zip(*self.collectives.values(), strict=True)
        return [*(map(sum, columns) if self.collectives else (0, 0)), self.waits]


_counting = threading.local()  # the counts of the run in this thread, because virtual XLA cores are threads


def _counted(read: Callable[..., Any]) -> Callable[..., Any]:
    """A method that copies values of a tensor to the host, with counted calls."""

    @functools.wraps(read)
    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counts = getattr(_counting, "counts", None)
        if counts is not None and not counts.is_paused:
            counts.waits += 1
        return read(tensor, *args, **kwargs)

    return counted


for _name in ("tolist", "numpy", "cpu"):  # on the host they are not operations that Counts intercepts
    setattr(torch.Tensor, _name, _counted(getattr(torch.Tensor, _name)))


class Clock:
    """A clock that the run advances, instead of those of the time module."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# ------------------------------------------------------------------------------------------------------------ a run


class Recorder:
    """Records one run on one rank.

    Args:
        directory: shared by all runs of a scenario, on any number of cores.
        device: of the model and the data.
    """

    def __init__(self, directory: Path, device: torch.device) -> None:
        self.directory = directory
        self.device = device
        self.steps: list[dict[str, Any]] = []
        self.run: dict[str, Any] = {}
        self._counts, self._clock = Counts(), Clock()
        self._samples: list[Any] = []
        self._losses: list[torch.Tensor] = []
        self._applied: list[Any] = []
        self._num_graphs = _num_graphs(device)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Count, with a clock that only this run advances; on XLA, where cores are threads, with the real clock."""
        clocks = time.monotonic, time.perf_counter
        if self.device.type != "xla":
            time.monotonic = time.perf_counter = self._clock
        _counting.counts = self._counts
        try:
            with self._counts:
                yield
        finally:
            _counting.counts = None
            time.monotonic, time.perf_counter = clocks

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        self._counts.is_paused = True
        try:
            with torch.no_grad():
                yield
        finally:
            self._counts.is_paused = False

    def begin(self, model: torch.nn.Module, optimizer: Any, inner: Any) -> None:
        """Record the initial state, with one inner optimizer or a list of several."""
        with self._paused():
            self._model, self._optimizer = model, optimizer
            self._given = inner if isinstance(inner, list) else [inner]
            # ZeroRedundancyOptimizer has this rank's shard of the state in a separate optimizer
            self._inners = [getattr(one, "optim", one) for one in self._given]
            for one in self._inners:
                one.register_step_pre_hook(self._note_applied)
            self.run.setdefault("setup", []).append(self._counts.summary())
            self._counts.reset()
            self.steps.append({"weights": digest(model.parameters()), "buffers": digest(model.buffers())})
        call(optimizer, "keep_gradient_norm", every=1)

    def step(self, samples: Any, loss: torch.Tensor | None = None, **how: Any) -> Any:
        """``optimizer.step(…)``, and a record if that completes a step of the schedule."""
        optimizer, before = self._optimizer, self._optimizer.steps_done
        self._samples.append(samples.tolist() if isinstance(samples, torch.Tensor) else samples)
        self._clock.now += 1 / 64
        result = optimizer.step(**how)
        with self._paused():
            self._losses.append(torch.zeros(()) if loss is None else loss.detach())
            if optimizer.steps_done > before:
                self._clock.now += 1 / 16
                self.steps.append(self._record())
                self._samples, self._losses, self._applied = [], [], []
        return result

    def end(self) -> dict[str, Any]:
        """The complete record."""
        with self._paused():
            self.run |= self._counts.summary()
            self.run["graphs"] = _num_graphs(self.device) - self._num_graphs
            if hasattr(self, "_optimizer"):
                self.run["batch_sizes"] = [step["batch_size"] for step in self.steps if "batch_size" in step]
                self.run["state_dict"] = self._state_dict()
        return {"run": self.run, "steps": self.steps}

    def _state_dict(self) -> dict[str, Any]:
        """Every leaf; ZeroRedundancyOptimizer has its full state on the rank of the last consolidation."""
        zeros = [one for one in self._given if hasattr(one, "consolidate_state_dict")]
        if not zeros:
            return flattened(self._optimizer.state_dict())
        found: dict[str, Any] = {}
        for rank in range(torch.distributed.get_world_size()):
            for zero in zeros:
                zero.consolidate_state_dict(to=rank)
            if rank == torch.distributed.get_rank():
                found = flattened(self._optimizer.state_dict())
        return found

    def _record(self) -> dict[str, Any]:
        optimizer, groups = self._optimizer, range(len(self._optimizer.param_groups))
        norm = optimizer.gradient_norm
        return {
            "weights": digest(self._model.parameters()),
            "buffers": digest(self._model.buffers()),
            "state": digest(_state_tensors(self._inners)),
            "applied": [[_digested(group) for group in groups] for groups in self._applied],
            "samples": [len(self._samples), hashlib.sha256(json.dumps(self._samples).encode()).hexdigest()[:16]],
            "losses": digest(self._losses),
            "at": [optimizer.epoch, optimizer.epoch_step, optimizer.steps_done, optimizer.samples_done],
            "batch_size": optimizer.batch_size,
            "updated": optimizer.updated,
            "steps_skipped": optimizer.steps_skipped,
            "is_idle": optimizer.is_idle,
            "lr": [optimizer.current_lr(group) for group in groups],
            "factor": [optimizer.factor(group) for group in groups],
            "norm": None if norm is None else float(norm),
            "weight": float(optimizer.weight_done),
            "progress": optimizer.progress,
            "gain": _measured(optimizer.gain),
            "noise_scale": _measured(lambda: optimizer.noise_scale),
            "counts": self._counts.total(),
        }

    def _note_applied(self, inner: Any, args: Any, kwargs: Any) -> None:
        """Record the gradients and hyperparameters of a step of the inner optimizer.

        They are copied and read after the step: virtual XLA cores that read within it would all start graphs with
        collectives, which may deadlock.
        """
        with self._paused():
            groups = [
                {name: _copied(group[name]) for name in SETTINGS if name in group}
                | {"gradients": [_copied(p.grad) for p in group["params"] if p.grad is not None]}
                | {"with_gradient": "".join("01"[p.grad is not None] for p in group["params"])}
                for group in inner.param_groups
            ]
            self._applied.append(groups)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _digested(group: dict[str, Any]) -> dict[str, Any]:
    """What was applied to a parameter group, with its gradients as one digest."""
    return {name: plain(value) for name, value in group.items()} | {"gradients": digest(group["gradients"])}


def _state_tensors(inners: list[Any]) -> Iterator[torch.Tensor]:
    for inner in inners:
        for p in (p for group in inner.param_groups for p in group["params"]):
            state = inner.state.get(p, {})
            yield from (torch.as_tensor(state[name]) for name in sorted(state) if state[name] is not None)


def _measured(read: Callable[[], float]) -> float | None:
    try:
        return read()
    except RuntimeError:  # no noise is measured
        return None


def _num_graphs(device: torch.device) -> int:
    if device.type != "xla":
        return 0
    import torch_xla.debug.metrics as metrics

    return metrics.counter_value("UncachedCompile") or 0
