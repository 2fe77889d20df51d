"""Full and sharded state of a model and its optimizer, and checkpoint directories with one file per rank."""

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from variable_batch_size.cores import xla
from variable_batch_size.cores.communicator import Communicator, Group, group_of, is_running, ranks_of
from variable_batch_size.cores.dtensor import (
    from_local_like,
    full_tensor,
    is_distributed,
    is_dtensor,
    shard_from_full,
    to_local,
)
from variable_batch_size.files import TEMPORARY, sync
from variable_batch_size.optim.optimizer import STATE_KEY, CustomOptimizer
from variable_batch_size.optim.proxy import MultiOptimizer, optimizers_of, parameters_of
from variable_batch_size.optim.wrappers import is_zero
from variable_batch_size.runs import state_file
from variable_batch_size.runs.checksums import DamagedFileError, SummedFiles, checksum_of
from variable_batch_size.runs.state_file import tree_map

Tensors = dict[str, torch.Tensor]
_CRCS = "crcs"  # the key for those of the other files, in the file with the rest
_PLACE = "variable_batch_size place"  # the key of the placeholder for a sharded tensor, in the file with the rest


def full_state(model: torch.nn.Module, optimizer: CustomOptimizer, *, is_first: bool) -> dict[str, Any]:
    """The state of both with full tensors on the first rank, empty on the others. Every rank must call it to gather."""
    if not is_first and not any(map(is_distributed, [*model.parameters(), *optimizer.parameters()])):
        _consolidate(optimizer)
        return {}
    return _gathered(local_state(model, optimizer), is_first=is_first)


def full_optimizer_state(optimizer: CustomOptimizer) -> dict[str, Any]:
    """The state of an optimizer. If it is sharded, every rank must call it: full on the first, empty on the others."""
    state = _optimizer_state(optimizer)
    if not any(map(is_distributed, optimizer.parameters())):
        return state
    return _gathered(state, is_first=optimizer.sampler.rank == 0)


def load_full_optimizer_state(optimizer: CustomOptimizer, state: Mapping[str, Any]) -> None:
    """Load full tensors into an optimizer whose parameters may be sharded. Every rank must call it."""
    is_own = STATE_KEY in state  # else load_state_dict() raises
    optimizer.load_state_dict(map_params(optimizer.inner, state, shard) if is_own else dict(state))


def _gathered(state: dict[str, Any], *, is_first: bool) -> dict[str, Any]:
    def full(part: Any, _: str) -> Any:
        if not isinstance(part, torch.Tensor) or not is_distributed(part):
            return part
        found = full_tensor(part.detach())
        return found.cpu() if is_first else None

    state = tree_map(state, full)
    return state if is_first else {}


def local_state(model: torch.nn.Module, optimizer: CustomOptimizer) -> dict[str, Any]:
    """The state of both on this rank, with sharded tensors as they are."""
    _consolidate(optimizer)
    return {"model": _model_state(model), "optimizer": _optimizer_state(optimizer)}


def _model_state(model: torch.nn.Module) -> dict[str, Any]:
    state = unwrapped(model).state_dict()
    renamed = OrderedDict((_plain_name(name), value) for name, value in state.items())
    versions = getattr(state, "_metadata", {}).items()
    renamed._metadata = OrderedDict((_plain_name(f"{name}.")[:-1], one) for name, one in versions)  # type: ignore[attr-defined]
    return renamed


def _optimizer_state(optimizer: CustomOptimizer) -> dict[str, Any]:
    # torch loses the order of shards in a dimension that is sharded twice; the parameter still has it
    state = optimizer.state_dict()
    return map_params(optimizer.inner, state, lambda p, v, _: from_local_like(p, to_local(v)) if _match(p, v) else v)


def try_out_optimizer(optimizer: CustomOptimizer) -> None:
    """Raise if a checkpoint cannot hold the optimizer's state; not for ZeRO, whose state must be consolidated first."""
    if not any(map(is_zero, optimizers_of(optimizer.inner))):
        state_file.in_memory({"optimizer": _optimizer_state(optimizer)})


