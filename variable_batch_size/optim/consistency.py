"""Rank consistency: the same settings and initial weights on all ranks, and the fingerprint of a run."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from variable_batch_size.cores.communicator import Communicator, Group, Ranks, group_of
from variable_batch_size.cores.detect import ProcessGroups, SpmdHosts, check_joined_torchrun, everyone_for
from variable_batch_size.cores.dtensor import dimensions_of, is_dtensor, model_groups, to_local
from variable_batch_size.data.sampler import Description, MinibatchSource
from variable_batch_size.optim.proxy import MultiOptimizer, optimizers_of
from variable_batch_size.optim.wrappers import Wrappers, forget_partition, fsdp_modules, is_zero
from variable_batch_size.rules.rule import Rule

Tensors = Sequence[torch.Tensor]
Changes = dict[str, tuple[object, object]]  # the old and the new value of each setting
_MAX_BYTES = 120  # of each rank's value in an error message


def fingerprint_of(sampler: MinibatchSource, rule: Rule, inner: Optimizer, ref_batchsize: int) -> Description:
    """Everything that determines the samples of a step and the meaning of the state; not the number of ranks."""
    schedule, rules = sampler.schedule, getattr(rule, "rules", [rule])
    # for a ZeroRedundancyOptimizer, the optimizer whose state it shards
    optimizers = inner.optimizers if isinstance(inner, MultiOptimizer) else [getattr(inner, "optim", inner)]
    return {
        "trace": schedule.description,
        "on_end": schedule.on_end,
        "minibatch_size": schedule.minibatch_size,
        **sampler.description,
        "rule": " and ".join(type(one).__name__ for one in rules),
        "settings of the rule": " and ".join(str(_numbers(vars(one))) for one in rules),
        "ref_batchsize": ref_batchsize,
        "optimizer": " and ".join(type(one).__name__ for one in optimizers),
    }


def changes(saved: Mapping[str, object], now: Mapping[str, object]) -> Changes:
    """Every difference from a saved fingerprint: the old and the new value; names that were not saved are skipped."""
    return {name: (saved[name], now[name]) for name in now if name in saved and saved[name] != now[name]}


def in_words(changes: Changes) -> list[str]:
    """Changes as "seed was 0 and is 3"."""
    return [f"{name} was {before} and is {now}" for name, (before, now) in changes.items()]


def differences(saved: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Every difference from a saved fingerprint, in words."""
    return in_words(changes(saved, now))


def _numbers(values: Mapping[str, Any], *kinds: type) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str, *kinds))}


def _shapes(tensors: Iterable[torch.Tensor]) -> str:
    return ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)


def _hyperparameters(inner: Optimizer) -> str:
    groups = []
    for group in inner.param_groups:
        tensors = {name: value for name, value in group.items() if isinstance(value, torch.Tensor)}
        on_host = {name: value.item() for name, value in tensors.items() if value.device.type == "cpu"}
        groups.append(f"{_numbers({**group, **on_host}, tuple)}, shapes {_shapes(group['params'])}")
    return "; ".join(groups)


def compare_ranks(facts: Mapping[str, object], communicator: Communicator, device: torch.device) -> Callable[[], None]:
    """Compare values between the ranks with one all-reduce. Every rank must call it with the same names.

    Each value is hashed to 32 bits, and each rank compares its hash times the number of ranks with the sum. Returns a
    function to call after a flush: it raises on every rank if the ranks differ, with the first difference.
    """
    # 32 bits each, so that an int64 holds the sum over all ranks
    digests = [hashlib.sha256(repr(value).encode()).digest()[:4] for value in facts.values()]
    own = torch.tensor([int.from_bytes(digest, "little") for digest in digests], dtype=torch.int64)
    total = own.to(device, copy=True)
    communicator.sum([total])

    def refuse_different() -> None:
        pairs = zip(facts, own * communicator.num_replicas, total.cpu(), strict=True)
        names = [name for name, expected, found in pairs if expected != found]
        if names:
            table = torch.zeros(communicator.num_replicas, _MAX_BYTES, dtype=torch.int32)
            content = str(facts[names[0]]).encode()[:_MAX_BYTES]
            table[communicator.rank, : len(content)] = torch.tensor(list(content), dtype=torch.int32)
            rows = communicator.total(table.to(device)).tolist()
            texts = [bytes(filter(None, row)).decode(errors="replace") for row in rows]
            values = ", ".join(f"{text} on rank {rank}" for rank, text in enumerate(texts))
            more = f" (and in {', '.join(names[1:])})" if len(names) > 1 else ""
            raise ValueError(f"ranks must have the same settings, but differ in {names[0]}{more}: {values}")

    return refuse_different


def check_same_on_all_ranks(
    facts: Mapping[str, object], tensors: Tensors, communicator: Communicator
) -> Callable[[], None]:
    """Broadcast tensors from rank 0, and raise if ranks differ in the facts: on lazy devices after the next flush."""
    check = None if communicator.num_replicas == 1 else compare_ranks(facts, communicator, tensors[0].device)
    if check is not None and not communicator.is_one_program:
        check()
    broadcast_from_rank0(tensors, communicator)
    return check if check is not None and communicator.is_one_program else lambda: None


