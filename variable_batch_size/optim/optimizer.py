"""CustomOptimizer: accumulates, or all-reduces and updates, as the schedule says."""

from __future__ import annotations

import dataclasses
import logging
import math
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict, TypeVar, overload

import torch
from torch.optim import Optimizer

from variable_batch_size.checks import check_not_negative, check_positive
from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.cores.detect import communicator_for
from variable_batch_size.data.sampler import Description, MinibatchSource
from variable_batch_size.optim.buffers import Buffers
from variable_batch_size.optim.consistency import (
    fingerprint_of,
    rollback_param_groups,
    sync_added_params,
    sync_and_check_ranks,
)
from variable_batch_size.optim.gradients.accumulator import GradientAccumulator, Mean
from variable_batch_size.optim.gradients.select import make_accumulator
from variable_batch_size.optim.hyperparameters import Preconditioner, StepHyperparameters
from variable_batch_size.optim.policy_driver import Record, deciding_for
from variable_batch_size.optim.proxy import Inner, OptimizerProxy, name_of, optimizers_of
from variable_batch_size.optim.seeding import MinibatchSeeder
from variable_batch_size.optim.step_plan import Position
from variable_batch_size.optim.token_weights import TokenWeights, Weight
from variable_batch_size.optim.wrappers import check_first_minibatch, find_wrappers, refuse_call
from variable_batch_size.rules.adascale import NoiseRule
from variable_batch_size.rules.noise import Noise, NoiseMeter
from variable_batch_size.rules.per_optimizer import PerOptimizerRule
from variable_batch_size.rules.rule import Rule, Step
from variable_batch_size.rules.transition import Transition
from variable_batch_size.schedules.schedule import BaseSchedule


class Options(TypedDict, total=False):
    """What every optimizer of the library takes; :class:`CustomOptimizer` says what each is."""

    log_steps: int
    clip_grad_norm: float | None
    model: torch.nn.Module | None
    smooth_steps: int
    max_factor: float | None
    skip_nonfinite: bool | None
    loss_scale: float
    keep_gradients: bool
    measure_noise: bool
    exact: bool
    seed_minibatches: bool | None
    reduce_once: bool


class Passes:
    """Sees the minibatches of each pass over the loader, and refuses those of a pass that only one of the two began."""

    def __init__(self, sampler: MinibatchSource) -> None:
        self._sampler = sampler
        self._has_begun = False  # whether there was a minibatch since the optimizer's set_epoch
        self._pass = -1  # of the sampler, that of the latest minibatch

    def begin(self) -> None:
        """The optimizer's ``set_epoch`` was called."""
        self._has_begun = False

    def see(self, position: Position, *, is_driven: bool = False) -> bool:
        """Before each minibatch; True for the first one of a pass.

        Args:
            position: of the optimizer.
            is_driven: whether somebody else's loop runs it, as a closure, who may not know of epochs.
        """
        sampler = self._sampler
        if is_driven and not sampler.num_passes:
            raise RuntimeError(
                "step(closure) was called before set_epoch: take `for epoch in vbs.epochs(optimizer, …)` in a loop of "
                "your own, and with a framework what variable_batch_size.integrations has for it, such as the callback "
                "for Lightning"
            )
        if sampler.epoch != position.epoch or sampler.first_step != position.first_step:
            raise RuntimeError(
                f"the sampler is in epoch {sampler.epoch} (from its step {sampler.first_step} on) but the optimizer in "
                f"epoch {position.epoch} (from {position.first_step} on): call set_epoch on both, alike"
            )
        is_same_pass = sampler.num_passes == self._pass
        if is_same_pass != self._has_begun:
            who = "optimizer" if is_same_pass else "sampler"
            raise RuntimeError(
                f"set_epoch was called on the {who} only: call it on the sampler and the optimizer before each pass "
                "over the loader"
            )
        self._pass, is_first, self._has_begun = sampler.num_passes, not self._has_begun, True
        return is_first


