"""Flow: how the numbers measured in a step reach the rule, and how its factors reach the optimizer."""

import copy
import dataclasses
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from operator import and_
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from variable_batch_size.cores import cuda_operations, xla
from variable_batch_size.cores.communicator import Communicator, Formula, Operation
from variable_batch_size.cores.dtensor import is_dtensor
from variable_batch_size.optim.gradients.accumulator import Layout, Measured, StepGradient
from variable_batch_size.optim.gradients.norms import is_finite
from variable_batch_size.optim.proxy import optimizers_of, parameters_of
from variable_batch_size.rules.adascale import NoiseRule
from variable_batch_size.rules.noise import NoiseMeter, Smoothing, decay_at
from variable_batch_size.rules.numbers import Condition, Number
from variable_batch_size.rules.per_optimizer import PerOptimizerRule
from variable_batch_size.rules.registry import RULES
from variable_batch_size.rules.rule import Rule, Step
from variable_batch_size.rules.transition import LRScaler

logger = logging.getLogger(__name__)

_HOSTS = ("cpu",)  # devices whose numbers the host reads without a wait
_MAX_GROUPS = 8  # each takes some small operations on the device
_NUM_AT_ONCE = 20  # estimates: until then, one step changes the average a lot, and weights and gradients change fast
_NONFINITE = "the gradient is not finite"
_NOTHING = "all minibatches have the weight 0"
_SIZES = ("batch_size", "minibatch_size", "ref_batchsize", "population", "num_minibatches")  # of a step


def make_meter(rule: Rule, smoothing: Smoothing, *, measure_noise: bool) -> NoiseMeter | None:
    """A meter in addition to those of the rules, if one is needed; all of them average in the same way."""
    rules = _noise_rules(rule)
    if smoothing is not None:
        if not rules and not measure_noise:
            reason = f"as {type(rule).__name__} measures no noise: pass `measure_noise=True` as well"
            raise ValueError(f"`smoothing` must be None, {reason}")
        for one in rules:
            one.set_smoothing(smoothing)
    has_own = measure_noise and not isinstance(rule, NoiseRule)
    return NoiseMeter(smoothing=smoothing) if has_own else None


def _noise_rules(rule: Rule) -> list[NoiseRule]:
    return [one for one in getattr(rule, "rules", [rule]) if isinstance(one, NoiseRule)]


class Outcome(NamedTuple):
    """What becomes of a step."""

    factors: list[Number]  # of the parameter groups; none if the update is skipped
    reason: str | None = None  # why it is skipped, if the host has decided that
    is_skipped: torch.Tensor | None = None  # whether it is, if the device has


