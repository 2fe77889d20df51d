"""What a step's batch size makes of the learning rate and other settings; numbers in, numbers out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final


@dataclass(frozen=True)
class Step:
    """One step, as a rule sees it.

    Args:
        batch_size: samples in the step, over all cores.
        minibatch_size: samples that one core runs at once.
        ref_batchsize: the batch size for which the inner optimizer's settings are right.
    """

    batch_size: int
    minibatch_size: int
    ref_batchsize: int

    @property
    def scale(self) -> float:
        """S = batch size / reference batch size."""
        return self.batch_size / self.ref_batchsize

    @property
    def num_minibatches(self) -> int:
        """n = batch size / minibatch size."""
        return self.batch_size // self.minibatch_size


class Rule(ABC):
    """How the settings of a step follow from its batch size.

    A rule of your own needs one method:

    >>> class CappedLinearRule(Rule):
    ...     def factor(self, step):
    ...         return min(step.scale, 8.0)
    >>> step = Step(batch_size=2048, minibatch_size=32, ref_batchsize=128)
    >>> CappedLinearRule().settings({"lr": 0.5}, step)
    {'lr': 4.0}
    """

    sums_gradients = False
    """Whether the update gets the sum of the minibatches' gradients, instead of their mean."""

    @abstractmethod
    def factor(self, step: Step) -> float:
        """What the learning rate is multiplied by."""

    def settings(self, group: Mapping[str, Any], step: Step) -> dict[str, Any]:
        """The settings of a parameter group that are different for this step, with the values they take."""
        return {"lr": group["lr"] * self.factor(step)}


@final
class LinearRule(Rule):
    """lr = lr0 · S (Goyal et al. 2017, "Accurate, large minibatch SGD").

    >>> LinearRule().factor(Step(batch_size=512, minibatch_size=32, ref_batchsize=128))
    4.0
    """

    def factor(self, step: Step) -> float:
        return step.scale


@final
class RootRule(Rule):
    """lr = lr0 · √S (Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks").

    >>> RootRule().factor(Step(batch_size=512, minibatch_size=32, ref_batchsize=128))
    2.0
    """

    def factor(self, step: Step) -> float:
        return math.sqrt(step.scale)


@final
class ConstantRule(Rule):
    """lr = lr0, whatever the batch size.

    >>> ConstantRule().factor(Step(batch_size=512, minibatch_size=32, ref_batchsize=128))
    1.0
    """

    def factor(self, step: Step) -> float:
        return 1.0


@final
class LinearMomentumRule(Rule):
    """The linear rule for SGD with momentum, whose momentum does not jump with the batch size.

    With n minibatches of size b the gradients are summed, Σg = n · mean, and the learning rate is that of one:

        lr = lr0 · b / B0,   weight decay = wd0 · n   (of the sum, as wd0 is of the mean)

    A plain step is that of the linear rule, lr0 · S · mean; but momentum, which is kept in units of the gradient, is
    then taken at the same learning rate in every step.

    >>> LinearMomentumRule().settings({"lr": 0.1, "weight_decay": 1e-4}, Step(512, 32, 128))
    {'lr': 0.025, 'weight_decay': 0.0016}
    """

    sums_gradients = True

    def factor(self, step: Step) -> float:
        return step.minibatch_size / step.ref_batchsize

    def settings(self, group: Mapping[str, Any], step: Step) -> dict[str, Any]:
        changed = super().settings(group, step)
        if "weight_decay" in group:
            changed["weight_decay"] = group["weight_decay"] * step.num_minibatches
        return changed
