"""Rule: maps a step's batch size to the learning rate and other settings; numbers in, numbers out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, final


class Norms(NamedTuple):
    """The gradient norms measured in a step.

    Args:
        mean_of_squares: the mean of ‖g_i‖² over the minibatches; weighted if they have weights.
        square_of_mean: ‖mean g_i‖², weighted in the same way.
    """

    mean_of_squares: float
    square_of_mean: float


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
        population: the size of the data set from which the step's samples are drawn without replacement; None if
            unknown.
        of_samples: the norms of the samples' gradients of normalization layers; None if they were not measured.
        samples_every: one step in this many has these norms.
    """

    batch_size: int
    minibatch_size: int
    ref_batchsize: int
    steps_done: int = 0
    weight: float | None = None
    num_weighted: int | None = None
    population: int | None = None
    of_samples: Norms | None = None
    samples_every: int = 1

    @property
    def scale(self) -> float:
        """S = batch size / reference batch size."""
        return self.batch_size / self.ref_batchsize

    @property
    def num_minibatches(self) -> int:
        """n = batch size / minibatch size."""
        return self.batch_size // self.minibatch_size


class Rule(ABC):
    """Maps a step's batch size to its settings.

    Every optimizer works with its own copy, which is ``optimizer.rule``. The object that was passed is not changed, and
    may be passed again. A custom rule needs one method:

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

    min_updates = 1
    """How many updates a parameter needs before its second moment is used for that."""

    scales_lr = True
    """Whether updates must be in proportion to the learning rate of their step; False if the factor is always 1."""

    corrects_bias = False
    """Whether the rule changes betas, to which only Adam's bias correction can be adapted."""

    checks_inner = True
    """Whether these assumptions are verified on a small parameter when an inner optimizer is wrapped.

    Set it to False, also on an instance, for an inner optimizer that is known to fit.
    """

    def __repr__(self) -> str:
        settings = {name: value for name, value in vars(self).items() if isinstance(value, bool | int | float | str)}
        shown = ", ".join(f"{name}={value!r}" for name, value in settings.items() if not name.startswith("_"))
        return f"{type(self).__name__}({shown})"

    def check(self, optimizer: str, groups: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027 (most rules fit any)
        """Reject an unsuitable inner optimizer, given its class name and parameter groups."""

    @abstractmethod
    def factor(self, step: Step) -> float:
        """The factor applied to the learning rate of the mean gradient."""

    def group_factor(self, step: Step, group: int) -> float:
        """The factor of one parameter group, for rules that scale groups separately."""
        return self.factor(step)

    def rule_for_group(self, group: int) -> "tuple[Rule, int]":
        """The rule of a parameter group, and the group's index among the groups of that rule."""
        return self, group

    def worth(self, step: Step, factor: float) -> float:
        """The progress of a step with this factor, in steps at the reference batch size."""
        return factor

    def observe(self, step: Step, norms: Sequence[Any]) -> None:  # noqa: B027 (most rules need none)
        """Receive a step's :class:`Norms`, one entry per parameter group; None for a group without any yet.

        In the optimizer's own norm, an entry is the noise itself (:class:`Noise`), and None in most steps.
        """

    def report(self, step: Step) -> dict[str, float]:
        """The rule's values to log for a step."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The rule's state between steps: numbers, lists and dictionaries."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore the result of :meth:`state_dict`."""

    def settings(self, group: Mapping[str, Any], step: Step, factor: float) -> dict[str, Any]:
        """The settings of a parameter group that change for this step, with their new values.

        A rule that overrides it returns settings in addition to the learning rate, which is ``group["lr"] * factor``
        unless it is among them.

        Args:
            group: the parameter group with the settings that are right at the reference batch size.
            step: the inputs of the rule.
            factor: of the group in this step, smoothed and bounded.
        """
        return {"lr": group["lr"] * factor}

    @final
    def merged_settings(self, group: Mapping[str, Any], step: Step, factor: float) -> dict[str, Any]:
        """The learning rate with the factor, and what :meth:`settings` returns."""
        changed = self.settings(group, step, factor)
        if not isinstance(changed, dict) or not changed.keys() <= group.keys():
            raise ValueError(
                f"{type(self).__name__}.settings must return a dictionary of settings that the parameter group has "
                f"({', '.join(name for name in group if name != 'params')}), got {changed!r}"
            )
        return {"lr": group["lr"] * factor, **changed}
