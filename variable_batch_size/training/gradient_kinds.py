"""Which kind of gradients suits a device and what is asked of them."""

from __future__ import annotations

from torch.optim import Optimizer

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.training.exact_gradients import ExactGradients
from variable_batch_size.training.exact_separate_gradients import ExactSeparateGradients
from variable_batch_size.training.flat_gradients import FlatGradients
from variable_batch_size.training.gradients import Divisors, Gradients
from variable_batch_size.training.kept_gradients import KeptGradients
from variable_batch_size.training.separate_gradients import SeparateGradients


def gradients_for(
    inner: Optimizer, communicator: Communicator, *, measures: bool, divisors: Divisors | None, keeps: bool, exact: bool
) -> Gradients:
    """The gradients of an optimizer.

    Args:
        measures: whether the squared norms of the minibatches' gradients are wanted.
        divisors: what gradients are divided by before that; None to divide none.
        keeps: whether they are to stay where they are, which on XLA has no meaning.
        exact: whether their sums are to be the same to the last bit on any number of cores.
    """
    if keeps and exact:
        raise ValueError("`keep_gradients` must be False with `exact`, which rounds each minibatch's gradient")
    kind: type[Gradients] = ExactSeparateGradients if exact else SeparateGradients
    if communicator.keeps_flat_gradients:
        kind = ExactGradients if exact else KeptGradients if keeps else FlatGradients
    return kind(inner, communicator, measures=measures, divisors=divisors)
