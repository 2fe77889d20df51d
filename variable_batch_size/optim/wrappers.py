"""Finds what else reduces or shards the gradients: DDP, fully_shard, Accelerate, and unsupported wrappers."""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from variable_batch_size.cores.communicator import Communicator, is_running
from variable_batch_size.cores.dtensor import any_dtensor, is_dtensor
from variable_batch_size.optim.proxy import OptimizerProxy, optimizers_of
from variable_batch_size.rules.rule import Rule

Kind = TypeVar("Kind")


def alive(*kinds: type[Kind]) -> list[Kind]:
    """All objects of a kind, or of one of several, in no order: an object refers to its class."""
    known: list[type] = [*kinds]
    for one in known:
        known += type.__subclasses__(one)
    return [thing for thing in gc.get_referrers(*known) if issubclass(type(thing), kinds)]


def owners(*kinds: type[Kind], parameters: Iterable[torch.Tensor]) -> list[Kind]:
    """The modules of a kind, or of one of several, that have some of the parameters, in no order."""
    own = set(parameters)
    return [thing for thing in alive(*kinds) if not own.isdisjoint(_parameters_of(thing))]


def _parameters_of(thing: object) -> Iterable[torch.Tensor]:
    module = getattr(thing, "submod", thing)  # as a stage of a pipeline has it
    return module.parameters() if isinstance(module, torch.nn.Module) else ()


_INSTEAD = (
    "call prepare(accelerator, …) of variable_batch_size.integrations.accelerate instead, and in Transformers take the "
    "VariableBatchTrainer of variable_batch_size.integrations.transformers"
)

_OPTIMIZER = f"accelerator.prepare was given an optimizer of this library, or its inner one: {_INSTEAD}"
_SCHEDULER = f"accelerator.prepare was given a scheduler, which would count minibatches: {_INSTEAD}"
_LOADER = f"accelerator.prepare was given a loader that the sampler deals to already: {_INSTEAD}"
_STREAM = f"accelerator.prepare was given a loader that the stream deals to already: {_INSTEAD}"
_SKIP = (
    "skip_first_batches would leave out minibatches that the optimizer counts: `for epoch in vbs.epochs(optimizer, …)` "
    "goes on behind the step that was saved, without it"
)

# why it is wrong, what Accelerate makes, and the name under which that has what it is made of
_MADE = (
    (_OPTIMIZER, "optimizer", "AcceleratedOptimizer", "optimizer"),
    (_SCHEDULER, "scheduler", "AcceleratedScheduler", "scheduler"),
    (_LOADER, "data_loader", "DataLoaderShard", "batch_sampler"),
    (_LOADER, "data_loader", "DataLoaderDispatcher", "batch_sampler"),
    (_STREAM, "data_loader", "DataLoaderShard", "dataset"),
    (_STREAM, "data_loader", "DataLoaderDispatcher", "dataset"),
    (_SKIP, "data_loader", "SkipBatchSampler", "batch_sampler"),
    (_SKIP, "data_loader", "SkipDataLoader", "dataset"),
)


def refuse_prepared(parameters: Iterable[torch.Tensor]) -> None:
    """Raise if Accelerate was given the optimizer, the loader or a scheduler of these parameters.

    The prepared optimizer leaves out minibatches where Accelerate accumulates, the loader is dealt out a second time,
    and the scheduler makes a step for each minibatch of each process.
    """
    if "accelerate.accelerator" not in sys.modules:
        return
    kinds = [getattr(sys.modules[f"accelerate.{module}"], kind) for _, module, kind, _ in _MADE]
    things = alive(OptimizerProxy, *kinds)  # all in one search, which goes through everything there is
    own = _of(set(parameters), things)
    for kind, (sentence, _, _, name) in zip(kinds, _MADE, strict=True):
        theirs = [thing for thing in things if issubclass(type(thing), kind)]
        if any(_has(thing, name, own) or any(thing is one for one in own) for thing in theirs):
            raise RuntimeError(sentence)
    _refuse_accumulation(sys.modules["accelerate.state"].GradientState)


def _of(parameters: set[torch.Tensor], things: list[Any]) -> list[Any]:
    """The optimizers of this library that have some of the parameters, their inner ones, and their samplers."""
    own = [thing for thing in things if isinstance(thing, OptimizerProxy) and hasattr(thing, "inner")]
    own = [one for one in own if not parameters.isdisjoint(one.parameters())]
    inner = [thing for one in own for thing in (one.inner, *optimizers_of(one.inner))]
    return [*own, *inner, *(one.sampler for one in own if hasattr(one, "sampler"))]


def _has(prepared: Any, name: str, own: list[Any]) -> bool:
    """Whether what was prepared is made of one of these things, of a scheduler of one, or of its part for a process."""
    made_of = getattr(prepared, name, None)
    made_of = getattr(made_of, "optimizer" if name == "scheduler" else name, made_of)
    return any(made_of is thing for thing in own)