class StandIns:
    """Sees that a stand-in leaves no mark, minibatch by minibatch; without lockstep the whole step is taken back.

    Args:
        is_on: whether cores are in lockstep.
        gradients: of the core.
        model: whose buffers are put back; None for none.
        communicator: the way to the other cores.
    """

    def __init__(
        self, is_on: bool, gradients: GradientAccumulator, model: torch.nn.Module | None, communicator: Communicator
    ) -> None:
        self._is_on = is_on
        self._gradients = gradients
        self._buffers = Buffers(model if is_on else None, communicator)

    def expect(self, position: Position) -> None:
        """Before a minibatch."""
        if self._is_on:
            self._gradients.expect(is_padding_minibatch=position.is_next_padding, is_last=position.is_last_next)
            self._buffers.save(position.is_next_padding)

    def take_back(self, position: Position, weight: Weight | None) -> Weight | None:
        """After a minibatch, of which only the gradient of the others is left if it was a stand-in; what it weighs."""
        if not self._is_on or not position.is_padding_minibatch:
            return weight
        self._buffers.settle(is_taken_back=True)
        self._gradients.leave_out()
        return None if weight is None else 0.0


_NO_WEIGHT = "all minibatches have the weight 0"


class Observer:
    """Looks at the gradients of a step between their reduction and the update.

    Args:
        gradients: of the optimizer.
        rule: that may want to know their norms.
        meter: likewise; None if the rule measures by itself, or nobody does.
        skip_nonfinite: whether no update is to be made where they are not finite.
    """

    def __init__(
        self, gradients: GradientAccumulator, rule: Rule, meter: NoiseMeter | None, *, skip_nonfinite: bool
    ) -> None:
        self._gradients = gradients
        self._rule = rule
        self._meter = meter
        self._skips = skip_nonfinite

    def reason_to_skip(self, step: Step) -> str | None:
        """Why no update is to be made, if so; else rule and meter have seen what was measured."""
        if self._gradients.weighs_nothing():
            return _NO_WEIGHT
        if not (self._skips or self._rule.measures_noise or self._meter is not None):
            return None
        measured = self._gradients.measured()
        if self._skips and not measured.is_finite:
            return "the gradient is not finite"
        if measured.weight == 0:
            return _NO_WEIGHT
        step = dataclasses.replace(step, weight=measured.weight, num_weighted=measured.num_weighted)
        for observing in (self._rule, self._meter):
            if observing is not None:
                observing.observe(step, measured.norms)
        return None


