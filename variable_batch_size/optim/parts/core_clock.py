"""CoreClock: tells how long this core's minibatches take to what assigns minibatches to cores."""

from typing import Any

from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.data.shares import Shares
from variable_batch_size.optim.flow import Outcome
from variable_batch_size.optim.parts.part import Part
from variable_batch_size.rules.rule import Step


class CoreClock(Part):
    """Where cores share steps other than round robin: starts the clock of each minibatch, and ends each step."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares

    def after_step(self, plan: StepPlan, step: Step, outcome: Outcome) -> None:
        self._shares.after_step(plan.step)

    def after_minibatch(self, plan: StepPlan, loss: Any) -> None:
        self._shares.begin_minibatch()
