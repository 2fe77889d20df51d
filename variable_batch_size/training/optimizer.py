"""CustomOptimizer: accumulates, or all-reduces and updates, as the schedule says; a subclass for each rule."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from variable_batch_size.checks import check_not_negative, check_positive, check_within
from variable_batch_size.cores.running import communicator_for
from variable_batch_size.rules.noise import Noise
from variable_batch_size.rules.rule import (
    AdamRule,
    AdamScaleRule,
    AdaScaleRule,
    ConstantRule,
    LEGWRule,
    LinearMomentumRule,
    LinearRule,
    RootRule,
    Rule,
    Step,
    Transition,
)
from variable_batch_size.training.buffers import Buffers
from variable_batch_size.training.gradients import gradients_for
from variable_batch_size.training.sampler import CustomSampler

logger = logging.getLogger(__name__)

STATE_KEY = "variable_batch_size"


class CustomOptimizer(Optimizer):
    """Makes one update of every step of the schedule, with the inner optimizer and the settings the rule gives it.

    Call :meth:`step` after the backward pass of each minibatch. It accumulates until this core has run its share of the
    step; then all cores sum their gradients, and each makes the same update with the mean over the step's samples.
    Parameters start out as they are on core 0.

    Args:
        inner: any optimizer of torch, with the settings that are right at `ref_batchsize`.
        sampler: the sampler that deals the minibatches.
        rule: what the batch size of a step makes of the settings.
        ref_batchsize: the batch size at which the settings of `inner` are right.
        log_steps: log every so many steps on core 0; 0 for never.
        clip_grad_norm: the largest norm of a step's mean gradient over all parameters; None for no bound.
        model: whose buffers (BatchNorm's statistics) an idle core's stand-in minibatch must not change.
        smooth_steps: spread a jump of the factor over so many steps (:class:`Transition`).
        max_factor: the largest factor; None for no bound.
        skip_nonfinite: make no update where the gradient is not finite, on all cores together; costs a wait for the
            device in every step. None for False, and True for rules that measure gradients anyway.
        loss_scale: what the user multiplies the loss by, to be divided out of the gradient; may be set between steps.

    Attributes:
        gradient_norm: the norm of the latest step's mean gradient before clipping, on the device; None unless that step
            is one of those for which :meth:`keep_gradient_norm` has asked.
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
    ) -> None:
        if not isinstance(inner, Optimizer) or isinstance(inner, CustomOptimizer):
            raise ValueError(f"`inner` must be an optimizer of torch, got {type(inner).__name__}")
        if isinstance(inner, torch.optim.LBFGS):
            raise ValueError(
                "`inner` must update from one gradient, got LBFGS, which evaluates the loss again and again"
            )
        if not isinstance(sampler, CustomSampler):
            raise ValueError(f"`sampler` must be a CustomSampler, got {type(sampler).__name__}")
        if not isinstance(rule, Rule):
            raise ValueError(f"`rule` must be a Rule, got {rule!r}")
        check_positive(ref_batchsize=ref_batchsize)
        check_not_negative(log_steps=log_steps)
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ValueError(f"`clip_grad_norm` must be positive, got {clip_grad_norm!r}")
        if not 0 < loss_scale < math.inf:
            raise ValueError(f"`loss_scale` must be positive and finite, got {loss_scale!r}")
        self.inner = inner
        self.sampler = sampler
        self.rule = rule
        self.ref_batchsize = int(ref_batchsize)
        self.log_steps = int(log_steps)
        self.clip_grad_norm = clip_grad_norm
        self.skip_nonfinite = rule.measures_noise if skip_nonfinite is None else skip_nonfinite
        self.loss_scale = loss_scale
        # sets up hooks and profiling as Optimizer.__init__ does, without a second set of param_groups and state
        super().__setstate__({})

        self._communicator = communicator_for(p for group in inner.param_groups for p in group["params"])
        if (sampler.rank, sampler.num_replicas) != (self._communicator.rank, self._communicator.num_replicas):
            raise ValueError(
                f"the sampler is for core {sampler.rank} of {sampler.num_replicas}, "
                f"but this is core {self._communicator.rank} of {self._communicator.num_replicas}"
            )
        self._gradients = gradients_for(
            lambda: self.inner.param_groups,
            self._communicator,
            measures=rule.measures_noise,
            is_preconditioned=rule.preconditions,
        )
        self._buffers = Buffers(model, self._communicator, may_skip=self.skip_nonfinite)
        self._new_transition = partial(Transition, smooth_steps=smooth_steps, max_factor=max_factor)
        self._transitions = [self._new_transition() for _ in inner.param_groups]  # more as groups are added
        self._factors: list[float] | None = None  # of the latest step, once it is complete
        self._lrs: list[float] = []  # likewise
        self._communicator.broadcast([p for group in inner.param_groups for p in group["params"]])
        self.steps_done = 0
        self.samples_done = 0
        self.steps_skipped = 0
        self._norm_every: set[int] = set()
        self.gradient_norm: torch.Tensor | None = None
        self._step = self._minibatches_left = 0
        self.set_epoch(0)

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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: gradients are zeroed after each update and must stay while they accumulate."""

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state and the position; in the middle of a step, the position before that step."""
        own = {
            "epoch": self.epoch,
            "epoch_step": self.epoch_step,
            "steps_done": self.steps_done,
            "samples_done": self.samples_done,
            "steps_skipped": self.steps_skipped,
            "rule": self.rule.state_dict(),
            "transitions": [transition.state_dict() for transition in self._transitions],
            "without_gradient": self._gradients.waiting,
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
        for group, saved in enumerate(own["transitions"]):
            self._transition_of(group).load_state_dict(saved)
        self._gradients.waiting = own["without_gradient"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r}, ref_batchsize={self.ref_batchsize})"

    # --------------------------------------------------------------------------------------------------------- position

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Go to an epoch. Call it before each pass over the loader, and on the sampler too.

        Args:
            epoch: its number, from 0.
            first_step: how many of the epoch's steps to leave out, for a run that was stopped after them.
        """
        steps = self.sampler.schedule.steps(epoch)
        check_within(len(steps), first_step=first_step)
        self._discard_unfinished()
        self.epoch = epoch
        self._steps = steps
        self._first_step = first_step
        self._step = steps[min(first_step, len(steps) - 1)]
        self._minibatches_left = self._share(self._step) if first_step < len(steps) else 0
        self._factors = None
        self._buffers.save(self.is_idle)
        self._communicator.flush()  # else what was noted down would make the first minibatch another program

    def _share(self, step: int) -> int:
        """How many minibatches this core runs in a step: at least a stand-in."""
        return max(1, len(self.sampler.schedule.minibatches(step, self.sampler.rank)))

    def _discard_unfinished(self) -> None:
        if self.is_accumulating:
            logger.warning(
                "core %d left step %d of epoch %d unfinished: its gradients are discarded",
                self.sampler.rank,
                self._steps.index(self._step),
                self.epoch,
            )
            self._gradients.clear()

    @property
    def epoch_step(self) -> int:
        """How many steps of the epoch are done."""
        return self._steps.index(self._step) + (self._minibatches_left == 0)

    @property
    def is_accumulating(self) -> bool:
        """Whether this core has run some of its minibatches of a step, and not all."""
        return self._minibatches_left not in (0, self._share(self._step))

    @property
    def batch_size(self) -> int:
        """The batch size of the step that the latest minibatch belongs to; at first, of the epoch's first step."""
        return self.sampler.schedule.batch_size(self._step)

    @property
    def is_idle(self) -> bool:
        """Whether the latest minibatch was a stand-in, because this core has none in that step."""
        return self.sampler.schedule.is_idle(self._step, self.sampler.rank)

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
        """Take in the gradients of one minibatch, and update if that completes the step.

        Returns:
            True exactly when the weights changed: neither while accumulating nor if the update was skipped.
        """
        if closure is not None:
            raise ValueError("`closure` must be None: run the backward pass, then call step()")
        for before in self._optimizer_step_pre_hooks.values():
            before(self, (), {})
        self._advance()
        is_last = not self._minibatches_left
        self._gradients.collect(is_last)
        has_updated = is_last and self._complete_step()
        self._communicator.flush()
        for after in self._optimizer_step_post_hooks.values():
            after(self, (), {})
        return has_updated

    # torch would wrap step() for hooks and profiling, which takes longer than the accumulating; the inner step has it
    step.hooked = True  # type: ignore[attr-defined]

    def _advance(self) -> None:
        """Note one more minibatch, which begins the next step if the latest is complete."""
        if self.sampler.epoch != self.epoch or self.sampler.first_step != self._first_step:
            raise RuntimeError(
                f"the sampler is in epoch {self.sampler.epoch} (from its step {self.sampler.first_step} on) but the "
                f"optimizer in epoch {self.epoch} (from {self._first_step} on): call set_epoch on both, alike"
            )
        if not self._minibatches_left:
            if self._step == self._steps[-1]:
                raise RuntimeError(
                    f"epoch {self.epoch} has {len(self._steps)} steps and all are done: call set_epoch on the sampler "
                    "and the optimizer before the next pass over the loader"
                )
            self._step += 1
            self._minibatches_left = self._share(self._step)
            self._factors = None
        self._minibatches_left -= 1

    def _complete_step(self) -> bool:
        """Reduce, update, and leave everything ready for the next step; False if the update was skipped."""
        step, is_idle = self._rule_step(), self.is_idle
        weight = (1 if self.rule.sums_gradients else 1 / step.num_minibatches) / self.loss_scale
        self._gradients.reduce(0.0 if is_idle else weight)
        self.gradient_norm = None
        if any((self.steps_done + 1) % every == 0 for every in self._norm_every):
            size = step.num_minibatches if self.rule.sums_gradients else 1
            self.gradient_norm = self._gradients.norm() / self._communicator.varying(size)
        is_skipped = False
        if self.skip_nonfinite or self.rule.measures_noise:
            # the squares of scaled gradients have been divided by the loss scale once
            norms = [(squares / self.loss_scale, square) for squares, square in self._gradients.norms()]
            is_skipped = self.skip_nonfinite and not all(math.isfinite(norm) for pair in norms for norm in pair)
            if not is_skipped:
                self.rule.observe(step, norms)
        if is_skipped:
            self._say_skipped()
        else:
            self._update(step)
        self._gradients.clear()
        self._buffers.settle(is_taken_back=is_idle or is_skipped)
        is_idle_next = self._step < self._steps[-1] and self.sampler.schedule.is_idle(self._step + 1, self.sampler.rank)
        self._buffers.save(is_idle_next)
        self.steps_done += 1
        self.samples_done += step.batch_size
        if self.log_steps and self.steps_done % self.log_steps == 0 and self.sampler.rank == 0:
            self._log()
        return not is_skipped

    def _update(self, step: Step) -> None:
        """Let the inner optimizer make its step, with the settings that the rule gives it."""
        if self.clip_grad_norm is not None:
            largest = self.clip_grad_norm * (step.num_minibatches if self.rule.sums_gradients else 1)
            torch.nn.utils.clip_grad_norm_(self._gradients.parameters, self._communicator.varying(largest))
        self._factors = [
            self._transition_of(group).move(self.rule.factor_of_group(step, group), step.batch_size)
            for group in range(len(self.param_groups))
        ]
        with self._settings_of(step, self._factors):
            self._lrs = [float(group["lr"]) for group in self.param_groups]
            self.inner.step()

    def _say_skipped(self) -> None:
        self.steps_skipped += 1
        if self.sampler.rank == 0:
            logger.warning(
                "epoch %d, step %d/%d: the gradient is not finite, the update is skipped (%d so far)",
                self.epoch,
                self.epoch_step,
                len(self._steps),
                self.steps_skipped,
            )

    @contextmanager
    def _settings_of(self, step: Step, factors: list[float]) -> Iterator[None]:
        """Within, the parameter groups have the settings that the rule gives this step."""
        found: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for group, factor in zip(self.param_groups, factors, strict=True):
                for name, value in self.rule.settings(group, step, factor).items():
                    found.append((group, name, group[name]))
                    group[name] = self._communicator.varying(value) if isinstance(value, float) else value
            yield
        finally:
            for group, name, value in found:
                group[name] = value

    def _log(self) -> None:
        logger.info(
            "epoch %d, step %d/%d: batch size %d, learning rate %g, %d samples in all",
            self.epoch,
            self.epoch_step,
            len(self._steps),
            self.batch_size,
            self.current_lr(),
            self.samples_done,
        )