def _refuse_accumulation(state: Any) -> None:
    if state._shared_state and state().num_steps != 1:
        raise RuntimeError(
            f"Accelerate's `gradient_accumulation_steps` must be 1, got {state().num_steps}: the trace says how many "
            "minibatches make up a step"
        )


Pair = tuple[torch.nn.Parameter, torch.nn.Parameter]


def is_fully_sharded(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether some of the parameters are in ``fully_shard``."""
    return bool(sharding_modules(list(parameters)))


def sharding_modules(parameters: Sequence[torch.Tensor]) -> list[Any]:
    """The modules that ``fully_shard`` was applied to and that have some of the parameters, the outer before the inner.

    In the same order on all cores, as what they do with their parameters they do together.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None or not any_dtensor(parameters):
        return []
    places = {id(p): place for place, p in enumerate(parameters)}

    def key(module: Any) -> tuple[int, int, int]:
        own = [places[id(p)] for p in module.parameters() if id(p) in places]
        return min(own), -len(own), -len(list(module.modules()))

    for module in alive(kind):
        module.reshard()  # one that has run without a backward pass may still show its whole parameters
    return sorted(owners(kind, parameters=parameters), key=key)


def refuse_sharded_since(parameters: Iterable[torch.Tensor]) -> None:
    """Raise, after a backward pass, if parameters have no gradients because a model in ``fully_shard`` has others."""
    parameters = list(parameters)
    if any_dtensor(parameters) or any(p.grad is not None for p in parameters):
        return
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is not None and alive(kind):
        raise RuntimeError(
            "no parameter of the optimizer has a gradient, and a model is in fully_shard, which gives it other "
            "parameters: apply it first, then make the optimizer from model.parameters(), before the model runs"
        )


def refuse_left_out(others: Collection[torch.Tensor]) -> None:
    """Raise if there are parameters that are not in ``fully_shard``, where others are."""
    if others:
        shapes = ", ".join(str(tuple(p.shape)) for p in list(others)[:3])
        raise ValueError(
            f"all parameters must be in fully_shard or none, but {len(others)} are not (of the shape {shapes}"
            f"{'…' if len(others) > 3 else ''}): apply it to the outermost module, too, then make the inner optimizer, "
            "before the model runs"
        )


def outermost(modules: list[Any]) -> list[Any]:
    """Those of some modules that are in no other of them."""
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in inner]


def with_whole_parameters(modules: list[Any]) -> Iterator[Pair]:
    """Each parameter of the modules with the one that these run with, whose gradient is that of this core alone.

    These stay the same objects for the whole run. Every core must call it; one module at a time has all values.
    """
    for module in modules:
        sharded = dict(module.named_parameters())
        module.unshard()
        try:
            pairs = [(sharded[name], p) for name, p in module.named_parameters() if p is not sharded[name]]
        finally:
            module.reshard()
        yield from pairs


def can_keep_unreduced(modules: list[Any]) -> bool:
    """Whether gradients that modules keep from one backward pass to the next can be reached, to be dropped."""
    return all(hasattr(one, "unsharded_accumulated_grad") for one in _states(modules)) and bool(_states(modules))


def forget_unreduced(modules: list[Any]) -> None:
    """Drop the gradients that modules keep from one backward pass to the next."""
    for one in _states(modules):
        one.unsharded_accumulated_grad = None
        if hasattr(one, "_unsharded_param"):
            one._unsharded_param.grad = None


def has_unreduced(modules: list[Any]) -> bool:
    """Whether modules keep gradients for the next backward pass, as far as that can be seen."""
    kept = [(one.unsharded_accumulated_grad, getattr(one, "_unsharded_param", None)) for one in _states(modules)]
    return any(summed is not None or (whole is not None and whole.grad is not None) for summed, whole in kept)


def _states(modules: list[Any]) -> list[Any]:
    """What ``fully_shard`` knows of each parameter: there is no public way to what it has not reduced."""
    states = [module._get_fsdp_state() for module in modules if hasattr(module, "_get_fsdp_state")]
    groups = [
        group
        for state in states
        for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    ]
    return [one for group in groups if group is not None for one in group.fsdp_params]


_WRAPPERS = [
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        "FullyShardedDataParallel (FSDP1) reduces gradients in a way of its own: use fully_shard (FSDP2), which is in "
        "torch.distributed.fsdp from torch 2.6 on",
    ),
    (
        "deepspeed.runtime.engine",
        "DeepSpeedEngine",
        "a DeepSpeed engine accumulates, reduces and updates by itself: train the plain model, in fully_shard if it "
        "does not fit one device",
    ),
    (
        "torch.distributed.pipelining.stage",
        "_PipelineStageBase",
        "a pipeline's schedule runs the minibatches by itself: use fully_shard or tensor parallelism for what does not "
        "fit one device",
    ),
    (
        "torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel",
        "XlaFullyShardedDataParallel",
        "XlaFullyShardedDataParallel reduces gradients in every minibatch: use XLA's SPMD for what does not fit one "
        "core",
    ),
    (
        "torch.distributed._composable.fsdp",
        "FSDPModule",
        "fully_shard must be that of torch.distributed.fsdp, which is there from torch 2.6 on",
    ),
]
"""Module, class and sentence. Where nobody has imported the module, there are no objects of the class."""


