"""ScheduledOptimizer: where an optimizer stands in its schedule, and what its rule makes of the step there."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from variable_batch_size.checks import check_positive
from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.rules.adascale import NoiseRule
from variable_batch_size.rules.noise import Noise
from variable_batch_size.rules.rule import Rule, Step
from variable_batch_size.training.deciding import Record, deciding_for
from variable_batch_size.training.description import description_of
from variable_batch_size.training.factors import Factors
from variable_batch_size.training.position import Position
from variable_batch_size.training.sampler import CustomSampler
from variable_batch_size.training.wrapper import Wrapper, name_of


class ScheduledOptimizer(Wrapper, ABC):
    """What can be read of a run between two calls of ``step()``.

    Args:
        inner: any optimizer of torch, with the settings that are right at `ref_batchsize`.
        sampler: the sampler that deals the minibatches.
        rule: what the batch size of a step makes of the settings.
        ref_batchsize: the batch size at which the settings of `inner` are right.
        smooth_steps: spread a jump of the factor over N steps.
        max_factor: the largest factor; None for no bound.
        loss_scale: what the user multiplies the loss by.

    Attributes:
        steps_done: steps so far, skipped ones included.
        samples_done: samples in these.
        steps_skipped: steps whose gradient was not finite.
        gradient_norm: the norm of the latest step's mean gradient before clipping, on the device; None unless that step
            is one of those for which :meth:`keep_gradient_norm` has asked.
    """

    _communicator: Communicator

    def __init__(
        self,
        inner: Optimizer,
        sampler: CustomSampler,
        *,
        rule: Rule,
        ref_batchsize: int,
        smooth_steps: int,
        max_factor: float | None,
        loss_scale: float,
    ) -> None:
        super().__init__(inner)
        if not isinstance(sampler, CustomSampler):
            raise ValueError(f"`sampler` must be a CustomSampler, got {type(sampler).__name__}")
        if not isinstance(rule, Rule):
            raise ValueError(f"`rule` must be a Rule, got {rule!r}")
        rule.check(name_of(inner), inner.param_groups)
        check_positive(ref_batchsize=ref_batchsize)
        self.sampler = sampler
        self.rule = rule
        self.ref_batchsize = int(ref_batchsize)
        self.steps_done = self.samples_done = self.steps_skipped = 0
        self.gradient_norm: torch.Tensor | None = None
        self._norm_every: set[int] = set()
        self._scaling = Factors(rule, smooth_steps=smooth_steps, max_factor=max_factor)
        self._deciding = deciding_for(self)
        self._position = Position(sampler.schedule, sampler.rank)
        self._factors: list[float] | None = None  # of the latest step, once it is complete
        self._lrs: list[float] = []  # likewise
        self._loss_scale = _checked_loss_scale(loss_scale)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r}, ref_batchsize={self.ref_batchsize})"

    @property
    def description(self) -> dict[str, str | int | bool]:
        """What must be the same on all cores, and when a run goes on."""
        return description_of(self.sampler, self.rule, self.inner, self.ref_batchsize)

    def call_when_decided(self, listener: Callable[[Record], Any]) -> None:
        """Give every decision of a policy to something that can be called with a record; nothing without a policy."""
        if self._deciding is not None:
            self._deciding.call_when_decided(listener)

    def note_loss(self, loss: float) -> None:
        """Let a policy know the loss that a log has recorded."""
        if self._deciding is not None:
            self._deciding.loss = loss

    def keep_gradient_norm(self, *, every: int) -> None:
        """From now on, leave the norm of every N-th step's mean gradient in `gradient_norm`; several N add up."""
        check_positive(every=every)
        self._norm_every.add(every)

    @property
    def loss_scale(self) -> float:
        """What the user multiplies the loss by; it may be set between steps."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if self.is_accumulating and value != self._loss_scale:
            raise RuntimeError(
                f"`loss_scale` must stay the same within a step, whose gradients are summed, got {value!r} after "
                f"{self._loss_scale!r}"
            )
        self._loss_scale = _checked_loss_scale(value)

    # --------------------------------------------------------------------------------------------------------- position

    @property
    def epoch(self) -> int:
        """The number of the epoch."""
        return self._position.epoch

    @property
    def epoch_step(self) -> int:
        """How many steps of the epoch are done."""
        return self._position.epoch_step

    @property
    def is_accumulating(self) -> bool:
        """Whether this core has run some of its minibatches of a step, and not all."""
        return self._position.is_accumulating

    @property
    def batch_size(self) -> int:
        """The batch size of the step that the latest minibatch belongs to; at first, of the epoch's first step."""
        return self._position.batch_size

    @property
    def is_idle(self) -> bool:
        """Whether the latest minibatch was a stand-in, because this core has none in that step."""
        return self._position.is_idle

    # ------------------------------------------------------------------------------------------------------------- rule

    def current_lr(self, group: int = 0) -> float:
        """The learning rate, scaled by the rule, of a parameter group in the step of the latest minibatch."""
        if self._is_known(group):
            return self._lrs[group]  # as it was then: a scheduler may have gone on
        return float(self.rule.settings(self.param_groups[group], self._rule_step(), self.factor(group))["lr"])

    def factor(self, group: int = 0) -> float:
        """What the learning rate is multiplied by in that step."""
        if self._factors is not None and self._is_known(group):
            return self._factors[group]
        return self._scaling.preview(self._rule_step(), group)

    def _is_known(self, group: int) -> bool:
        """Whether the step of the latest minibatch is complete and had this group, which may have been added since."""
        return self._factors is not None and group < len(self._factors)

    @property
    def progress(self) -> float:
        """How many steps at `ref_batchsize` the run is worth so far: with AdaScale, the sum of the gains."""
        return self._scaling.progress

    def report(self) -> dict[str, float]:
        """What the rule, and the policy if there is one, has to tell a log about the latest step."""
        times = self._deciding.report() if self._deciding is not None else {}
        return self.rule.report(self._rule_step()) | times

    def gain(self, batch_size: int | None = None, group: int | None = None) -> float:
        """How many steps at `ref_batchsize` a step is worth, from the noise as it is known now.

        Args:
            batch_size: of any step; of the step of the latest minibatch if None.
            group: a parameter group; all together if None.
        """
        size = self.batch_size if batch_size is None else batch_size
        return self._noise_rule().gain(size, self.ref_batchsize, group)

    @property
    def noise(self) -> Noise | None:
        """Variance and squared norm of per-sample gradients, averaged over steps; None before the first estimate."""
        return self._noise_rule().noise()

    @property
    def noise_scale(self) -> float:
        """The simple noise scale V/G², in samples; NaN before the first estimate."""
        return self.noise.scale if self.noise else math.nan

    def _noise_rule(self) -> NoiseRule:
        if not isinstance(self.rule, NoiseRule):
            raise RuntimeError(f"{type(self.rule).__name__} measures no noise: AdaScaleRule does")
        return self.rule

    def _count_step(self, step: Step) -> None:
        self.steps_done += 1
        self.samples_done += step.batch_size
        if self._deciding is not None:
            self._deciding.after_step(self._communicator, self._position.step)

    def _state_of_run(self) -> dict[str, Any]:
        decided = {} if self._deciding is None else {"deciding": self._deciding.state_dict()}
        return {
            "epoch": self.epoch,
            "epoch_step": self.epoch_step,
            "steps_done": self.steps_done,
            "samples_done": self.samples_done,
            "steps_skipped": self.steps_skipped,
            **decided,
        }

    def _load_state_of_run(self, own: Mapping[str, Any]) -> None:
        if ("deciding" in own) != (self._deciding is not None):
            was, is_ = ("a policy", "a trace") if "deciding" in own else ("a trace", "a policy")
            raise ValueError(f"the state is that of a run with {was}, and this one has {is_}")
        self.steps_done = own["steps_done"]
        self.samples_done = own["samples_done"]
        self.steps_skipped = own["steps_skipped"]
        if self._deciding is not None:
            self._deciding.load_state_dict(own["deciding"], self._communicator)

    def _rule_step(self) -> Step:
        return Step(self.batch_size, self.sampler.minibatch_size, self.ref_batchsize, self.steps_done)


def _checked_loss_scale(value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"`loss_scale` must be positive and finite, got {value!r}")
    return value
