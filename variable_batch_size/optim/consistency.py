"""Rank consistency: the same settings and initial weights on all ranks, and the fingerprint of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from variable_batch_size.cores.communicator import Communicator, Group, Ranks, group_of
from variable_batch_size.cores.detect import everyone_for
from variable_batch_size.cores.dtensor import any_dtensor, dimensions_of, model_groups, to_local
from variable_batch_size.cores.process_group import ProcessGroups, SpmdHosts
from variable_batch_size.data.sampler import Description, MinibatchSource
from variable_batch_size.optim.proxy import MultiOptimizer, optimizers_of
from variable_batch_size.optim.wrappers import (
    disable_ddp_allreduce,
    is_fully_sharded,
    is_zero,
    refuse_spread_moments,
    refuse_unsupported,
)
from variable_batch_size.rules.rule import Rule


def fingerprint_of(sampler: MinibatchSource, rule: Rule, inner: Optimizer, ref_batchsize: int) -> Description:
    """What the samples of a step and the meaning of the state depend on; the number of cores is not among it."""
    schedule = sampler.schedule
    return {
        "trace": schedule.description,
        "on_end": schedule.on_end,
        "minibatch_size": schedule.minibatch_size,
        **sampler.description,
        "rule": " and ".join(type(one).__name__ for one in getattr(rule, "rules", [rule])),
        "settings of the rule": settings_of_rule(rule),
        "ref_batchsize": ref_batchsize,
        # that of ZeroRedundancyOptimizer is the one whose state it has in parts
        "optimizer": inner.name if isinstance(inner, MultiOptimizer) else type(getattr(inner, "optim", inner)).__name__,
    }


def settings_of(inner: Optimizer) -> str:
    """The numbers among the settings of an optimizer's groups, and how many parameters of which sizes they have."""
    groups = []
    for group in inner.param_groups:
        values = {
            name: value.item() if isinstance(value, torch.Tensor) and value.device.type == "cpu" else value
            for name, value in group.items()
            if name != "params"
        }
        numbers = {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str, tuple))}
        groups.append(f"{numbers}, shapes {shapes_of(group['params'])}")
    return "; ".join(groups)


def differences(saved: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """In what a run is not the one that was saved, each in words.

    >>> differences({"seed": 0, "rule": "LinearRule"}, {"seed": 3, "rule": "LinearRule"})
    ['seed was 0 and is 3']
    """
    # what a run did not note that was saved by an older version cannot be compared
    return [
        f"{name} was {saved[name]} and is {now[name]}" for name in now if name in saved and saved[name] != now[name]
    ]


def settings_of_rule(rule: Rule) -> str:
    """The numbers among the settings of a rule."""
    found = [
        str({name: value for name, value in vars(one).items() if isinstance(value, (bool, int, float, str))})
        for one in getattr(rule, "rules", [rule])
    ]
    return " and ".join(found)


def shapes_of(tensors: Iterable[torch.Tensor]) -> str:
    """The shape and dtype of each."""
    return ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)


_LONGEST = 120


def check_same_on_all_ranks(
    facts: Mapping[str, object], tensors: Sequence[torch.Tensor], communicator: Communicator
) -> Callable[[], None]:
    """Let tensors be on all cores as they are on core 0, and refuse cores that were set up differently.

    Returns:
        what must be called after the next flush. Where work is only noted down first, it does the refusing: so both are
        one program with whatever else is noted down until then.
    """
    if communicator.num_replicas == 1:
        broadcast_from_rank0(tensors, communicator)
        return _nothing_more
    comparison = Comparison(facts, communicator, tensors[0].device)
    if communicator.is_one_program:
        broadcast_from_rank0(tensors, communicator)
        return comparison.refuse_different
    comparison.refuse_different()
    broadcast_from_rank0(tensors, communicator)
    return _nothing_more


def _nothing_more() -> None:
    pass


def broadcast_from_rank0(tensors: Iterable[torch.Tensor], communicator: Communicator) -> None:
    """Let parameters and buffers be on all cores as they are on core 0."""
    tensors = list({id(tensor): tensor for tensor in tensors}.values())
    communicator.shard_like(tensors)
    if communicator.num_replicas > 1:
        communicator.broadcast(tensors)


class Comparison:
    """Compares facts between the cores, in one sum over all of them; every core must make one and ask it.

    Args:
        facts: what must be the same, by name; the same names on all cores.
        communicator: the way to the other cores.
        device: on which it sums.
    """

    def __init__(self, facts: Mapping[str, object], communicator: Communicator, device: torch.device) -> None:
        self._facts = facts
        self._communicator = communicator
        self._device = device
        self._own = torch.tensor([_digest(value) for value in facts.values()], dtype=torch.int64)
        self._total = self._own.to(device, copy=True)
        communicator.sum([self._total])

    def refuse_different(self) -> None:
        """After a flush: raise on every core if the cores differ in any of the facts, and say in which."""
        names = self._different()
        if not names:
            return
        texts = _texts_of_all_cores(str(self._facts[names[0]]), self._communicator, self._device)
        said = ", ".join(f"{text} on core {rank}" for rank, text in enumerate(texts))
        more = f" (and in {', '.join(names[1:])})" if len(names) > 1 else ""
        raise ValueError(f"all cores must be set up alike, but they differ in {names[0]}{more}: {said}")

    def _different(self) -> list[str]:
        num_replicas, total = self._communicator.num_replicas, self._total.cpu()
        return [
            name for name, mine, sum_ in zip(self._facts, self._own, total, strict=True) if mine * num_replicas != sum_
        ]


