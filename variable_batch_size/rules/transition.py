"""Transition and LRScaler: factors that are limited and whose jumps are spread over steps."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from typing import Any

from variable_batch_size.checks import check_not_negative
from variable_batch_size.rules.numbers import Condition, Number, at_least, at_most, is_tensor, where
from variable_batch_size.rules.rule import Rule, Step

_NUMBERS = (float, Real)  # a float is a Real, too, but that check takes longer


class Transition:
    """Bounds a factor and spreads its jumps over steps, because momentum outlives a jump of the learning rate.

    When the batch size changes, the factor moves to the rule's in `smooth_steps` equal parts (Lin et al. 2019, "Dynamic
    mini-batch SGD for elastic distributed training"), even if the rule's factor moves in the meantime.

    Args:
        smooth_steps: steps that a jump is spread over; 0 or 1 for none.
        max_factor: the largest factor; None for no bound.

    >>> transition = Transition(smooth_steps=4)
    >>> [transition.move(goal, batch_size) for goal, batch_size in [(1, 128), (5, 640), (5, 640), (5, 640), (5, 640)]]
    [1.0, 2.0, 3.0, 4.0, 5.0]
    """

    def __init__(self, *, smooth_steps: int = 0, max_factor: float | None = None) -> None:
        check_not_negative(smooth_steps=smooth_steps)
        if max_factor is not None and not max_factor > 0:
            raise ValueError(f"`max_factor` must be positive, got {max_factor!r}")
        self.smooth_steps, self.max_factor = smooth_steps, max_factor
        self._factor: float | None = None
        self._batch_size, self._steps_left = 0, 1

    def preview(self, goal: Number, batch_size: Number) -> Number:
        """The factor of a step of this batch size, if the rule returns `goal`."""
        return self._at(goal, batch_size)[0]

    def move(self, goal: Number, batch_size: Number, is_counted: Condition = True) -> Number:
        """The same, for a step that is then made. A step that does not count changes nothing."""
        factor, steps_left = self._at(goal, batch_size)
        if is_counted is True:
            self._factor, self._batch_size, self._steps_left = factor, batch_size, steps_left
        else:
            self._factor = where(is_counted, factor, self._factor)
            self._batch_size = where(is_counted, batch_size, self._batch_size)
            self._steps_left = where(is_counted, steps_left, self._steps_left)
        return factor

    def _at(self, goal: Number, batch_size: Number) -> tuple[Number, Number]:
        """The factor, and how many steps the jump takes after this one, at least 1."""
        if self.max_factor is not None:
            goal = at_most(goal, self.max_factor)
        if isinstance(goal, int):
            goal = float(goal)
        if self._factor is None or self.smooth_steps <= 1:
            return goal, 1
        steps_left = where(batch_size == self._batch_size, self._steps_left, self.smooth_steps)
        factor = where(steps_left == 1, goal, self._factor + (goal - self._factor) / steps_left)
        return factor, at_least(steps_left - 1, 1)

    @property
    def is_new(self) -> bool:
        """Whether no step was made yet."""
        return self._factor is None

    def map_(self, function: Callable[[Number], Number]) -> None:
        """Replace every number that a step may change by a function of it."""
        if self._factor is not None:
            self._factor, self._batch_size = function(self._factor), function(self._batch_size)
            self._steps_left = function(self._steps_left)

    def state_dict(self) -> dict[str, Any]:
        """The state of a jump that is not complete."""
        return {"factor": self._factor, "batch_size": self._batch_size, "steps_left": self._steps_left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._factor, self._batch_size, self._steps_left = state["factor"], state["batch_size"], state["steps_left"]


class LRScaler:
    """The factors of a rule's parameter groups, each with its :class:`Transition`, and the progress of all steps."""

    def __init__(self, rule: Rule, *, smooth_steps: int, max_factor: float | None) -> None:
        self._rule = rule
        self._new_transition = partial(Transition, smooth_steps=smooth_steps, max_factor=max_factor)
        self._overall = self._new_transition()
        self._of_groups: list[Transition] = []
        self.progress: Number = 0.0
        self._is_on_device = False  # whether the numbers are tensors

    def preview(self, step: Step, group: int) -> Number:
        """The factor of a parameter group in a step."""
        self._have_groups(group + 1)
        goal = self._checked(self._rule.group_factor(step, group), step)
        return self._of_groups[group].preview(goal, step.batch_size)

    def move(self, step: Step, num_groups: int, is_counted: Condition = True) -> list[Number]:
        """The factors of all groups in a step, which counts as done."""
        self._have_groups(num_groups)
        rule, size = self._rule, step.batch_size
        goal = self._checked(rule.factor(step), step)
        goals = [self._checked(rule.group_factor(step, group), step) for group in range(num_groups)]
        worth = rule.worth(step, self._overall.move(goal, size, is_counted))
        progress = self.progress + worth
        self.progress = progress if is_counted is True else where(is_counted, progress, self.progress)
        pairs = zip(self._of_groups, goals, strict=False)
        return [transition.move(goal, size, is_counted) for transition, goal in pairs]

    def has_moved(self, num_groups: int) -> bool:
        """Whether `num_groups` groups have made a step."""
        return len(self._of_groups) >= num_groups and not any(one.is_new for one in self._of_groups)

    def map_(self, function: Callable[[Number], Number]) -> None:
        """Replace every number that a step may change by a function of it, always in the same order."""
        self.progress = function(self.progress)
        self._is_on_device = is_tensor(self.progress)
        for transition in (self._overall, *self._of_groups):
            transition.map_(function)

    def _checked(self, factor: Any, step: Step) -> Number:
        if self._is_on_device and is_tensor(factor):
            return factor
        if not isinstance(factor, _NUMBERS) or not 0 <= float(factor) < math.inf:
            raise ValueError(
                f"the factor of {type(self._rule).__name__} must be a finite number of at least 0, got {factor!r} for "
                f"a batch size of {step.batch_size}"
            )
        return float(factor)

    def _have_groups(self, number: int) -> None:
        while len(self._of_groups) < number:
            self._of_groups.append(self._new_transition())

    def state_dict(self) -> dict[str, Any]:
        """The progress, and the state of jumps that are not complete."""
        transitions = [transition.state_dict() for transition in self._of_groups]
        return {"progress": self.progress, "transitions": transitions, "transition_of_all": self._overall.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.progress = state["progress"]
        self._overall.load_state_dict(state["transition_of_all"])
        self._of_groups = []  # a run that has made no step has none saved
        self._have_groups(len(state["transitions"]))
        for transition, saved in zip(self._of_groups, state["transitions"], strict=True):
            transition.load_state_dict(saved)
