"""CustomOptimizer: accumulates, or all-reduces and updates, following the schedule."""

import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypedDict, TypeVar, overload

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from variable_batch_size.checks import check_not_negative, check_one_of, check_positive, copy_for_run
from variable_batch_size.cores.detect import communicator_for, everyone_for
from variable_batch_size.cores.live import LiveCores
from variable_batch_size.cores.messages import show
from variable_batch_size.data.cursor import Cursor, StepPlan
from variable_batch_size.data.sampler import CustomSampler, Description, MinibatchSource, source_of
from variable_batch_size.data.shares import Shares
from variable_batch_size.optim import consistency
from variable_batch_size.optim.attachments import Attachments, Limit, Per
from variable_batch_size.optim.buffers import Buffers
from variable_batch_size.optim.flow import Flow, Outcome, step_unless
from variable_batch_size.optim.gradients import make_accumulator
from variable_batch_size.optim.gradients.accumulator import Counts, StepGradient
from variable_batch_size.optim.gradients.buckets import BucketAccumulator
from variable_batch_size.optim.hyperparameters import Preconditioner, StepHyperparameters
from variable_batch_size.optim.live_steps import LiveSteps, refuse_unsupported
from variable_batch_size.optim.loss_scale import LossScale
from variable_batch_size.optim.norm_layers import EVERY, MEASURES, NormLayers
from variable_batch_size.optim.open_step import OpenStep
from variable_batch_size.optim.own_norms import OWN_NORM, make_own_norms
from variable_batch_size.optim.policy_driver import PolicyDriver, Record
from variable_batch_size.optim.probe import check_inner
from variable_batch_size.optim.proxy import Inner, OptimizerProxy, name_of, optimizers_of
from variable_batch_size.optim.seeding import MinibatchSeeder
from variable_batch_size.optim.token_weights import TokenWeights, Weight
from variable_batch_size.optim.trace_watcher import TraceWatcher, driver_for
from variable_batch_size.optim.wrappers import Wrappers
from variable_batch_size.rules.adascale import NoiseRule
from variable_batch_size.rules.noise import Noise, NoiseMeter, Smoothing
from variable_batch_size.rules.numbers import Number
from variable_batch_size.rules.per_optimizer import PerOptimizerRule
from variable_batch_size.rules.registry import make_rule
from variable_batch_size.rules.rule import Rule, Step
from variable_batch_size.rules.transition import LRScaler
from variable_batch_size.schedules.open_steps import OpenSchedule
from variable_batch_size.schedules.schedule import BaseSchedule

logger = logging.getLogger(__name__)

STATE_KEY = "variable_batch_size"
Loss = TypeVar("Loss")
Data = TypeVar("Data")
RuleLike = Rule | str

_HALVES = "step() must be called once after each half that halves() yields, before another minibatch"
_END: Any = object()  # after the last minibatch
_LOST = -1  # as the half that is next: the loop over halves was left

