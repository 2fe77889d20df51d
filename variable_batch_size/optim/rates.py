"""Rates: the factors and learning rates of a step."""

from torch.optim import Optimizer

from variable_batch_size.optim.flow import Flow
from variable_batch_size.rules.numbers import Number
from variable_batch_size.rules.rule import Step


class Rates:
    """The factors and learning rates of the latest step; while it is not complete, or skipped, what they would be.

    Attributes:
        factors: of the parameter groups, once the step is complete.
        lrs: likewise, the learning rates: a scheduler may have stepped since.
    """

    def __init__(self, flow: Flow, inner: Optimizer) -> None:
        self._flow, self._inner = flow, inner
        self.factors: list[Number] = []
        self.lrs: list[Number] = []

    def factor(self, step: Step, group: int = 0) -> float:
        """What the learning rate is multiplied by."""
        if group < len(self.factors):  # the group was not added since
            return float(self.factors[group])
        self._flow.settle()
        return float(self._flow.scaler.preview(step, group))

    def lr(self, step: Step, group: int = 0) -> float:
        """The learning rate, scaled by the rule."""
        if group < len(self.factors):
            return float(self.lrs[group])
        self._flow.release()
        settings = self._flow.rule.rule_for_group(group)[0].merged_settings
        return float(settings(self._inner.param_groups[group], step, self.factor(step, group))["lr"])
