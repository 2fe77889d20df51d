"""Steps: how minibatches become steps; KnownSteps, determined by the schedule."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar, final

from variable_batch_size.data.cursor import Cursor, StepPlan
from variable_batch_size.optim.gradients.accumulator import Counts, GradientAccumulator, StepGradient
from variable_batch_size.optim.loss_scale import LossScale

Data = TypeVar("Data")


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
        is_used = scaling.is_used
        accumulator.counts = Counts(cursor.num_own, plan.num_minibatches, scaled=int(is_used))
        gradient = accumulator.reduce(plan)
        if not is_used and accumulator.counts.scaled:
            scaling.use()
        return gradient
