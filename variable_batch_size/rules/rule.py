"""Rule: what a step's batch size makes of the learning rate and other settings; numbers in, numbers out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple


@dataclass(frozen=True)
class Step:
    """One step, as a rule sees it.

    Args:
        batch_size: samples in the step, over all cores.
        minibatch_size: samples that one core runs at once.
        ref_batchsize: the batch size for which the inner optimizer's settings are right.
        steps_done: steps before this one.
        weight: the sum of the minibatches' weights, such as the step's tokens; None if they have none.
        num_weighted: how many minibatches have a weight above 0; None if they have none.
    """

    batch_size: int
    minibatch_size: int
    ref_batchsize: int
    steps_done: int = 0
    weight: float | None = None
    num_weighted: int | None = None

    @property
    def scale(self) -> float:
        """S = batch size / reference batch size."""
        return self.batch_size / self.ref_batchsize

    @property
    def num_minibatches(self) -> int:
        """n = batch size / minibatch size."""
        return self.batch_size // self.minibatch_size


class Norms(NamedTuple):
    """What was measured of a step's gradients.

    Args:
        mean_of_squares: the mean of ‖g_i‖² over the minibatches; with weights, their weighted mean.
        square_of_mean: ‖mean g_i‖², likewise.
    """

    mean_of_squares: float
    square_of_mean: float


class Rule(ABC):
    """How the settings of a step follow from its batch size.

    A rule of your own needs one method:

    >>> class CappedLinearRule(Rule):
    ...     def factor(self, step):
    ...         return min(step.scale, 8.0)
    >>> step = Step(batch_size=2048, minibatch_size=32, ref_batchsize=128)
    >>> rule = CappedLinearRule()
    >>> rule.settings({"lr": 0.5}, step, rule.factor(step))
    {'lr': 4.0}
    """

    needs: ClassVar[tuple[str, ...]] = ()
    """The settings without which the rule cannot be made, by their names."""

    text_setting: ClassVar[tuple[str, type[int] | type[str]] | None] = None
    """The setting that may follow the rule's name after a colon, and its type: ``legw:5000``, ``adam:half-life``."""

    sums_gradients = False
    """Whether the update gets the sum of the minibatches' gradients, instead of their mean."""

    measures_noise = False
    """Whether the norms of gradients are to be measured and given to :meth:`observe`."""

    preconditions = False
    """Whether those norms are of gradients divided by the root of Adam's second moment."""

    def check(self, optimizer: str, groups: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027 (most rules fit any)
        """Refuse an inner optimizer that the rule does not fit, by its name and the settings of its groups."""

    @abstractmethod
    def factor(self, step: Step) -> float:
        """What the learning rate of the mean gradient is multiplied by."""

    def group_factor(self, step: Step, group: int) -> float:
        """The factor of one parameter group, for a rule that gives each its own."""
        return self.factor(step)

    def rule_for_group(self, group: int) -> tuple[Rule, int]:
        """The rule of a parameter group, and its number there, where several optimizers have one each."""
        return self, group

    def worth(self, step: Step, factor: float) -> float:
        """How many steps at the reference batch size a step with this factor counts for, as to progress."""
        return factor

    def observe(self, step: Step, norms: Sequence[Norms | None]) -> None:  # noqa: B027 (most rules need none)
        """Take in what was measured in a step: for each parameter group its norms, None where there are none yet."""

    def report(self, step: Step) -> dict[str, float]:
        """What the rule has to tell a log about a step."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What the rule has to remember from one step to the next: numbers, lists and dictionaries."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Take over what :meth:`state_dict` returned."""

    def settings(self, group: Mapping[str, Any], step: Step, factor: float) -> dict[str, Any]:
        """The settings of a parameter group that are different for this step, with the values they take."""
        return {"lr": group["lr"] * factor}
