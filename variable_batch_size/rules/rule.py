"""Rule: maps a step's batch size to the learning rate and other settings; numbers in, numbers out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple


@dataclass(frozen=True)
class Step:
    """The inputs of a rule for one step.

    Args:
        batch_size: samples in the step, summed over cores.
        minibatch_size: samples per forward and backward pass of one core.
        ref_batchsize: the batch size for which the inner optimizer's settings were chosen.
        steps_done: steps before this one.
        weight: the sum of the minibatches' weights, such as the step's tokens; None without weights.
        num_weighted: number of minibatches with a positive weight; None without weights.
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
    """The gradient norms measured in a step.

    Args:
        mean_of_squares: the mean of ‖g_i‖² over the minibatches; weighted if they have weights.
        square_of_mean: ‖mean g_i‖², weighted in the same way.
    """

    mean_of_squares: float
    square_of_mean: float


class Rule(ABC):
    """Maps a step's batch size to its settings.

    A custom rule needs one method:

    >>> class CappedLinearRule(Rule):
    ...     def factor(self, step):
    ...         return min(step.scale, 8.0)
    >>> step = Step(batch_size=2048, minibatch_size=32, ref_batchsize=128)
    >>> rule = CappedLinearRule()
    >>> rule.settings({"lr": 0.5}, step, rule.factor(step))
    {'lr': 4.0}
    """

    needs: ClassVar[tuple[str, ...]] = ()
    """Names of the required settings."""

    text_setting: ClassVar[tuple[str, type[int] | type[str]] | None] = None
    """The setting that may follow the rule's name after a colon, and its type: ``legw:5000``, ``adam:half-life``."""

    sums_gradients = False
    """Whether the inner optimizer receives the sum of the minibatches' gradients instead of their mean."""

    measures_noise = False
    """Whether gradient norms are measured and passed to :meth:`observe`."""

    preconditions = False
    """Whether these norms are taken after dividing gradients by the root of Adam's second moment."""

    def check(self, optimizer: str, groups: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027 (most rules fit any)
        """Reject an unsuitable inner optimizer, given its class name and parameter groups."""

    @abstractmethod
    def factor(self, step: Step) -> float:
        """The factor applied to the learning rate of the mean gradient."""

    def group_factor(self, step: Step, group: int) -> float:
        """The factor of one parameter group, for rules that scale groups separately."""
        return self.factor(step)

    def rule_for_group(self, group: int) -> tuple[Rule, int]:
        """The rule of a parameter group, and the group's index among the groups of that rule."""
        return self, group

    def worth(self, step: Step, factor: float) -> float:
        """The progress of a step with this factor, in steps at the reference batch size."""
        return factor

    def observe(self, step: Step, norms: Sequence[Norms | None]) -> None:  # noqa: B027 (most rules need none)
        """Receive a step's norms, one entry per parameter group; None for a group without any yet."""

    def report(self, step: Step) -> dict[str, float]:
        """The rule's values to log for a step."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The rule's state between steps: numbers, lists and dictionaries."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore the result of :meth:`state_dict`."""

    def settings(self, group: Mapping[str, Any], step: Step, factor: float) -> dict[str, Any]:
        """The settings of a parameter group that change for this step, with their new values."""
        return {"lr": group["lr"] * factor}