class LinearRuleOptimizer(CustomOptimizer):
    """:class:`CustomOptimizer` with lr = lr0 · S, S = batch size / `ref_batchsize` (:class:`LinearRule`)."""

    def __init__(self, inner: Optimizer, sampler: CustomSampler, *, ref_batchsize: int, **options: Any) -> None:
        super().__init__(inner, sampler, rule=LinearRule(), ref_batchsize=ref_batchsize, **options)


class RootRuleOptimizer(CustomOptimizer):
    """:class:`CustomOptimizer` with lr = lr0 · √S, S = batch size / `ref_batchsize` (:class:`RootRule`)."""

    def __init__(self, inner: Optimizer, sampler: CustomSampler, *, ref_batchsize: int, **options: Any) -> None:
        super().__init__(inner, sampler, rule=RootRule(), ref_batchsize=ref_batchsize, **options)


class ConstantOptimizer(CustomOptimizer):
    """:class:`CustomOptimizer` with lr = lr0 for every batch size, so that `ref_batchsize` is of no effect."""

    def __init__(self, inner: Optimizer, sampler: CustomSampler, *, ref_batchsize: int = 1, **options: Any) -> None:
        super().__init__(inner, sampler, rule=ConstantRule(), ref_batchsize=ref_batchsize, **options)


