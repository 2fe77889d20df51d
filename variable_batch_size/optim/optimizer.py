"""CustomOptimizer: accumulates, or all-reduces and updates, following the schedule."""

import logging
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NoReturn, TypedDict, TypeVar, overload

import torch
from torch.utils.data import DataLoader

from variable_batch_size.checks import check_not_negative, check_positive, given_ref_batchsize
from variable_batch_size.cores.detect import communicator_for, everyone_for
from variable_batch_size.cores.live import LiveCores
from variable_batch_size.data.cursor import Cursor, RunCount, StepPlan
from variable_batch_size.data.sampler import CustomSampler, Description, MinibatchSource, source_of
from variable_batch_size.data.shares import connect_cores
from variable_batch_size.optim import consistency
from variable_batch_size.optim.attachments import Attachments, Per
from variable_batch_size.optim.buffers import Buffers
from variable_batch_size.optim.engine import StepEngine
from variable_batch_size.optim.flow import Flow, make_meter
from variable_batch_size.optim.forward_state import ForwardState
from variable_batch_size.optim.gradients import make_accumulator
from variable_batch_size.optim.gradients.buckets import BucketAccumulator
from variable_batch_size.optim.hyperparameters import Preconditioner
from variable_batch_size.optim.live_steps import LiveSteps, refuse_unsupported
from variable_batch_size.optim.loop_checks import LoopChecks, refuse_direct_step
from variable_batch_size.optim.loss_scale import LossScale, Unscaling
from variable_batch_size.optim.open_step import OpenStep, refuse_options
from variable_batch_size.optim.parts.core_clock import CoreClock
from variable_batch_size.optim.parts.gradient_norm import GradientNorm
from variable_batch_size.optim.parts.log_line import LogLine
from variable_batch_size.optim.parts.part import Hooks, Part
from variable_batch_size.optim.parts.preparation import Flush, LayerSwitch, Rounds
from variable_batch_size.optim.policy_driver import PolicyDriver, Record
from variable_batch_size.optim.probe import RuleLike, checked_rule
from variable_batch_size.optim.proxy import Inner, OptimizerProxy, optimizers_of
from variable_batch_size.optim.run import Limit, Run
from variable_batch_size.optim.seeding import MinibatchSeeder
from variable_batch_size.optim.steps import KnownSteps, Steps
from variable_batch_size.optim.token_weights import TokenWeights, Weight
from variable_batch_size.optim.trace_watcher import driver_for
from variable_batch_size.optim.wrappers import Wrappers
from variable_batch_size.rules.noise import Noise, Smoothing
from variable_batch_size.rules.numbers import Number
from variable_batch_size.rules.rule import Rule
from variable_batch_size.rules.transition import LRScaler
from variable_batch_size.schedules.schedule import BaseSchedule

logger = logging.getLogger(__name__)

STATE_KEY = "variable_batch_size"
Loss = TypeVar("Loss")
Data = TypeVar("Data")


class Options(TypedDict, total=False):
    """The options of every optimizer of the library; :class:`CustomOptimizer` documents them."""

    ref_batch_size: int
    log_steps: int
    clip_grad_norm: float | None
    model: torch.nn.Module | None
    smooth_steps: int
    max_factor: float | None
    skip_nonfinite: bool | None
    gradient_as_bucket_view: bool
    measure_noise: bool | Literal["norm layers", "own norm"]
    smoothing: Smoothing
    exact: bool
    seed_minibatches: bool | None
    reduce_scatter_once: bool
    ignored_state: Collection[str]


# not those that may differ between ranks, or are compared by themselves, such as the shapes of the model
_COMPARED = Options.__annotations__.keys() - {"model", "log_steps", "ref_batch_size", "smoothing"}


def checked_limit(clip_grad_norm: float | None) -> float | None:
    """A limit of norms, which must be positive."""
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        raise ValueError(f"`clip_grad_norm` must be positive, got {clip_grad_norm!r}")
    return clip_grad_norm


