"""CustomOptimizer: accumulates, or all-reduces and updates, as the schedule says."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypedDict

import torch
from torch.optim import Optimizer

from variable_batch_size.checks import check_not_negative, check_positive
from variable_batch_size.cores.running import communicator_for
from variable_batch_size.rules.adascale import NoiseRule
from variable_batch_size.rules.noise import Noise
from variable_batch_size.rules.rule import Norms, Rule, Step
from variable_batch_size.rules.transition import Transition
from variable_batch_size.training.buffers import Buffers
from variable_batch_size.training.description import description_of, settings_of
from variable_batch_size.training.flat_gradients import FlatGradients
from variable_batch_size.training.gradients import Gradients
from variable_batch_size.training.kept_gradients import KeptGradients
from variable_batch_size.training.position import Position
from variable_batch_size.training.preconditioner import Preconditioner
from variable_batch_size.training.sameness import refuse_different, share_from_first
from variable_batch_size.training.sampler import CustomSampler
from variable_batch_size.training.separate_gradients import SeparateGradients
from variable_batch_size.training.settings import Settings
from variable_batch_size.training.wrapped import refuse_late_wrapper, take_over_reduction

logger = logging.getLogger(__name__)

STATE_KEY = "variable_batch_size"


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


class CustomOptimizer(Optimizer):
    """Makes one update of every step of the schedule, with the inner optimizer and the settings the rule gives it.

    Call :meth:`step` after the backward pass of each minibatch. It takes over ``p.grad`` of all parameters as that
    minibatch's gradient, whatever made it, and leaves ``p.grad`` empty. It accumulates until this core has run its
    share of the step; then all cores sum their gradients, and each makes the same update with the mean over the step's
    samples. Parameters and the model's buffers start out as they are on core 0.

    Args:
        inner: any optimizer of torch, with the settings that are right at `ref_batchsize`.
        sampler: the sampler that deals the minibatches.
        rule: what the batch size of a step makes of the settings.
        ref_batchsize: the batch size at which the settings of `inner` are right.
        log_steps: log every N steps on core 0; 0 for never.
        clip_grad_norm: the largest norm of a step's mean gradient over all parameters; None for no bound.
        model: whose buffers (BatchNorm's statistics) an idle core's stand-in minibatch must not change.
        smooth_steps: spread a jump of the factor over N steps (:class:`Transition`).
        max_factor: the largest factor; None for no bound.
        skip_nonfinite: make no update where the gradient is not finite, on all cores together; costs a wait for the
            device in every step. None for False, and True for rules that measure gradients anyway.
        loss_scale: what the user multiplies the loss by, to be divided out of the gradient; may be set between steps.
        keep_gradients: let gradients stay where they are, zeroed in place, and autograd accumulate there, for CUDA
            graphs and to save the memory of one gradient; they must then not be touched.

    Attributes:
        gradient_norm: the norm of the latest step's mean gradient before clipping, on the device; None unless that step
            is one of those for which :meth:`keep_gradient_norm` has asked.
        progress: how many steps at `ref_batchsize` the run is worth so far: the sum of what each step's factor is worth
            to the rule, which with AdaScale is its gain.
    """

    def __init__(
        self,
        inner: Optimizer,
        sampler: CustomSampler,
        *,
        rule: Rule,
        ref_batchsize: int,
        log_steps: int = 0,
        clip_grad_norm: float | None = None,
        model: torch.nn.Module | None = None,
        smooth_steps: int = 0,
        max_factor: float | None = None,
        skip_nonfinite: bool | None = None,
        loss_scale: float = 1.0,
        keep_gradients: bool = False,
    ) -> None:
        _check(inner, sampler, rule, clip_grad_norm, loss_scale)
        check_positive(ref_batchsize=ref_batchsize)
        check_not_negative(log_steps=log_steps)
        self.inner = inner
        self.sampler = sampler
        self.rule = rule
        self.ref_batchsize = int(ref_batchsize)
        self.log_steps = int(log_steps)
        self.clip_grad_norm = clip_grad_norm
        self.skip_nonfinite = rule.measures_noise if skip_nonfinite is None else skip_nonfinite
        self.loss_scale = loss_scale
        self.steps_done = self.samples_done = self.steps_skipped = 0
        self.progress = 0.0
        self.gradient_norm: torch.Tensor | None = None
        self._norm_every: set[int] = set()
        self._new_transition = partial(Transition, smooth_steps=smooth_steps, max_factor=max_factor)
        self._transitions = [self._new_transition() for _ in inner.param_groups]  # more as groups are added
        self._transition_of_all = self._new_transition()
        self._factors: list[float] | None = None  # of the latest step, once it is complete
        self._lrs: list[float] = []  # likewise
        # sets up hooks and profiling as Optimizer.__init__ does, without a second set of param_groups and state
        super().__setstate__({})
        self._join_other_cores(model)
        self._preconditioner = Preconditioner(inner) if rule.preconditions else None
        self._gradients = self._new_gradients(keep_gradients)
        self._buffers = Buffers(model, self._communicator, may_skip=self.skip_nonfinite)
        self._settings = Settings(inner, self._communicator)
        self._position = Position(sampler.schedule, sampler.rank)
        self._begin_epoch()

    def _join_other_cores(self, model: torch.nn.Module | None) -> None:
        """See that all cores begin with the same, and that nobody else reduces the gradients."""
        parameters = list(self._parameters())
        sampler = self.sampler
        self._communicator = communicator_for(parameters)
        if (sampler.rank, sampler.num_replicas) != (self._communicator.rank, self._communicator.num_replicas):
            raise ValueError(
                f"the sampler is for core {sampler.rank} of {sampler.num_replicas}, "
                f"but this is core {self._communicator.rank} of {self._communicator.num_replicas}"
            )
        facts = {**self.description, "clip_grad_norm": self.clip_grad_norm, "settings": settings_of(self.inner)}
        refuse_different(facts, self._communicator, parameters[0].device)
        of_model = [*model.parameters(), *model.buffers()] if model is not None else []
        share_from_first([*parameters, *of_model], self._communicator)
        take_over_reduction(parameters, self._communicator)
        self._has_begun = False

    def _new_gradients(self, keep_gradients: bool) -> Gradients:
        kind: type[Gradients] = FlatGradients if self._communicator.keeps_flat_gradients else SeparateGradients
        if keep_gradients and self._communicator.keeps_flat_gradients:
            kind = KeptGradients
        divisors = None if self._preconditioner is None else self._preconditioner.divisors
        measures = self.rule.measures_noise
        return kind(lambda: self.inner.param_groups, self._communicator, measures=measures, divisors=divisors)

    # ---------------------------------------------------------------------------------------- a torch.optim.Optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def _parameters(self) -> Any:
        return (p for group in self.inner.param_groups for p in group["params"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, on all cores; they start out as they are on core 0, without a gradient."""
        self.inner.add_param_group(param_group)
        added = self.inner.param_groups[-1]["params"]
        for p in added:
            p.grad = None  # of minibatches before, which nobody has taken over
        share_from_first(added, self._communicator)
        self._communicator.flush()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: :meth:`step` empties the gradients."""

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state and the position; in the middle of a step, the position before that step."""
        own = {
            "epoch": self.epoch,
            "epoch_step": self.epoch_step,
            "steps_done": self.steps_done,
            "samples_done": self.samples_done,
            "steps_skipped": self.steps_skipped,
            "progress": self.progress,
            "rule": self.rule.state_dict(),
            "transitions": [transition.state_dict() for transition in self._transitions],
            "transition_of_all": self._transition_of_all.state_dict(),
            "adam_bias": self._settings.adam_bias.state_dict(),
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
        self.set_epoch(own["epoch"], own["epoch_step"])
        self.steps_done = own["steps_done"]
        self.samples_done = own["samples_done"]
        self.steps_skipped = own["steps_skipped"]
        self.rule.load_state_dict(own["rule"])
        # the first version of the format has no such things
        self.progress = own.get("progress", own["rule"].get("progress", 0.0))
        if "transition_of_all" in own:
            self._transition_of_all.load_state_dict(own["transition_of_all"])
        self._settings.adam_bias.load_state_dict(own.get("adam_bias", {}))
        for group, saved in enumerate(own["transitions"]):
            self._transition_of(group).load_state_dict(saved)
        if self._preconditioner is not None:
            self._preconditioner.refresh()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r}, ref_batchsize={self.ref_batchsize})"

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
        self._gradients.discard()
        self._factors = None
        self._buffers.save(self.is_idle)
        self._communicator.flush()  # else what was noted down would make the first minibatch another program

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

    @property
    def description(self) -> dict[str, str | int | bool]:
        """What must be the same on all cores, and when a run goes on."""
        return description_of(self.sampler, self.rule, self.inner, self.ref_batchsize)

    # -------------------------------------------------------------------------------------------- what the rule says

    def current_lr(self, group: int = 0) -> float:
        """The learning rate, scaled by the rule, of a parameter group in the step of the latest minibatch."""
        if self._factors is not None:
            return self._lrs[group]  # as it was then: a scheduler may have gone on
        return float(self.rule.settings(self.param_groups[group], self._rule_step(), self.factor(group))["lr"])

    def factor(self, group: int = 0) -> float:
        """What the learning rate is multiplied by in that step."""
        if self._factors is not None:
            return self._factors[group]
        goal = self.rule.factor_of_group(self._rule_step(), group)
        return self._transition_of(group).preview(goal, self.batch_size)

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

    def _transition_of(self, group: int) -> Transition:
        while len(self._transitions) <= group:
            self._transitions.append(self._new_transition())
        return self._transitions[group]

    def _rule_step(self) -> Step:
        return Step(self.batch_size, self.sampler.minibatch_size, self.ref_batchsize, self.steps_done)

    def keep_gradient_norm(self, *, every: int) -> None:
        """From now on, leave the norm of every N-th step's mean gradient in `gradient_norm`; several N add up."""
        check_positive(every=every)
        self._norm_every.add(every)

    # ------------------------------------------------------------------------------------------------------------- step

    def step(self, closure: Callable[[], Any] | None = None) -> bool:  # type: ignore[override]
        """Take over the gradients of one minibatch, and update if that completes the step.

        Returns:
            True exactly when the weights changed: neither while accumulating nor if the update was skipped.
        """
        if closure is not None:
            raise ValueError("`closure` must be None: run the backward pass, then call step()")
        for before in self._optimizer_step_pre_hooks.values():
            before(self, (), {})
        if not self._has_begun:
            refuse_late_wrapper(self._parameters(), self._communicator)
            self._has_begun = True
        self._refuse_other_epoch()
        self._position.advance()
        self._factors = None
        is_last = self._position.is_complete
        with torch.no_grad():
            self._gradients.take(is_last=is_last)
            has_updated = is_last and self._complete_step()
        self._communicator.flush()
        for after in self._optimizer_step_post_hooks.values():
            after(self, (), {})
        return has_updated

    # torch would wrap step() for hooks and profiling, which takes longer than the accumulating; the inner step has it
    step.hooked = True  # type: ignore[attr-defined]

    def _refuse_other_epoch(self) -> None:
        sampler, position = self.sampler, self._position
        if sampler.epoch != position.epoch or sampler.first_step != position.first_step:
            raise RuntimeError(
                f"the sampler is in epoch {sampler.epoch} (from its step {sampler.first_step} on) but the optimizer in "
                f"epoch {position.epoch} (from {position.first_step} on): call set_epoch on both, alike"
            )

    def _complete_step(self) -> bool:
        """Reduce, update, and leave everything ready for the next step; False if the update was skipped."""
        step, is_idle = self._rule_step(), self.is_idle
        weight = (1 if self.rule.sums_gradients else 1 / step.num_minibatches) / self.loss_scale
        self._gradients.reduce(0.0 if is_idle else weight)
        self.gradient_norm = self._norm_of(step)
        is_skipped = (self.skip_nonfinite or self.rule.measures_noise) and self._observe(step)
        if is_skipped:
            self._say_skipped()
        else:
            self._update(step)
        self._gradients.clear()
        self._buffers.settle(is_taken_back=is_idle or is_skipped)
        self._buffers.save(self._position.is_idle_next)
        self.steps_done += 1
        self.samples_done += step.batch_size
        if self.log_steps and self.steps_done % self.log_steps == 0 and self.sampler.rank == 0:
            self._log()
        return not is_skipped

    def _size_of_sum(self, step: Step) -> int:
        """By what the gradient of the update is larger than the mean."""
        return step.num_minibatches if self.rule.sums_gradients else 1

    def _norm_of(self, step: Step) -> torch.Tensor | None:
        if not any((self.steps_done + 1) % every == 0 for every in self._norm_every):
            return None
        return self._gradients.norm() / self._communicator.varying(self._size_of_sum(step))

    def _observe(self, step: Step) -> bool:
        """Show the rule the norms of the gradients, unless they are not finite and the update is to be skipped."""
        size = self._size_of_sum(step)
        # the squares of scaled gradients have been divided by the loss scale once, and by n unless they are of a sum
        found, is_finite = self._gradients.norms()
        if self.skip_nonfinite and not is_finite:
            return True
        norms = [pair and Norms(pair[0] / self.loss_scale / size, pair[1] / size**2) for pair in found]
        self.rule.observe(step, norms)
        return False

    def _update(self, step: Step) -> None:
        """Let the inner optimizer make its step, with the settings that the rule gives it."""
        if self.clip_grad_norm is not None:
            largest = self._communicator.varying(self.clip_grad_norm * self._size_of_sum(step))
            torch.nn.utils.clip_grad_norm_([p for p in self._parameters() if p.grad is not None], largest)
        self._factors = [
            self._transition_of(group).move(self.rule.factor_of_group(step, group), step.batch_size)
            for group in range(len(self.param_groups))
        ]
        with self._settings.of_step(self.rule, step, self._factors) as self._lrs:
            self.inner.step()
        self.progress += self.rule.worth(self._transition_of_all.move(self.rule.factor(step), step.batch_size))
        if self._preconditioner is not None:
            self._preconditioner.refresh()

    def _say_skipped(self) -> None:
        self.steps_skipped += 1
        if self.sampler.rank == 0:
            logger.warning(
                "epoch %d, step %d/%d: the gradient is not finite, the update is skipped (%d so far)",
                self.epoch,
                self.epoch_step,
                self._position.num_epoch_steps,
                self.steps_skipped,
            )

    def _log(self) -> None:
        logger.info(
            "epoch %d, step %d/%d: batch size %d, learning rate %g, %d samples in all",
            self.epoch,
            self.epoch_step,
            self._position.num_epoch_steps,
            self.batch_size,
            self.current_lr(),
            self.samples_done,
        )


