"""ScheduledOptimizer: where an optimizer stands in its schedule, and what its rule makes of the step there."""

from __future__ import annotations

import logging
import math
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from variable_batch_size.checks import check_not_negative, check_positive
from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.rules.adascale import NoiseRule
from variable_batch_size.rules.each import RuleOfEach
from variable_batch_size.rules.noise import Noise
from variable_batch_size.rules.noise_meter import NoiseMeter
from variable_batch_size.rules.rule import Rule, Step
from variable_batch_size.schedules.layout import Layout
from variable_batch_size.training.dealer import Dealer, Description
from variable_batch_size.training.deciding import Record, deciding_for
from variable_batch_size.training.description import description_of
from variable_batch_size.training.factors import Factors
from variable_batch_size.training.fully_sharded import is_fully_sharded
from variable_batch_size.training.position import Position
from variable_batch_size.training.rule_for import rule_for
from variable_batch_size.training.together import Inner
from variable_batch_size.training.weights import Weight, Weights
from variable_batch_size.training.wrapper import Wrapper

logger = logging.getLogger(__name__)


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
        measure_noise: whether the gradient noise is measured though the rule does not need it.
        log_steps: log every N steps on core 0; 0 for never.
        exact: whether sums are the same to the last bit on any number of cores.
        seed_minibatches: whether the random generators are set before each minibatch.

    Attributes:
        updated: whether the latest call of ``step()`` changed the weights.
        steps_done: steps so far, skipped ones included.
        samples_done: samples in these.
        steps_made: steps with this object, whatever state was loaded meanwhile.
        steps_skipped: steps whose gradient was not finite, or whose minibatches all have the weight 0.
        minibatch_weights: what minibatches weigh, and how much that is so far.
        gradient_norm: the norm of the latest step's mean gradient before clipping, on the device; None unless that step
            is one of those for which :meth:`keep_gradient_norm` has asked.
    """

    _communicator: Communicator
    _factors: list[float] | None  # of the latest step, once it is complete
    _lrs: list[float]  # likewise

    def __init__(
        self,
        inner: Inner,
        sampler: Dealer,
        *,
        rule: Rule | Sequence[Rule],
        ref_batchsize: int,
        smooth_steps: int,
        max_factor: float | None,
        loss_scale: float,
        measure_noise: bool,
        log_steps: int,
        exact: bool,
        seed_minibatches: bool,
    ) -> None:
        super().__init__(inner)
        if not isinstance(sampler, Dealer):
            raise ValueError(f"`sampler` must be a CustomSampler or a Stream, got {type(sampler).__name__}")
        rule = rule_for(rule, self.inner)
        check_positive(ref_batchsize=ref_batchsize)
        check_not_negative(log_steps=log_steps)
        self.sampler = sampler
        self.rule = rule
        self.ref_batchsize = int(ref_batchsize)
        self.log_steps = int(log_steps)
        self.exact = exact
        self.seeds_minibatches = seed_minibatches
        self.steps_done = self.samples_done = self.steps_skipped = self.steps_made = 0
        self.updated = False
        self.gradient_norm: torch.Tensor | None = None
        self._norm_every: set[int] = set()
        if is_fully_sharded(self.parameters()):
            sampler.run_in_lockstep()
        self._scaling = Factors(rule, smooth_steps=smooth_steps, max_factor=max_factor)
        self._loss_scale = _checked_loss_scale(loss_scale)
        self._own_meter = NoiseMeter() if measure_noise and not isinstance(rule, NoiseRule) else None  # over all groups
        self._described = description_of(sampler, rule, self.inner, self.ref_batchsize)  # before a rule notes anything
        self._deciding = deciding_for(self)
        self._position = Position(sampler.schedule, sampler.rank)
        self.minibatch_weights = Weights(next(self.parameters()).device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r}, ref_batchsize={self.ref_batchsize})"

    @property
    def description(self) -> Description:
        """What must be the same on all cores, and when a run goes on."""
        own: Description = {"exact": self.exact, "seed_minibatches": self.seeds_minibatches}
        if self.exact and next(self.parameters()).device.type == "cpu":
            own["threads"] = torch.get_num_threads()  # on which the bits of a minibatch's gradient depend
        return {**self._described, **own}

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
        """Whether the latest minibatch was a stand-in: this core has none in that step, or in lockstep no more."""
        return self._position.is_stand_in

    def go_on_with(self, schedule: Layout) -> None:
        """Take another schedule in place of the sampler's, and give it to the sampler; ``set_epoch`` goes into it."""
        self.sampler.schedule = schedule
        self._position.take(schedule)

    # ------------------------------------------------------------------------------------------------------------- rule

    def current_lr(self, group: int = 0) -> float:
        """The learning rate, scaled by the rule, of a parameter group in the step of the latest minibatch."""
        if self._is_known(group):
            return self._lrs[group]  # as it was then: a scheduler may have gone on
        return float(
            self.rule.of_group(group)[0].settings(self.param_groups[group], self._rule_step(), self.factor(group))["lr"]
        )

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

    @property
    def weight_done(self) -> float:
        """The sum of all minibatches' weights so far, such as the tokens seen; reading it waits for the device."""
        return self.minibatch_weights.done

    def report(self) -> dict[str, float]:
        """What the rule, the noise if it is measured, and a policy have to tell a log about the latest step."""
        step = self._rule_step()
        times = self._deciding.report() if self._deciding is not None else {}
        return {**(self._own_meter.report(step) if self._own_meter else {}), **self.rule.report(step), **times}

    def gain(self, batch_size: int | None = None, group: int | None = None) -> float:
        """How many steps at `ref_batchsize` a step is worth, from the noise as it is known now.

        Args:
            batch_size: of any step; of the step of the latest minibatch if None.
            group: a parameter group; all together if None.
        """
        size = self.batch_size if batch_size is None else batch_size
        return self._meter().gain(size, self.ref_batchsize, group)

    @property
    def noise(self) -> Noise | None:
        """Variance and squared norm of per-sample gradients, averaged over steps; None before the first estimate.

        Where minibatches have weights it is per unit of weight, as per token.
        """
        return self._meter().noise()

    @property
    def noise_scale(self) -> float:
        """The simple noise scale V/G², in samples, or in units of weight; NaN before the first estimate."""
        noise = self.noise
        return noise.scale if noise else math.nan

    @property
    def noise_scale_in_samples(self) -> float | None:
        """The same in samples always, by what one has weighed on average; None before the first estimate."""
        return self._meter().scale_in_samples()

    def _meter(self) -> NoiseMeter:
        meter = self._own_meter or (self.rule.meter if isinstance(self.rule, NoiseRule | RuleOfEach) else None)
        if meter is None:
            raise RuntimeError(
                f"{type(self.rule).__name__} measures no noise: AdaScaleRule does, and so does any rule with "
                "`measure_noise=True`"
            )
        return meter

    def _rule_step(self) -> Step:
        return Step(self.batch_size, self.sampler.minibatch_size, self.ref_batchsize, self.steps_done)

    def _count(self, step: Step, weight: Weight | None) -> None:
        """Note that a step is done, and what its minibatches weigh."""
        self.steps_done += 1
        self.steps_made += 1
        self.samples_done += step.batch_size
        self.minibatch_weights.add(weight)
        if self._deciding is not None:
            self._deciding.after_step(self._position.step)

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
        self.steps_done = own["steps_done"]
        self.samples_done = own["samples_done"]
        self.steps_skipped = own["steps_skipped"]
        if self._deciding is not None:
            self._deciding.load_state_dict(own.get("deciding"))

    # ---------------------------------------------------------------------------------------------------------- telling

    def _say_done(self) -> None:
        if self.log_steps and self.steps_done % self.log_steps == 0 and self.sampler.rank == 0:
            message = "%s: batch size %d, learning rate %g, %d samples in all"
            logger.info(message, str(self._position), self.batch_size, self.current_lr(), self.samples_done)

    def _say_skipped(self, reason: str) -> None:
        self.steps_skipped += 1
        if self.sampler.rank == 0:
            message = "%s: %s, the update is skipped (%d so far)"
            logger.warning(message, str(self._position), reason, self.steps_skipped)


def _checked_loss_scale(value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"`loss_scale` must be positive and finite, got {value!r}")
    return value