class LinearRuleMomentumOptimizer(CustomOptimizer):
    """:class:`CustomOptimizer` with the linear rule in the form that suits momentum (:class:`LinearMomentumRule`)."""

    def __init__(self, inner: Optimizer, sampler: CustomSampler, *, ref_batchsize: int, **options: Any) -> None:
        super().__init__(inner, sampler, rule=LinearMomentumRule(), ref_batchsize=ref_batchsize, **options)


class LEGWRuleOptimizer(CustomOptimizer):
    """:class:`CustomOptimizer` with lr = lr0 · √S behind a warm-up of S · `warmup_samples` (:class:`LEGWRule`)."""

    def __init__(
        self, inner: Optimizer, sampler: CustomSampler, *, ref_batchsize: int, warmup_samples: int, **options: Any
    ) -> None:
        rule = LEGWRule(warmup_samples=warmup_samples)
        super().__init__(inner, sampler, rule=rule, ref_batchsize=ref_batchsize, **options)


class AdamRuleOptimizer(CustomOptimizer):
    """:class:`CustomOptimizer` with the square root rule for Adam's lr, betas and eps (:class:`AdamRule`)."""

    def __init__(self, inner: Optimizer, sampler: CustomSampler, *, ref_batchsize: int, **options: Any) -> None:
        _check_adam(inner)
        super().__init__(inner, sampler, rule=AdamRule(), ref_batchsize=ref_batchsize, **options)