class Flow:
    """Passes the norms of each step to the rule and the noise meter, and returns the factors of the step.

    Reading a number from an accelerator makes the host wait for all work queued there. Hence there are three ways:

    - *At once*: the host reads the norms before it makes the update. On CPUs, where it need not wait, and wherever
      non-finite updates must be skipped but the inner optimizer cannot skip them by itself.
    - *On the device*: noise, gain, learning rate, progress, and whether the update is skipped are tensors there, which
      the host reads only on request. This needs a rule of this library and an inner optimizer that accepts these
      tensors: fused SGD, Adam and AdamW, and on XLA, SGD and capturable Adam and AdamW. Results are the same.
    - *One step late*: the norms of a step are copied while the next step runs, and determine that step's gain. For all
      other inner optimizers and rules. The first steps are read at once.

    Args:
        rule, scaler, meter: the rule, its factors, and another meter if there is one; they hold the host's numbers.
        inner: the inner optimizer.
        communicator: of the cores.
        is_read: whether the host must read each step on XLA, which also shows which parameters have a gradient.

    Attributes:
        skips: whether updates with gradients that are not finite are skipped.
    """

    def __init__(
        self,
        rule: Rule,
        scaler: LRScaler,
        meter: NoiseMeter | None,
        inner: Optimizer,
        communicator: Communicator,
        *,
        is_read: bool = False,
    ) -> None:
        self.rule, self.scaler, self.meter, self.inner = rule, scaler, meter, inner
        self.num_skipped = 0
        self.skips = False
        self._measures = rule.measures_noise or meter is not None
        self._communicator, self._is_traced = communicator, communicator.is_one_program
        self._device = parameters_of(inner)[0].device
        self._twin: _Twin | None = None
        self._pending: _Pending | None = None
        self._saved_progress: float | None = None  # before the latest step, until the next one
        if self._device.type in _HOSTS or (self._is_traced and is_read):
            self.way = "at once"
        elif _stays_on_device(rule, inner, self._device, is_traced=self._is_traced):
            self.way = "on the device"
        else:
            self.way = "at once" if self._is_traced or not self._measures else "one step late"

    @property
    def time_of_gain(self) -> str:
        """Which step the gain comes from, in words; it is part of a run's description."""
        return "one step late" if self.way == "one step late" else "of the step itself"

    @property
    def skips_by_default(self) -> bool:
        """Whether checking for non-finite gradients costs no extra wait."""
        return self._measures and self.way != "one step late"

    def scale(self, step: Step, gradient: StepGradient) -> Outcome:
        """Observe the gradient of a step, and return its factors; or skip it."""
        skips = self.skips
        if gradient.weighs_nothing:
            return Outcome([], _NOTHING)
        is_weight_traced = gradient.weight is not None and self._is_traced
        looks = skips or (self._measures and gradient.tells_noise) or is_weight_traced
        num_groups = len(self.inner.param_groups)
        if looks and self.way == "on the device" and self._has_state(gradient):
            if self._twin is None:
                self._twin = self._new_twin(gradient)
            return self._twin.scale(step, gradient, num_groups, skips=skips)
        if self._twin is not None or self._pending is not None:
            self.settle()
        self._twin = self._saved_progress = None
        if looks and self.way == "one step late" and not skips and not self._is_new(step, gradient):
            self._pending = _Pending(step, gradient)
        elif looks:
            measured = gradient.measure()
            if skips and not measured.is_finite:
                return Outcome([], _NONFINITE)
            if measured.weight == 0:
                return Outcome([], _NOTHING)
            if measured.is_finite:  # otherwise the averages would never be finite again
                self._observe(step, measured)
        return Outcome(self.scaler.move(step, num_groups))

    def _new_twin(self, gradient: StepGradient) -> "_Twin":
        parts = (self.rule, self.scaler, self.meter, self._device)
        if self._is_traced:
            return _OperationTwin(*parts, self._communicator.as_operation, torch.float32)
        is_formula = isinstance(self.rule, NoiseRule) and not gradient.has_own_norms
        if is_formula and cuda_operations.are_available(self._device):
            return _OperationTwin(*parts, cuda_operations.as_operation, torch.float64)
        return _EagerTwin(*parts)

    def _is_new(self, step: Step, gradient: StepGradient) -> bool:
        """Whether the rule has few estimates, and this step gives another, or changes the mean weight of a sample."""
        if not isinstance(self.rule, NoiseRule):
            return self.rule.measures_noise and step.steps_done < _NUM_AT_ONCE
        counts = [average.count for average in self.rule.meter.averages]
        is_known = len(counts) == len(self.inner.param_groups) and any(counts)
        if is_known and all(count >= _NUM_AT_ONCE for count in counts if count):
            return False
        is_estimate = step.num_minibatches >= 2 or gradient.measures_samples
        return is_estimate or (gradient.weight is not None and any(counts))

    def _observe(self, step: Step, measured: Measured) -> None:
        observed = _observed(step, measured)
        self.rule.observe(observed, measured.norms)
        if self.meter is not None:
            self.meter.observe(observed, measured.norms)

    def settle(self) -> None:
        """Bring all numbers of the steps so far to the host; waits for the device if they are still there."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            measured = pending.read()
            if measured.is_finite and measured.weight != 0:  # otherwise the averages would never be finite again
                self._observe(pending.step, measured)
        if self._twin is not None:
            if self._is_traced:
                self._communicator.flush(is_extra=True)  # reading would start graphs of several threads at once
            num_skipped = self._twin.read_into(self.rule, self.scaler, self.meter)
            self.num_skipped += num_skipped
            if num_skipped and self._communicator.rank == 0:
                message = "%d updates were skipped up to step %d: %s, or %s"
                logger.warning(message, num_skipped, self._twin.latest, _NONFINITE, _NOTHING)

    def noise_meter(self) -> NoiseMeter:
        """The meter of the noise of the steps so far; waits for the device if its numbers are still there."""
        self.settle()
        meter = self.meter or (self.rule.meter if isinstance(self.rule, NoiseRule | PerOptimizerRule) else None)
        if meter is None:
            name = type(self.rule).__name__
            raise RuntimeError(f"{name} measures no noise: use AdaScaleRule, or pass `measure_noise=True`")
        return meter

    def forget_noise(self) -> None:
        """After loading a state with the noise in another norm: restart its averages."""
        for meter in [self.meter, *(rule.meter for rule in _noise_rules(self.rule))]:
            if meter is not None and meter.averages:
                meter.load_state_dict(NoiseMeter().state_dict())
                logger.warning("the noise in this state was measured in another norm: its averages restart")

    def release(self) -> None:
        """Bring all numbers to the host, and use those in the next step: the rule may be changed."""
        self.settle()
        self.forget(self.late_progress)

    def forget(self, late_progress: float | None = None) -> None:
        """After another state was loaded: drop what is on the device, which belongs to another run."""
        self._twin, self._pending, self._saved_progress = None, None, late_progress

    @property
    def late_progress(self) -> float:
        """The progress before the latest step, or after it if that is known to the host; never waits for that step."""
        if self._twin is not None:
            return self._twin.read_progress_before()
        return float(self.scaler.progress) if self._saved_progress is None else self._saved_progress

    def _has_state(self, gradient: StepGradient) -> bool:
        """Whether each parameter was updated before: a first update that is skipped would leave a state behind."""
        observed = {"is_weighted": gradient.weight is not None, "has_samples": gradient.has_samples}
        num_groups = len(self.inner.param_groups)
        if not self.scaler.has_moved(num_groups):
            return False
        if not all(meter.has_observed(num_groups, **observed) for meter in _meters(self.rule, self.meter)):
            return False
        for optimizer in optimizers_of(self.inner):
            if not _takes_tensors(optimizer, is_traced=self._is_traced):  # a state or a group may have changed that
                return False
            for group in optimizer.param_groups:
                if group.get("momentum", 1) and any(
                    p.grad is not None and not optimizer.state.get(p) for p in group["params"]
                ):
                    return False
        return True

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return {**self.__dict__, "_twin": None, "_pending": None, "_saved_progress": self.late_progress}


def _observed(step: Step, measured: Measured) -> Step:
    if measured.weight is None and measured.of_samples is None:
        return step
    weights: Any = {"weight": measured.weight, "num_weighted": measured.num_weighted}
    return dataclasses.replace(step, of_samples=measured.of_samples, **weights)


def _stays_on_device(rule: Rule, inner: Optimizer, device: torch.device, *, is_traced: bool) -> bool:
    if type(rule) not in RULES.builtin.values() or rule.corrects_bias or len(inner.param_groups) > _MAX_GROUPS:
        return False
    if is_traced and (not isinstance(rule, NoiseRule) or xla.is_spmd()):  # there, each number would need a sharding
        return False
    if any(p.device != device or is_dtensor(p) for p in parameters_of(inner)):
        return False
    return all(_takes_tensors(optimizer, is_traced=is_traced) for optimizer in optimizers_of(inner))


def _takes_tensors(optimizer: Optimizer, *, is_traced: bool) -> bool:
    """Whether an optimizer takes its learning rate on the device, and can skip a step there."""
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        return False
    if not is_traced:
        return all(group.get("fused") for group in optimizer.param_groups)
    is_sgd = type(optimizer) is torch.optim.SGD
    return all((is_sgd or group.get("capturable")) and not group.get("foreach") for group in optimizer.param_groups)


class _Pending:
    """The numbers of a step, on their way to the host."""

    def __init__(self, step: Step, gradient: StepGradient) -> None:
        self.step, self._gradient = step, gradient
        self._numbers = _Travelling(gradient.numbers())

    def read(self) -> Measured:
        return self._gradient.interpret(self._numbers.read())


class _Travelling:
    """A tensor that is copied to the host while the device continues with other work."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers, self._event = numbers, None  # type: tuple[Any, Any]
        if numbers.device.type == "cuda":
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> Any:
        if self._event is not None:
            self._event.synchronize()
        if isinstance(self._numbers, torch.Tensor):
            self._numbers = self._numbers.tolist()
        return self._numbers


