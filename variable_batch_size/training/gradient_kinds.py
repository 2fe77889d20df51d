"""Which kind of gradients suits a device, the way parameters are split, and what is asked of them."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from variable_batch_size.cores import distributed, meshes
from variable_batch_size.cores.communicator import Alone, Communicator
from variable_batch_size.training.exact_gradients import ExactGradients
from variable_batch_size.training.exact_separate_gradients import ExactSeparateGradients
from variable_batch_size.training.flat_gradients import FlatGradients
from variable_batch_size.training.gradients import Divisors, Gradients
from variable_batch_size.training.kept_gradients import KeptGradients
from variable_batch_size.training.separate_gradients import SeparateGradients
from variable_batch_size.training.split_gradients import SplitGradients


def gradients_for(
    inner: Optimizer,
    communicator: Communicator,
    *,
    process_group: Any,
    measures: bool,
    divisors: Divisors | None,
    keeps: bool,
    exact: bool,
) -> Gradients:
    """The gradients of an optimizer.

    Args:
        process_group: of the cores that share the samples, as the sampler has it.
        measures: whether the squared norms of the minibatches' gradients are wanted.
        divisors: what gradients are divided by before that; None to divide none.
        keeps: whether they are to stay where they are, which on XLA has no meaning.
        exact: whether their sums are to be the same to the last bit on any number of cores.
    """
    if keeps and exact:
        raise ValueError("`keep_gradients` must be False with `exact`, which rounds each minibatch's gradient")
    options: dict[str, Any] = {"measures": measures, "divisors": divisors}
    parameters = [p for group in inner.param_groups for p in group["params"]]
    if meshes.any_split(parameters):
        if keeps or exact:
            name = "keep_gradients" if keeps else "exact"
            raise ValueError(f"`{name}` must be False where parameters are split over processes")
        groups = meshes.model_groups(parameters, distributed.group_of(process_group))
        model = distributed.Distributed(*groups.values()) if groups else Alone()
        return SplitGradients(inner, communicator, model=model, model_groups=list(groups), **options)
    kind: type[Gradients] = ExactSeparateGradients if exact else SeparateGradients
    if communicator.keeps_flat_gradients:
        kind = ExactGradients if exact else KeptGradients if keeps else FlatGradients
    return kind(inner, communicator, **options)
