"""Models that are wrapped in DistributedDataParallel: its own reduction is switched off, as the library reduces."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch.nn.parallel import DistributedDataParallel

from variable_batch_size.cores.communicator import Communicator


def take_over_reduction(parameters: Iterable[torch.Tensor], communicator: Communicator) -> None:
    """Switch off the reduction of every DistributedDataParallel that has some of these parameters.

    In every backward pass it takes the mean over all processes, which is wrong where these have different numbers of
    minibatches, and hangs where they do not all have one.
    """
    for module in _wrappers_of(parameters, communicator):
        module.require_backward_grad_sync = False


def refuse_late_wrapper(parameters: Iterable[torch.Tensor], communicator: Communicator) -> None:
    """Raise if a model was wrapped since its wrappers were looked for: it has reduced a minibatch already."""
    if any(module.require_backward_grad_sync for module in _wrappers_of(parameters, communicator)):
        raise RuntimeError(
            "the model was wrapped in DistributedDataParallel after the optimizer was made, so that its gradients were "
            "reduced twice: wrap the model first"
        )


def _wrappers_of(parameters: Iterable[torch.Tensor], communicator: Communicator) -> list[DistributedDataParallel]:
    """Those that have some of the parameters; these do not know it, so all objects of the process are looked at."""
    if communicator.num_replicas == 1:
        return []
    own = {id(p) for p in parameters}
    # not isinstance, which would run code of objects that pretend to be of another class
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    return [module for module in found if any(id(p) in own for p in module.parameters())]