class _Twin(ABC):
    """The rule, its factors and the meter with all their numbers on the device."""

    def __init__(self, rule: Rule, scaler: LRScaler, meter: NoiseMeter | None) -> None:
        # together, as the scaler refers to the rule
        self._rule, self._scaler, self._meter = copy.deepcopy((rule, scaler, meter))
        self.latest = self._latest_read = -1  # steps, by their number
        self._num_skipped = 0  # of those that were read

    @abstractmethod
    def scale(self, step: Step, gradient: StepGradient, num_groups: int, *, skips: bool) -> Outcome:
        """The factors of a step, and whether it is skipped, on the device."""

    @abstractmethod
    def _numbers(self) -> torch.Tensor:
        """The progress before the latest step, the number of skipped steps, and the numbers of all parts."""

    @abstractmethod
    def read_progress_before(self) -> float:
        """The progress before the latest step."""

    def _move(
        self, step: Step, measured: Measured, num_groups: int, *, is_finite: Condition, skips: bool
    ) -> tuple[list[Number], Condition]:
        """Observe a step; returns its factors, and whether it is made."""
        is_made = is_finite if skips else is_finite | True
        if measured.weight is not None:
            is_made = is_made & (measured.weight != 0)
        observed = _observed(step, measured)
        for meter in _meters(self._rule, self._meter):
            meter.observe(observed, measured.norms, is_made & is_finite)
        return self._scaler.move(step, num_groups, is_made), is_made

    def read_into(self, rule: Rule, scaler: LRScaler, meter: NoiseMeter | None) -> int:
        """Set the numbers of the host to those on the device; returns how many steps were skipped since last time."""
        if self.latest == self._latest_read:
            return 0
        _, num_skipped, *values = self._numbers().cpu().tolist()
        numbers = iter(values)
        for part in _parts(rule, scaler, meter):
            part.map_(lambda number: type(number)(next(numbers)))
        num_before, self._num_skipped, self._latest_read = self._num_skipped, int(num_skipped), self.latest
        return self._num_skipped - num_before

    def _map(self, function: Callable[[Number], Number]) -> None:
        for part in _parts(self._rule, self._scaler, self._meter):
            part.map_(function)


