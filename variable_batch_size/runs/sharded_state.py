"""Full and sharded state of a model and its optimizer, and checkpoint directories with one file per rank."""

from __future__ import annotations

import copy
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from variable_batch_size.cores import xla
from variable_batch_size.cores.communicator import Communicator, Group, group_of, is_running, ranks_of
from variable_batch_size.cores.dtensor import from_local_like, is_dtensor, is_spread, shard_from_full, to_local, whole
from variable_batch_size.files import TEMPORARY, sync
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.optim.proxy import MultiOptimizer, optimizers_of
from variable_batch_size.optim.wrappers import is_zero
from variable_batch_size.runs import state_file
from variable_batch_size.runs.async_writer import AsyncWriter
from variable_batch_size.runs.state_file import mapped

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
    state = _changed(optimizer.inner, optimizer.state_dict(), lambda p, value: from_local_like(p, to_local(value)))
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
        if name in present and present[name].shape == value.shape and not is_dtensor(value):
            loaded[name] = shard_from_full(present[name], value)
    if list(names) != list(names.values()):
        loaded = OrderedDict((names.get(name, name), value) for name, value in loaded.items())
    own.load_state_dict(loaded)


def split_optimizer_state(inner: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state of whole tensors, as the optimizer's own ``load_state_dict`` takes it; every core must call it."""
    return _changed(inner, state, lambda p, value: value if is_dtensor(value) else shard_from_full(p, value))


def _changed(inner: Optimizer, state: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """The state of an optimizer with those tensors changed that are of the shape of their parameter."""
    if isinstance(inner, MultiOptimizer):
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


Tensors = dict[str, torch.Tensor]

_PLACE = "variable_batch_size place"
"""The key of what stands in the file of the rest for a tensor that is in parts."""


class ShardedFiles:
    """Writes a directory for each checkpoint, under a temporary name until all of it is there.

    Args:
        directory: where.
        communicator: of all processes that have a part.
        device: on which they can sum.
        writer: writes while training goes on, for the memory of one more copy of the parts; None to wait meanwhile.
    """

    def __init__(
        self, directory: Path, communicator: Communicator, device: torch.device, *, writer: AsyncWriter | None
    ) -> None:
        self._directory = directory
        self._communicator = communicator
        self._group = _host_group(communicator, device)
        self._writer = writer

    def save(self, steps_done: int, state: dict[str, Any], *, when_done: Callable[[], None]) -> None:
        """Save a state, whose split tensors are on all processes and whose rest is that of core 0.

        Args:
            steps_done: names it.
            state: every process calls with its own.
            when_done: called on core 0 when the directory has its name.
        """
        tensors: Tensors = {}
        rest = _without_split(state, tensors)
        if self._writer is None:
            self._write(steps_done, tensors, rest, when_done)
            return
        self._writer.wait()
        copies = {place: from_local_like(tensor, to_local(tensor).clone()) for place, tensor in tensors.items()}
        rest = copy.deepcopy(rest) if self._communicator.rank == 0 else {}
        self._writer.start(lambda: self._write(steps_done, copies, rest, when_done))

    def _write(self, steps_done: int, tensors: Tensors, rest: dict[str, Any], when_done: Callable[[], None]) -> None:
        # core 0 says which name is free: others may not see yet what it has just written
        number = torch.zeros(1, dtype=torch.int64)
        if self._communicator.rank == 0:
            number[0] = state_file.free_number(self._directory, steps_done)
        if self._group is not None:
            dist.all_reduce(number, group=self._group)
        path = state_file.directory_of(self._directory, steps_done, int(number))
        temporary = path.with_name(path.name + TEMPORARY)
        if self._communicator.rank == 0:
            temporary.mkdir(exist_ok=True)
            state_file.save(state_file.rest_of(temporary), rest)
        if tensors:
            _save_parts(tensors, temporary, self._group)  # in which core 0 waits for all
        if self._communicator.rank == 0:
            for file in temporary.iterdir():
                sync(file)
            os.replace(temporary, path)
            sync(path.parent)
            when_done()


def filled(path: Path, state: dict[str, Any], model: torch.nn.Module, optimizer: CustomOptimizer) -> dict[str, Any]:
    """The state with the tensors that are in parts, split as they are in this run; every core must call it.

    Args:
        path: of the checkpoint.
        state: what was read of it.
        model: of this run.
        optimizer: likewise.
    """
    places = _places(state)
    if not places:
        return state
    present = {f"['model'][{name!r}]": value for name, value in unwrapped(model).state_dict().items()}
    for place, dtype in places.items():
        if place not in present:
            present[place] = torch.zeros_like(_parameter_at(place, state, optimizer), dtype=dtype)
    tensors = {place: torch.zeros_like(present[place].detach()) for place in places}
    _load_parts(tensors, path)
    completed: dict[str, Any] = _with_tensors(state, tensors)
    return completed


def _parameter_at(place: str, state: dict[str, Any], optimizer: CustomOptimizer) -> torch.Tensor:
    """The parameter whose state in the optimizer is at a place."""
    inner = optimizers_of(optimizer.inner)
    states = state["optimizer"].get("optimizers", [state["optimizer"]])
    prefixes = [f"['optimizer']['optimizers'][{i}]['state']" for i in range(len(states))] + ["['optimizer']['state']"]
    for prefix, saved, one in zip(prefixes[-1:] if len(states) == 1 else prefixes, states, inner, strict=False):
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        parameters = [p for group in one.param_groups for p in group["params"]]
        for number, p in zip(numbers, parameters, strict=True):
            if place.startswith(f"{prefix}[{number}]["):
                found: torch.Tensor = p.detach()
                return found
    raise ValueError(f"the checkpoint has a tensor in parts at state{place} that this run does not have")


# ---------------------------------------------------------------------------------- split tensors and what stands there


def _without_split(state: dict[str, Any], found: Tensors) -> Any:
    """A state with a note in the place of each split tensor, which are put into `found`."""

    def note(part: Any, place: str) -> Any:
        if not (isinstance(part, torch.Tensor) and is_dtensor(part)):
            return part
        found[place] = part.detach()
        return {_PLACE: place, "dtype": part.dtype}

    return mapped(state, note)


def _places(state: dict[str, Any]) -> dict[str, torch.dtype]:
    """Where split tensors were, and what they are of."""
    found = {}

    def see(part: Any, place: str) -> Any:
        if _is_note(part):
            found[part[_PLACE]] = part["dtype"]
        return part

    mapped(state, see)
    return found


def _with_tensors(state: dict[str, Any], tensors: Tensors) -> Any:
    return mapped(state, lambda part, place: tensors[part[_PLACE]] if _is_note(part) else part)


def _is_note(part: Any) -> bool:
    return isinstance(part, dict) and _PLACE in part


# ----------------------------------------------------------------------------------------- torch.distributed.checkpoint


def _save_parts(tensors: Tensors, path: Path, group: Group) -> None:
    from torch.distributed.checkpoint import api, state_dict_saver

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a process alone, that it is alone
            state_dict_saver.save(tensors, checkpoint_id=path, process_group=group)
    except api.CheckpointException as error:  # which is no Exception
        raise OSError(f"{path} could not be written: {_last_line(error)}") from error


def _load_parts(tensors: Tensors, path: Path) -> None:
    from torch.distributed.checkpoint import api, state_dict_loader

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # each process reads what it needs, and waits for nobody
            state_dict_loader.load(tensors, checkpoint_id=path, no_dist=True)
    except (Exception, api.CheckpointException) as error:
        raise ValueError(f"{path} does not load: {_last_line(error)}") from error


def _last_line(error: BaseException) -> str:
    """What has gone wrong, behind the tracebacks of all processes."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def _host_group(communicator: Communicator, device: torch.device) -> Group:
    """A group of the same processes for what they have on the host, which no other sum can come into."""
    if not is_running():
        return None
    members = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    members[dist.get_rank()] = 1
    ranks = communicator.total(members.to(device)).nonzero().flatten().tolist()
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=len(ranks) < dist.get_world_size())
