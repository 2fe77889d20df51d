"""ScheduledOptimizer: where an optimizer stands in its schedule, and what its rule makes of the step there."""

from __future__ import annotations

import math
from abc import ABC

import torch
from torch.optim import Optimizer

from variable_batch_size.checks import check_positive
from variable_batch_size.rules.adascale import NoiseRule
from variable_batch_size.rules.noise import Noise
from variable_batch_size.rules.rule import Rule, Step
from variable_batch_size.training.dealer import Dealer, Description
from variable_batch_size.training.description import description_of
from variable_batch_size.training.factors import Factors
from variable_batch_size.training.position import Position
from variable_batch_size.training.wrapper import Wrapper, name_of


class ScheduledOptimizer(Wrapper, ABC):
    """What can be read of a run between two calls of ``step()``.

    Args:
        inner: any optimizer of torch, with the settings that are right at `ref_batchsize`.
        sampler: what deals the minibatches: a :class:`CustomSampler` or a :class:`Stream`.
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

    def __init__(
        self,
        inner: Optimizer,
        sampler: Dealer,
        *,
        rule: Rule,
        ref_batchsize: int,
        smooth_steps: int,
        max_factor: float | None,
        loss_scale: float,
    ) -> None:
        super().__init__(inner)
        if not isinstance(sampler, Dealer):
            raise ValueError(f"`sampler` must be a CustomSampler or a Stream, got {type(sampler).__name__}")
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
        self._position = Position(sampler.schedule, sampler.rank)
        self._scaling = Factors(rule, smooth_steps=smooth_steps, max_factor=max_factor)
        self._factors: list[float] | None = None  # of the latest step, once it is complete
        self._lrs: list[float] = []  # likewise
        self._loss_scale = _checked_loss_scale(loss_scale)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r}, ref_batchsize={self.ref_batchsize})"

    @property
    def description(self) -> Description:
        """What must be the same on all cores, and when a run goes on."""
        return description_of(self.sampler, self.rule, self.inner, self.ref_batchsize)

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
        """What the rule has to tell a log about the latest step."""
        return self.rule.report(self._rule_step())

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

    def _rule_step(self) -> Step:
        return Step(self.batch_size, self.sampler.minibatch_size, self.ref_batchsize, self.steps_done)


def _checked_loss_scale(value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"`loss_scale` must be positive and finite, got {value!r}")
    return value