class AdaScaleOptimizer(CustomOptimizer):
    """:class:`CustomOptimizer` with lr = lr0 · gain, the gain measured from the gradients (:class:`AdaScaleRule`).

    The statistics travel with the gradients in the same reduction, and are read once for each update.

    Args:
        starts_with_mean: average the noise of the first steps as the paper does, instead of debiased.
    """

    def __init__(
        self,
        inner: Optimizer,
        sampler: CustomSampler,
        *,
        ref_batchsize: int,
        starts_with_mean: bool = False,
        **options: Any,
    ) -> None:
        self._noise_rule = self._make_rule(starts_with_mean)
        super().__init__(inner, sampler, rule=self._noise_rule, ref_batchsize=ref_batchsize, **options)

    def _make_rule(self, starts_with_mean: bool) -> AdaScaleRule:
        return AdaScaleRule(starts_with_mean=starts_with_mean)

    def gain(self, batch_size: int | None = None, group: int | None = None) -> float:
        """How many steps at `ref_batchsize` a step is worth, from the noise as it is known now.

        Args:
            batch_size: of any step; of the step of the latest minibatch if None.
            group: a parameter group; all together if None.
        """
        size = self.batch_size if batch_size is None else batch_size
        return self._noise_rule.gain(size, self.ref_batchsize, group)

    @property
    def noise(self) -> Noise | None:
        """Variance and squared norm of per-sample gradients, averaged over steps; None before the first estimate."""
        return self._noise_rule.noise()

    @property
    def noise_scale(self) -> float:
        """The simple noise scale V/G², in samples; NaN before the first estimate."""
        return self.noise.scale if self.noise else math.nan

    @property
    def progress(self) -> float:
        """The sum of the gains of all steps: how many steps at `ref_batchsize` the run is worth so far."""
        return self._noise_rule.progress


class AdamScaleOptimizer(AdaScaleOptimizer):
    """:class:`CustomOptimizer` with lr = lr0 · √gain, for Adam and AdamW (:class:`AdamScaleRule`)."""

    def __init__(self, inner: Optimizer, sampler: CustomSampler, *, ref_batchsize: int, **options: Any) -> None:
        _check_adam(inner)
        super().__init__(inner, sampler, ref_batchsize=ref_batchsize, **options)

    def _make_rule(self, starts_with_mean: bool) -> AdaScaleRule:
        return AdamScaleRule(starts_with_mean=starts_with_mean)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._precondition()

    def _update(self, step: Step) -> None:
        super()._update(step)
        self._precondition()

    @torch.no_grad()
    def _precondition(self) -> None:
        """Let the next step's gradients be divided by the root of Adam's second moment, as far as there is one."""
        settings = {id(p): (group["betas"][1], group["eps"]) for group in self.param_groups for p in group["params"]}
        for p, divisor in zip(self._gradients.parameters, self._gradients.preconditioners, strict=True):
            if "exp_avg_sq" in self.state[p]:
                beta, eps = settings[id(p)]
                correction = 1 - beta ** float(self.state[p]["step"])
                divisor.copy_((self.state[p]["exp_avg_sq"] / correction).sqrt_().add_(eps))


def _check_adam(inner: Optimizer) -> None:
    if not all("betas" in group and "eps" in group for group in inner.param_groups):
        raise ValueError(f"`inner` must be Adam or of its kind, with betas and eps, got {type(inner).__name__}")