_updates = threading.local()  # `is_running`: whether an optimizer of this library calls step() of an inner one


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
            ``"adascale"`` or ``"adam:half-life"``; or one for each of several optimizers. It is copied, so that it may
            be used again: what is measured is in the attribute `rule`.
        ref_batchsize: the batch size at which the settings of `inner` are right.
        ref_batch_size: the same.
        log_steps: log every N steps on core 0, also if logging is not configured; 0 for never.
        clip_grad_norm: the largest norm of a step's mean gradient over all parameters; None for no limit.
        model: whose buffers (BatchNorm's statistics) the padding minibatch of an idle core must not change.
        smooth_steps: spread a jump of the factor over N steps (:class:`Transition`).
        max_factor: the largest factor; None for no limit.
        skip_nonfinite: skip the update where the gradient is not finite, on all cores together. With ``GradScaler``,
            such updates are always skipped. None for True where the gradients are measured and it costs no further
            wait for the device (:class:`Flow`), otherwise False.
        gradient_as_bucket_view: leave gradients where they are, zeroed in place, and let autograd accumulate there, for
            CUDA graphs and to save the memory of one gradient; they must then not be modified, nor may a parameter be
            frozen, added or converted within a step.
        measure_noise: measure the gradient noise though the rule does not need it, for `noise_scale` and `gain()`.
            ``"norm layers"`` also measures it in steps of one minibatch, by the samples' gradients of the model's
            normalization layers (:class:`NormLayers`). ``"own norm"`` measures it every 16 steps in the norm that fits
            the steps of `inner`: ℓ1 for Adam, Lion and the like, the nuclear norm for Muon (:class:`OwnNorms`).
        smoothing: how the noise is averaged, that of a rule as well: a number, a function or ``"paper"``; None for an
            average that remembers at least 20 steps (:class:`NoiseRule`).
        exact: sum so that the weights are the same to the last bit on any number of cores; see the page on exactness.
        seed_minibatches: seed the random generators before each minibatch, so that its random numbers do not depend on
            the core (:class:`MinibatchSeeder`); None for the value of `exact`.
        reduce_scatter_once: let a model in ``fully_shard`` reduce once a step instead of in every round, at the cost of
            memory for full gradients on each core; other models always reduce once.

    Attributes:
        steps_done: steps so far, skipped ones included.
        samples_done: samples in these.
        steps_made: steps with this object, whatever state was loaded in between.
        minibatch_weights: the weights of minibatches and their sum so far.
        gradient_norm: the norm of the latest step's mean gradient before clipping, on the device; None unless
            :meth:`record_grad_norm` has requested it for that step.
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
    ) -> None:
        # what must be the same on all ranks; shapes of the model are compared by themselves
        names = Options.__annotations__.keys() - {"model", "log_steps", "ref_batch_size", "smoothing"}
        options = {name: value for name, value in locals().items() if name in names}
        super().__init__(inner)
        sampler = source_of(sampler)
        self._rule = _make_rule(rule, self.inner, model)
        ref_batchsize = _given_ref_batchsize(ref_batchsize, ref_batch_size)
        check_not_negative(log_steps=log_steps)
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ValueError(f"`clip_grad_norm` must be positive, got {clip_grad_norm!r}")
        self.sampler, self._population = sampler, sampler.population
        self.ref_batchsize, self.log_steps = int(ref_batchsize), int(log_steps)
        self.clip_grad_norm, self.exact = clip_grad_norm, exact
        seeds_by_default = exact and not sampler.schedule.is_open
        self.seeds_minibatches = seeds_by_default if seed_minibatches is None else seed_minibatches
        self._measures = measures = self._rule.measures_noise or bool(measure_noise)
        self._lr_scaler = LRScaler(self._rule, smooth_steps=smooth_steps, max_factor=max_factor)
        self._own_meter = self._make_meter(smoothing, measure_noise=bool(measure_noise))
        self._init_counters()
        self._init_wrappers(model)
        self._fingerprint = consistency.fingerprint_of(sampler, self._rule, self.inner, self.ref_batchsize)
        self._communicator = communicator_for(self.parameters(), sampler.process_group)
        parts = (self._rule, self._lr_scaler, self._own_meter)
        self._flow = Flow(*parts, self.inner, self._communicator, is_read=skip_nonfinite is True)
        self.skip_nonfinite = self._flow.skips_by_default if skip_nonfinite is None else skip_nonfinite
        self._driver, self._cursor = self._make_driver()
        self._refuse_for_open_steps(options)
        options |= {"skip_nonfinite": self.skip_nonfinite, "seed_minibatches": self.seeds_minibatches}
        finish_checks = consistency.sync_and_check_ranks(self, self._wrappers, self._communicator, options)
        self._shares, self._open = self._connect_shares()
        self._preconditioner = Preconditioner(self.inner, self._rule.min_updates) if self._rule.preconditions else None
        self._accumulator = make_accumulator(
            self.inner,
            self._communicator,
            sampler=sampler,
            wrappers=self._wrappers,
            is_read=(measures or self.skip_nonfinite) and self._flow.way != "on the device",
            divisors=None if self._preconditioner is None else self._preconditioner.divisors,
            **self._measuring(measure_noise, model, is_view=gradient_as_bucket_view),
            sums_gradients=self._rule.sums_gradients,
            gradient_as_bucket_view=gradient_as_bucket_view,
            exact=exact,
            reduce_scatter_once=reduce_scatter_once,
        )
        self._init_minibatches(model)
        self._begin_epoch()
        sampler.attach(self)
        finish_checks()

    def _make_driver(self) -> tuple[PolicyDriver | TraceWatcher | None, Cursor]:
        """Let a policy decide the first batch sizes, and go to the first step."""
        sampler, schedule = self.sampler, self.sampler.schedule
        driver = driver_for(self, schedule)
        cursor = Cursor(schedule, sampler.rank)
        cursor.move(sampler.epoch, sampler.first_step)
        return driver, cursor

    def _connect_shares(self) -> tuple[Shares | None, OpenStep | None]:
        """How the cores share steps, unless by round robin, once it is known that they have the same settings."""
        sampler, cursor, device = self.sampler, self._cursor, next(self.parameters()).device
        shares, counter = sampler.shares, sampler.counter
        cursor.shares = shares
        if shares is not None and not shares.is_connected:
            shares.connect(self._communicator, device)
            shares.begin(sampler.schedule, sampler.epoch, sampler.first_step)
        if counter is not None and not counter.run:
            counter.connect(self._communicator, device, "OpenSteps")
            counter.begin()
        cursor.move(sampler.epoch, sampler.first_step)
        return shares, None if counter is None else OpenStep(sampler, cursor, self._communicator, device)

    def _refuse_for_open_steps(self, options: Mapping[str, Any]) -> None:
        """Raise for what needs the number of minibatches before a step is complete."""
        if not self.sampler.schedule.is_open:
            return
        names = ("gradient_as_bucket_view", "reduce_scatter_once", "seed_minibatches")
        wrong = {f"`{name}`": "False" for name in names if options[name]}
        if options["measure_noise"] in (MEASURES, OWN_NORM):
            wrong["`measure_noise`"] = "True or False"
        if self._communicator.is_one_program:
            wrong["the device"] = "one that is not XLA's, where cores run the same graphs,"
        if self._rule.sums_gradients:
            wrong["`rule`"] = "one of mean gradients"
        for name, allowed in wrong.items():
            raise ValueError(f"{name} must be {allowed} with OpenSteps, whose minibatches are not known before")

    def _make_meter(self, smoothing: Smoothing, *, measure_noise: bool) -> NoiseMeter | None:
        """A meter besides those of the rules, if there is one; all of them average in the same way."""
        rules = [one for one in getattr(self._rule, "rules", [self._rule]) if isinstance(one, NoiseRule)]
        if smoothing is not None:
            if not rules and not measure_noise:
                reason = f"as {type(self._rule).__name__} measures no noise: pass `measure_noise=True` as well"
                raise ValueError(f"`smoothing` must be None, {reason}")
            for rule in rules:
                rule.set_smoothing(smoothing)
        has_own = measure_noise and not isinstance(self._rule, NoiseRule)
        return NoiseMeter(smoothing=smoothing) if has_own else None

    def _forget_noise(self) -> None:
        """After a state with the noise in another norm was loaded: start its averages anew."""
        rules = [one for one in getattr(self._rule, "rules", [self._rule]) if isinstance(one, NoiseRule)]
        for meter in [self._own_meter, *(rule.meter for rule in rules)]:
            if meter is not None and meter.averages:
                meter.load_state_dict(NoiseMeter().state_dict())
                logger.warning("the noise in this state is that of another norm: its averages start anew")

    def _measuring(self, measure_noise: bool | str, model: torch.nn.Module | None, *, is_view: bool) -> dict[str, Any]:
        """What the accumulator measures."""
        if not isinstance(measure_noise, bool):
            check_one_of((MEASURES, OWN_NORM), measure_noise=measure_noise)
        if measure_noise == OWN_NORM:
            more: Any = {"rule": self._rule, "exact": self.exact, "is_view": is_view, "population": self._population}
            return {"own_norms": make_own_norms(self.inner, self._communicator, **more)}
        layers = self._make_norm_layers(model) if measure_noise == MEASURES else None
        return {"measures": self._measures, "norm_layers": layers}

    def _make_norm_layers(self, model: torch.nn.Module | None) -> NormLayers:
        if self.sampler.needs_weights:
            reason = "its minibatches hold different numbers of samples"
            raise ValueError(f"`measure_noise` must not be {MEASURES!r} with a TokenBudget: {reason}")
        if self._rule.preconditions or self.exact:
            what = "exact=True" if self.exact else type(self._rule).__name__
            raise ValueError(f"`measure_noise` must not be {MEASURES!r} with {what}: use optimizer.halves(…) instead")
        self._samples_every = 1 if self._communicator.is_one_program else EVERY  # there, it would be another graph
        return NormLayers(model, self.parameters(), num_samples=self.sampler.minibatch_size)

    def _init_counters(self) -> None:
        self.steps_done = self.samples_done = self.steps_made = 0
        self._updated: bool | torch.Tensor = False
        is_required = self.sampler.needs_weights
        self.minibatch_weights = TokenWeights(next(self.parameters()).device, is_required=is_required)
        self.gradient_norm: torch.Tensor | None = None
        self._norm_every: set[int] = set()
        self._factors: list[Number] = []  # of the latest step, once it is complete
        self._lrs: list[Number] = []  # likewise
        self._is_scaled = False  # whether a GradScaler has called step() in this pass
        self._has_joined = False  # whether set_epoch() was called here in this pass
        self._attachments = Attachments()
        self._samples_every = 1  # steps from one measurement of norm layers to the next
        self._half = 0  # of the minibatch that halves() has split: which one is next
        self._is_last = False  # whether the next minibatch is the core's last one in an open step
        self.limit: Limit | None = None  # within epochs() that have one
        self.num_epochs: int | None = None  # likewise
        self.restart_seconds: float | None = None  # to save and to resume, measured by a checkpoint
        self._precedes = self._has_warned = False  # whether other optimizers of the sampler had no gradient at step()

    def _init_wrappers(self, model: torch.nn.Module | None) -> None:
        self._wrappers = Wrappers(self.parameters(), model)
        if self.sampler.is_elastic:
            refuse_unsupported(self)
        if self._wrappers.fsdp:
            self.sampler.run_in_lockstep()

    def _init_minibatches(self, model: torch.nn.Module | None) -> None:
        """What happens before and after each minibatch."""
        sampler, parameters = self.sampler, self.parameters
        everyone = everyone_for(parameters(), sampler.process_group) if self._wrappers.fsdp else None
        is_summed = self._accumulator.is_summed_by_autograd
        self._loss_scale = LossScale(parameters, is_summed=is_summed, everyone=everyone, measures=self._measures)
        self._buffers = Buffers(model, self._communicator, may_skip=self.skip_nonfinite)
        self._seeder = MinibatchSeeder(self.seeds_minibatches, sampler, self._cursor, next(parameters()), model)
        self._hyperparameters = StepHyperparameters(self.inner, self._communicator)
        self._live: LiveSteps | None = None
        if isinstance(self._communicator, LiveCores) and isinstance(self._accumulator, BucketAccumulator):
            self._live = LiveSteps(self, self._communicator, self._cursor, self._accumulator, self._buffers)
        self._watch(not isinstance(sampler, CustomSampler))  # a stream may be read in another process
        for one in optimizers_of(self.inner):
            if hasattr(one, "_optimizer_step_pre_hooks"):  # a wrapper of another library may lack them
                one.register_step_pre_hook(partial(_refuse_direct_step, weakref.ref(self)))

    def __repr__(self) -> str:
        names = " and ".join(type(one).__name__ for one in optimizers_of(self.inner))
        lrs = ", ".join(f"{float(group['lr']):g}" for group in self.param_groups)
        at = f"lr {lrs} at batch size {self.ref_batchsize}, epoch {self.epoch}, {self.steps_done} steps done"
        return f"<{type(self).__name__} of {names}: {self._rule!r}, {at}>"

    def __getstate__(self) -> dict[str, Any]:
        self._flow.settle()  # first: a copy has the numbers that the host knows
        return {**super().__getstate__(), "_attachments": Attachments()}  # these belong to this optimizer

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
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
            Whether the step is complete; False while accumulating. With a closure, what that returned. If the update
            was skipped, the step is complete, too; `updated` is whether the weights changed.
        """
        if torch.compiler.is_dynamo_compiling():  # a function that contains a whole step
            return self._step_eagerly(closure, weight=weight, loss=loss, last=last)
        self._updated = False
        for hook in self._optimizer_step_pre_hooks.values():
            hook(self, (), {})
        result = None if closure is None else self._run(closure)
        if weight is not None or self.minibatch_weights.is_weighted is not False:
            weight = self.minibatch_weights.checked(weight)
        if self.sampler.num_to_run is not None and self._drops_minibatch:
            self._drop_minibatch()
            return False if closure is None else result
        plan = self._plan_minibatch(is_closure=closure is not None, is_weighted=weight is not None, last=last)
        is_complete = self._take_minibatch(plan, weight, result if loss is None else loss)
        return is_complete if closure is None else result

    def _take_minibatch(self, plan: StepPlan, weight: Weight | None, loss: Any) -> bool:
        """Accumulate the gradients of a minibatch, update if it completes the step, and prepare the next one."""
        if self._live is not None:
            self._live.begin(plan)
        self._factors = []
        was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # a function, where the public one is an object
        try:
            if "found_inf" in self.__dict__:
                self._unscale(plan)
            # the sum of the weights divides the gradient: in open steps without weights, it is their number
            self._accumulator.accumulate(plan, 1.0 if weight is None and plan.is_open else weight)
            if plan.is_padding and not plan.is_idle:
                self._buffers.restore_before_padding()
            if plan.is_last and (self._communicator.num_replicas > 1 or self._open is not None):
                self._count(plan)
            if plan.is_last and self._live is not None:
                plan = self._live.reduce(plan)
            if plan.is_last:
                self._updated = self._complete_step(plan)
                plan = self._cursor.plan
        finally:
            torch._C._set_grad_enabled(was_enabled)
        if plan.is_last and self.limit is not None and self.limit.is_reached(self):
            self.sampler.end_run(self._runs.number)
            self._buffers.expect_skips(True)  # of minibatches that a loader has read ahead
            self._buffers.snapshot(True)
        self._prepare_next()
        for hook in self._optimizer_step_post_hooks.values():
            hook(self, (), {})
        if not self._attachments.is_empty:
            self._attachments.after_minibatch(self, loss, is_complete=plan.is_last)
        if self._shares is not None:
            self._shares.begin_minibatch()
        return plan.is_last

    # torch would wrap step() for hooks and profiling, which takes longer than accumulating; the inner step() has both
    step.hooked = True  # type: ignore[attr-defined]
    _step_eagerly: Any = torch._disable_dynamo(step)  # type: ignore[attr-defined]

    def end_step(self) -> bool:
        """End this core's part of an open step without a further minibatch; it may have had none in the step.

        Returns whether the step is complete: False if no core has had a minibatch, which is not a step.
        """
        self._refuse_known_steps("end_step()")
        if self._cursor.schedule.lockstep:
            rule = "end_step() must not be called in lockstep, as with fully_shard, where cores run padding minibatches"
            raise RuntimeError(f"{rule}: loop over optimizer.minibatches(…, padding=…)")
        if self._accumulator.has_gradients():
            raise RuntimeError("end_step() was called after backward(): pass last=True to step() instead")
        self._updated = False
        self._cursor.is_done = True
        plan = self._plan_minibatch(is_closure=False, is_weighted=False, last=True)
        return self._take_minibatch(plan, None, 0.0)

    def _end_open_epoch(self) -> None:
        """Other cores may have more minibatches; in lockstep they must not."""
        if self._open is not None and not self._cursor.schedule.lockstep:
            self._open.end_epoch(self.end_step)

    def minibatches(self, own: Iterable[Data], padding: Data | None = None) -> Iterator[Data]:
        """Yield this core's minibatches of an open step, and end the step.

            for minibatch in optimizer.minibatches(own):
                loss_of(model(minibatch)).backward()
                optimizer.step(weight=num_tokens(minibatch))

        :meth:`step` follows each of them, and need not be told which one is the last. In lockstep, as with
        ``fully_shard``, a core that has no more gets padding until all are done: its latest minibatch once more.

        Args:
            own: the minibatches, of any number, which may be 0.
            padding: what a core without any runs in lockstep; it must be given there.
        """
        self._refuse_known_steps("minibatches()")
        left, is_lockstep = iter(own), self._cursor.schedule.lockstep
        data = next(left, _END)
        if data is _END:
            if not is_lockstep:
                self.end_step()
                return
            if padding is None:
                raise ValueError("`padding` must be given in lockstep: what a core without minibatches runs")
            self._cursor.is_done, data = True, padding
            self._prepare_next()
        following = data
        while True:
            following = following if self._cursor.is_done else next(left, _END)
            self._is_last, number = following is _END, self._runs.number
            yield data
            if self._runs.number != number + 1:
                raise RuntimeError("step() must be called once for each minibatch that minibatches() yields")
            if not self._cursor.is_accumulating:
                return
            data = data if self._cursor.is_done else following

    def _refuse_known_steps(self, what: str) -> None:
        if self._open is None:
            name = self.sampler.schedule.name
            raise RuntimeError(f"{what} is for vbs.OpenSteps, but {name} determines where steps end: call step() only")

    def _plan_open(self, last: bool | None, *, is_weighted: bool) -> StepPlan:
        """Advance to a minibatch of an open step, which all cores may have ended then."""
        cursor, opened = self._cursor, self._open
        assert opened is not None
        is_done = cursor.is_done or (self._is_last if last is None else last)
        self._is_last = False
        if self.sampler.is_shared:
            raise RuntimeError("open steps need a sampler of one optimizer, but several are attached to this one")
        is_last = opened.agree(is_done) if cursor.schedule.lockstep else is_done
        plan = cursor.advance_open(is_done=is_done, is_last=is_last)
        opened.note_minibatch(is_weighted=is_weighted and not plan.is_padding)
        return plan

    def _close_step(self) -> bool:
        """Learn how many minibatches an open step has had; returns whether there was any."""
        totals, schedule = self._accumulator.totals, self._cursor.schedule
        assert totals is not None and self._open is not None
        assert isinstance(schedule, OpenSchedule)
        self._open.close(has_minibatches=totals.own > 0)
        size = schedule.append(totals.own, totals.read) if totals.own else 0
        self._cursor.close(totals.own, size)
        if not totals.own and self._open.is_epoch_over and self.sampler.rank == 0:
            logger.warning("%s: no core has a minibatch, so there is no update", str(self._cursor))
        return totals.own > 0

    def _plan_minibatch(self, *, is_closure: bool, is_weighted: bool, last: bool | None) -> StepPlan:
        """Count a minibatch, with its second half if it has halves, and advance to it."""
        runs, sampler, half = self._runs, self.sampler, self._half
        if half == _LOST:
            raise RuntimeError(_HALVES)
        if not runs.number:
            self._check_first_minibatch(is_closure=is_closure)
        if not runs.number or runs.number >= sampler.num_read:
            sampler.check_run(runs)
        if half == 1:
            self._half = 2
            return self._cursor.begin_half()
        self._half = 0
        runs.add(sampler.num_read)
        if self._open is not None:
            return self._plan_open(last, is_weighted=is_weighted)
        if last is not None:
            raise ValueError(
                f"`last` must be None, got {last}: {sampler.schedule.name} determines it; see vbs.OpenSteps"
            )
        if self._shares is None:
            plan = self._cursor.advance(is_half=half == 2)
        else:
            self._shares.await_device()
            plan = self._cursor.advance()
            self._shares.end_minibatch(is_padding=plan.is_padding)
        if plan.num_minibatches > 1 and sampler.is_shared:
            self._check_order()
        return plan

    def halves(self, *data: Any, every: int = 20) -> Iterator[Any]:
        """Yield a minibatch, in every N-th step that consists of this one alone as two halves, to measure the noise.

            for data, target in loader:
                for x, y in optimizer.halves(data, target):
                    loss_fn(model(x), y).backward()
                    optimizer.step()

        One minibatch tells nothing about the gradient noise. Its halves are two minibatches of half the size: their
        mean is the gradient of the step, and their norms estimate the noise without bias. Each estimate counts once in
        the averages, however many steps are between two: the memory of `smoothing` is in estimates. Every rank must
        call it, and ``step()`` follows each yield. Forward and backward passes run with two batch shapes, and only
        those.

        Args:
            data: tensors whose first dimension is the minibatch, or lists, tuples and mappings of these; what else
                there is in them is passed on. One argument is yielded as it is, several as a tuple.
            every: from one such step to the next.
        """
        check_positive(every=every)
        if self._half:
            raise RuntimeError(_HALVES)
        plan = self._cursor.next
        if self._drops_minibatch or not self._is_split(plan, every):
            yield data[0] if len(data) == 1 else data
            return
        size, self._half = self.sampler.minibatch_size, 1
        try:
            if self._accumulator.norm_layers is not None:
                self._accumulator.norm_layers.num_samples = size // 2
            for number in (1, 2):
                if self._cursor.schedule.lockstep:
                    self._accumulator.begin_minibatch(is_padding=plan.is_padding, is_last=number == 2)  # type: ignore[union-attr]
                part = slice((number - 1) * size // 2, number * size // 2)
                tensors: list[torch.Tensor] = []
                parts = tuple(_half_of(one, part, size, tensors) for one in data)
                if not tensors:  # the halves would be the same
                    kinds = ", ".join(type(one).__name__ for one in data)
                    raise ValueError(f"halves() needs tensors, or lists, tuples and mappings of these, got {kinds}")
                yield parts[0] if len(parts) == 1 else parts
                if self._half != (2 if number == 1 else 0):
                    raise RuntimeError(_HALVES)
        finally:
            if self._half:  # the loop was left
                self._half = _LOST

    def _is_split(self, plan: StepPlan | None, every: int) -> bool:
        if not self._measures:
            raise ValueError(f"halves() needs a rule that measures noise, or `measure_noise=True`, got {self._rule!r}")
        if self.sampler.needs_weights:
            raise ValueError("halves() needs minibatches of equal size, which those of a TokenBudget are not")
        if self.sampler.minibatch_size % 2:
            raise ValueError(f"`minibatch_size` must be even for halves(), got {self.sampler.minibatch_size}")
        if self._rule.sums_gradients:
            raise ValueError(f"halves() needs a rule of mean gradients, but {type(self._rule).__name__} sums them")
        if self._live is not None:
            raise ValueError("halves() must not be used with `elastic`: pass measure_noise='norm layers' instead")
        if self.sampler.is_shared:
            raise ValueError("halves() needs a sampler of one optimizer, but several are attached to this one")
        if self._shares is not None or self._open is not None:
            raise ValueError('halves() needs steps that are known before, and assign="round robin"')
        return plan is not None and plan.num_minibatches == 1 and plan.step % every == 0

    @property
    def num_parts(self) -> int:
        """In how many parts the latest minibatch is run: 2 if :meth:`halves` has split it, else 1."""
        plan = self._cursor.plan
        if plan.is_open:
            return 1
        return plan.num_minibatches * self._cursor.schedule.minibatch_size_of(plan.batch_size) // plan.batch_size

    @property
    def _drops_minibatch(self) -> bool:
        """Whether the run has reached its limit before the latest minibatch that was read."""
        return self.sampler.num_to_run is not None and self._runs.number >= self.sampler.num_to_run

    def _drop_minibatch(self) -> None:
        """Undo a minibatch that a loader had read before the run reached its limit."""
        self.zero_grad()
        self._buffers.restore(True)
        self._buffers.snapshot(True)
        self._communicator.flush()

    def _run(self, closure: Any) -> Any:
        if not callable(closure):
            raise ValueError(f"`closure` must be a function, got {closure!r}: pass a weight as step(weight=…)")
        with torch.enable_grad():  # type: ignore[no-untyped-call]
            return closure()

    def _check_first_minibatch(self, *, is_closure: bool) -> None:
        """Before the first minibatch of a pass counts."""
        if is_closure and not self.sampler.num_passes:
            raise RuntimeError(
                "step(closure) was called before set_epoch(): use `for epoch in optimizer.epochs(…)` in your own "
                "loop, and with a framework its integration from variable_batch_size.integrations, such as the "
                "callback for Lightning"
            )
        if not self._cursor.is_done:  # a core without a minibatch in its first step has no gradient
            self._wrappers.check_first_minibatch(self, self._communicator)
        own = set(() if self._runs.is_late else self.parameters())
        for other in self.sampler.followers():
            if other is not self and other._runs.number and not own.isdisjoint(other.parameters()):
                raise RuntimeError(
                    "two optimizers of one sampler have the same parameters, but step() of the first takes their "
                    "gradients: let one of them train the shared parameters, or make one optimizer for all, with a "
                    "list of inner optimizers where they differ"
                )
        self._attachments.check()
        norms = [f"the gradient norm every {every} steps" for every in sorted(self._norm_every)]
        # cores that have begun different numbers of passes would not share what they read
        passes = [f"pass {self.sampler.num_passes} over the loader"] if self._open is not None else []
        self._accumulator.attached = ", ".join([*self._attachments.names, *norms, *passes])
        self._watch(True)
        self._accumulator.is_one_of_several = self.sampler.is_shared
        self._is_scaled = False
        if not self._communicator.is_one_program:
            self._buffers.expect_skips(self.skip_nonfinite or "found_inf" in self.__dict__)

    def _check_order(self) -> None:
        """Raise or warn if this backward pass ran through a model after ``step()`` of that model's optimizer.

        It then saw an update of the other model in the last minibatch that a core runs in a step, and only there.
        """
        others = [other for other in self.sampler.followers() if other is not self]
        before = [other for other in others if other._runs.number >= self._runs.number]  # in this minibatch
        self._precedes = not any(other._accumulator.has_gradients() for other in others if other not in before)
        if self._has_warned or not any(other._precedes and other._has_been_used() for other in before):
            return
        message = (
            "The backward pass of this minibatch ran through a model after step() of that model's optimizer, so the "
            "result depends on the number of cores. Run all backward passes of a minibatch before the first step(), or "
            "give each optimizer its own sampler."
        )
        if self.exact:
            raise RuntimeError(message)
        self._has_warned = True
        if self.sampler.rank == 0:
            logger.warning(message)

    def _has_been_used(self) -> bool:
        """Whether the model seems to have run since the latest call of :meth:`step`."""
        is_frozen = not any(p.requires_grad for p in self.parameters())
        return is_frozen or self._seeder.has_run or self._accumulator.has_gradients()

    def _unscale(self, plan: StepPlan) -> None:
        """Divide the gradients of the minibatch by the scale of the GradScaler that has called :meth:`step`."""
        if not self._is_scaled and self._communicator.is_one_program and not self.skip_nonfinite:
            raise RuntimeError("GradScaler on XLA needs an optimizer with `skip_nonfinite=True`")
        self._is_scaled = True
        scale, found_inf = self.__dict__["grad_scale"], self.__dict__["found_inf"]
        self._accumulator.inverse_scale = self._loss_scale.unscale_(plan, scale, found_inf)

    def _count(self, plan: StepPlan) -> None:
        """Before the reduction: count the minibatches that this core has run in the step."""
        counts = Counts(self.num_own * self.num_parts, plan.num_minibatches)
        self._accumulator.counts = counts if self._open is None else self._open.counts()

    def _complete_step(self, plan: StepPlan) -> bool | torch.Tensor:
        """Reduce and update, or skip the update; returns whether the weights changed, maybe on the device."""
        if self._driver is not None:
            self._driver.before_update()
        try:
            if self._live is not None:
                gradient = self._live.take()
            elif self._open is None:
                gradient = self._accumulator.reduce(plan)
            else:
                with self._open.waiting():
                    gradient = self._accumulator.reduce(plan)
                if not self._close_step():
                    return False
            step, weight = self._rule_step(), gradient.weight
            if not self.steps_made:
                self._warn_without_gradients()
            is_recorded = self._norm_every and any((self.steps_done + 1) % every == 0 for every in self._norm_every)
            self.gradient_norm = gradient.norm() if is_recorded else None
            outcome = self._flow.scale(step, gradient, skips=self.skip_nonfinite or self._is_scaled)
            if outcome.reason is None:
                self._update(step, gradient, outcome)
            else:
                self._flow.num_skipped += 1
                if self.sampler.rank == 0:
                    message = "%s: %s, the update is skipped (%d so far)"
                    logger.warning(message, str(self._cursor), outcome.reason, self._flow.num_skipped)
        finally:
            self._accumulator.reset()
        if self._buffers.is_on:
            self._buffers.restore(plan.is_idle or outcome.reason is not None, outcome.is_skipped)
            upcoming = self._cursor.next
            self._buffers.snapshot(upcoming is not None and upcoming.is_idle)
        self.steps_done += 1
        self.steps_made += 1
        self.samples_done += step.batch_size
        if weight is not None:
            self.minibatch_weights.add(weight)
        if self._driver is not None:
            self._driver.after_step(plan.step)
            self._cursor.refresh()
        else:
            self._cursor.look_ahead()
        if self._shares is not None:
            self._shares.after_step(plan.step, self.sampler.num_prefetched)
        if self.log_steps and self.steps_done % self.log_steps == 0 and self.sampler.rank == 0:
            message = f"%s: batch size %d, learning rate %g, %d {self.sampler.unit} in all"
            show(logger, message, str(self._cursor), step.batch_size, self.current_lr(), self.samples_done)
        return outcome.reason is None if outcome.is_skipped is None else outcome.is_skipped.logical_not()

    def _warn_without_gradients(self) -> None:
        """Warn if nothing will be trained: a minibatch may be left out, but hardly all of the first step."""
        if self.sampler.rank == 0 and all(p.grad is None for p in self.parameters()):
            logger.warning(
                "No parameter has a gradient in the first step. Call backward() before step(), on the loss of the "
                "model whose parameters the optimizer has, and zero_grad() not in between."
            )

    def _update(self, step: Step, gradient: StepGradient, outcome: Outcome) -> None:
        """Make a step of the inner optimizer, with the settings that the rule returns."""
        if self.clip_grad_norm is not None:
            gradient.clip_(self.clip_grad_norm)
        self._factors = outcome.factors
        with self._hyperparameters.applied(self._rule, step, self._factors) as self._lrs:
            _updates.is_running = True
            try:
                if outcome.is_skipped is None:
                    self.inner.step()
                else:
                    step_unless(outcome.is_skipped, self.inner, is_traced=self._communicator.is_one_program)
            finally:
                _updates.is_running = False
        if self._preconditioner is not None:
            self._preconditioner.refresh()

    def _prepare_next(self) -> None:
        """Before each minibatch."""
        if (layers := self._accumulator.norm_layers) is not None:
            upcoming = self._cursor.next
            layers.is_on = upcoming is not None and upcoming.step % self._samples_every == 0
            if upcoming is not None:
                layers.num_samples = upcoming.batch_size // upcoming.num_minibatches // (2 if self._half else 1)
        if self._half:
            self._communicator.flush()
            return
        if self._cursor.schedule.lockstep:
            plan = self._cursor.next or StepPlan(1)
            self._accumulator.begin_minibatch(is_padding=plan.is_padding, is_last=plan.is_last)
            if plan.is_padding and not plan.is_idle:
                self._buffers.snapshot_before_padding()
        self._communicator.flush()  # on XLA, else several minibatches would be one graph
        if self._cursor.next is None:
            self._accumulator.end_epoch()
            self._watch(False)
        if self.seeds_minibatches:
            self._seeder.set()

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Start an epoch, together with the sampler. Call it before each pass over the loader, here or there.

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
        self._has_joined = self._is_last = False
        if self._open is not None:
            self._open.begin()
        self._begin_epoch()
        self._watch(True)

    def _follow_reassigned(self) -> None:
        """Go on with the minibatches of another rank, after cores have joined or left."""
        self._runs = self.sampler.new_count()
        self._buffers.expect_skips(self.skip_nonfinite or self._is_scaled)
        upcoming = self._cursor.next
        self._buffers.snapshot(upcoming is not None and upcoming.is_idle)
        self._prepare_next()

    def _settle(self) -> None:
        if self._live is not None:
            self._live.settle()

    def _watch(self, is_on: bool) -> None:
        """Have hooks on the model, which are needed in a pass only, or none."""
        self._buffers.watch(is_on)
        self._seeder.watch(is_on)

    def _on_request(self, is_first: bool) -> None:
        if is_first:
            self._watch(True)
        is_run_next = self._runs.number < self.sampler.num_read and not self.sampler.is_read_ahead
        if is_run_next and not self._cursor.is_accumulating and not self._communicator.is_one_program:
            self._buffers.expect_changes()
        self._seeder.on_request(is_first, is_run_next=is_run_next)

    def _begin_epoch(self) -> None:
        self._runs, self._half = self.sampler.new_count(), 0
        self._accumulator.begin_epoch(self._cursor.epoch)
        self._loss_scale.reset()
        self._attachments.begin_pass(self)
        self._factors = []
        if not self._communicator.is_one_program:
            self._buffers.expect_skips(True)  # until the first minibatch shows whether a GradScaler is in use
        self._buffers.snapshot(self._cursor.plan.is_idle)
        self._prepare_next()

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
                of the gains. Where the progress is computed on the device, it is that before the latest step.
            every: how many units a scheduler's step takes; None for `ref_batchsize` samples, so that a schedule that
                was written for that batch size keeps its meaning, and otherwise for 1.
        """
        for part in parts:
            self._attachments.add(part, self, per=per, every=every)

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
            samples: likewise, this number of samples.
            tokens: likewise, this sum of the weights passed to :meth:`step`, which waits for the device in every step.

        Raises:
            ValueError: at the start, if the trace holds fewer epochs.
        """
        if self._live is not None:
            self._live.join()
        return self._attachments.epochs(self, num_epochs, Limit(progress, samples, tokens))

    def set_schedule(self, schedule: BaseSchedule) -> None:
        """Replace the schedule, and that of the sampler; ``set_epoch`` then selects a position in it."""
        self.sampler.schedule = self._cursor.schedule = schedule
        if self._shares is not None:
            self._shares.begin(schedule, 0, 0)
        self._cursor.move(0)

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
        return self._cursor.is_accumulating or self._half == 2

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
        if group < len(self._factors):
            return float(self._lrs[group])  # at the update: a scheduler may have stepped since
        settings = self.rule.rule_for_group(group)[0].merged_settings
        return float(settings(self.param_groups[group], self._rule_step(), self.factor(group))["lr"])

    def factor(self, group: int = 0) -> float:
        """What the learning rate is multiplied by in that step."""
        if group < len(self._factors):  # the step is complete, and the group was not added since
            return float(self._factors[group])
        self._flow.settle()
        return float(self._lr_scaler.preview(self._rule_step(), group))

    def _rule_step(self) -> Step:
        size, number = self._cursor.plan.batch_size, self._cursor.plan.num_minibatches
        totals = self._accumulator.totals if self._open is not None else None
        is_drawn = totals is None or totals.read == totals.own  # whether the samples are those of the loader
        more: Any = {"population": self._population if is_drawn else None, "samples_every": self._samples_every}
        return Step(size, size // number, self.ref_batchsize, self.steps_done, **more)

    @property
    def rule(self) -> Rule:
        """The optimizer's own copy of the rule, with what it has measured so far."""
        self._flow.release()
        return self._rule

    @property
    def updated(self) -> bool:
        """Whether the latest call of ``step()`` changed the weights; waits for the device if that decides it."""
        return bool(self._updated)

    @property
    def steps_skipped(self) -> int:
        """Steps whose gradient was not finite, or whose minibatches all have the weight 0; may wait for the device."""
        self._flow.settle()
        return self._flow.num_skipped

    @property
    def progress(self) -> float:
        """How many steps at `ref_batchsize` the run is worth so far: with AdaScale, the sum of the gains."""
        self._flow.settle()
        return float(self._lr_scaler.progress)

    @property
    def late_progress(self) -> float:
        """The progress as far as the host knows it without a wait: on an accelerator maybe without the latest step."""
        return self._flow.late_progress

    @property
    def weight_done(self) -> float:
        """The sum of all minibatches' weights so far, such as the tokens seen; reading it waits for the device."""
        return self.minibatch_weights.done

    def gain(self, batch_size: int | None = None, group: int | None = None) -> float:
        """How many steps at `ref_batchsize` a step is worth, from the noise measured so far.

        Args:
            batch_size: of any step; of the step of the latest minibatch if None.
            group: a parameter group; all together if None.
        """
        size = self.batch_size if batch_size is None else batch_size
        return float(self._meter().gain(size, self.ref_batchsize, group))

    @property
    def noise(self) -> Noise | None:
        """Variance and squared norm of gradients per sample, or per unit of weight; None before the first estimate."""
        return self._meter().noise()

    @property
    def noise_scale(self) -> float:
        """The simple noise scale V/G², in samples, or in units of weight; NaN before the first estimate."""
        noise = self.noise
        return noise.scale if noise else math.nan

    @property
    def noise_scale_in_samples(self) -> float | None:
        """The same always in samples, converted by their mean weight; None before the first estimate."""
        return self._meter().scale_in_samples()

    def _meter(self) -> NoiseMeter:
        self._flow.settle()
        meter = self._own_meter or (self._rule.meter if isinstance(self._rule, NoiseRule | PerOptimizerRule) else None)
        if meter is None:
            name = type(self._rule).__name__
            raise RuntimeError(f"{name} measures no noise: use AdaScaleRule, or pass `measure_noise=True`")
        return meter

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
        step = self._rule_step()
        times = self._driver.report() if self._driver is not None else {}
        return {**(self._own_meter.report(step) if self._own_meter else {}), **self._rule.report(step), **times}

    def record_grad_norm(self, *, every: int) -> None:
        """From now on, leave the norm of every N-th step's mean gradient in `gradient_norm`; several N add up."""
        check_positive(every=every)
        self._norm_every.add(every)

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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, on all cores; their values are those of core 0, and they have no gradient."""
        before = list(self.parameters())
        with consistency.rollback_param_groups(self.inner):
            self.inner.add_param_group(param_group)
            added, group = self.inner.param_groups[-1]["params"], self.sampler.process_group
            consistency.sync_added_params(added, before, self._wrappers, self._communicator, group)
            for p in added:
                p.grad = None  # of earlier minibatches
            self._accumulator.rebuild()
        self._communicator.flush()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that :meth:`step` has not taken, such as of another loss; after ``step()`` there are none."""
        self._accumulator.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state and the position; in the middle of a step, the position before that step."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        schedule = self.sampler.schedule
        own = {
            "epoch": self.epoch,
            "epoch_step": self.epoch_step,
            "steps_done": self.steps_done,
            "samples_done": self.samples_done,
            "steps_skipped": self.steps_skipped,
            **({} if self._driver is None else {self._driver.state_key: self._driver.state_dict()}),
            **({"open": schedule.state_dict()} if isinstance(schedule, OpenSchedule) else {}),
            "rule": self._rule.state_dict(),
            **({"late_progress": self._flow.late_progress} if self._flow.way == "on the device" else {}),
            **self._lr_scaler.state_dict(),
            **self._attachments.state_dict(),
            "weights": self.minibatch_weights.state_dict(),
            "gradients": self._accumulator.state_dict(),
            "noise": self._own_meter.state_dict() if self._own_meter else None,
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
            raise ValueError(f"the state has no {STATE_KEY!r}, so it is not of this library: {advice}")
        own = state_dict[STATE_KEY]
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != STATE_KEY})
        self._flow.forget(own.get("late_progress"))
        self._rule.load_state_dict(own["rule"])
        self._lr_scaler.load_state_dict(own)
        if self._own_meter is not None and own["noise"]:
            self._own_meter.load_state_dict(own["noise"])
        if ("own_norms" in own["gradients"]) != (self._accumulator.own_norms is not None):
            self._forget_noise()
        self.steps_done, self.samples_done = own["steps_done"], own["samples_done"]
        self._flow.num_skipped = own["steps_skipped"]
        if self._driver is not None:
            self._driver.load_state_dict(own.get(self._driver.state_key))
        if "open" in own and isinstance(self.sampler.schedule, OpenSchedule):
            self.sampler.schedule.load_state_dict(own["open"])
        self._attachments.load_state_dict(own.get("schedulers", ()), self.param_groups)
        if own["epoch_step"] < len(self.sampler.schedule.steps(own["epoch"])):
            self.set_epoch(own["epoch"], own["epoch_step"])
        else:  # a framework must not find an empty pass in the sampler
            self._cursor.schedule = self.sampler.schedule
            self._cursor.move(own["epoch"], own["epoch_step"])
            self._begin_epoch()
        self.minibatch_weights.load_state_dict(own["weights"])
        self._accumulator.load_state_dict(own["gradients"])
        if self._preconditioner is not None:
            self._preconditioner.refresh(has_updated=False)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


