"""How an optimizer joins the other cores, when it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.cores.distributed import Distributed
from variable_batch_size.cores.groups import Group, Ranks, group_of
from variable_batch_size.cores.hosts import Hosts
from variable_batch_size.cores.meshes import any_split, dimensions_of, local_part, model_groups
from variable_batch_size.cores.running import everyone_for
from variable_batch_size.training.description import settings_of, shapes_of
from variable_batch_size.training.fully_sharded import is_fully_sharded
from variable_batch_size.training.sameness import Comparison, begin_alike, share_from_first
from variable_batch_size.training.scheduled import ScheduledOptimizer
from variable_batch_size.training.unsupported import is_zero, refuse_spread_moments, refuse_unsupported
from variable_batch_size.training.wrapped import take_over_reduction
from variable_batch_size.training.wrapper import optimizers_of


def join_other_cores(
    optimizer: ScheduledOptimizer,
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
    if any_split(tensors):
        return _join_over_a_mesh(facts, tensors, communicator, sampler.process_group)
    everyone = everyone_for(tensors, sampler.process_group)
    if isinstance(everyone, Hosts):
        Comparison(facts, everyone, torch.device("cpu")).refuse_different()
    complete = begin_alike(facts, tensors, communicator)
    take_over_reduction(parameters, communicator)
    return complete


def _join_over_a_mesh(
    facts: Mapping[str, Any], tensors: Sequence[torch.Tensor], communicator: Communicator, process_group: Any
) -> Callable[[], None]:
    """The same where processes share the samples, which must begin with the same of what is not split over them."""
    everyone = everyone_for(tensors, process_group)
    if everyone.num_replicas > 1:
        Comparison(facts, everyone, local_part(tensors[0]).device).refuse_different()
    _share_over_a_mesh(tensors, communicator, model_groups(tensors, group_of(process_group)))
    return lambda: None


def _share_over_a_mesh(
    tensors: Sequence[torch.Tensor], communicator: Communicator, groups: Mapping[Ranks, Group]
) -> None:
    """Let tensors be as on the first core, and what is not split over a group as on the first process of that."""
    share_from_first(tensors, communicator)
    for ranks, group in groups.items():
        copied = [local_part(tensor.detach()) for tensor in tensors if ranks not in _ranks_of_meshes([tensor])]
        share_from_first(copied, Distributed(group))


def join_later(
    added: Sequence[torch.Tensor], before: Sequence[torch.Tensor], communicator: Communicator, process_group: Any
) -> None:
    """The same for parameters that are added to those before, in which all processes must be alike.

    Raises:
        ValueError: if they are split in another way, of which nothing was known when the optimizer was made, or if one
            is there already.
    """
    if len({*added, *before}) < len(added) + len(before):
        raise ValueError("a group that is added must have new parameters, each of them once, got one a second time")
    if any_split(added) and not _are_split_as(added, before):
        raise ValueError(
            "parameters that are added must be split over the processes that others are split over, and in the same "
            "way, or not at all: make the optimizer with them, frozen until they are to be trained"
        )
    _share_over_a_mesh(added, communicator, model_groups(before, group_of(process_group)))
    take_over_reduction(added, communicator)


@contextmanager
def as_before_if_refused(inner: Optimizer) -> Iterator[None]:
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