def refuse_unsupported(parameters: Iterable[torch.Tensor], model: torch.nn.Module | None) -> None:
    """Raise if some of the parameters, or the model, are in a wrapper that is not supported."""
    parameters, sentences = list(parameters), {}
    supported = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)  # which has an older name, too
    for module, name, sentence in _WRAPPERS:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and kind is not supported:
            sentences[kind] = sentence
    found = [model, *(owners(*sentences, parameters=parameters) if sentences else ())]
    for kind, sentence in sentences.items():
        if any(isinstance(thing, kind) for thing in found):
            raise ValueError(sentence)
    if is_fully_sharded(parameters):
        refuse_left_out([p for p in parameters if not is_dtensor(p)])


def refuse_spread_moments(rule: Rule, inner: Optimizer) -> None:
    """Raise if the rule needs Adam's second moments and these are not all on each core."""
    if not rule.preconditions:
        return
    name = type(rule).__name__
    if is_fully_sharded(p for group in inner.param_groups for p in group["params"]):
        raise ValueError(
            f"{name} needs whole second moments, and fully_shard splits them: use AdaScaleRule or AdamRule"
        )
    if any(is_zero(one) for one in optimizers_of(inner)):
        raise ValueError(
            f"{name} needs all second moments, and ZeroRedundancyOptimizer has a part of them on each core: use "
            "AdamRule, or the optimizer itself"
        )


def is_zero(inner: Any) -> bool:
    """Whether an optimizer is a ZeroRedundancyOptimizer, which has a part of the state on each core."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(inner, module.ZeroRedundancyOptimizer)


def disable_ddp_allreduce(parameters: Iterable[torch.Tensor], communicator: Communicator) -> None:
    """Switch off the reduction of every DistributedDataParallel that has some of these parameters.

    In every backward pass it takes the mean over all processes, which is wrong where these have different numbers of
    minibatches, and hangs where they do not all have one.
    """
    if not is_running():
        return
    own, is_alone = set(parameters), communicator.num_replicas == 1
    for wrapper in alive(DistributedDataParallel):
        if own.isdisjoint(wrapper.parameters()):
            continue
        if wrapper.static_graph:
            if is_alone:
                continue
            raise ValueError("a DistributedDataParallel with static_graph=True always reduces: make it without that")
        wrapper.require_backward_grad_sync = False
        # loops that accumulate by themselves switch it on for the last of some minibatches
        wrapper.register_forward_pre_hook(_switch_off_reduction)
    if not is_alone and not all(own.isdisjoint(module.parameters()) for module in alive(SyncBatchNorm)):
        raise ValueError(
            "SyncBatchNorm waits for all cores in every minibatch, and they do not all have the same number: use "
            "BatchNorm"
        )


def refuse_other_reductions(parameters: Iterable[torch.Tensor], communicator: Communicator) -> None:
    """Raise if someone has reduced these parameters' gradients already, or should reduce others that now nobody does.

    The first is a model that was wrapped since its wrappers were looked for. The second are parameters of a wrapped
    model that another optimizer trains.
    """
    own = set(parameters)
    refuse_prepared(own)
    if not is_running():
        return
    refuse_sharded_since(own)
    if communicator.num_replicas == 1:
        return
    wrappers = [wrapper for wrapper in alive(DistributedDataParallel) if not own.isdisjoint(wrapper.parameters())]
    sharding = sharding_modules(list(own))
    if not wrappers and not sharding:
        return
    if any(getattr(wrapper, "require_backward_grad_sync", False) for wrapper in wrappers):
        raise RuntimeError(
            "the model was wrapped in DistributedDataParallel after the optimizer was made, so that its gradients were "
            "reduced twice: wrap the model first"
        )
    optimizers = alive(Optimizer)
    reduced = {
        p for optimizer in optimizers if isinstance(optimizer, OptimizerProxy) for p in _parameters_of_other(optimizer)
    }
    left_out = {p for wrapper in [*wrappers, *sharding] for p in wrapper.parameters() if p.requires_grad} - reduced
    for optimizer in optimizers:
        if not left_out.isdisjoint(_parameters_of_other(optimizer)):
            if sharding:
                raise RuntimeError(
                    f"{type(optimizer).__name__} trains parameters of a model in fully_shard, and an optimizer of this "
                    "library the others, so that stand-ins would count in its own: give that both, as a list"
                )
            raise RuntimeError(
                f"{type(optimizer).__name__} trains parameters of a model in DistributedDataParallel that nobody "
                "reduces, as another optimizer of this library trains the others: wrap them in a module of their own"
            )


def _parameters_of_other(optimizer: Optimizer) -> list[torch.Tensor]:
    # one that was refused while it was made may still be alive, without groups
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def _switch_off_reduction(wrapper: DistributedDataParallel, args: Any) -> None:
    wrapper.require_backward_grad_sync = False