class CustomOptimizer(OptimizerProxy):
    """Makes one update for every step of the schedule, with the inner optimizer and the settings that the rule returns.

        loader = vbs.DataLoader(dataset, trace="0:64 20:128 40:256", minibatch_size=32)
        optimizer = vbs.Optimizer(inner, loader, rule="linear", ref_batchsize=64, model=model)
        for epoch in optimizer.epochs(10):
            for data, target in loader:
                loss_fn(model(data), target).backward()
                optimizer.step()

    Call :meth:`step` after the backward pass of each minibatch. It takes ``p.grad`` of all parameters as that
    minibatch's gradient and leaves ``p.grad`` None. It accumulates until this core has run its share of the step; then
    all cores sum their gradients, and each makes the same update with the mean over the step's samples. Parameters and
    the model's buffers are broadcast from core 0 at the start.

    Args:
        inner: any optimizer of torch, with the settings that are right at `ref_batchsize`; or several for one model.
        sampler: the source of the minibatches: a :class:`DataLoader`, a :class:`CustomSampler`, a :class:`Stream`, or
            another loader that reads one of these.
        rule: computes the settings of a step from its batch size: a rule, or its name, such as ``"linear"``,
            ``"adascale"`` or ``"adam:half-life"``; or one for each of several optimizers. It is copied, so it can be
            used again; the attribute `rule` holds what is measured.
        ref_batchsize: the batch size at which the settings of `inner` are right.
        ref_batch_size: the same.
        log_steps: log every N steps on core 0, even if logging is not configured; 0 for never.
        clip_grad_norm: the largest norm of a step's mean gradient over all parameters; None for no limit.
        model: whose buffers (BatchNorm's statistics) the padding minibatch of an idle core must not change.
        smooth_steps: spread a jump of the factor over N steps (:class:`Transition`).
        max_factor: the largest factor; None for no limit.
        skip_nonfinite: skip the update where the gradient is not finite, on all cores together. With ``GradScaler``,
            such updates are always skipped. None means True where the gradients are measured and it costs no extra wait
            for the device (:class:`Flow`), otherwise False.
        gradient_as_bucket_view: leave gradients where they are, zeroed in place, and let autograd accumulate there, for
            CUDA graphs and to save the memory of one gradient; they must then not be modified, nor may a parameter be
            frozen, added or converted within a step.
        measure_noise: measure the gradient noise even if the rule does not need it, for `noise_scale` and `gain()`.
            ``"norm layers"`` also measures it in steps of one minibatch, by the samples' gradients of the model's
            normalization layers (:class:`NormLayers`). ``"own norm"`` measures it every 16 steps in the norm that fits
            the steps of `inner`: ℓ1 for Adam, Lion and the like, the nuclear norm for Muon (:class:`OwnNorms`).
        smoothing: how the noise is averaged, including that of a rule: a number, a function or ``"paper"``; None for an
            average that remembers at least 20 steps (:class:`NoiseRule`).
        exact: sum so that the weights are the same to the last bit on any number of cores; see the page on exactness.
        seed_minibatches: seed the random generators before each minibatch, so that its random numbers do not depend on
            the core (:class:`MinibatchSeeder`); None for the value of `exact`.
        reduce_scatter_once: let a model in ``fully_shard`` reduce once a step instead of in every round, at the cost of
            memory for full gradients on each core; other models always reduce once.
        ignored_state: names of buffers and other attributes of the model, with wildcards such as ``"*.calls"``, that a
            forward pass may change because they have no influence on the loss (:class:`ForwardState`).

    Attributes:
        run: the position of the run, and what it has done so far (:class:`Run`).
    """

    # GradScaler then calls step() for every minibatch, with `grad_scale` and `found_inf` as attributes of the optimizer
    _step_supports_amp_scaling = True

    def __init__(
        self,
        inner: Inner,
        sampler: MinibatchSource | DataLoader[Any],
        *,
        rule: RuleLike | Sequence[RuleLike],
        ref_batchsize: int | None = None,
        ref_batch_size: int | None = None,
        log_steps: int = 0,
        clip_grad_norm: float | None = None,
        model: torch.nn.Module | None = None,
        smooth_steps: int = 0,
        max_factor: float | None = None,
        skip_nonfinite: bool | None = None,
        gradient_as_bucket_view: bool = False,
        measure_noise: bool | Literal["norm layers", "own norm"] = False,
        smoothing: Smoothing = None,
        exact: bool = False,
        seed_minibatches: bool | None = None,
        reduce_scatter_once: bool = False,
        ignored_state: Collection[str] = (),
    ) -> None:
        options = {name: value for name, value in locals().items() if name in _COMPARED}
        super().__init__(inner)
        self.sampler = sampler = source_of(sampler)
        self._population = sampler.population
        self._communicator = communicator_for(self.parameters(), sampler.process_group)
        self._communicator.flush_before_collective()
        self._rule = checked_rule(rule, self.inner, model)
        ref_batchsize = given_ref_batchsize(ref_batchsize, ref_batch_size)
        check_not_negative(log_steps=log_steps)
        checked_limit(clip_grad_norm)
        self.ref_batchsize, self.exact = int(ref_batchsize), exact
        seeds_by_default = exact and not sampler.schedule.is_open
        self.seeds_minibatches = seeds_by_default if seed_minibatches is None else seed_minibatches
        self._measures = measures = self._rule.measures_noise or bool(measure_noise)
        self._lr_scaler = LRScaler(self._rule, smooth_steps=smooth_steps, max_factor=max_factor)
        meter = make_meter(self._rule, smoothing, measure_noise=bool(measure_noise))
        self._has_joined = False  # whether set_epoch() was called here in this pass
        self._init_wrappers(model)
        self._fingerprint = consistency.fingerprint_of(sampler, self._rule, self.inner, self.ref_batchsize)
        parts = (self._rule, self._lr_scaler, meter, self.inner, self._communicator)
        self._flow = Flow(*parts, is_read=skip_nonfinite is True)
        self.run = Run(sampler, self.parameters, self._flow, self.ref_batchsize)
        self.skip_nonfinite = self._flow.skips_by_default if skip_nonfinite is None else skip_nonfinite
        self._flow.skips = self.skip_nonfinite
        self._init_position()
        refuse_options(options, sampler, self._rule, self._communicator)
        self.ignored_state = sorted([ignored_state] if isinstance(ignored_state, str) else ignored_state)
        self._forward_state = self._make_forward_state()
        options |= {"skip_nonfinite": self.skip_nonfinite, "seed_minibatches": self.seeds_minibatches}
        options |= {"ignored_state": tuple(self.ignored_state)}
        finish_checks = consistency.sync_and_check_ranks(self, self._wrappers, self._communicator, options)
        connect_cores(sampler, self._communicator, next(self.parameters()).device)
        self._cursor.shares = sampler.shares
        self._cursor.move(sampler.epoch, sampler.first_step)
        self._preconditioner = Preconditioner(self.inner, self._rule.min_updates) if self._rule.preconditions else None
        self._accumulator = make_accumulator(
            self.inner,
            self._communicator,
            sampler=sampler,
            wrappers=self._wrappers,
            rule=self._rule,
            measure_noise=measure_noise,
            is_read=measures or self.skip_nonfinite,
            stays_on_device=self._flow.way == "on the device",
            divisors=None if self._preconditioner is None else self._preconditioner.divisors,
            gradient_as_bucket_view=gradient_as_bucket_view,
            exact=exact,
            reduce_scatter_once=reduce_scatter_once,
        )
        self._init_minibatches(model, reduces_once=reduce_scatter_once)
        self._engine = StepEngine(
            self.run,
            self._make_steps(),
            self._accumulator,
            self._flow,
            self.inner,
            self._communicator,
            self._preconditioner,
            clip_grad_norm,
        )
        self._parts = self._make_parts(int(log_steps))
        self._attachments = Attachments()
        self._bind_parts()
        # a stream may be read in another process, and with open steps a loader need not be read
        self._engine.watch(not isinstance(sampler, CustomSampler) or sampler.schedule.is_open)
        self._begin_epoch()
        sampler.attach(self)
        finish_checks()

    def _init_wrappers(self, model: torch.nn.Module | None) -> None:
        self._wrappers = Wrappers(self.parameters(), model, self._communicator)
        if self.sampler.is_elastic:
            refuse_unsupported(self)
        if self._wrappers.fsdp:
            self.sampler.run_in_lockstep()

    def _init_position(self) -> None:
        """Let a policy decide the first batch sizes, and go to the first step."""
        sampler = self.sampler
        self._driver = driver_for(self.run, sampler.schedule)
        self._cursor = self.run.cursor = Cursor(sampler.schedule, sampler.rank)
        self._cursor.move(sampler.epoch, sampler.first_step)

    def _init_minibatches(self, model: torch.nn.Module | None, *, reduces_once: bool) -> None:
        """What happens before and after each minibatch."""
        sampler, parameters = self.sampler, self.parameters
        everyone = everyone_for(parameters(), sampler.process_group) if self._wrappers.fsdp else None
        is_summed = self._accumulator.is_summed_by_autograd
        how: Any = {"measures": self._measures, "reduces_once": reduces_once}
        self._loss_scale = LossScale(parameters, is_summed=is_summed, everyone=everyone, **how)
        self._buffers = Buffers(model, self._communicator, may_skip=self.skip_nonfinite)
        self._seeder = MinibatchSeeder(self.seeds_minibatches, sampler, self._cursor, next(parameters()), model)
        self._checks = LoopChecks(parameters, sampler, self._accumulator, self._seeder, self.run, exact=self.exact)
        for one in optimizers_of(self.inner):
            if hasattr(one, "_optimizer_step_pre_hooks"):  # a wrapper of another library may lack them
                one.register_step_pre_hook(partial(refuse_direct_step, weakref.ref(self)))

    def _make_forward_state(self) -> ForwardState:
        is_on = self.exact or self._communicator.num_replicas > 1 or self.sampler.is_elastic
        return ForwardState(self._wrappers, is_on=is_on, exact=self.exact, ignored=self.ignored_state)

    def _make_parts(self, log_steps: int) -> list[Part]:
        """What happens around minibatches and steps, in this order; what is attached follows."""
        run, gradients, communicator = self.run, self._accumulator, self._communicator
        loss_scale, buffers, schedule = self._loss_scale, self._buffers, self.sampler.schedule
        self._gradient_norm = GradientNorm(run)
        self._unscaling = Unscaling(loss_scale, gradients, buffers, self._flow, communicator, skips=self.skip_nonfinite)
        layers = gradients.norm_layers
        parts = [
            self._unscaling,  # first: all others see gradients without a loss scale
            self._forward_state,  # before anything else writes to the model
            self._checks,  # before a step without gradients counts
            self._gradient_norm,
            None if layers is None else LayerSwitch(layers),
            Rounds(gradients) if schedule.lockstep else None,  # before buffers are saved, as FSDP may have some
            self._driver,  # the next steps are decided before anything asks for their plans
            None if self._buffers.model is None else buffers,
            CoreClock(self._cursor.shares) if self._cursor.shares is not None else None,
            LogLine(run, self._engine.rates, log_steps) if log_steps else None,
            Flush(communicator) if communicator.is_one_program else None,  # ends the graph, before seeds are set
            self._seeder if self.seeds_minibatches else None,  # last: what comes before may draw random numbers
        ]
        return [part for part in parts if part is not None]

    def _bind_parts(self) -> None:
        self._engine.hooks = Hooks([*self._parts, *self._attachments.parts])

    def _make_steps(self) -> Steps:
        sampler, cursor, accumulator = self.sampler, self._cursor, self._accumulator
        if sampler.schedule.is_open:
            what = (self.run.weights, self._loss_scale, self._buffers)
            device = next(self.parameters()).device
            return OpenStep(sampler, cursor, accumulator, *what, skips=self.skip_nonfinite, device=device)
        if isinstance(self._communicator, LiveCores) and isinstance(accumulator, BucketAccumulator):
            return LiveSteps(self, self._communicator, cursor, accumulator, self._buffers, self._loss_scale)
        return KnownSteps(cursor, accumulator, self._loss_scale)

    def __repr__(self) -> str:
        names = " and ".join(type(one).__name__ for one in optimizers_of(self.inner))
        lrs = ", ".join(f"{float(group['lr']):g}" for group in self.param_groups)
        at = f"lr {lrs} at batch size {self.ref_batchsize}, epoch {self.epoch}, {self.run.steps_done} steps done"
        return f"<{type(self).__name__} of {names}: {self._rule!r}, {at}>"

    def __getstate__(self) -> dict[str, Any]:
        self._flow.settle()  # first: a copy has the numbers that the host knows
        return {**super().__getstate__(), "_attachments": Attachments()}  # these belong to this optimizer

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind_parts()
        self.sampler.attach(self)

    @overload  # type: ignore[override]
    def step(
        self,
        closure: None = None,
        *,
        weight: Weight | None = None,
        loss: Number | None = None,
        last: bool | None = None,
    ) -> bool: ...

    @overload
    def step(
        self,
        closure: Callable[[], Loss],
        *,
        weight: Weight | None = None,
        loss: Number | None = None,
        last: bool | None = None,
    ) -> Loss: ...

    def step(
        self, closure: Any = None, *, weight: Weight | None = None, loss: Number | None = None, last: bool | None = None
    ) -> Any:
        """Accumulate the gradients of one minibatch, and update if it completes the step.

        Args:
            closure: runs the forward and the backward pass of the minibatch, and is called once; None if both have run.
            weight: of the minibatch, for example the number of its tokens, where the loss is the *sum* over them; the
                gradient of the step is then the mean over all tokens of all cores. A number, or a tensor on the device.
            loss: of the minibatch, for a log that is attached; by default what the closure returns.
            last: in :class:`OpenSteps`, whether this is the core's last minibatch of the step.

        Returns:
            Whether the step is complete; False while accumulating. With a closure, its result. If the update was
            skipped, the step is complete, too; `updated` is whether the weights changed.
        """
        if torch.compiler.is_dynamo_compiling():  # a function that contains a whole step
            return self._step_eagerly(closure, weight=weight, loss=loss, last=last)
        self._engine.updated = False
        for hook in self._optimizer_step_pre_hooks.values():
            hook(self, (), {})
        result = None if closure is None else self._run(closure)
        if weight is not None or self.run.weights.is_weighted is not False:
            weight = self.run.weights.checked(weight)
        if self.sampler.num_to_run is not None and self._runs.has_reached(self.sampler.num_to_run):
            self._drop_minibatch()
            return False if closure is None else result
        plan = self._plan_minibatch(last, is_closure=closure is not None)
        if "found_inf" in self.__dict__:  # set by a GradScaler that calls step()
            self._unscaling.given = self.__dict__["grad_scale"], self.__dict__["found_inf"]
        is_complete = self._take_minibatch(plan, weight, result if loss is None else loss)
        return is_complete if closure is None else result

    # torch would wrap step() for hooks and profiling, which takes longer than accumulating; the inner step() has both
    step.hooked = True  # type: ignore[attr-defined]
    _step_eagerly: Any = torch._disable_dynamo(step)  # type: ignore[attr-defined]

    def _plan_minibatch(self, last: bool | None, *, is_closure: bool) -> StepPlan:
        """Count a minibatch, and advance to it."""
        runs, sampler = self._runs, self.sampler
        if not runs.number:
            self._begin_first_minibatch(is_closure=is_closure)
        if not runs.number or (runs.number >= sampler.num_read and sampler.must_be_read):
            sampler.check_run(runs)
        runs.add(sampler.num_read)
        if last is not None:
            self._engine.steps.end_with_next(last)
        plan = self._engine.steps.advance()
        if plan.num_minibatches > 1 and sampler.is_shared:
            self._checks.check_order(runs)
        return plan

    def _take_minibatch(self, plan: StepPlan, weight: Weight | None, loss: Any) -> bool:
        """Accumulate the gradients of a minibatch, update if it completes the step, and prepare the next one."""
        plan = self._engine.minibatch(plan, weight)
        for hook in self._optimizer_step_post_hooks.values():
            hook(self, (), {})
        for after_minibatch in self._engine.hooks.after_minibatch:
            after_minibatch(plan, loss)
        return plan.is_last

    def _begin_first_minibatch(self, *, is_closure: bool) -> None:
        """Before the first minibatch of a pass counts."""
        if is_closure:
            self._checks.check_closure()
        if not self._cursor.is_done:  # a core without a minibatch in its first step has no gradient
            self._wrappers.check_first_minibatch(self)
        self._checks.check_parameters(self._runs)
        self._attachments.check()
        for before_first in self._engine.hooks.before_first_minibatch:
            before_first()
        # cores that have begun different numbers of passes would not share what they read
        passes = [f"pass {self.sampler.num_passes} over the loader"] if self._cursor.schedule.is_open else []
        names = [name for part in self._parts for name in part.names]
        self._accumulator.attached = ", ".join([*self._attachments.names, *names, *passes])
        self._engine.watch(True)
        self._accumulator.is_one_of_several = self.sampler.is_shared

    def _run(self, closure: Any) -> Any:
        if not callable(closure):
            raise ValueError(f"`closure` must be a function, got {closure!r}: pass a weight as step(weight=…)")
        if "found_inf" in self.__dict__:  # of before the closure
            advice = "run the backward pass before scaler.step(optimizer)"
            raise RuntimeError(f"GradScaler.step() must not be called with a closure, whose scale is unknown: {advice}")
        with torch.enable_grad():
            return closure()

    def _drop_minibatch(self) -> None:
        """Undo a minibatch that a loader had read before the run reached its limit."""
        self.zero_grad()
        self._buffers.restore(True)
        self._buffers.snapshot(True)
        self._communicator.flush()

    def end_step(self) -> bool:
        """End this core's part of an open step without a further minibatch; it may have had none in the step.

        Returns whether the step is complete: False if no core has had a minibatch, which is not a step.
        """
        if torch.compiler.is_dynamo_compiling():
            return bool(self._end_step_eagerly())
        if self._cursor.schedule.is_open and self._runs.has_reached(self.sampler.num_to_run):  # as step() drops it
            self.zero_grad()
            return False
        return self._end_step()

    _end_step_eagerly: Any = torch._disable_dynamo(end_step)  # type: ignore[attr-defined]

    def _end_step(self) -> bool:
        self._engine.steps.end()
        self._engine.updated = False
        for hook in self._optimizer_step_pre_hooks.values():
            hook(self, (), {})
        return self._take_minibatch(self._plan_minibatch(None, is_closure=False), None, 0.0)

    def _end_open_epoch(self) -> None:
        self._engine.steps.end_epoch(self._end_step)

    def minibatches(self, own: Iterable[Data], padding: Data | None = None) -> Iterator[Data]:
        """Yield this core's minibatches of an open step, and end the step.

            for minibatch in optimizer.minibatches(own):
                loss_of(model(minibatch)).backward()
                optimizer.step(weight=num_tokens(minibatch))

        Call :meth:`step` after each of them, without `last`. To leave the loop early, call :meth:`end_step` first. In
        lockstep, as with ``fully_shard``, a core that has no more gets padding until all are done: its latest minibatch
        once more.

        Args:
            own: the minibatches, of any number, which may be 0.
            padding: what a core without any runs in lockstep; it must be given there.
        """
        yield from self._engine.steps.minibatches(own, padding, self, self._engine.prepare)

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Start an epoch, together with the sampler. Call it before each pass over the loader, here or on the sampler.

        Gradients that :meth:`step` has not taken are dropped, and so is a step that is not complete. Until the first
        minibatch of the pass, calling it again with the same arguments, here or on the sampler, changes nothing.

        Args:
            epoch: its number, from 0.
            first_step: how many of the epoch's steps to skip, for a run that was stopped after them.
        """
        sampler = self.sampler
        is_in_use = self._runs.number > 0 or ((self._has_joined or self._runs.is_late) and sampler.has_been_read)
        if is_in_use or not sampler.is_at(epoch, first_step):
            sampler.begin_pass(epoch, first_step)
        else:
            self._follow()
        self._has_joined = True

    def _follow(self) -> None:
        """Move to the sampler's position."""
        cursor, sampler = self._cursor, self.sampler
        if cursor.is_accumulating:
            message = "core %d left step %d of epoch %d unfinished: its gradients are discarded"
            logger.warning(message, sampler.rank, cursor.epoch_step, cursor.epoch)
        cursor.schedule = sampler.schedule
        cursor.move(sampler.epoch, sampler.first_step)
        self._has_joined = False
        self._engine.steps.follow()
        self._begin_epoch()
        self._engine.watch(True)

    def _follow_reassigned(self) -> None:
        """Continue with the minibatches of another rank, after cores have joined or left."""
        self.run.begin_pass()
        self._buffers.expect_skips(self.skip_nonfinite or not self._loss_scale.is_absent)
        if not self._cursor.is_accumulating:  # otherwise there is one from before the step
            upcoming = self._cursor.next
            self._buffers.snapshot(upcoming is not None and upcoming.is_idle)
        self._engine.prepare()

    def _settle(self) -> None:
        self._engine.steps.settle()

    def _on_request(self, is_first: bool) -> None:
        if is_first:
            self._engine.watch(True)
        is_run_next = self._runs.number < self.sampler.num_read and not self.sampler.is_read_ahead
        for on_request in self._engine.hooks.on_request:
            on_request(is_first=is_first, is_run_next=is_run_next)

    def _begin_epoch(self) -> None:
        self.run.begin_pass()
        self._engine.begin_pass()

    @property
    def _runs(self) -> RunCount:
        return self.run.minibatches

    def attach(self, *parts: Any, per: Per = "update", every: float | None = None) -> None:
        """Step schedulers, a log and a checkpoint after each minibatch, and save schedulers with this optimizer.

            optimizer.attach(scheduler, per="samples")
            optimizer.attach(log, checkpoint)
            for epoch in optimizer.epochs(10):
                for data, target in loader:
                    loss = loss_fn(model(data), target)
                    loss.backward()
                    optimizer.step(loss=loss)

        Don't call ``step()`` of what is attached. A scheduler makes a step whenever the run has advanced by `every`
        units; at the same position the learning rate is the same, whatever the batch sizes were. When its schedule has
        ended, it stays at its end.

        Args:
            parts: schedulers of torch for this optimizer or for `inner`, a :class:`Log`, a :class:`Checkpoint`.
            per: the unit of schedulers: ``"update"``; ``"epoch"``; ``"samples"``; ``"tokens"``, the sum of the weights
                passed to :meth:`step`; or ``"progress"``, in steps at `ref_batchsize`, which with AdaScale is the sum
                of the gains. Where the progress is computed on the device, it is the progress before the latest step.
            every: how many units a scheduler's step takes; it must be given for tokens. None for `ref_batchsize`
                samples, so that a schedule that was written for that batch size keeps its meaning, and otherwise for 1.
        """
        for part in parts:
            self._attachments.add(part, self, self.run, per=per, every=every)
            self._bind_parts()

    def epochs(
        self,
        num_epochs: int | None = None,
        *,
        progress: float | None = None,
        samples: float | None = None,
        tokens: float | None = None,
    ) -> Iterator[int]:
        """The remaining epochs of a run, with ``set_epoch`` called for each.

            for epoch in optimizer.epochs(10):
                for data, target in loader:
                    loss_fn(model(data), target).backward()
                    optimizer.step()

        After ``load_state_dict`` the run resumes after its last step: within an epoch, or with the next one if all
        steps of that epoch were done. The loop may leave an epoch early. With a :class:`Checkpoint` attached, these are
        its :meth:`Checkpoint.epochs`. The logs that are attached are closed at the end.

        Args:
            num_epochs: how many epochs the whole run has, including those done before; None for all of the trace.
            progress: end the run after the step that reaches this :attr:`progress`, even within an epoch. The loader
                then has no more minibatches. With a larger value, the run resumes there.
            samples: likewise, at this number of samples.
            tokens: likewise, at this sum of the weights passed to :meth:`step`, which waits for the device in every
                step.

        Raises:
            ValueError: at the start, if the trace holds fewer epochs.
        """
        self._engine.steps.join()
        return self._attachments.epochs(self.run, num_epochs, Limit(progress, samples, tokens))

    def set_schedule(self, schedule: BaseSchedule) -> None:
        """Replace the schedule, and that of the sampler; ``set_epoch`` then selects a position in it."""
        self.sampler.schedule = self._cursor.schedule = schedule
        if self._cursor.shares is not None:
            self._cursor.shares.begin(schedule, 0, 0)
        self._cursor.move(0)

    @property
    def steps_done(self) -> int:
        """Steps so far, skipped ones included."""
        return self.run.steps_done

    @property
    def samples_done(self) -> int:
        """Samples in these."""
        return self.run.samples_done

    @property
    def steps_made(self) -> int:
        """Steps with this object, whatever state was loaded in between."""
        return self.run.steps_made

    @property
    def minibatch_weights(self) -> TokenWeights:
        """The weights of minibatches and their sum so far."""
        return self.run.weights

    @property
    def epoch(self) -> int:
        """The number of the epoch."""
        return self._cursor.epoch

    @property
    def epoch_step(self) -> int:
        """How many steps of the epoch are done."""
        return self._cursor.epoch_step

    @property
    def has_completed_epoch(self) -> bool:
        """Whether all steps of the epoch are done."""
        return self._cursor.next is None

    @property
    def is_accumulating(self) -> bool:
        """Whether this core has run some of its minibatches of a step, but not all."""
        return self._cursor.is_accumulating

    @property
    def batch_size(self) -> int:
        """The batch size of the step that the latest minibatch belongs to; at first, of the epoch's first step."""
        return self._cursor.plan.batch_size

    @property
    def num_own(self) -> int:
        """How many minibatches this core has run in the step of the latest one, without padding."""
        return self._cursor.num_own

    @property
    def is_idle(self) -> bool:
        """Whether the latest minibatch was padding: this core has none in that step, or in lockstep no more."""
        return self._cursor.plan.is_padding

    def get_lr(self) -> tuple[float, ...]:
        """The learning rates of all parameter groups at `ref_batchsize`; :meth:`current_lr` is the scaled one."""
        return tuple(group["lr"] for group in self.param_groups)

    def get_bs(self) -> int:
        """The batch size of the step that the next minibatch belongs to; 0 if all steps of the epoch are done."""
        return 0 if self._cursor.next is None else self._cursor.next.batch_size

    def current_lr(self, group: int = 0) -> float:
        """The learning rate, scaled by the rule, of a parameter group in the step of the latest minibatch."""
        return self._engine.rates.lr(self._engine.rule_step(), group)

    def factor(self, group: int = 0) -> float:
        """What the learning rate is multiplied by in that step."""
        return self._engine.rates.factor(self._engine.rule_step(), group)

    @property
    def rule(self) -> Rule:
        """The optimizer's own copy of the rule, with what it has measured so far."""
        self._flow.release()
        return self._rule

    @property
    def updated(self) -> bool:
        """Whether the latest call of ``step()`` changed the weights; waits for the device if that decides it."""
        return bool(self._engine.updated)

    @property
    def steps_skipped(self) -> int:
        """Steps whose gradient was not finite, or whose minibatches all have the weight 0; may wait for the device."""
        self._flow.settle()
        return self._flow.num_skipped

    @property
    def progress(self) -> float:
        """How many steps at `ref_batchsize` the run is worth so far: with AdaScale, the sum of the gains."""
        return self.run.progress

    @property
    def late_progress(self) -> float:
        """The progress that the host has without waiting: on an accelerator, it might not include the latest step."""
        return self._flow.late_progress

    @property
    def weight_done(self) -> float:
        """The sum of all minibatches' weights so far, such as the tokens seen; reading it waits for the device."""
        return self.run.weights.done

    def gain(self, batch_size: int | None = None, group: int | None = None) -> float:
        """How many steps at `ref_batchsize` a step is worth, from the noise measured so far.

        Args:
            batch_size: of any step; of the step of the latest minibatch if None.
            group: a parameter group; all together if None.
        """
        size = self._engine.rule_step().batch_size if batch_size is None else batch_size
        return float(self._flow.noise_meter().gain(size, self.ref_batchsize, group))

    @property
    def noise(self) -> Noise | None:
        """Variance and squared norm of gradients per sample, or per unit of weight; None before the first estimate."""
        return self._flow.noise_meter().noise()

    @property
    def noise_scale(self) -> float:
        """The simple noise scale V/G², in samples, or in units of weight; NaN before the first estimate."""
        noise = self.noise
        return noise.scale if noise else math.nan

    @property
    def noise_scale_in_samples(self) -> float | None:
        """The noise scale, always in samples, converted by their mean weight; None before the first estimate."""
        return self._flow.noise_meter().scale_in_samples()

    @property
    def description(self) -> Description:
        """What must be the same on all cores, and when a run is resumed."""
        own: Description = {"exact": self.exact, "seed_minibatches": self.seeds_minibatches}
        if self.exact and next(self.parameters()).device.type == "cpu":
            own["threads"] = torch.get_num_threads()  # a minibatch's gradient depends on it
        if self._rule.measures_noise:
            own["gain"] = self._flow.time_of_gain
        return {**self._fingerprint, **own}

    def report(self) -> dict[str, float]:
        """What the rule, the noise meter and the policy report to a log about the latest step."""
        self._flow.settle()
        step = self._engine.rule_step()
        times = self._driver.report() if self._driver is not None else {}
        own = {} if self._flow.meter is None else self._flow.meter.report(step)
        return {**own, **self._rule.report(step), **times}

    def record_grad_norm(self, *, every: int) -> None:
        """From now on, leave the norm of every N-th step's mean gradient in `gradient_norm`; several N add up."""
        check_positive(every=every)
        self._gradient_norm.every.add(every)

    @property
    def gradient_norm(self) -> torch.Tensor | None:
        """The norm of the latest step's mean gradient before clipping, on the device.

        None unless :meth:`record_grad_norm` has requested it for that step.
        """
        return self._gradient_norm.latest

    @property
    def clip_grad_norm(self) -> float | None:
        """The largest norm of a step's mean gradient; it may be changed between two steps."""
        return self._engine.clip_grad_norm

    @clip_grad_norm.setter
    def clip_grad_norm(self, value: float | None) -> None:
        self._engine.clip_grad_norm = checked_limit(value)

    def state_of_parts(self) -> list[dict[str, Any]]:
        """The state of the parts that are attached, for a checkpoint. Every core must call it."""
        return self._attachments.state_of_parts()

    def load_state_of_parts(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Load the result of :meth:`state_of_parts`; a part may be attached after that."""
        self._attachments.load_state_of_parts(saved)

    def on_decision(self, listener: Callable[[Record], Any]) -> None:
        """Call a function with the record of every decision of the policy, if the schedule has one."""
        if self._driver is not None:
            self._driver.on_decision(listener)

    def hints(self) -> dict[str, Any]:
        """What the run is worth on other numbers of cores, as in the file ``hints.json`` of a :class:`Checkpoint`.

        See :class:`variable_batch_size.policies.Hints` for the values.
        """
        if not isinstance(self._driver, PolicyDriver):
            raise RuntimeError("hints are measured by a policy, but this run has a trace: use one such as Autoscale")
        return self._driver.hints().as_dict()

    def note_loss(self, loss: float) -> None:
        """Report to the policy the loss that a log has recorded."""
        if self._driver is not None:
            self._driver.loss = loss

    def _refuse_loss_scale(self, value: object) -> NoReturn:
        advice = "gradients are divided by the scale of a torch.amp.GradScaler that calls scaler.step(optimizer)"
        raise AttributeError(f"`loss_scale` of the optimizer must not be set, got {value!r}: {advice}")

    # of the optimizers of apex and DeepSpeed, which divide gradients by it; it cannot be read, so hasattr() is False
    loss_scale = property(None, _refuse_loss_scale)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, on all cores; their values are those of core 0, and they have no gradient.

        With ``add_param_group`` of `inner` instead, they keep the gradients that they have, which may be sums over
        several minibatches: call ``model.zero_grad()`` before.
        """
        before = list(self.parameters())
        self._communicator.flush_before_collective()
        with consistency.rollback_param_groups(self.inner):
            self.inner.add_param_group(param_group)
            added, group = self.inner.param_groups[-1]["params"], self.sampler.process_group
            consistency.sync_added_params(added, before, self._wrappers, self._communicator, group)
            for p in added:
                p.grad = None  # of earlier minibatches
            self._accumulator.rebuild()
        self._communicator.flush()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that :meth:`step` has not taken, such as those of another loss; ``step()`` leaves none."""
        self._accumulator.zero_grad()
        if self._accumulator.norm_layers is not None:
            self._accumulator.norm_layers.drop()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state and the position; in the middle of a step, the position before that step."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        own = {
            "epoch": self.epoch,
            "epoch_step": self.epoch_step,
            "steps_done": self.run.steps_done,
            "samples_done": self.run.samples_done,
            "steps_skipped": self.steps_skipped,
            **({} if self._driver is None else {self._driver.state_key: self._driver.state_dict()}),
            **self._engine.steps.state_dict(),
            "rule": self._rule.state_dict(),
            **({"late_progress": self._flow.late_progress} if self._flow.way == "on the device" else {}),
            **self._lr_scaler.state_dict(),
            **self._attachments.state_dict(),
            "weights": self.run.weights.state_dict(),
            "gradients": self._accumulator.state_dict(),
            "noise": None if self._flow.meter is None else self._flow.meter.state_dict(),
        }
        state: dict[str, Any] = {**self.inner.state_dict(), STATE_KEY: own}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that was saved on any number of cores.

        It also moves the sampler, so that the next pass over the loader resumes the run. If all steps of the epoch were
        done, ``set_epoch`` must select the next one first, as :func:`epochs` does.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        if STATE_KEY not in state_dict:
            advice = "load the state of an optimizer of torch into `optimizer.inner`"
            raise ValueError(f"the state has no {STATE_KEY!r}, so it was not saved by this library: {advice}")
        own = state_dict[STATE_KEY]
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != STATE_KEY})
        self._flow.forget(own.get("late_progress"))
        self._rule.load_state_dict(own["rule"])
        self._lr_scaler.load_state_dict(own)
        if self._flow.meter is not None and own["noise"]:
            self._flow.meter.load_state_dict(own["noise"])
        if ("own_norms" in own["gradients"]) != (self._accumulator.own_norms is not None):
            self._flow.forget_noise()
        self.run.steps_done, self.run.samples_done = own["steps_done"], own["samples_done"]
        self._flow.num_skipped = own["steps_skipped"]
        if self._driver is not None:
            self._driver.load_state_dict(own.get(self._driver.state_key))
        self._engine.steps.load_state_dict(own)
        self._attachments.load_state_dict(own.get("schedulers", ()), self.param_groups)
        self._accumulator.forget_digest()
        if own["epoch_step"] < len(self.sampler.schedule.steps(own["epoch"])):
            self.set_epoch(own["epoch"], own["epoch_step"])
        else:  # a framework must not find an empty pass in the sampler
            self._cursor.schedule = self.sampler.schedule
            self._cursor.move(own["epoch"], own["epoch_step"])
            self._begin_epoch()
        self.run.weights.load_state_dict(own["weights"])
        self._accumulator.load_state_dict(own["gradients"])
        if self._preconditioner is not None:
            self._preconditioner.refresh(has_updated=False)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)
