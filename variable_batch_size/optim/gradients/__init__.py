"""How gradients become the gradient of a step; and the choice of an accumulator by device, sharding and options."""

from typing import Any

from torch.optim import Optimizer

from variable_batch_size.checks import check_one_of
from variable_batch_size.cores import dtensor, xla
from variable_batch_size.cores.communicator import Communicator, SingleProcess, group_of, ranks_of
from variable_batch_size.cores.detect import ProcessGroups, everyone_for
from variable_batch_size.data.sampler import MinibatchSource
from variable_batch_size.optim.gradients.accumulator import GradientAccumulator
from variable_batch_size.optim.gradients.buckets import BucketAccumulator
from variable_batch_size.optim.gradients.fsdp import FSDPAccumulator
from variable_batch_size.optim.gradients.traced import TracedAccumulator
from variable_batch_size.optim.norm_layers import MEASURES, make_norm_layers
from variable_batch_size.optim.own_norms import OWN_NORM, make_own_norms
from variable_batch_size.optim.proxy import parameters_of
from variable_batch_size.optim.wrappers import Wrappers
from variable_batch_size.rules.rule import Rule
from variable_batch_size.schedules.schedule import require_equal_minibatches


def make_accumulator(
    inner: Optimizer,
    communicator: Communicator,
    *,
    sampler: MinibatchSource,
    wrappers: Wrappers,
    rule: Rule,
    measure_noise: bool | str,
    gradient_as_bucket_view: bool,
    exact: bool,
    reduce_scatter_once: bool,
    **options: Any,
) -> GradientAccumulator:
    """The accumulator of an optimizer; further options are those of every :class:`GradientAccumulator`."""
    parameters = parameters_of(inner)
    if not isinstance(measure_noise, bool):
        check_one_of((MEASURES, OWN_NORM), measure_noise=measure_noise)
    of_run: Any = {"rule": rule, "exact": exact}
    if measure_noise == OWN_NORM:
        of_run |= {"is_view": gradient_as_bucket_view, "population": sampler.population}
        options["own_norms"] = make_own_norms(inner, communicator, **of_run)
    else:
        options["measures"] = rule.measures_noise or bool(measure_noise)
    if measure_noise == MEASURES:
        of_run |= {"sampler": sampler, "is_one_program": communicator.is_one_program}
        options["norm_layers"] = make_norm_layers(wrappers.model, parameters, **of_run)
    options["sums_gradients"] = rule.sums_gradients
    if gradient_as_bucket_view and exact:
        raise ValueError("`gradient_as_bucket_view` must be False with `exact`, which rounds each minibatch's gradient")
    for option, is_on in (("`exact`", exact), ("a rule that sums gradients", options["sums_gradients"])):
        if is_on:
            require_equal_minibatches(sampler.schedule, option)
    if sampler.schedule.lockstep and (gradient_as_bucket_view or communicator.is_one_program):
        where = "with `gradient_as_bucket_view`" if gradient_as_bucket_view else "on XLA"
        reason = "padding minibatches cannot be dropped there"
        raise ValueError(f"`lockstep` of the sampler must be False {where}: {reason}")
    if exact and xla.is_spmd():
        raise ValueError("`exact` must be False in XLA's SPMD mode, where several devices sum within each minibatch")
    if exact and parameters[0].device.type == "tpu":
        raise ValueError("`exact` must be False on TorchTPU: it sums in float64, which a TPU only emulates")
    if exact and parameters[0].device.type == "xla" and not xla.has_fixed_threads():
        problem = f"`exact` on XLA's CPU needs the thread pools of vbs.launch, on at most {xla.NUM_THREADS // 2} cores"
        raise ValueError(f'{problem}: use vbs.launch(train, cores=…, backend="xla"), also for one core')
    options["model"] = wrappers.model
    if not any(map(dtensor.is_dtensor, parameters)):
        if not communicator.keeps_flat_gradients:
            return TracedAccumulator(inner, communicator, exact=exact, **options)
        views = gradient_as_bucket_view
        return BucketAccumulator(inner, communicator, exact=exact, gradient_as_bucket_view=views, **options)
    if gradient_as_bucket_view or exact:
        name = "gradient_as_bucket_view" if gradient_as_bucket_view else "exact"
        raise ValueError(f"`{name}` must be False for sharded parameters")
    group = group_of(sampler.process_group)
    ranks = ranks_of(group)
    groups = dtensor.model_groups(parameters, group)
    model_parallel = ProcessGroups(*groups.values()) if groups else SingleProcess()
    if groups and (sampler.shares is not None or sampler.counter is not None):
        problem = "parameters must not be sharded over ranks of one core"
        raise ValueError(
            f'{problem} with OpenSteps, or unless `assign` is "round robin": these ranks must read the same samples'
        )
    options |= {"model_parallel": model_parallel, "model_groups": list(groups)}
    if wrappers.fsdp:
        options |= {"wrappers": wrappers, "ranks": ranks, "everyone": everyone_for(parameters, sampler.process_group)}
        return FSDPAccumulator(inner, communicator, reduce_scatter_once=reduce_scatter_once, **options)
    if any(set(ranks).issuperset(dimension.ranks) for p in parameters for dimension in dtensor.dimensions_of(p)):
        problem = "Parameters are sharded over ranks that the sampler assigns different samples to"
        advice = 'Pass it the other dimension of the mesh, as process_group=mesh["data"]'
        raise ValueError(f"{problem}. {advice}.")
    return BucketAccumulator(inner, communicator, **options)