def _check(
    inner: Optimizer, sampler: CustomSampler, rule: Rule, clip_grad_norm: float | None, loss_scale: float
) -> None:
    if not isinstance(inner, Optimizer) or isinstance(inner, CustomOptimizer):
        raise ValueError(f"`inner` must be an optimizer of torch, got {type(inner).__name__}")
    if isinstance(inner, torch.optim.LBFGS):
        raise ValueError("`inner` must update from one gradient, got LBFGS, which evaluates the loss again and again")
    if not isinstance(sampler, CustomSampler):
        raise ValueError(f"`sampler` must be a CustomSampler, got {type(sampler).__name__}")
    if not isinstance(rule, Rule):
        raise ValueError(f"`rule` must be a Rule, got {rule!r}")
    rule.check(_name_of(inner), inner.param_groups)
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        raise ValueError(f"`clip_grad_norm` must be positive, got {clip_grad_norm!r}")
    if not 0 < loss_scale < math.inf:
        raise ValueError(f"`loss_scale` must be positive and finite, got {loss_scale!r}")


def _name_of(inner: Optimizer) -> str:
    """The name of an optimizer's class, or of the one of torch that it is made of."""
    names = [kind.__name__ for kind in type(inner).__mro__ if kind.__module__.startswith("torch.optim.")]
    return next((name for name in names if name != "Optimizer"), type(inner).__name__)
