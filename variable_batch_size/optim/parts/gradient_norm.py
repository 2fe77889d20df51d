"""GradientNorm: the norm of every N-th step's mean gradient, for logs."""

import torch

from variable_batch_size.optim.gradients.accumulator import StepGradient
from variable_batch_size.optim.parts.part import Part
from variable_batch_size.optim.run import Run
from variable_batch_size.rules.rule import Step


class GradientNorm(Part):
    """Leaves the norm before clipping in `latest`, on the device; None in steps for which nobody has requested it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.every: set[int] = set()
        self.latest: torch.Tensor | None = None

    @property
    def names(self) -> list[str]:
        return [f"the gradient norm every {every} steps" for every in sorted(self.every)]

    def before_update(self, step: Step, gradient: StepGradient) -> None:
        number = self._run.steps_done + 1
        self.latest = gradient.norm() if any(number % every == 0 for every in self.every) else None
