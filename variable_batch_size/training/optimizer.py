"""CustomOptimizer: accumulates, or all-reduces and updates, as the schedule says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import torch

from variable_batch_size.cores.running import communicator_for
from variable_batch_size.rules.rule import Rule, Step
from variable_batch_size.training.buffers import Buffers
from variable_batch_size.training.dealer import Dealer
from variable_batch_size.training.first_names import FirstNames
from variable_batch_size.training.gradient_kinds import gradients_for
from variable_batch_size.training.gradients import Mean
from variable_batch_size.training.joining import as_before_if_refused, join_later, join_other_cores
from variable_batch_size.training.minibatch_seeds import MinibatchSeeds
from variable_batch_size.training.observer import Observer
from variable_batch_size.training.passes import Passes
from variable_batch_size.training.preconditioner import Preconditioner
from variable_batch_size.training.settings import Settings
from variable_batch_size.training.stand_ins import StandIns
from variable_batch_size.training.together import Inner
from variable_batch_size.training.unsupported import refuse_call
from variable_batch_size.training.weights import Weight
from variable_batch_size.training.wrapped import refuse_other_reductions

logger = logging.getLogger(__name__)

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
            core (:class:`MinibatchSeeds`); None for as `exact` is.
        reduce_once: let a model in ``fully_shard`` reduce once a step instead of in every round, for the memory of
            whole gradients on each core; other models always do so.
    """

    def __init__(
        self,
        inner: Inner,
        sampler: Dealer,
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
        complete_joining = join_other_cores(self, self._communicator, model, options)
        self._preconditioner = Preconditioner(self.inner) if self.rule.preconditions else None
        divisors = None if self._preconditioner is None else self._preconditioner.divisors
        self._gradients = gradients_for(
            self.inner,
            self._communicator,
            sampler=sampler,
            measures=measures,
            divisors=divisors,
            keeps=keep_gradients,
            exact=exact,
            reduces_once=reduce_once,
        )
        self._observer = Observer(self._gradients, self.rule, self._own_meter, skip_nonfinite=self.skip_nonfinite)
        self._stand_ins = StandIns(sampler.schedule.lockstep, self._gradients, model, self._communicator)
        self._buffers = Buffers(model, self._communicator, may_skip=self.skip_nonfinite)
        self._settings, self._passes = Settings(self.inner, self._communicator), Passes(sampler)
        self._seeds = MinibatchSeeds(self.seeds_minibatches, sampler, self._position, next(self.parameters()), model)
        self._begin_epoch()
        complete_joining()

    # ---------------------------------------------------------------------------------------- a torch.optim.Optimizer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, on all cores; they start out as they are on core 0, without a gradient."""
        before = list(self.parameters())
        with as_before_if_refused(self.inner):
            self.inner.add_param_group(param_group)
            added = self.inner.param_groups[-1]["params"]
            join_later(added, before, self._communicator, self.sampler.process_group)
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
            refuse_other_reductions(self.parameters(), self._communicator)
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
            largest = self._communicator.varying(self.clip_grad_norm * self._mean().multiple)
            self._gradients.clip(largest)
        self._factors = self._scaling.move(step, len(self.param_groups))
        with self._settings.of_step(self.rule, step, self._factors) as self._lrs:
            self.inner.step()
        if self._preconditioner is not None:
            self._preconditioner.refresh()
