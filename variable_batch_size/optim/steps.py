"""Steps: how minibatches become steps; KnownSteps, determined by the schedule; Halves of a minibatch in such a step."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar, final

import torch

from variable_batch_size.data.cursor import Cursor, RunCount, StepPlan
from variable_batch_size.data.sampler import MinibatchSource
from variable_batch_size.optim.gradients.accumulator import Counts, GradientAccumulator, StepGradient
from variable_batch_size.optim.loss_scale import LossScale
from variable_batch_size.rules.rule import Rule

Data = TypeVar("Data")

_LOST = -1  # as the half that is next: the loop over halves was left


class Steps:
    """How an optimizer advances to a minibatch and reduces a step, and what happens when a run moves.

    There are three kinds: those that the schedule determines, open ones (:class:`OpenStep`), and those of cores that
    join and leave (:class:`LiveSteps`).
    """

    _cursor: Cursor
    advance: Callable[[], StepPlan]  # the plan of the next minibatch, which is then the latest one
    reduce: Callable[[StepPlan], StepGradient | None]  # the gradient of a step; None if it is not complete

    def join(self) -> None:
        """Before the first epoch of a run."""

    def follow(self) -> None:
        """After the position was moved."""

    def settle(self) -> None:
        """When the loop requests a minibatch."""

    def end_epoch(self, end_step: Callable[[], Any]) -> None:
        """After the loop over an epoch. Every core must call it."""

    def state_dict(self) -> dict[str, Any]:
        """What the run needs to resume, besides its position."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, if the state has it."""

    def end_with_next(self, is_last: bool) -> None:
        """Whether the next minibatch is this core's last one in an open step."""
        name = self._cursor.schedule.name
        raise ValueError(f"`last` must be None, got {is_last}: {name} determines it; see vbs.OpenSteps")

    def end(self) -> None:
        """Let this core have no further minibatch in an open step."""
        _refuse_known("end_step()")

    def minibatches(
        self, own: Iterable[Data], padding: Data | None, optimizer: Any, prepare_next: Callable[[], None]
    ) -> Iterator[Data]:
        """This core's minibatches of an open step, which ends with them."""
        _refuse_known("minibatches()")


def _refuse_known(what: str) -> NoReturn:
    rule = f"{what} is for vbs.OpenSteps, but here the trace determines where steps end"
    raise RuntimeError(f"{rule}: call step() only")


@final
class KnownSteps(Steps):
    """The cursor advances and the accumulator reduces: one call each, as every minibatch makes them."""

    def __init__(self, cursor: Cursor, accumulator: GradientAccumulator, loss_scale: LossScale) -> None:
        self._cursor, self._accumulator, self._loss_scale = cursor, accumulator, loss_scale
        self.advance = cursor.advance
        self.reduce = accumulator.reduce if accumulator.communicator.num_replicas == 1 else self._count_and_reduce

    def _count_and_reduce(self, plan: StepPlan) -> StepGradient:
        """Compare the minibatches that the cores have run, too, and learn whether any has a GradScaler."""
        cursor, accumulator, scaling = self._cursor, self._accumulator, self._loss_scale
        num_own, is_used = cursor.num_own * cursor.num_parts, scaling.is_used
        accumulator.counts = Counts(num_own, plan.num_minibatches, scaled=int(is_used))
        gradient = accumulator.reduce(plan)
        if not is_used and accumulator.counts.scaled:
            scaling.use()
        return gradient


class Halves:
    """Splits the only minibatch of a step in two, from which its noise is estimated.

    Attributes:
        next: of the minibatch that is split, which half is next; 0 if none is split.
    """

    def __init__(
        self, sampler: MinibatchSource, cursor: Cursor, accumulator: GradientAccumulator, rule: Rule, *, measures: bool
    ) -> None:
        self._sampler, self._cursor, self._accumulator = sampler, cursor, accumulator
        self._rule, self._measures = rule, measures
        self.next = 0

    def of(self, data: tuple[Any, ...], runs: RunCount, every: int) -> Iterator[Any]:
        """A minibatch, or its two halves in every N-th step if it is the step's only one."""
        if self.next:
            self.refuse_order()
        plan = self._cursor.next
        if runs.has_reached(self._sampler.num_to_run) or not self._is_split(plan, every):
            yield data[0] if len(data) == 1 else data
            return
        assert plan is not None
        size, self.next = self._sampler.minibatch_size, 1
        try:
            if self._accumulator.norm_layers is not None:
                self._accumulator.norm_layers.num_samples = size // 2
            for number in (1, 2):
                if self._cursor.schedule.lockstep:
                    self._accumulator.begin_minibatch(is_padding=plan.is_padding, is_last=number == 2)
                part = slice((number - 1) * size // 2, number * size // 2)
                tensors: list[torch.Tensor] = []
                parts = tuple(_half_of(one, part, size, tensors) for one in data)
                if not tensors:  # the halves would be the same
                    kinds = ", ".join(type(one).__name__ for one in data)
                    raise ValueError(f"halves() needs tensors, or lists, tuples and mappings of these, got {kinds}")
                yield parts[0] if len(parts) == 1 else parts
                if self.next != (2 if number == 1 else 0):
                    self.refuse_order()
        finally:
            if self.next:  # the loop was left
                self.next = _LOST

    @property
    def is_lost(self) -> bool:
        """Whether a loop over halves was left between them."""
        return self.next == _LOST

    def refuse_order(self) -> NoReturn:
        rule = "step() must be called once after each half that halves() yields, before another minibatch"
        raise RuntimeError(rule)

    def _is_split(self, plan: StepPlan | None, every: int) -> bool:
        sampler = self._sampler
        if not self._measures:
            raise ValueError(f"halves() needs a rule that measures noise, or `measure_noise=True`, got {self._rule!r}")
        if sampler.needs_weights:
            raise ValueError("halves() needs minibatches of equal size, but those of a TokenBudget differ")
        if sampler.minibatch_size % 2:
            raise ValueError(f"`minibatch_size` must be even for halves(), got {sampler.minibatch_size}")
        if self._rule.sums_gradients:
            raise ValueError(f"halves() needs a rule of mean gradients, but {type(self._rule).__name__} sums them")
        if sampler.is_elastic:
            raise ValueError("halves() must not be used with `elastic`: pass measure_noise='norm layers' instead")
        if sampler.is_shared:
            raise ValueError("halves() needs a sampler of one optimizer, but several are attached to this one")
        if sampler.shares is not None or sampler.schedule.is_open:
            raise ValueError('halves() needs steps that are known in advance, and assign="round robin"')
        return plan is not None and plan.num_minibatches == 1 and plan.step % every == 0


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
