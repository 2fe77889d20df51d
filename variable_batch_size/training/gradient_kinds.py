"""Which kind of gradients suits a device and what is asked of them."""

from __future__ import annotations

from torch.optim import Optimizer

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.training.flat_gradients import FlatGradients
from variable_batch_size.training.gradients import Divisors, Gradients
from variable_batch_size.training.kept_gradients import KeptGradients
from variable_batch_size.training.separate_gradients import SeparateGradients


def gradients_for(
    inner: Optimizer, communicator: Communicator, *, measures: bool, divisors: Divisors | None, keeps: bool
) -> Gradients:
    """The gradients of an optimizer; `keeps` if they are to stay where they are, which on XLA has no meaning."""
    kind: type[Gradients] = SeparateGradients
    if communicator.keeps_flat_gradients:
        kind = KeptGradients if keeps else FlatGradients
    return kind(inner, communicator, measures=measures, divisors=divisors)
