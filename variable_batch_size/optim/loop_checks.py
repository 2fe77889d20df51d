"""LoopChecks: raises for training loops in which step() would not train what they appear to."""

import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from variable_batch_size.data.cursor import RunCount
from variable_batch_size.data.sampler import MinibatchSource
from variable_batch_size.optim.gradients.accumulator import GradientAccumulator, StepGradient
from variable_batch_size.optim.parts.part import Part
from variable_batch_size.optim.run import Run
from variable_batch_size.optim.seeding import MinibatchSeeder
from variable_batch_size.rules.rule import Step

logger = logging.getLogger(__name__)

updates = threading.local()  # `is_running`: whether an optimizer of this library calls step() of an inner one


class LoopChecks(Part):
    """What an optimizer checks before the first minibatch of a pass, and when several optimizers share a sampler."""

    def __init__(
        self,
        parameters: Callable[[], Iterable[torch.nn.Parameter]],
        sampler: MinibatchSource,
        accumulator: GradientAccumulator,
        seeder: MinibatchSeeder,
        run: Run,
        *,
        exact: bool,
    ) -> None:
        self._parameters, self._sampler = parameters, sampler
        self._accumulator, self._seeder, self._run, self._exact = accumulator, seeder, run, exact
        self._precedes = self._has_warned = False  # whether other optimizers of the sampler had no gradient at step()

    def check_closure(self) -> None:
        """Raise if a framework calls step(closure) by itself."""
        if not self._sampler.num_passes:
            raise RuntimeError(
                "step(closure) was called before set_epoch(): use `for epoch in optimizer.epochs(…)` in your own "
                "loop, and with a framework its integration from variable_batch_size.integrations, such as the "
                "callback for Lightning"
            )

    def check_parameters(self, runs: RunCount) -> None:
        """Before the first minibatch of a pass: raise if another optimizer has taken its gradients."""
        own = set(() if runs.is_late else self._parameters())
        for other in self._others():
            if other._runs.number and not own.isdisjoint(other.parameters()):
                raise RuntimeError(
                    "two optimizers of one sampler have the same parameters, but step() of the first takes their "
                    "gradients: let one of them train the shared parameters, or make one optimizer for all, with a "
                    "list of inner optimizers where they differ"
                )

    def check_order(self, runs: RunCount) -> None:
        """Raise or warn if this backward pass ran through a model after ``step()`` of that model's optimizer.

        It then saw an update of the other model in the last minibatch that a core runs in a step, and only there.
        """
        others = self._others()
        before = [other for other in others if other._runs.number >= runs.number]  # in this minibatch
        after = [other for other in others if other not in before]
        self._precedes = not any(other._checks._accumulator.has_gradients() for other in after)
        if self._has_warned or not any(other._checks._has_been_used() for other in before):
            return
        message = (
            "The backward pass of this minibatch ran through a model after step() of that model's optimizer, so the "
            "result depends on the number of cores. Run all backward passes of a minibatch before the first step(), or "
            "give each optimizer its own sampler."
        )
        if self._exact:
            raise RuntimeError(message)
        self._has_warned = True
        if self._sampler.rank == 0:
            logger.warning(message)

    def _others(self) -> list[Any]:
        return [other for other in self._sampler.followers() if other._checks is not self]

    def _has_been_used(self) -> bool:
        """Whether the model seems to have run since the latest call of ``step()``, which preceded others."""
        if not self._precedes:
            return False
        is_frozen = not any(p.requires_grad for p in self._parameters())
        return is_frozen or self._seeder.has_run or self._accumulator.has_gradients()

    def before_update(self, step: Step, gradient: StepGradient) -> None:
        """Warn if nothing will be trained: a minibatch may be left out, but hardly all of the first step."""
        if self._run.steps_made:
            return
        if self._sampler.rank == 0 and all(p.grad is None for p in self._parameters()):
            logger.warning(
                "No parameter has a gradient in the first step. Call backward() before step(), on the loss of the "
                "model whose parameters the optimizer has, and do not call zero_grad() in between."
            )


def refuse_direct_step(reference: weakref.ref[Any], inner: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise if an inner optimizer makes a step by itself in the middle of a pass."""
    optimizer = None if getattr(updates, "is_running", False) else reference()
    if optimizer is not None and optimizer.sampler.has_been_read and not optimizer.has_completed_epoch:
        kind, name = type(inner).__name__, type(optimizer).__name__
        raise RuntimeError(
            f"step() of {kind} was called in the middle of a pass: call step() of the {name} that {kind} belongs to, "
            "or pass that to scaler.step()"
        )
