"""Models that are wrapped in DistributedDataParallel: its own reduction is switched off, as the library reduces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.cores.groups import is_running
from variable_batch_size.training.fully_sharded import refuse_sharded_since, sharding_modules
from variable_batch_size.training.owners import alive
from variable_batch_size.training.wrapper import Wrapper


def take_over_reduction(parameters: Iterable[torch.Tensor], communicator: Communicator) -> None:
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
    if not is_running():
        return
    own = set(parameters)
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
    reduced = {p for optimizer in optimizers if isinstance(optimizer, Wrapper) for p in _parameters_of(optimizer)}
    left_out = {p for wrapper in [*wrappers, *sharding] for p in wrapper.parameters() if p.requires_grad} - reduced
    for optimizer in optimizers:
        if not left_out.isdisjoint(_parameters_of(optimizer)):
            if sharding:
                raise RuntimeError(
                    f"{type(optimizer).__name__} trains parameters of a model in fully_shard, and an optimizer of this "
                    "library the others, so that stand-ins would count in its own: give that both, as a list"
                )
            raise RuntimeError(
                f"{type(optimizer).__name__} trains parameters of a model in DistributedDataParallel that nobody "
                "reduces, as another optimizer of this library trains the others: wrap them in a module of their own"
            )


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    # one that was refused while it was made may still be alive, without groups
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def _switch_off_reduction(wrapper: DistributedDataParallel, args: Any) -> None:
    wrapper.require_backward_grad_sync = False
