"""Models that are wrapped in DistributedDataParallel: its own reduction is switched off, as the library reduces."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from variable_batch_size.cores.communicator import Communicator


def take_over_reduction(parameters: Sequence[torch.Tensor], communicator: Communicator) -> None:
    """Switch off the reduction of every DistributedDataParallel that has these parameters.

    In every backward pass it takes the mean over all processes, which is wrong where these have different numbers of
    minibatches, and hangs where they do not all have one.
    """
    for wrapper in _wrappers_of(parameters, communicator):
        if wrapper.static_graph:
            raise ValueError("a DistributedDataParallel with static_graph=True always reduces: make it without that")
        wrapper.require_backward_grad_sync = False


def refuse_late_wrapper(parameters: Sequence[torch.Tensor], communicator: Communicator) -> None:
    """Raise if a model was wrapped since its wrappers were looked for: it has reduced a minibatch already."""
    if any(wrapper.require_backward_grad_sync for wrapper in _wrappers_of(parameters, communicator)):
        raise RuntimeError(
            "the model was wrapped in DistributedDataParallel after the optimizer was made, so that its gradients were "
            "reduced twice: wrap the model first"
        )


def _wrappers_of(parameters: Sequence[torch.Tensor], communicator: Communicator) -> list[DistributedDataParallel]:
    """Those that have some of the parameters.

    A parameter does not know of them, but they keep a list of their parameters, and Python knows who refers to whom.
    """
    if communicator.num_replicas == 1:
        return []
    some = (parameters[0], parameters[-1])  # each costs a look at all objects there are
    lists = [thing for thing in gc.get_referrers(*some) if type(thing) is list]
    owners = gc.get_referrers(*lists)
    owners += gc.get_referrers(*[thing for thing in owners if type(thing) is dict])  # the attributes of an object
    found = {id(thing): thing for thing in owners if issubclass(type(thing), DistributedDataParallel)}
    return list(found.values())
