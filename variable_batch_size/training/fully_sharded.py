"""Models in `fully_shard` (FSDP2): who has the parameters, and the whole parameters that modules run with."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from variable_batch_size.cores.meshes import any_split
from variable_batch_size.training.owners import owners

Pair = tuple[torch.nn.Parameter, torch.nn.Parameter]


def is_fully_sharded(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether some of the parameters are in ``fully_shard``."""
    return bool(sharding_modules(list(parameters)))


def sharding_modules(parameters: list[torch.Tensor]) -> list[Any]:
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

    return sorted(owners(kind, parameters), key=key)


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
