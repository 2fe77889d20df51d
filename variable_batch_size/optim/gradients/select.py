"""Chooses the accumulator for a device, a way of sharding, and the options of the optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from variable_batch_size.cores import dtensor, xla
from variable_batch_size.cores.communicator import Communicator, SingleProcess, group_of, ranks_of
from variable_batch_size.cores.detect import everyone_for
from variable_batch_size.cores.process_group import ProcessGroups
from variable_batch_size.data.sampler import MinibatchSource
from variable_batch_size.optim.gradients.accumulator import Divisors, GradientAccumulator
from variable_batch_size.optim.gradients.buckets import (
    BucketAccumulator,
    BucketViewAccumulator,
    ShardedBucketAccumulator,
)
from variable_batch_size.optim.gradients.fixed_point import FixedPointAccumulator, FixedPointTracedAccumulator
from variable_batch_size.optim.gradients.fsdp import FSDPAccumulator
from variable_batch_size.optim.gradients.traced import TracedAccumulator
from variable_batch_size.optim.wrappers import Wrappers


def make_accumulator(
    inner: Optimizer,
    communicator: Communicator,
    *,
    sampler: MinibatchSource,
    measures: bool,
    divisors: Divisors | None,
    keeps: bool,
    exact: bool,
    wrappers: Wrappers,
    reduces_once: bool = False,
) -> GradientAccumulator:
    """The gradients of an optimizer.

    Args:
        sampler: which knows the cores that share the samples, and whether they are in lockstep.
        measures: whether the squared norms of the minibatches' gradients are wanted.
        divisors: what gradients are divided by before that; None to divide none.
        keeps: whether they are to stay where they are, which on XLA has no meaning.
        exact: whether their sums are to be the same to the last bit on any number of cores.
        wrappers: what else reduces or shards the gradients.
        reduces_once: whether a model that reduces by itself does so once a step; the others always do.
    """
    if keeps and exact:
        raise ValueError("`keep_gradients` must be False with `exact`, which rounds each minibatch's gradient")
    if sampler.schedule.lockstep and (keeps or communicator.is_one_program):
        what = "with `keep_gradients`" if keeps else "on XLA"
        raise ValueError(f"`lockstep` of the sampler must be False {what}, where a single minibatch cannot be left out")
    if exact and xla.is_spmd():
        raise ValueError("`exact` must be False in XLA's SPMD mode, where several devices sum within each minibatch")
    options: dict[str, Any] = {"measures": measures, "divisors": divisors}
    parameters = [p for group in inner.param_groups for p in group["params"]]
    if dtensor.any_dtensor(parameters):
        if keeps or exact:
            name = "keep_gradients" if keeps else "exact"
            raise ValueError(f"`{name}` must be False where parameters are split over processes")
        return _of_split(inner, communicator, parameters, sampler.process_group, options, reduces_once, wrappers)
    kind: type[GradientAccumulator] = FixedPointTracedAccumulator if exact else TracedAccumulator
    if communicator.keeps_flat_gradients:
        kind = FixedPointAccumulator if exact else BucketViewAccumulator if keeps else BucketAccumulator
    return kind(inner, communicator, **options)


def _of_split(
    inner: Optimizer,
    communicator: Communicator,
    parameters: list[torch.Tensor],
    process_group: Any,
    options: dict[str, Any],
    reduces_once: bool,
    wrappers: Wrappers,
) -> GradientAccumulator:
    group = group_of(process_group)
    cores = ranks_of(group)
    groups = dtensor.model_groups(parameters, group)
    options |= {"model": ProcessGroups(*groups.values()) if groups else SingleProcess(), "model_groups": list(groups)}
    if wrappers.fsdp:
        everyone = everyone_for(parameters, process_group)
        return FSDPAccumulator(
            inner, communicator, cores=cores, everyone=everyone, reduces_once=reduces_once, wrappers=wrappers, **options
        )
    if any(set(cores).issuperset(dimension.ranks) for p in parameters for dimension in dtensor.dimensions_of(p)):
        raise ValueError(
            "parameters are split over processes that the sampler deals different samples: pass it the other dimension "
            'of the mesh, as process_group=mesh["data"]; or pass `model`, if gc.freeze() hides its fully_shard'
        )
    return ShardedBucketAccumulator(inner, communicator, **options)