def _digest(value: object) -> int:
    """32 bits, so that their sum over all cores is exact in 64."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:4], "little")


def _texts_of_all_cores(text: str, communicator: Communicator, device: torch.device) -> list[str]:
    table = torch.zeros(communicator.num_replicas, _LONGEST, dtype=torch.int32)
    content = text.encode()[:_LONGEST]
    table[communicator.rank, : len(content)] = torch.tensor(list(content), dtype=torch.int32)
    rows = communicator.total(table.to(device)).tolist()
    return [bytes(int(number) for number in row if number).decode(errors="replace") for row in rows]


class Joining(Protocol):
    """What is compared of an optimizer, or broadcast, before its first step."""

    rule: Rule
    inner: Optimizer
    sampler: MinibatchSource

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def description(self) -> Description: ...


def sync_and_check_ranks(
    optimizer: Joining,
    communicator: Communicator,
    model: torch.nn.Module | None,
    options: Mapping[str, Any],
) -> Callable[[], None]:
    """See that all cores begin with the same, and that nobody else reduces the gradients.

    Args:
        optimizer: of this core.
        communicator: the way to the other cores.
        model: whose parameters and buffers are to be the same, too; None for none.
        options: further arguments of the optimizer that must be the same on all cores, by name.

    Returns:
        what must be called after the next flush.
    """
    parameters, sampler = list(optimizer.parameters()), optimizer.sampler
    refuse_unsupported(parameters, model)
    refuse_spread_moments(optimizer.rule, optimizer.inner)
    if (sampler.rank, sampler.num_replicas) != (communicator.rank, communicator.num_replicas):
        raise ValueError(
            f"the sampler is for core {sampler.rank} of {sampler.num_replicas}, "
            f"but this is core {communicator.rank} of {communicator.num_replicas}"
        )
    of_model = [*model.parameters(), *model.buffers()] if model is not None else []
    description = optimizer.description
    facts = {
        **description,
        "threads": description.get("threads"),  # the same names on all cores, also where one of them is not exact
        **options,
        "settings": settings_of(optimizer.inner),
        "model": shapes_of(of_model),
        "frozen parameters": str([number for number, p in enumerate(parameters) if not p.requires_grad]),
        "first batch size": optimizer.batch_size,
    }
    tensors = [*parameters, *of_model]
    if any_dtensor(tensors):
        return _join_over_a_mesh(facts, tensors, communicator, sampler.process_group)
    everyone = everyone_for(tensors, sampler.process_group)
    if isinstance(everyone, SpmdHosts):
        Comparison(facts, everyone, torch.device("cpu")).refuse_different()
    complete = check_same_on_all_ranks(facts, tensors, communicator)
    disable_ddp_allreduce(parameters, communicator)
    return complete


def _join_over_a_mesh(
    facts: Mapping[str, Any], tensors: Sequence[torch.Tensor], communicator: Communicator, process_group: Any
) -> Callable[[], None]:
    """The same where processes share the samples, which must begin with the same of what is not split over them."""
    everyone = everyone_for(tensors, process_group)
    if everyone.num_replicas > 1:
        Comparison(facts, everyone, to_local(tensors[0]).device).refuse_different()
    _share_over_a_mesh(tensors, communicator, model_groups(tensors, group_of(process_group)))
    return lambda: None


def _share_over_a_mesh(
    tensors: Sequence[torch.Tensor], communicator: Communicator, groups: Mapping[Ranks, Group]
) -> None:
    """Let tensors be as on the first core, and what is not split over a group as on the first process of that."""
    broadcast_from_rank0(tensors, communicator)
    for ranks, group in groups.items():
        copied = [to_local(tensor.detach()) for tensor in tensors if ranks not in _ranks_of_meshes([tensor])]
        broadcast_from_rank0(copied, ProcessGroups(group))


def sync_added_params(
    added: Sequence[torch.Tensor], before: Sequence[torch.Tensor], communicator: Communicator, process_group: Any
) -> None:
    """The same for parameters that are added to those before, in which all processes must be alike.

    Raises:
        ValueError: if they are split in another way, of which nothing was known when the optimizer was made, or if one
            is there already.
    """
    if len({*added, *before}) < len(added) + len(before):
        raise ValueError("a group that is added must have new parameters, each of them once, got one a second time")
    if any_dtensor(added) and not _are_split_as(added, before):
        raise ValueError(
            "parameters that are added must be split over the processes that others are split over, and in the same "
            "way, or not at all: make the optimizer with them, frozen until they are to be trained"
        )
    _share_over_a_mesh(added, communicator, model_groups(before, group_of(process_group)))
    disable_ddp_allreduce(added, communicator)


@contextmanager
def rollback_param_groups(inner: Optimizer) -> Iterator[None]:
    """Within, a group may be added to an optimizer; if that ends in an error, it has the groups that it had."""
    spread: list[Any] = [one for one in optimizers_of(inner) if is_zero(one)]
    optimizers = {inner, *optimizers_of(inner), *(one.optim for one in spread)}
    before = [(one, list(one.param_groups)) for one in optimizers]
    try:
        yield
    except BaseException:
        for one, groups in before:
            one.param_groups[:] = groups
        for one in spread:
            one._clear_cache()  # of which core has which parameter
        raise


def _are_split_as(added: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> bool:
    return _ranks_of_meshes(added) <= _ranks_of_meshes(before) and is_fully_sharded(added) == is_fully_sharded(before)


def _ranks_of_meshes(tensors: Iterable[torch.Tensor]) -> set[Ranks]:
    return {dimension.ranks for tensor in tensors for dimension in dimensions_of(tensor)}