class _EagerTwin(_Twin):
    """A twin whose numbers are tensors."""

    def __init__(self, rule: Rule, scaler: LRScaler, meter: NoiseMeter | None, device: torch.device) -> None:
        super().__init__(rule, scaler, meter)
        self._device = device
        self._dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
        self._map(self._to_device)
        self._skipped = self._to_device(0.0)

    def _to_device(self, number: float) -> torch.Tensor:
        return torch.full(
            (), number, dtype=torch.bool if isinstance(number, bool) else self._dtype, device=self._device
        )

    def scale(self, step: Step, gradient: StepGradient, num_groups: int, *, skips: bool) -> Outcome:
        self.latest = step.steps_done + 1
        self._before = self._scaler.progress
        numbers = gradient.numbers()
        measured = gradient.interpret(numbers.to(self._dtype).unbind(), is_finite=True)
        is_all_finite = is_finite(numbers).all()
        factors, is_made = self._move(step, measured, num_groups, is_finite=is_all_finite, skips=skips)
        is_skipped = is_made.logical_not()
        self._skipped = self._skipped + is_skipped
        self._travelling = _Travelling(self._before)
        return Outcome(factors, is_skipped=is_skipped)

    def _numbers(self) -> torch.Tensor:
        found = [self._before, self._skipped]
        self._map(lambda number: found.append(number) or number)  # type: ignore[func-returns-value]
        return torch.stack([number.to(self._dtype) for number in found])

    def read_progress_before(self) -> float:
        return float(self._travelling.read())


@dataclasses.dataclass(frozen=True)
class _StepOfData(Step):
    """A step whose number of minibatches is data: it would be too small by 1 where a device divides inexactly."""

    num_minibatches: Number = 0