class Factors:
    """The factors that a rule wants, bounded and with their jumps spread over steps, one for each parameter group.

    Args:
        rule: what the batch size of a step makes of the settings.
        smooth_steps: spread a jump over N steps.
        max_factor: the largest factor; None for no bound.

    Attributes:
        progress: the sum of what the factors of all steps are worth to the rule.
    """

    def __init__(self, rule: Rule, *, smooth_steps: int, max_factor: float | None) -> None:
        self._rule = rule
        self._new_transition = partial(Transition, smooth_steps=smooth_steps, max_factor=max_factor)
        self._of_all = self._new_transition()
        self._of_groups: list[Transition] = []
        self.progress = 0.0

    def preview(self, step: Step, group: int) -> float:
        """The factor of a parameter group in a step."""
        return self._of_group(group).preview(self._rule.group_factor(step, group), step.batch_size)

    def move(self, step: Step, num_groups: int) -> list[float]:
        """The factors of all groups in a step, which is then taken as made."""
        self.progress += self._rule.worth(step, self._of_all.move(self._rule.factor(step), step.batch_size))
        return [
            self._of_group(group).move(self._rule.group_factor(step, group), step.batch_size)
            for group in range(num_groups)
        ]

    def _of_group(self, group: int) -> Transition:
        while len(self._of_groups) <= group:
            self._of_groups.append(self._new_transition())
        return self._of_groups[group]

    def state_dict(self) -> dict[str, Any]:
        """The progress, and where jumps under way stand."""
        return {
            "progress": self.progress,
            "transitions": [transition.state_dict() for transition in self._of_groups],
            "transition_of_all": self._of_all.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        transitions = state["transitions"]
        # the first version of the format has the progress with the rule, and transitions of groups only
        self.progress = state["progress"] if "progress" in state else state["rule"].get("progress", 0.0)
        self._of_all, self._of_groups = self._new_transition(), []  # a run that had made no step has none saved
        for of_all in [state["transition_of_all"]] if "transition_of_all" in state else transitions[:1]:
            self._of_all.load_state_dict(of_all)
        for group, saved in enumerate(transitions):
            self._of_group(group).load_state_dict(saved)


def make_rule_for(rule: Rule | Sequence[Rule], inner: Optimizer) -> Rule:
    """The rule of an optimizer, or one made of the rules of several; what does not fit is refused."""
    optimizers = optimizers_of(inner)
    rules: list[Any] = list(rule) if isinstance(rule, list | tuple) else [rule] * len(optimizers)
    for one in rules:
        if not isinstance(one, Rule):
            raise ValueError(f"`rule` must be a Rule, got {one!r}")
    for one, optimizer in zip(rules, optimizers, strict=False):
        one.check(name_of(optimizer), optimizer.param_groups)
    if isinstance(rule, Rule):
        return rule
    return PerOptimizerRule(rules, num_groups=[len(optimizer.param_groups) for optimizer in optimizers])


logger = logging.getLogger(__name__)


class ScheduledOptimizer(OptimizerProxy, ABC):
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
            is one of those for which :meth:`record_grad_norm` has asked.
    """

    _communicator: Communicator
    _factors: list[float] | None  # of the latest step, once it is complete
    _lrs: list[float]  # likewise

    def __init__(
        self,
        inner: Inner,
        sampler: MinibatchSource,
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
        model: torch.nn.Module | None,
    ) -> None:
        super().__init__(inner)
        if not isinstance(sampler, MinibatchSource):
            raise ValueError(f"`sampler` must be a CustomSampler or a Stream, got {type(sampler).__name__}")
        rule = make_rule_for(rule, self.inner)
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
        self._wrappers = find_wrappers(self.parameters(), model)
        if self._wrappers.fsdp:
            sampler.run_in_lockstep()
        self._scaling = Factors(rule, smooth_steps=smooth_steps, max_factor=max_factor)
        self._loss_scale = _checked_loss_scale(loss_scale)
        self._own_meter = NoiseMeter() if measure_noise and not isinstance(rule, NoiseRule) else None  # over all groups
        self._described = fingerprint_of(sampler, rule, self.inner, self.ref_batchsize)  # before a rule notes anything
        self._deciding = deciding_for(self)
        self._position = Position(sampler.schedule, sampler.rank)
        self.minibatch_weights = TokenWeights(next(self.parameters()).device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r}, ref_batchsize={self.ref_batchsize})"

    @property
    def description(self) -> Description:
        """What must be the same on all cores, and when a run goes on."""
        own: Description = {"exact": self.exact, "seed_minibatches": self.seeds_minibatches}
        if self.exact and next(self.parameters()).device.type == "cpu":
            own["threads"] = torch.get_num_threads()  # on which the bits of a minibatch's gradient depend
        return {**self._described, **own}

    def on_decision(self, listener: Callable[[Record], Any]) -> None:
        """Give every decision of a policy to something that can be called with a record; nothing without a policy."""
        if self._deciding is not None:
            self._deciding.on_decision(listener)

    def note_loss(self, loss: float) -> None:
        """Let a policy know the loss that a log has recorded."""
        if self._deciding is not None:
            self._deciding.loss = loss

    def record_grad_norm(self, *, every: int) -> None:
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
        return self._position.is_padding_minibatch

    def set_schedule(self, schedule: BaseSchedule) -> None:
        """Take another schedule in place of the sampler's, and give it to the sampler; ``set_epoch`` goes into it."""
        self.sampler.schedule = schedule
        self._position.take(schedule)

    # ------------------------------------------------------------------------------------------------------------- rule

    def current_lr(self, group: int = 0) -> float:
        """The learning rate, scaled by the rule, of a parameter group in the step of the latest minibatch."""
        if self._is_known(group):
            return self._lrs[group]  # as it was then: a scheduler may have gone on
        return float(
            self.rule.rule_for_group(group)[0].settings(
                self.param_groups[group], self._rule_step(), self.factor(group)
            )["lr"]
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
        meter = self._own_meter or (self.rule.meter if isinstance(self.rule, NoiseRule | PerOptimizerRule) else None)
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


class FirstNames(ScheduledOptimizer):
    """Names for scripts that were written for the first version."""

    def get_lr(self) -> tuple[float, ...]:
        """The learning rates of all parameter groups at `ref_batchsize`; :meth:`current_lr` is the scaled one."""
        return tuple(group["lr"] for group in self.param_groups)

    def get_bs(self) -> int:
        """The batch size of the step that the next minibatch belongs to; 0 if all steps of the epoch are done."""
        schedule = self.sampler.schedule
        steps = schedule.steps(self.epoch)
        return schedule.batch_size(steps[self.epoch_step]) if self.epoch_step < len(steps) else 0


STATE_KEY = "variable_batch_size"

Loss = TypeVar("Loss")


class CustomOptimizer(FirstNames):
    """Makes one update of every step of the schedule, with the inner optimizer and the settings the rule gives it.

    Call :meth:`step` after the backward pass of each minibatch. It takes over ``p.grad`` of all parameters as that
    minibatch's gradient, whatever made it, and leaves ``p.grad`` empty. It accumulates until this core has run its
    share of the step; then all cores sum their gradients, and each makes the same update with the mean over the step's
    samples. Parameters and the model's buffers start out as they are on core 0.

    Args:
        inner: any optimizer of torch, with the settings that are right at `ref_batchsize`; or several for one model.
        sampler: what deals the minibatches: a :class:`CustomSampler` or a :class:`Stream`.
        rule: what the batch size of a step makes of the settings; or one for each of several optimizers.
        ref_batchsize: the batch size at which the settings of `inner` are right.
        log_steps: log every N steps on core 0; 0 for never.
        clip_grad_norm: the largest norm of a step's mean gradient over all parameters; None for no bound.
        model: whose buffers (BatchNorm's statistics) an idle core's stand-in minibatch must not change.
        smooth_steps: spread a jump of the factor over N steps (:class:`Transition`).
        max_factor: the largest factor; None for no bound.
        skip_nonfinite: make no update where the gradient is not finite, on all cores together; costs a wait for the
            device in every step. None for False, and True for rules that measure gradients anyway.
        loss_scale: what the user multiplies the loss by on this core, to be divided out of the gradient; may be set
            between steps.
        keep_gradients: let gradients stay where they are, zeroed in place, and autograd accumulate there, for CUDA
            graphs and to save the memory of one gradient; they must then not be touched, nor may a parameter be frozen,
            added or converted within a step.
        measure_noise: measure the gradient noise though the rule does not need it, for `noise_scale` and `gain()`.
        exact: sum so that the weights are the same to the last bit on any number of cores; see the page on exactness
            for what that needs and costs.
        seed_minibatches: set the random generators before each minibatch, so that what it draws does not depend on the
            core (:class:`MinibatchSeeder`); None for as `exact` is.
        reduce_once: let a model in ``fully_shard`` reduce once a step instead of in every round, for the memory of
            whole gradients on each core; other models always do so.
    """

    def __init__(
        self,
        inner: Inner,
        sampler: MinibatchSource,
        *,
        rule: Rule | Sequence[Rule],
        ref_batchsize: int,
        log_steps: int = 0,
        clip_grad_norm: float | None = None,
        model: torch.nn.Module | None = None,
        smooth_steps: int = 0,
        max_factor: float | None = None,
        skip_nonfinite: bool | None = None,
        loss_scale: float = 1.0,
        keep_gradients: bool = False,
        measure_noise: bool = False,
        exact: bool = False,
        seed_minibatches: bool | None = None,
        reduce_once: bool = False,
    ) -> None:
        super().__init__(
            inner,
            sampler,
            rule=rule,
            ref_batchsize=ref_batchsize,
            smooth_steps=smooth_steps,
            max_factor=max_factor,
            loss_scale=loss_scale,
            measure_noise=measure_noise,
            log_steps=log_steps,
            exact=exact,
            seed_minibatches=exact if seed_minibatches is None else seed_minibatches,
            model=model,
        )
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ValueError(f"`clip_grad_norm` must be positive, got {clip_grad_norm!r}")
        self.clip_grad_norm = clip_grad_norm
        measures = self.rule.measures_noise or measure_noise
        self.skip_nonfinite = measures if skip_nonfinite is None else skip_nonfinite
        self._communicator = communicator_for(self.parameters(), sampler.process_group)
        options = {"clip_grad_norm": clip_grad_norm, "smooth_steps": smooth_steps, "max_factor": max_factor}
        options |= {"skip_nonfinite": self.skip_nonfinite, "keep_gradients": keep_gradients, "loss_scale": loss_scale}
        options |= {"measure_noise": measure_noise, "reduce_once": reduce_once}
        complete_joining = sync_and_check_ranks(self, self._wrappers, self._communicator, options)
        self._preconditioner = Preconditioner(self.inner) if self.rule.preconditions else None
        divisors = None if self._preconditioner is None else self._preconditioner.divisors
        self._gradients = make_accumulator(
            self.inner,
            self._communicator,
            sampler=sampler,
            measures=measures,
            divisors=divisors,
            keeps=keep_gradients,
            exact=exact,
            reduces_once=reduce_once,
            wrappers=self._wrappers,
        )
        self._observer = Observer(self._gradients, self.rule, self._own_meter, skip_nonfinite=self.skip_nonfinite)
        self._stand_ins = StandIns(sampler.schedule.lockstep, self._gradients, model, self._communicator)
        self._buffers = Buffers(model, self._communicator, may_skip=self.skip_nonfinite)
        self._settings, self._passes = StepHyperparameters(self.inner, self._communicator), Passes(sampler)
        self._seeds = MinibatchSeeder(self.seeds_minibatches, sampler, self._position, next(self.parameters()), model)
        self._begin_epoch()
        complete_joining()

    # ---------------------------------------------------------------------------------------- a torch.optim.Optimizer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, on all cores; they start out as they are on core 0, without a gradient."""
        before = list(self.parameters())
        with rollback_param_groups(self.inner):
            self.inner.add_param_group(param_group)
            added = self.inner.param_groups[-1]["params"]
            sync_added_params(added, before, self._wrappers, self._communicator, self.sampler.process_group)
            for p in added:
                p.grad = None  # of minibatches before, which nobody has taken over
            self._gradients.fit()
        self._communicator.flush()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that :meth:`step` has not taken over, as of another loss; there are none after it."""
        self._gradients.drop()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state and the position; in the middle of a step, the position before that step."""
        own = {
            **self._state_of_run(),
            "rule": self.rule.state_dict(),
            **self._scaling.state_dict(),
            "adam_bias": self._settings.adam_bias.state_dict(),
            "weights": self.minibatch_weights.state_dict(),
            "gradients": self._gradients.state_dict(),
            "noise": self._own_meter.state_dict() if self._own_meter else None,
        }
        return {**self.inner.state_dict(), STATE_KEY: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state that was saved on any number of cores.

        Training goes on where it stopped after ``set_epoch(optimizer.epoch, optimizer.epoch_step)`` on the sampler.
        """
        if STATE_KEY not in state_dict:
            raise ValueError(f"the state has no {STATE_KEY!r}: it is that of another kind of optimizer")
        own = state_dict[STATE_KEY]
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != STATE_KEY})
        self.rule.load_state_dict(own["rule"])
        self._scaling.load_state_dict(own)
        if self._own_meter is not None and own.get("noise"):
            self._own_meter.load_state_dict(own["noise"])
        self._load_state_of_run(own)
        self.set_epoch(own["epoch"], own["epoch_step"])
        self._settings.adam_bias.load_state_dict(own.get("adam_bias", {}))
        self.minibatch_weights.load_state_dict(own.get("weights", {}))
        self._gradients.load_state_dict(own.get("gradients", {}))
        if self._preconditioner is not None:
            self._preconditioner.refresh(has_updated=False)

    # --------------------------------------------------------------------------------------------------------- position

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Go to an epoch. Call it before each pass over the loader, and on the sampler too.

        Gradients that :meth:`step` has not taken over are dropped, and so is a step that is not complete.

        Args:
            epoch: its number, from 0.
            first_step: how many of the epoch's steps to leave out, for a run that was stopped after them.
        """
        was_accumulating, unfinished, before = self.is_accumulating, self.epoch_step, self.epoch
        self._position.set_epoch(epoch, first_step)
        if was_accumulating:
            logger.warning(
                "core %d left step %d of epoch %d unfinished: its gradients are discarded",
                self.sampler.rank,
                unfinished,
                before,
            )
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._passes.begin()
        self._gradients.begin(self.epoch)
        self._factors = None
        self._buffers.save(self._position.is_idle)
        self._stand_ins.expect(self._position)
        self._communicator.flush()  # else what was noted down would make the first minibatch another program
        self._seeds.set()

    # ------------------------------------------------------------------------------------------------------------- step

    @overload  # type: ignore[override]
    def step(self, closure: None = None, *, weight: Weight | None = None) -> bool: ...

    @overload
    def step(self, closure: Callable[[], Loss], *, weight: Weight | None = None) -> Loss: ...

    def step(self, closure: Callable[[], Any] | None = None, *, weight: Weight | None = None) -> Any:
        """Take over the gradients of one minibatch, and update if that completes the step.

        Args:
            closure: runs the forward and the backward pass of the minibatch, and is called once; None if that was done.
            weight: what the minibatch weighs, as the number of its tokens, where the loss is the *sum* over them; the
                gradient of the step is then the mean over all tokens of all cores. A number, or a tensor on the device.

        Returns:
            True exactly when the weights changed: neither while accumulating nor if the update was skipped. What the
            closure returned, if there is one: then `updated` says whether they changed.
        """
        self.updated = False
        refuse_call(self, closure)
        for before in self._optimizer_step_pre_hooks.values():
            before(self, (), {})
        with torch.enable_grad():  # type: ignore[no-untyped-call]
            loss = None if closure is None else closure()
        weight = self.minibatch_weights.checked(weight)
        if self._passes.see(self._position, is_driven=closure is not None):
            check_first_minibatch(self, self._wrappers, self._communicator)
        self._position.advance()
        self._factors = None
        weight = self._stand_ins.take_back(self._position, weight)
        with torch.no_grad():
            self._gradients.take(self._mean(), is_last=self._position.is_complete, weight=weight)
            self.updated = self._position.is_complete and self._complete_step()
        self._stand_ins.expect(self._position)
        self._communicator.flush()
        self._seeds.set()
        for after in self._optimizer_step_post_hooks.values():
            after(self, (), {})
        return self.updated if closure is None else loss

    # GradScaler then calls step() for every minibatch, instead of leaving out some without a word
    _step_supports_amp_scaling = True

    # torch would wrap step() for hooks and profiling, which takes longer than the accumulating; the inner step has it
    step.hooked = True  # type: ignore[attr-defined]

    def _mean(self) -> Mean:
        n = self.batch_size // self.sampler.minibatch_size
        return Mean(n, self.loss_scale, n if self.rule.sums_gradients else 1)

    def _complete_step(self) -> bool:
        """Reduce, update, and leave everything ready for the next step; False if the update was skipped."""
        step, is_idle = self._rule_step(), self._position.is_idle
        try:
            self._gradients.reduce(self._mean(), is_idle=is_idle)
            weight = self._gradients.weight()
            keeps_norm = any((self.steps_done + 1) % every == 0 for every in self._norm_every)
            self.gradient_norm = self._gradients.norm() if keeps_norm else None
            reason = self._observer.reason_to_skip(step)
            if reason is None:
                self._update(step)
            else:
                self._say_skipped(reason)
        finally:
            self._gradients.clear()
        self._buffers.settle(is_taken_back=is_idle or reason is not None)
        self._buffers.save(self._position.is_idle_next)
        self._count(step, weight)
        self._say_done()
        return reason is None

    def _update(self, step: Step) -> None:
        """Let the inner optimizer make its step, with the settings that the rule gives it."""
        if self.clip_grad_norm is not None:
            largest = self._communicator.traced_scalar(self.clip_grad_norm * self._mean().multiple)
            self._gradients.clip(largest)
        self._factors = self._scaling.move(step, len(self.param_groups))
        with self._settings.of_step(self.rule, step, self._factors) as self._lrs:
            self.inner.step()
        if self._preconditioner is not None:
            self._preconditioner.refresh()