def broadcast_from_rank0(tensors: Iterable[torch.Tensor], communicator: Communicator) -> None:
    """Make parameters and buffers on all ranks equal to those of rank 0."""
    tensors = list({id(tensor): tensor for tensor in tensors}.values())
    communicator.shard_like(tensors)
    if communicator.num_replicas > 1:
        communicator.broadcast(tensors)


def sync_and_check_ranks(
    optimizer: Any, wrappers: Wrappers, communicator: Communicator, options: Mapping[str, Any]
) -> Callable[[], None]:
    """Check that all ranks have the same settings, broadcast the model of rank 0, and switch other reductions off.

    Returns a function to call after a flush.
    """
    parameters, sampler, model = list(optimizer.parameters()), optimizer.sampler, wrappers.model
    wrappers.refuse_unsupported(optimizer.rule, optimizer.inner)
    if sampler.detects_cores:
        check_joined_torchrun(communicator)
    expected, found = (f"rank {one.rank} of {one.num_replicas}" for one in (sampler, communicator))
    if expected != found:
        hint = ": make the loader after torch.distributed is initialized" if sampler.detects_cores else ""
        raise ValueError(f"the sampler is for {expected}, but this is {found}{hint}")
    of_model = [*model.parameters(), *model.buffers()] if model is not None else []
    largest = sampler.schedule.max_minibatch_size
    facts = {
        **optimizer.description,
        "threads": optimizer.description.get("threads"),  # the same names on all ranks, even if only some are exact
        **options,
        "settings": _hyperparameters(optimizer.inner),
        "model": _shapes(of_model),
        "frozen parameters": str([number for number, p in enumerate(parameters) if not p.requires_grad]),
        "first batch size": optimizer.batch_size,
        "max_minibatch_size": largest if largest > sampler.minibatch_size else None,
        "assign": None if sampler.shares is None else type(sampler.shares).__name__,
    }
    tensors = [*parameters, *of_model]
    everyone = everyone_for(tensors, sampler.process_group)
    if any(map(is_dtensor, tensors)):
        if everyone.num_replicas > 1:
            compare_ranks(facts, everyone, to_local(tensors[0]).device)()
        _broadcast_over_mesh(tensors, communicator, model_groups(tensors, group_of(sampler.process_group)))
        return lambda: None
    if isinstance(everyone, SpmdHosts):
        compare_ranks(facts, everyone, torch.device("cpu"))()
    complete = check_same_on_all_ranks(facts, tensors, communicator)
    wrappers.disable_ddp_allreduce()
    return complete


def _broadcast_over_mesh(tensors: Tensors, communicator: Communicator, groups: Mapping[Ranks, Group]) -> None:
    """Broadcast from rank 0, and within each model-parallel group the tensors that are not sharded over it."""
    broadcast_from_rank0(tensors, communicator)
    for ranks, group in groups.items():
        replicated = [to_local(tensor.detach()) for tensor in tensors if ranks not in _ranks_of_meshes([tensor])]
        broadcast_from_rank0(replicated, ProcessGroups(group))


def sync_added_params(
    added: Tensors, before: Tensors, wrappers: Wrappers, communicator: Communicator, process_group: Any
) -> None:
    """Do the same for added parameters, which must be sharded as the others are."""
    if len({*added, *before}) < len(added) + len(before):
        raise ValueError("some parameters appear in more than one parameter group")
    if any(map(is_dtensor, added)):
        is_fully_sharded = bool(fsdp_modules(added))
        if is_fully_sharded != bool(wrappers.fsdp) or not _ranks_of_meshes(added) <= _ranks_of_meshes(before):
            raise ValueError(
                "added parameters must be sharded over the same processes and in the same way as the others, or not "
                "at all: include them when the optimizer is made, frozen until they should train"
            )
    _broadcast_over_mesh(added, communicator, model_groups(before, group_of(process_group)))
    wrappers.update([*before, *added])
    wrappers.disable_ddp_allreduce()


@contextmanager
def rollback_param_groups(inner: Optimizer) -> Iterator[None]:
    """Restore the parameter groups of an optimizer if an error occurs while one is added."""
    zero: list[Any] = [one for one in optimizers_of(inner) if is_zero(one)]
    optimizers = {inner, *optimizers_of(inner), *(one.optim for one in zero)}
    before = [(one, list(one.param_groups)) for one in optimizers]
    try:
        yield
    except BaseException:
        for one, groups in before:
            one.param_groups[:] = groups
        for one in zero:
            forget_partition(one)
        raise


def _ranks_of_meshes(tensors: Iterable[torch.Tensor]) -> set[Ranks]:
    return {dimension.ranks for tensor in tensors for dimension in dimensions_of(tensor)}
