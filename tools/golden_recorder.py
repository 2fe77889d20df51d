"""Record a run through the public API only: the numbers of every step, collectives and waits of the host."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# settings of a parameter group that the inner optimizer reads in its step
SETTINGS = ("lr", "betas", "eps", "momentum", "weight_decay", "dampening")

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")

_here = threading.local()  # the recorder of this thread: virtual XLA cores are threads


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
    """A value for JSON, without rounding; tensors of more than one element as digests."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 and not hasattr(value, "to_local") else digest([value])
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
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

    def total(self) -> dict[str, int]:
        calls, size = map(sum, zip((0, 0), *self.collectives.values(), strict=True))
        return {"collectives": calls, "bytes": size, "waits": self.waits}


def _counted(read: Callable[..., Any]) -> Callable[..., Any]:
    """A method that copies values of a tensor to the host, with counted calls."""

    @functools.wraps(read)
    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counts = getattr(_here, "counts", None)
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
        self.speed = 1.0  # seconds that it advances in a second of the run, to have a slow core

    def advance(self, seconds: float) -> None:
        self.now += seconds * self.speed

    def __call__(self) -> float:
        return self.now


class _Messages(logging.Handler):
    """Passes what the library logs to the recorder of the thread: the level, and the numbers in the message."""

    def emit(self, record: logging.LogRecord) -> None:
        messages = getattr(_here, "messages", None)
        if messages is not None:
            text = record.getMessage().replace(str(_here.directory), "")
            messages.append([record.levelname, *_NUMBER.findall(text)])


def keep_messages() -> None:
    """Let recorders have the messages of the library, and nobody those of others."""
    logging.getLogger().setLevel(logging.CRITICAL)
    logger = logging.getLogger("variable_batch_size")
    logger.handlers, logger.propagate = [_Messages()], False
    logger.setLevel(logging.INFO)


# ------------------------------------------------------------------------------------------------------------ a run


class Recorder:
    """Records one run on one rank.

    Args:
        directory: shared by all runs of a scenario, on any number of cores.
        device: of the model and the data.
        has_own_clock: whether the clocks of the time module advance with the run only. Not for cores that are threads,
            or that watch each other.
        is_quiet: whether no step is recorded, as that starts operations and waits for the device.
    """

    def __init__(
        self, directory: Path, device: torch.device, *, has_own_clock: bool = True, is_quiet: bool = False
    ) -> None:
        self.is_quiet = is_quiet
        self.directory, self.device, self.clock = directory, device, Clock()
        self.steps: list[dict[str, Any]] = []
        self.run: dict[str, Any] = {}
        self.tracks: list[Track] = []
        self.counts = Counts()
        self.messages: list[Any] = []
        self._has_own_clock = has_own_clock

    @contextlib.contextmanager
    def recording(self, *, counts: bool = True) -> Iterator[None]:
        """In this context, keep messages, replace the clocks, and count operations if `counts`."""
        clocks = time.monotonic, time.perf_counter
        if self._has_own_clock:
            time.monotonic = time.perf_counter = self.clock
        _here.counts, _here.messages, _here.directory = self.counts, self.messages, self.directory
        try:
            with self.counts if counts else contextlib.nullcontext():
                yield
        finally:
            _here.counts = _here.messages = None
            time.monotonic, time.perf_counter = clocks

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """In this context, nothing is counted."""
        before, self.counts.is_paused = self.counts.is_paused, True
        try:
            with torch.no_grad():
                yield
        finally:
            self.counts.is_paused = before

    def begin(self, model: torch.nn.Module, optimizer: Any, inner: Any, **how: Any) -> Track:
        """Record an optimizer from its initial state on; the latest one is that of :meth:`step`."""
        if self.is_quiet:
            self.tracks.append(Track(self, len(self.tracks), model, optimizer, inner, **how))
            return self.tracks[-1]
        with self.paused():
            self.run.setdefault("setup", []).append(self.counts.summary())
            self.counts.reset()
            self.tracks.append(Track(self, len(self.tracks), model, optimizer, inner, **how))
        optimizer.record_grad_norm(every=1)
        return self.tracks[-1]

    def step(self, samples: Any, loss: Any = None, by: Callable[..., Any] | None = None, /, **how: Any) -> Any:
        """:meth:`Track.step` of the latest optimizer."""
        return self.tracks[-1].step(samples, loss, by, **how)

    def note(self, name: str, value: Any) -> None:
        """Record something else of the run, in the order in which it is noted."""
        if not self.is_quiet:
            with self.paused():
                self.run.setdefault("notes", []).append([name, plain(value)])

    def text(self, path: Path) -> list[str]:
        """The lines of a file, without the directory of this record."""
        return path.read_text().replace(str(self.directory), "").splitlines() if path.exists() else ["no file"]

    def end(self) -> dict[str, Any]:
        """The complete record; of a quiet run, what cannot be had otherwise."""
        waits = self.counts.waits
        if self.is_quiet:
            return {"weights": [digest(track.model.parameters()) for track in self.tracks], "waits": waits}
        with self.paused():
            self.run["messages"] = self.take_messages()
            self.run |= {} if any(track.is_common for track in self.tracks) else self.counts.summary()
            self.run["left"] = [plain(track.minibatches) for track in self.tracks]  # of a step that was not completed
            states = [track.state_dict() for track in self.tracks]
            self.run["state_dict"] = flattened(states[0] if len(states) == 1 else states) if states else {}
        return {"run": self.run, "steps": self.steps}

    def take_messages(self) -> list[Any]:
        """The messages since the last call."""
        taken = self.messages[:]
        self.messages.clear()
        return taken


