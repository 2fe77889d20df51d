"""CustomOptimizer: accumulates, or all-reduces and updates, as the schedule says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from variable_batch_size.checks import check_not_negative
from variable_batch_size.cores.running import communicator_for
from variable_batch_size.rules.rule import Norms, Rule, Step
from variable_batch_size.training.buffers import Buffers
from variable_batch_size.training.gradient_kinds import gradients_for
from variable_batch_size.training.joining import join_other_cores
from variable_batch_size.training.preconditioner import Preconditioner
from variable_batch_size.training.sameness import share_from_first
from variable_batch_size.training.sampler import CustomSampler
from variable_batch_size.training.scheduled import ScheduledOptimizer
from variable_batch_size.training.settings import Settings
from variable_batch_size.training.wrapped import refuse_other_reductions, take_over_reduction

logger = logging.getLogger(__name__)

STATE_KEY = "variable_batch_size"


class CustomOptimizer(ScheduledOptimizer):
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
            graphs and to save the memory of one gradient; they must then not be touched, nor may a parameter be frozen,
            added or converted within a step.
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
        super().__init__(
            inner,
            sampler,
            rule=rule,
            ref_batchsize=ref_batchsize,
            smooth_steps=smooth_steps,
            max_factor=max_factor,
            loss_scale=loss_scale,
        )
        check_not_negative(log_steps=log_steps)
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ValueError(f"`clip_grad_norm` must be positive, got {clip_grad_norm!r}")
        self.log_steps = int(log_steps)
        self.clip_grad_norm = clip_grad_norm
        self.skip_nonfinite = rule.measures_noise if skip_nonfinite is None else skip_nonfinite
        self._communicator = communicator_for(self.parameters())
        self._pass = -1  # of the sampler, that of the latest minibatch
        options = {"clip_grad_norm": clip_grad_norm, "smooth_steps": smooth_steps, "max_factor": max_factor}
        options |= {"skip_nonfinite": self.skip_nonfinite, "keep_gradients": keep_gradients, "loss_scale": loss_scale}
        join_other_cores(self, self._communicator, model, options)
        self._preconditioner = Preconditioner(inner) if rule.preconditions else None
        divisors = None if self._preconditioner is None else self._preconditioner.divisors
        self._gradients = gradients_for(
            inner, self._communicator, measures=rule.measures_noise, divisors=divisors, keeps=keep_gradients
        )
        self._buffers = Buffers(model, self._communicator, may_skip=self.skip_nonfinite)
        self._settings = Settings(inner, self._communicator)
        self._begin_epoch()

    # ---------------------------------------------------------------------------------------- a torch.optim.Optimizer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, on all cores; they start out as they are on core 0, without a gradient."""
        self.inner.add_param_group(param_group)
        added = self.inner.param_groups[-1]["params"]
        for p in added:
            p.grad = None  # of minibatches before, which nobody has taken over
        share_from_first(added, self._communicator)
        take_over_reduction(added, self._communicator)
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
        self._load_state_of_run(own)
        self.set_epoch(own["epoch"], own["epoch_step"])
        self._settings.adam_bias.load_state_dict(own.get("adam_bias", {}))
        if self._preconditioner is not None:
            self._preconditioner.refresh()

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
        self._has_begun = False  # whether there was a minibatch since
        self._gradients.discard()
        self._factors = None
        self._buffers.save(self.is_idle)
        self._communicator.flush()  # else what was noted down would make the first minibatch another program

    # ------------------------------------------------------------------------------------------------------------- step

    def step(self, closure: Callable[[], Any] | None = None) -> bool:  # type: ignore[override]
        """Take over the gradients of one minibatch, and update if that completes the step.

        Returns:
            True exactly when the weights changed: neither while accumulating nor if the update was skipped.
        """
        if closure is not None:
            raise ValueError("`closure` must be None: run the backward pass, then call step()")
        if hasattr(self, "found_inf"):
            raise RuntimeError(
                "GradScaler.step() would leave out minibatches that are not finite: call step() of the optimizer, with "
                "`loss_scale`, and give the scale to GradScaler.update()"
            )
        for before in self._optimizer_step_pre_hooks.values():
            before(self, (), {})
        self._refuse_other_epoch()
        if not self._has_begun:
            refuse_other_reductions(self.parameters(), self._communicator)
            self._has_begun = True
        self._position.advance()
        self._factors = None
        is_last = self._position.is_complete
        with torch.no_grad():
            self._gradients.take(is_last=is_last, is_only=self.batch_size == self.sampler.minibatch_size)
            has_updated = is_last and self._complete_step()
        self._communicator.flush()
        for after in self._optimizer_step_post_hooks.values():
            after(self, (), {})
        return has_updated

    # GradScaler then calls step() for every minibatch, instead of leaving out some without a word
    _step_supports_amp_scaling = True

    # torch would wrap step() for hooks and profiling, which takes longer than the accumulating; the inner step has it
    step.hooked = True  # type: ignore[attr-defined]

    def _refuse_other_epoch(self) -> None:
        sampler, position = self.sampler, self._position
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
        self._pass = sampler.num_passes

    def _complete_step(self) -> bool:
        """Reduce, update, and leave everything ready for the next step; False if the update was skipped."""
        step, is_idle = self._rule_step(), self.is_idle
        weight = (1 if self.rule.sums_gradients else 1 / step.num_minibatches) / self.loss_scale
        try:
            self._gradients.reduce(0.0 if is_idle else weight)
            self.gradient_norm = self._norm_of(step)
            is_skipped = (self.skip_nonfinite or self.rule.measures_noise) and self._observe(step)
            if is_skipped:
                self._say_skipped()
            else:
                self._update(step)
        finally:
            self._gradients.clear()
        self._buffers.settle(is_taken_back=is_idle or is_skipped)
        self._buffers.save(self._position.is_idle_next)
        self._count_step(step)
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
        if step.num_minibatches == 1:  # whose squared norm need not have been measured twice
            norms = [pair and Norms(pair.square_of_mean, pair.square_of_mean) for pair in norms]
        self.rule.observe(step, norms)
        return False

    def _update(self, step: Step) -> None:
        """Let the inner optimizer make its step, with the settings that the rule gives it."""
        if self.clip_grad_norm is not None:
            largest = self._communicator.varying(self.clip_grad_norm * self._size_of_sum(step))
            torch.nn.utils.clip_grad_norm_([p for p in self.parameters() if p.grad is not None], largest)
        self._factors = self._scaling.move(step, len(self.param_groups))
        with self._settings.of_step(self.rule, step, self._factors) as self._lrs:
            self.inner.step()
        if self._preconditioner is not None:
            self._preconditioner.refresh()

    def _say_skipped(self) -> None:
        self.steps_skipped += 1
        if self.sampler.rank == 0:
            message = "epoch %d, step %d/%d: the gradient is not finite, the update is skipped (%d so far)"
            logger.warning(message, *self._place(), self.steps_skipped)

    def _log(self) -> None:
        message = "epoch %d, step %d/%d: batch size %d, learning rate %g, %d samples in all"
        logger.info(message, *self._place(), self.batch_size, self.current_lr(), self.samples_done)

    def _place(self) -> tuple[int, int, int]:
        return self.epoch, self.epoch_step, self._position.num_epoch_steps
