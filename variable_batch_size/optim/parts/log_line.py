"""LogLine: a message every N steps."""

import logging

from variable_batch_size.cores.messages import show
from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.optim.flow import Outcome
from variable_batch_size.optim.parts.part import Part
from variable_batch_size.optim.rates import Rates
from variable_batch_size.optim.run import Run
from variable_batch_size.rules.rule import Step

logger = logging.getLogger(__name__)


class LogLine(Part):
    """Logs position, batch size and learning rate every N steps on core 0, even if logging is not configured."""

    def __init__(self, run: Run, rates: Rates, every: int) -> None:
        self._run, self._rates, self._every = run, rates, every

    def after_step(self, plan: StepPlan, step: Step, outcome: Outcome) -> None:
        run = self._run
        if run.steps_done % self._every == 0 and run.sampler.rank == 0:
            message = f"%s: batch size %d, learning rate %g, %d {run.sampler.unit} in all"
            show(logger, message, str(run.cursor), step.batch_size, self._rates.lr(step), run.samples_done)