class _OperationTwin(_Twin):
    """A twin whose formulas are one operation: otherwise the host would start or trace a hundred in every step.

    Its numbers are one tensor, and all that changes from step to step is data.
    """

    def __init__(
        self,
        rule: Any,  # a NoiseRule
        scaler: LRScaler,
        meter: NoiseMeter | None,
        device: torch.device,
        as_operation: Callable[[Formula], Operation],
        dtype: torch.dtype,
    ) -> None:
        super().__init__(rule, scaler, meter)
        self._device, self._dtype, self._smoothing = device, dtype, rule.meter.smoothing
        self._as_operation = as_operation
        numbers: list[float] = [scaler.progress, 0.0]  # before the latest step; how many were skipped
        self._map(lambda number: numbers.append(number) or number)  # type: ignore[func-returns-value]
        self._are_conditions = [isinstance(number, bool) for number in numbers]
        self._state = self._to_device(numbers)
        self._operations: dict[Any, Operation] = {}

    def _to_device(self, numbers: list[float]) -> torch.Tensor:
        is_cuda = self._device.type == "cuda"  # a copy from pinned memory does not wait for the device
        return torch.tensor(numbers, dtype=self._dtype, pin_memory=is_cuda).to(self._device, non_blocking=is_cuda)

    def scale(self, step: Step, gradient: StepGradient, num_groups: int, *, skips: bool) -> Outcome:
        self.latest = step.steps_done + 1
        numbers, layout = gradient.numbers().to(self._dtype), gradient.layout
        data: list[Any] = [decay_at(step.scale, self._smoothing), *(getattr(step, name) for name in _SIZES)]
        data = [number for number in data if number is not None]
        blank: Any = {name: 0 for name in _SIZES if getattr(step, name) is not None}
        fixed = _StepOfData(**{**vars(step), **blank, "steps_done": 0})
        key = layout, fixed, num_groups, skips
        if key not in self._operations:
            self._operations[key] = self._as_operation(partial(self._formula, *key))
        self._state, factors, is_skipped = self._operations[key](self._state, numbers, self._to_device(data))
        self._travelling = _Travelling(self._state)
        return Outcome(list(factors.unbind()), is_skipped=is_skipped.view(()))

    def _formula(
        self,
        layout: Layout,
        fixed: "_StepOfData",
        num_groups: int,
        skips: bool,
        state: Sequence[Number],
        numbers: Sequence[Number],
        data: Sequence[Number],
    ) -> tuple[list[Number], list[Number], list[Condition]]:
        """The state after a step, its factors, and whether it is skipped."""
        _, num_skipped, *values = state
        decay, *sizes = data
        names = [name for name in _SIZES if getattr(fixed, name) is not None]
        step = dataclasses.replace(fixed, **dict(zip(names, sizes, strict=True)))
        pairs = zip(values, self._are_conditions[2:], strict=True)
        old = iter([value != 0 if is_condition else value for value, is_condition in pairs])
        self._map(lambda _: next(old))
        for meter in _meters(self._rule, self._meter):
            meter.use_decay(decay)
        before = self._scaler.progress
        measured = layout.interpret(numbers, step.num_minibatches, is_finite=True)
        is_finite = reduce(and_, [(number < math.inf) & (number > -math.inf) for number in numbers])
        factors, is_made = self._move(step, measured, num_groups, is_finite=is_finite, skips=skips)
        is_skipped = is_made.logical_not()
        new = [before, num_skipped + is_skipped]
        self._map(lambda number: new.append(number * 1.0) or number)  # type: ignore[func-returns-value]
        return new, factors, [is_skipped]

    def _numbers(self) -> torch.Tensor:
        return self._state

    def read_progress_before(self) -> float:
        return float(self._travelling.read()[0])


def _meters(rule: Rule, meter: NoiseMeter | None) -> Iterator[NoiseMeter]:
    if isinstance(rule, NoiseRule):
        yield rule.meter
    if meter is not None:
        yield meter


def _parts(rule: Rule, scaler: LRScaler, meter: NoiseMeter | None) -> Iterator[Any]:
    """What has numbers that change in a step."""
    yield scaler
    yield from _meters(rule, meter)


def step_unless(is_skipped: torch.Tensor, inner: Optimizer, communicator: Communicator) -> None:
    """Let an inner optimizer make a step, unless the device has decided otherwise.

    Fused optimizers skip it by themselves. On XLA, the new weights and state are computed in any case, and discarded if
    the step is skipped.
    """
    optimizers = optimizers_of(inner)
    if communicator.is_one_program:
        tensors = list(_tensors_of(optimizers))
        before = [tensor.clone() for tensor in tensors]
        inner.step()
        for tensor, value in zip(tensors, communicator.where(is_skipped, before, tensors), strict=True):
            tensor.copy_(value)
        return
    for optimizer in optimizers:
        optimizer.found_inf, optimizer.grad_scale = is_skipped.float(), None  # type: ignore[attr-defined]
    try:
        inner.step()
    finally:
        for optimizer in optimizers:
            del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]


def _tensors_of(optimizers: list[Optimizer]) -> Iterator[torch.Tensor]:
    """All tensors that a step changes."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                yield p
                yield from (value for value in optimizer.state.get(p, {}).values() if torch.is_tensor(value))