class Track:
    """The record of one optimizer.

    Args:
        is_common: whether only what does not depend on the core is recorded, as another run may share the minibatches
            of a step in another way.
        has_hook: whether steps are recorded by a hook, too, in a loop that does not call :meth:`step` for all of them.
    """

    def __init__(
        self,
        recorder: Recorder,
        number: int,
        model: torch.nn.Module,
        optimizer: Any,
        inner: Any,
        *,
        is_common: bool = False,
        has_hook: bool = False,
    ) -> None:
        self.recorder, self.number, self.model, self.optimizer = recorder, number, model, optimizer
        self.is_common = is_common
        self.given = inner if isinstance(inner, list) else [inner]
        # ZeroRedundancyOptimizer has this rank's shard of the state in a separate optimizer
        self._inners = [getattr(one, "optim", one) for one in self.given]
        self.minibatches: list[Any] = []  # since the last complete step
        self._applied: list[Any] = []
        self._steps_done, self._is_within = optimizer.steps_done, False
        if recorder.is_quiet:
            return
        for one in self._inners:
            one.register_step_pre_hook(self._note_applied)
        self.num_calls = 0  # of the hook before step()
        if has_hook:
            optimizer.register_step_pre_hook(lambda *_: setattr(self, "num_calls", self.num_calls + 1))
            optimizer.register_step_post_hook(lambda *_: None if self._is_within else self._note(None, None, None))
        of_begin = {"weights": digest(model.parameters()), "buffers": digest(model.buffers())}
        recorder.steps.append({"optimizer": number, "at": self._position(), **of_begin})

    def step(self, samples: Any, loss: Any = None, by: Callable[..., Any] | None = None, /, **how: Any) -> Any:
        """``optimizer.step(…)``, or another function that calls it, and a record of what it has done."""
        self.recorder.clock.advance(1 / 64)
        if self.recorder.is_quiet:
            return (by or self.optimizer.step)(**how)
        self._is_within = True
        result = (by or self.optimizer.step)(**how)
        self._is_within = False
        self._note(samples, loss, result)
        return result

    def _note(self, samples: Any, loss: Any, result: Any) -> None:
        optimizer = self.optimizer
        with self.recorder.paused():
            if not self.is_common:
                self.minibatches.append(
                    {
                        "samples": samples.tolist() if isinstance(samples, torch.Tensor) else samples,
                        "loss": loss if loss is None else loss.detach(),
                        "returned": result.detach() if isinstance(result, torch.Tensor) else result,
                        "is_idle": optimizer.is_idle,
                        "is_accumulating": optimizer.is_accumulating,
                        "at": [optimizer.epoch, optimizer.epoch_step],
                        # elsewhere, reading it would bring numbers to the host
                        "lr": optimizer.current_lr() if self.recorder.device.type == "cpu" else None,
                    }
                )
            if optimizer.steps_done > self._steps_done:
                self.recorder.steps.append(self._step())
                self.minibatches, self._applied = [], []
            self._steps_done = optimizer.steps_done

    def _position(self) -> list[int]:
        optimizer = self.optimizer
        return [optimizer.epoch, optimizer.epoch_step, optimizer.steps_done, optimizer.samples_done]

    def _step(self) -> dict[str, Any]:
        """The record of a step, from its beginning to its end: the first difference is the cause of the others."""
        optimizer, groups = self.optimizer, range(len(self.optimizer.param_groups))
        norm, noise = optimizer.gradient_norm, _measured(lambda: optimizer.noise)
        record = {
            "optimizer": self.number,
            "at": self._position(),
            "batch_size": optimizer.batch_size,
            "num_calls": self.num_calls,
            "minibatches": plain(self.minibatches),
            "counts": self.recorder.counts.total(),
            "norm": None if norm is None else float(norm),
            "weight": float(optimizer.weight_done),
            "noise": noise if noise is None else plain(dataclasses.asdict(noise)),
            "noise_scale": _measured(lambda: optimizer.noise_scale),
            "gain": _measured(optimizer.gain),
            "gain_of_64": _measured(lambda: optimizer.gain(64)),
            "factor": [optimizer.factor(group) for group in groups],
            "lr": [optimizer.current_lr(group) for group in groups],
            "applied": [[_digested(group) for group in groups] for groups in self._applied],
            "weights": digest(self.model.parameters()),
            "buffers": digest(self.model.buffers()),
            "state": digest(_state_tensors(self._inners)),
            "restored": [_settings(group) for group in optimizer.param_groups],
            "updated": optimizer.updated,
            "steps_skipped": optimizer.steps_skipped,
            "progress": optimizer.progress,
            "messages": self.recorder.take_messages(),
        }
        of_core = ("minibatches", "counts", "buffers", "messages", "num_calls")
        return {name: value for name, value in record.items() if not (self.is_common and name in of_core)}

    def _note_applied(self, inner: Any, args: Any, kwargs: Any) -> None:
        """Record the gradients and hyperparameters of a step of the inner optimizer.

        They are copied and read after the step: virtual XLA cores that read within it would all start graphs with
        collectives, which may deadlock.
        """
        self.recorder.clock.advance(1 / 16)
        with self.recorder.paused():
            self._applied.append(
                [
                    {name: _copied(group[name]) for name in SETTINGS if name in group}
                    | {"gradients": [_copied(p.grad) for p in group["params"] if p.grad is not None]}
                    | {"with_gradient": "".join("01"[p.grad is not None] for p in group["params"])}
                    for group in inner.param_groups
                ]
            )

    def state_dict(self) -> dict[str, Any]:
        """Every leaf; ZeroRedundancyOptimizer has its full state on the rank of the last consolidation."""
        zeros = [one for one in self.given if hasattr(one, "consolidate_state_dict")]
        if not zeros:
            return self.optimizer.state_dict()
        found: dict[str, Any] = {}
        for rank in range(torch.distributed.get_world_size()):
            for zero in zeros:
                zero.consolidate_state_dict(to=rank)
            if rank == torch.distributed.get_rank():
                found = self.optimizer.state_dict()
        return found


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _digested(group: dict[str, Any]) -> dict[str, Any]:
    """What was applied to a parameter group, with its gradients as one digest."""
    return {name: digest(value) if name == "gradients" else plain(value) for name, value in group.items()}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: plain(group[name]) for name in SETTINGS if name in group}


def _state_tensors(inners: list[Any]) -> Iterator[torch.Tensor]:
    for inner in inners:
        for p in (p for group in inner.param_groups for p in group["params"]):
            state = inner.state.get(p, {})
            yield from (torch.as_tensor(state[name]) for name in sorted(state) if state[name] is not None)


def _measured(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:  # no noise is measured
        return None


def xla_counts() -> dict[str, int]:
    """What XLA has done so far in this process, on all of its cores."""
    import torch_xla.debug.metrics as metrics

    def number(name: str) -> int:
        return (metrics.metric_data(name) or (0,))[0]

    graphs = metrics.counter_value("UncachedCompile") or 0
    return {
        "graphs": graphs,
        "executions": number("ExecuteTime"),
        "transfers from device": number("TransferFromDeviceTime"),
        "transfers to device": number("TransferToDeviceTime"),
    }
