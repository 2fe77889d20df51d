"""Models in `fully_shard` (FSDP2): who has the parameters, and the whole parameters that modules run with."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from variable_batch_size.cores.meshes import any_split
from variable_batch_size.training.owners import alive, owners

Pair = tuple[torch.nn.Parameter, torch.nn.Parameter]


def is_fully_sharded(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether some of the parameters are in ``fully_shard``."""
    return bool(sharding_modules(list(parameters)))


def sharding_modules(parameters: Sequence[torch.Tensor]) -> list[Any]:
    """The modules that ``fully_shard`` was applied to and that have some of the parameters, the outer before the inner.

    In the same order on all cores, as what they do with their parameters they do together.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None or not any_split(parameters):
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
    if any_split(parameters) or any(p.grad is not None for p in parameters):
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
