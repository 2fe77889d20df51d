"""The state of a model and its optimizer as one plain process has it, wherever their parts are; and back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from variable_batch_size.cores import xla
from variable_batch_size.cores.groups import group_of, ranks_of
from variable_batch_size.cores.meshes import is_split, is_spread, local_part, split_from, split_like, whole
from variable_batch_size.training.optimizer import CustomOptimizer
from variable_batch_size.training.together import Together
from variable_batch_size.training.unsupported import is_zero
from variable_batch_size.training.wrapper import optimizers_of

Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_PREFIXES = ("module.", "_orig_mod.")
"""Of DistributedDataParallel and torch.compile, before the names of a model's own state."""

_WITHIN = "_orig_module."
"""Of SpmdFullyShardedDataParallel, which may be around any module of a model."""


def collect(model: torch.nn.Module, optimizer: CustomOptimizer, *, is_writer: bool) -> dict[str, Any]:
    """The state of both, with whole tensors, on the process that writes it; nothing on the others.

    Every core must call it: where tensors are split, or the optimizer has a part of its state on each core, all of them
    send theirs, one tensor at a time.
    """
    if not is_writer and not any(map(is_spread, [*model.parameters(), *optimizer.parameters()])):
        _consolidate(optimizer)
        return {}
    collected: dict[str, Any] = _collected(state_in_parts(model, optimizer), is_writer)
    return collected if is_writer else {}


def state_in_parts(model: torch.nn.Module, optimizer: CustomOptimizer) -> dict[str, Any]:
    """The state of both as this process has it."""
    _consolidate(optimizer)
    # torch forgets in which order a dimension is split that is split twice; the order is the parameter's
    state = _changed(optimizer.inner, optimizer.state_dict(), lambda p, value: split_like(p, local_part(value)))
    return {"model": _under_plain_names(unwrapped(model).state_dict()), "optimizer": state}


def _consolidate(optimizer: CustomOptimizer) -> None:
    for inner in optimizers_of(optimizer.inner):
        if is_zero(inner):
            group = group_of(optimizer.sampler.process_group)
            inner.consolidate_state_dict(to=ranks_of(group)[0])  # type: ignore[attr-defined]


def _collected(value: Any, is_writer: bool) -> Any:
    """Nested containers with whole tensors, on the host if they were split; those of other processes are dropped."""
    if isinstance(value, torch.Tensor):
        if not is_spread(value):
            return value
        complete = whole(value.detach())
        return complete.cpu() if is_writer else None
    if isinstance(value, list | tuple):
        return type(value)(_collected(part, is_writer) for part in value)
    if not isinstance(value, dict):
        return value
    parts = [(key, _collected(part, is_writer)) for key, part in value.items()]
    if not isinstance(value, OrderedDict):
        return dict(parts)
    ordered = OrderedDict(parts)
    if hasattr(value, "_metadata"):  # the versions of a model's modules, which load_state_dict goes by
        ordered._metadata = value._metadata  # type: ignore[attr-defined]
    return ordered


def load_model(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state of whole tensors into a model that is wrapped or split in any way; every core must call it."""
    own = unwrapped(model)
    names = {_plain_name(name): name for name in own.state_dict()}
    present = _under_plain_names(own.state_dict())
    loaded = _without_prefixes(state, present)
    for name, value in loaded.items():
        if name in present and present[name].shape == value.shape and not is_split(value):
            loaded[name] = split_from(present[name], value)
    if list(names) != list(names.values()):
        loaded = OrderedDict((names.get(name, name), value) for name, value in loaded.items())
    own.load_state_dict(loaded)


def split_optimizer_state(inner: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state of whole tensors, as the optimizer's own ``load_state_dict`` takes it; every core must call it."""
    return _changed(inner, state, lambda p, value: value if is_split(value) else split_from(p, value))


def _changed(inner: Optimizer, state: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """The state of an optimizer with those tensors changed that are of the shape of their parameter."""
    if isinstance(inner, Together):
        pairs = zip(inner.optimizers, state["optimizers"], strict=True)
        return {**state, "optimizers": [_changed(*pair, change) for pair in pairs]}
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [p for group in inner.param_groups for p in group["params"]]
    of_number = dict(zip(numbers, parameters, strict=False))

    def changed(number: int, value: Any) -> Any:
        p = of_number.get(number)
        is_like = p is not None and isinstance(value, torch.Tensor) and value.shape == p.shape
        return change(p, value) if p is not None and is_like else value

    values = {
        number: {name: changed(number, value) for name, value in of_one.items()}
        for number, of_one in state["state"].items()
    }
    return {**state, "state": values}


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model that DistributedDataParallel or torch.compile was given."""
    while True:
        inside = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inside, torch.nn.Module):
            return model
        model = inside


def _plain_name(name: str) -> str:
    """The name of a model's parameter, or of a module with a dot behind it, without the wrappers within the model."""
    return name.replace(_WITHIN, "") if xla.is_spmd() else name


def _under_plain_names(state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    renamed = OrderedDict((_plain_name(name), value) for name, value in state.items())
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        plain = {_plain_name(f"{name}.")[:-1]: value for name, value in metadata.items()}
        renamed._metadata = OrderedDict(plain)  # type: ignore[attr-defined]
    return renamed


def _without_prefixes(state: Mapping[str, Any], present: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """The state under the names of the model, if it was saved under those of a wrapper."""
    names = list(state)
    for prefix in _PREFIXES * 2:
        if names and all(name.startswith(prefix) for name in names) and not set(names) & set(present):
            names = [name.removeprefix(prefix) for name in names]
    renamed = OrderedDict(zip(names, state.values(), strict=True))
    metadata = getattr(state, "_metadata", None)
    if metadata is not None and names == list(state):
        renamed._metadata = metadata  # type: ignore[attr-defined]
    return renamed
