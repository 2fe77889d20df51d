"""Chooses the accumulator for a device, a way of sharding, and the options of the optimizer."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from variable_batch_size.cores import dtensor, xla
from variable_batch_size.cores.communicator import Communicator, SingleProcess, group_of, ranks_of
from variable_batch_size.cores.detect import everyone_for
from variable_batch_size.cores.process_group import ProcessGroups
from variable_batch_size.data.sampler import MinibatchSource
from variable_batch_size.optim.gradients.accumulator import Divisors, GradientAccumulator
from variable_batch_size.optim.gradients.buckets import BucketAccumulator
from variable_batch_size.optim.gradients.fsdp import FSDPAccumulator
from variable_batch_size.optim.gradients.traced import TracedAccumulator
from variable_batch_size.optim.wrappers import Wrappers


def make_accumulator(
    inner: Optimizer,
    communicator: Communicator,
    *,
    sampler: MinibatchSource,
    wrappers: Wrappers,
    measures: bool = False,
    divisors: Divisors | None = None,
    gradient_as_bucket_view: bool = False,
    exact: bool = False,
    reduce_scatter_once: bool = False,
    sums_gradients: bool = False,
) -> GradientAccumulator:
    """The accumulator of an optimizer.

    Args:
        sampler: has the process group of the ranks with different samples, and whether they are in lockstep.
        wrappers: what else reduces or shards the gradients.
        measures: whether the squared norms of the minibatches' gradients are needed.
        divisors: what gradients are divided by before they are measured; None to divide none.
        gradient_as_bucket_view: whether ``p.grad`` keeps its memory; it always does so on XLA.
        exact: whether sums are the same to the last bit on any number of ranks.
        reduce_scatter_once: whether a model in ``fully_shard`` is reduced once a step; other models always are.
        sums_gradients: whether the rule sums gradients instead of averaging them.
    """
    if gradient_as_bucket_view and exact:
        raise ValueError("`gradient_as_bucket_view` must be False with `exact`, which rounds each minibatch's gradient")
    if sampler.schedule.lockstep and (gradient_as_bucket_view or communicator.is_one_program):
        where = "with `gradient_as_bucket_view`" if gradient_as_bucket_view else "on XLA"
        raise ValueError(
            f"`lockstep` of the sampler must be False {where}: a padding minibatch cannot be dropped there"
        )
    if exact and xla.is_spmd():
        raise ValueError("`exact` must be False in XLA's SPMD mode, where several devices sum within each minibatch")
    options: dict[str, Any] = {"measures": measures, "divisors": divisors, "sums_gradients": sums_gradients}
    parameters = [p for group in inner.param_groups for p in group["params"]]
    if not dtensor.any_dtensor(parameters):
        if not communicator.keeps_flat_gradients:
            return TracedAccumulator(inner, communicator, exact=exact, **options)
        options["gradient_as_bucket_view"] = gradient_as_bucket_view
        return BucketAccumulator(inner, communicator, exact=exact, **options)
    if gradient_as_bucket_view or exact:
        name = "gradient_as_bucket_view" if gradient_as_bucket_view else "exact"
        raise ValueError(f"`{name}` must be False for sharded parameters")
    group = group_of(sampler.process_group)
    ranks = ranks_of(group)
    groups = dtensor.model_groups(parameters, group)
    model_parallel = ProcessGroups(*groups.values()) if groups else SingleProcess()
    options |= {"model_parallel": model_parallel, "model_groups": list(groups)}
    if wrappers.fsdp:
        options |= {"wrappers": wrappers, "ranks": ranks, "everyone": everyone_for(parameters, sampler.process_group)}
        return FSDPAccumulator(inner, communicator, reduce_scatter_once=reduce_scatter_once, **options)
    if any(set(ranks).issuperset(dimension.ranks) for p in parameters for dimension in dtensor.dimensions_of(p)):
        raise ValueError(
            "Parameters are sharded over ranks that the sampler assigns different samples to. Pass it the other "
            'dimension of the mesh, as process_group=mesh["data"]; or pass `model`, if gc.freeze() hides its '
            "fully_shard."
        )
    return BucketAccumulator(inner, communicator, **options)
