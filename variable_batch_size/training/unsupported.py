"""What would give a wrong result, refused by name with what to do instead: ways to spread a model, and to call step."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from variable_batch_size.cores.meshes import is_split
from variable_batch_size.rules.rule import Rule
from variable_batch_size.training.fully_sharded import is_fully_sharded, refuse_left_out
from variable_batch_size.training.owners import owners
from variable_batch_size.training.wrapper import optimizers_of

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
        refuse_left_out([p for p in parameters if not is_split(p)])


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


def refuse_call(optimizer: Optimizer, closure: Any) -> None:
    """Raise if ``step`` was called by something, or with something, that would leave out minibatches."""
    if closure is not None and not callable(closure):
        raise ValueError(f"`closure` must be a function, got {closure!r}: a weight is given as step(weight=…)")
    if hasattr(optimizer, "found_inf"):
        raise RuntimeError(
            "GradScaler.step() would leave out minibatches that are not finite: call step() of the optimizer, with "
            "`loss_scale`, and give the scale to GradScaler.update()"
        )


def is_zero(inner: Any) -> bool:
    """Whether an optimizer is a ZeroRedundancyOptimizer, which has a part of the state on each core."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(inner, module.ZeroRedundancyOptimizer)