def _refuse_direct_step(reference: weakref.ref[CustomOptimizer], inner: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise if an inner optimizer makes a step by itself in the middle of a pass."""
    optimizer = None if getattr(_updates, "is_running", False) else reference()
    if optimizer is not None and optimizer.sampler.has_been_read and optimizer._cursor.next is not None:
        kind, name = type(inner).__name__, type(optimizer).__name__
        raise RuntimeError(
            f"step() of {kind} was called in the middle of a pass: call step() of the {name} that {kind} belongs to, "
            "or scaler.step() with that"
        )


def _half_of(data: Any, part: slice, size: int, tensors: list[torch.Tensor]) -> Any:
    """A part of each tensor in the data whose first dimension is the minibatch; appends these tensors to a list."""
    if isinstance(data, Mapping):
        halved = {key: _half_of(value, part, size, tensors) for key, value in data.items()}
        return halved if isinstance(data, dict) else type(data)(halved)  # type: ignore[call-arg]
    if isinstance(data, list | tuple):
        values = [_half_of(value, part, size, tensors) for value in data]
        return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)
    if isinstance(data, torch.Tensor) and data.dim():
        if len(data) != size:
            raise ValueError(f"halves() needs tensors of {size} samples, the minibatch size, got {tuple(data.shape)}")
        tensors.append(data)
        return data[part]
    return data


def _given_ref_batchsize(ref_batchsize: int | None, ref_batch_size: int | None) -> int:
    """The one that was passed of two spellings."""
    if ref_batchsize is not None and ref_batch_size is not None:
        raise ValueError("`ref_batchsize` and `ref_batch_size` are the same: pass one of them")
    given = ref_batch_size if ref_batchsize is None else ref_batchsize
    if given is None:
        raise ValueError("`ref_batchsize` must be given: the batch size at which the settings of `inner` are right")
    check_positive(**{"ref_batch_size" if ref_batchsize is None else "ref_batchsize": given})
    return given


def _make_rule(rule: RuleLike | Sequence[RuleLike], inner: Optimizer, model: torch.nn.Module | None) -> Rule:
    """A copy of the rule, or one rule that combines copies of several; raises if a rule does not fit.

    A copy refers to the same model, parameters and inner optimizers, if the rule does.
    """
    optimizers = optimizers_of(inner)
    rule = make_rule(rule) if isinstance(rule, str) else rule
    rules: list[Any] = list(rule) if isinstance(rule, list | tuple) else [rule] * len(optimizers)
    rules = [make_rule(one) if isinstance(one, str) else one for one in rules]
    for one in rules:
        if not isinstance(one, Rule):
            hint = ": pass an object, not the class" if isinstance(one, type) and issubclass(one, Rule) else ""
            raise ValueError(f"`rule` must be a Rule or a name such as 'linear', got {one!r}{hint}")
    for one, optimizer in zip(rules, optimizers, strict=False):
        one.check(name_of(optimizer), optimizer.param_groups)
        check_inner(one, optimizer)
    parameters = [p for group in inner.param_groups for p in group["params"]]
    shared = [inner, *optimizers, *parameters, *([] if model is None else [model])]
    if isinstance(rule, Rule):
        return copy_for_run(rule, *shared)
    rules = [copy_for_run(one, *shared) for one in rules]
    return PerOptimizerRule(rules, num_groups=[len(optimizer.param_groups) for optimizer in optimizers])