def try_out_model(model: torch.nn.Module) -> None:
    """Raise if a checkpoint cannot hold the model's state, or modules cannot load their extra state from it."""
    loaded = state_file.in_memory({"model": _model_state(model)})["model"]
    for name, module in unwrapped(model).named_modules():
        key = _plain_name(f"{name}.{state_file.EXTRA_STATE}".removeprefix("."))
        if key in loaded:
            try:
                module.set_extra_state(loaded[key])
            except Exception as error:
                raise ValueError(f"{key} of the model's state can be saved, but not loaded: {error}") from error


def _consolidate(optimizer: CustomOptimizer) -> None:
    for inner in filter(is_zero, optimizers_of(optimizer.inner)):
        first = ranks_of(group_of(optimizer.sampler.process_group))[0]
        inner.consolidate_state_dict(to=first)  # type: ignore[attr-defined]


def load_model(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Load full tensors into a model that may be wrapped or sharded. Every rank must call it."""
    own = unwrapped(model)
    present = own.state_dict()
    names = {_plain_name(name): name for name in present}
    renamed = ((names.get(key, key), value) for key, value in state.items())
    loaded = OrderedDict((name, shard(present.get(name), value)) for name, value in renamed)
    loaded._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]
    own.load_state_dict(loaded)


def shard(like: Any, value: Any, _: str = "") -> Any:
    """A full tensor, sharded like another one; anything but a tensor of the same shape is returned as it is."""
    return value if not _match(like, value) or is_dtensor(value) else shard_from_full(like, value)


def _match(one: Any, other: Any) -> bool:
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape


def map_params(inner: Optimizer, state: Mapping[str, Any], change: Callable[..., Any]) -> dict[str, Any]:
    """Apply a function to each parameter and everything in its state, of any type, as :func:`tree_map` does."""
    if isinstance(inner, MultiOptimizer):
        pairs = zip(inner.optimizers, state["optimizers"], strict=True)
        return {**state, "optimizers": [map_params(*pair, change) for pair in pairs]}
    changed = dict(state["state"])
    for number, p in _numbered_params(inner, state):
        if number in changed:
            changed[number] = tree_map(changed[number], partial(change, p))
    return {**state, "state": changed}


def _numbered_params(inner: Optimizer, state: Mapping[str, Any]) -> Iterator[tuple[int, torch.Tensor]]:
    """The parameters of an optimizer, with their numbers in a state of it."""
    numbers = (number for group in state["param_groups"] for number in group["params"])
    return zip(numbers, parameters_of(inner), strict=False)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DistributedDataParallel and torch.compile."""
    inside = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    return unwrapped(inside) if isinstance(inside, torch.nn.Module) else model


def _plain_name(name: str) -> str:
    """A name in a model's state without SpmdFullyShardedDataParallel, which may wrap any of its modules."""
    return name.replace("_orig_module.", "") if xla.is_spmd() else name


def split_sharded(state: dict[str, Any], *, copies: bool) -> tuple[dict[str, Any], Tensors]:
    """A state with placeholders for its sharded tensors, and these tensors or copies of their shards, by place."""
    tensors: Tensors = {}

    def replaced(part: Any, place: str) -> Any:
        if not (isinstance(part, torch.Tensor) and is_dtensor(part)):
            return part
        tensor = part.detach()
        tensors[place] = from_local_like(tensor, to_local(tensor).clone()) if copies else tensor
        return {_PLACE: place, "dtype": part.dtype}

    return tree_map(state, replaced), tensors


def write_directory(
    directory: Path, steps_done: int, rest: dict[str, Any], tensors: Tensors, group: Group, *, is_first: bool
) -> None:
    """Write the shards of all ranks, then rank 0's rest of the state with the CRCs of these files.

    The directory has a temporary name until all are complete.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    # rank 0 chooses the name, as others may not yet see the files that it has just written
    number = torch.tensor([state_file.free_number(directory, steps_done) if is_first else 0])
    if group is not None:
        dist.all_reduce(number, group=group)
    path = state_file.path_of(directory, steps_done, int(number))
    temporary = path.with_name(path.name + TEMPORARY)
    if is_first:
        temporary.mkdir(exist_ok=True)
    crcs: list[dict[str, int]] = []  # of the files of each rank
    if tensors:
        with _dcp_errors(OSError, f"{temporary} could not be written"):
            writer = FileSystemWriter(temporary)
            files = SummedFiles(writer.fs)
            writer.fs = files  # type: ignore[assignment]
            save(tensors, storage_writer=writer, process_group=group)
        crcs = _gathered_objects(files.crcs, group)  # once all ranks have written theirs
    if is_first:
        of_files = {name: crc for of_rank in crcs for name, crc in of_rank.items()}
        state_file.save(temporary / state_file.REST, {**rest, _CRCS: of_files})
        for file in temporary.iterdir():
            sync(file)
        os.replace(temporary, path)
        sync(path.parent)


def _gathered_objects(own: Any, group: Group) -> list[Any]:
    """The objects of all ranks. Every rank must call it."""
    if group is None:
        return [own]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    return found


def check_shards(path: Path, rest: Mapping[str, Any], *, rank: int, num_ranks: int) -> None:
    """Raise if the files of a checkpoint directory are not what was written. Each rank reads some of them."""
    of_files = rest.get(_CRCS, {})  # a directory of an earlier version has none
    for name in sorted(of_files)[rank::num_ranks]:
        if not (path / name).exists():
            raise DamagedFileError(f"{path / name} is missing")
        if checksum_of(path / name) != of_files[name]:
            raise DamagedFileError(f"{path / name} is damaged: its CRC is not the one with which it was written")


def load_sharded(path: Path, state: dict[str, Any], model: torch.nn.Module, optimizer: CustomOptimizer) -> Any:
    """A state whose placeholders are replaced by tensors, sharded as in this run. Every rank must call it."""
    from torch.distributed.checkpoint.state_dict_loader import load

    dtypes = _placeholders(state)
    if not dtypes:
        return state
    like = {f"['model'][{name!r}]": value for name, value in unwrapped(model).state_dict().items()}
    states = state["optimizer"].get("optimizers", [state["optimizer"]])
    for inner, saved in zip(optimizers_of(optimizer.inner), states, strict=False):
        for number, p in _numbered_params(inner, saved):
            like |= dict.fromkeys(_placeholders(saved["state"].get(number)), p)
    if missing := dtypes.keys() - like.keys():
        raise ValueError(f"{path} has a sharded tensor at state{min(missing)} that this run does not have")
    tensors = {place: torch.zeros_like(like[place].detach(), dtype=dtype) for place, dtype in dtypes.items()}
    with _dcp_errors(ValueError, f"{path} does not load"):
        load(tensors, checkpoint_id=path, no_dist=True)  # each rank reads what it needs, without collectives
    return tree_map(state, lambda part, _: tensors[part[_PLACE]] if _is_placeholder(part) else part)


def _placeholders(state: Any) -> dict[str, torch.dtype]:
    """The places and dtypes of sharded tensors."""
    found: dict[str, torch.dtype] = {}

    def collect(part: Any, _: str) -> Any:
        if _is_placeholder(part):
            found[part[_PLACE]] = part["dtype"]
        return part

    tree_map(state, collect)
    return found


def _is_placeholder(part: Any) -> bool:
    return isinstance(part, dict) and _PLACE in part


@contextmanager
def _dcp_errors(error_type: type[Exception], message: str) -> Iterator[None]:
    """Raise errors of torch.distributed.checkpoint without the tracebacks of all ranks that precede the reason."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a single process
            yield
    except (Exception, CheckpointException) as error:  # the latter is not an Exception
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise error_type(f"{message}: {reason}") from error


def host_group(communicator: Communicator, device: torch.device) -> Group:
    """A gloo group of the same ranks that no other collective uses."""
    if not is_running():
        return None
    members = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    members[dist.get_rank()] = 1
    ranks = communicator.total(members.to(device)).nonzero().flatten().tolist()
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=len(ranks) < dist.get_world_size())
