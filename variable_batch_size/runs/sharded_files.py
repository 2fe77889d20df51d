"""Checkpoints as directories: what is split over processes in a part of each, by torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.cores.groups import Group, is_running
from variable_batch_size.cores.meshes import is_split, local_part, split_like
from variable_batch_size.files import TEMPORARY, sync
from variable_batch_size.runs import storage
from variable_batch_size.runs.nested import mapped
from variable_batch_size.runs.spread_state import unwrapped
from variable_batch_size.runs.writer import Writer
from variable_batch_size.training.optimizer import CustomOptimizer
from variable_batch_size.training.wrapper import optimizers_of

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
        self, directory: Path, communicator: Communicator, device: torch.device, *, writer: Writer | None
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
        copies = {place: split_like(tensor, local_part(tensor).clone()) for place, tensor in tensors.items()}
        rest = copy.deepcopy(rest) if self._communicator.rank == 0 else {}
        self._writer.start(lambda: self._write(steps_done, copies, rest, when_done))

    def _write(self, steps_done: int, tensors: Tensors, rest: dict[str, Any], when_done: Callable[[], None]) -> None:
        # core 0 says which name is free: others may not see yet what it has just written
        number = torch.zeros(1, dtype=torch.int64)
        if self._communicator.rank == 0:
            number[0] = storage.free_number(self._directory, steps_done)
        if self._group is not None:
            dist.all_reduce(number, group=self._group)
        path = storage.directory_of(self._directory, steps_done, int(number))
        temporary = path.with_name(path.name + TEMPORARY)
        if self._communicator.rank == 0:
            temporary.mkdir(exist_ok=True)
            storage.save(storage.rest_of(temporary), rest)
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
        if not (isinstance(part, torch.Tensor) and is_split(part)):
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
