"""StepEngine: the order of things in a minibatch and in a step."""

import logging
from typing import Any

import torch
from torch.optim import Optimizer

from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.optim.flow import Flow, Outcome, step_unless
from variable_batch_size.optim.gradients.accumulator import GradientAccumulator, StepGradient
from variable_batch_size.optim.hyperparameters import Preconditioner, StepHyperparameters
from variable_batch_size.optim.loop_checks import updates
from variable_batch_size.optim.parts.part import Hooks
from variable_batch_size.optim.rates import Rates
from variable_batch_size.optim.run import Run
from variable_batch_size.optim.steps import Steps
from variable_batch_size.optim.token_weights import Weight
from variable_batch_size.rules.rule import Step

logger = logging.getLogger(__name__)


class StepEngine:
    """Takes the gradient of each minibatch, and makes an update where a step is complete.

    Attributes:
        hooks: of the parts; what is not in every run is in one of these.
        rates: the factors and learning rates of the latest step.
        updated: whether the latest minibatch changed the weights; maybe a tensor on the device.
        clip_grad_norm: the largest norm of a step's mean gradient; None for no limit.
    """

    hooks: Hooks

    def __init__(
        self,
        run: Run,
        steps: Steps,
        gradients: GradientAccumulator,
        flow: Flow,
        inner: Optimizer,
        communicator: Communicator,
        preconditioner: Preconditioner | None,
        clip_grad_norm: float | None,
    ) -> None:
        self.run, self.steps, self.gradients, self.flow, self.inner = run, steps, gradients, flow, inner
        self.clip_grad_norm = clip_grad_norm
        self.rates = Rates(flow, inner)
        self.updated: bool | torch.Tensor = False
        self._communicator, self._preconditioner = communicator, preconditioner
        self._population = run.sampler.population
        self._hyperparameters = StepHyperparameters(inner, communicator)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "hooks"}  # set again by its owner

    def minibatch(self, plan: StepPlan, weight: Weight | None) -> StepPlan:
        """Take ``p.grad`` as the gradient of a minibatch, and update if it completes the step; returns its plan."""
        self.rates.factors = []
        was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # a function, where the public one is an object
        try:
            for hook in self.hooks.after_backward:
                hook(plan)
            # the sum of the weights divides the gradient: in open steps without weights, the number of minibatches
            self.gradients.accumulate(plan, 1.0 if weight is None and plan.is_open else weight)
            if plan.is_last:
                self.updated = self.complete(plan)
                plan = self.run.cursor.plan
        finally:
            torch._C._set_grad_enabled(was_enabled)
        if plan.is_last:
            self.run.end_if_due()
        self.prepare()
        return plan

    def complete(self, plan: StepPlan) -> bool | torch.Tensor:
        """Reduce and update, or skip the update; returns whether the weights changed, maybe on the device."""
        for before_reduce in self.hooks.before_reduce:
            before_reduce(plan)
        gradient, run = None, self.run
        try:
            gradient = self.steps.reduce(plan)  # the one collective
            if gradient is None:  # not complete
                return False
            step = self.rule_step()
            for before_update in self.hooks.before_update:
                before_update(step, gradient)
            outcome = self.flow.scale(step, gradient)
            if outcome.reason is None:
                self._update(step, gradient, outcome)
            else:
                self.flow.num_skipped += 1
                if run.sampler.rank == 0:
                    message = "%s: %s, the update is skipped (%d so far)"
                    logger.warning(message, str(run.cursor), outcome.reason, self.flow.num_skipped)
        finally:
            if gradient is not None or not run.cursor.is_accumulating:  # this core has no more to run in the step
                self.gradients.reset()
        run.count(step.batch_size, gradient.weight)
        for after_step in self.hooks.after_step:
            after_step(plan, step, outcome)
        return outcome.reason is None if outcome.is_skipped is None else outcome.is_skipped.logical_not()

    def _update(self, step: Step, gradient: StepGradient, outcome: Outcome) -> None:
        """Make a step of the inner optimizer, with the settings that the rule returns."""
        if self.clip_grad_norm is not None:
            gradient.clip_(self.clip_grad_norm)
        self.rates.factors = outcome.factors
        with self._hyperparameters.applied(self.flow.rule, step, outcome.factors) as self.rates.lrs:
            updates.is_running = True
            try:
                if outcome.is_skipped is None:
                    self.inner.step()
                else:
                    step_unless(outcome.is_skipped, self.inner, self._communicator)
            finally:
                updates.is_running = False
        if self._preconditioner is not None:
            self._preconditioner.refresh()

    def rule_step(self) -> Step:
        """The step of the latest minibatch, as rules see it."""
        run, plan, schedule = self.run, self.run.cursor.plan, self.run.cursor.schedule
        size, of_one = plan.batch_size, plan.batch_size // plan.num_minibatches
        if not size:  # in an open step that is not complete, that of the step before
            size = schedule.batch_size(plan.step - 1) if plan.step else run.ref_batchsize
            of_one = schedule.minibatch_size
        totals, layers = self.gradients.totals, self.gradients.norm_layers
        is_drawn = totals is None or totals.read == totals.own  # whether all samples come from the loader
        return Step(
            size,
            of_one,
            run.ref_batchsize,
            run.steps_done,
            population=self._population if is_drawn else None,
            samples_every=1 if layers is None else layers.every,
        )

    def prepare(self) -> None:
        """At the end of a minibatch, and when the run has moved: prepare for the next minibatch."""
        upcoming = self.run.cursor.next
        for hook in self.hooks.before_minibatch:
            hook(upcoming)
        if upcoming is None:
            self.gradients.end_epoch()
            self.watch(False)

    def begin_pass(self) -> None:
        """The run has moved."""
        self.gradients.begin_epoch(self.run.epoch)
        self.rates.factors = []
        for hook in self.hooks.begin_pass:
            hook(self.run)
        self.prepare()

    def watch(self, is_on: bool) -> None:
        """Add or remove the hooks on the model, which are needed only in a pass."""
        for hook in self.hooks.watch:
            hook(is_on)
