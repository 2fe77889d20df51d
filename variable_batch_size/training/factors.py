"""Factors: what the learning rates of a step are multiplied by, and how far a run has come by that."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from variable_batch_size.rules.rule import Rule, Step
from variable_batch_size.rules.transition import Transition


class Factors:
    """The factors that a rule wants, bounded and with their jumps spread over steps, one for each parameter group.

    Args:
        rule: what the batch size of a step makes of the settings.
        smooth_steps: spread a jump over N steps.
        max_factor: the largest factor; None for no bound.

    Attributes:
        progress: the sum of what the factors of all steps are worth to the rule.
    """

    def __init__(self, rule: Rule, *, smooth_steps: int, max_factor: float | None) -> None:
        self._rule = rule
        self._new_transition = partial(Transition, smooth_steps=smooth_steps, max_factor=max_factor)
        self._of_all = self._new_transition()
        self._of_groups: list[Transition] = []
        self.progress = 0.0

    def preview(self, step: Step, group: int) -> float:
        """The factor of a parameter group in a step."""
        return self._of_group(group).preview(self._rule.factor_of_group(step, group), step.batch_size)

    def move(self, step: Step, num_groups: int) -> list[float]:
        """The factors of all groups in a step, which is then taken as made."""
        self.progress += self._rule.worth(step, self._of_all.move(self._rule.factor(step), step.batch_size))
        return [
            self._of_group(group).move(self._rule.factor_of_group(step, group), step.batch_size)
            for group in range(num_groups)
        ]

    def _of_group(self, group: int) -> Transition:
        while len(self._of_groups) <= group:
            self._of_groups.append(self._new_transition())
        return self._of_groups[group]

    def state_dict(self) -> dict[str, Any]:
        """The progress, and where jumps under way stand."""
        return {
            "progress": self.progress,
            "transitions": [transition.state_dict() for transition in self._of_groups],
            "transition_of_all": self._of_all.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        transitions = state["transitions"]
        # the first version of the format has the progress with the rule, and transitions of groups only
        self.progress = state["progress"] if "progress" in state else state["rule"].get("progress", 0.0)
        self._of_all, self._of_groups = self._new_transition(), []  # a run that had made no step has none saved
        for of_all in [state["transition_of_all"]] if "transition_of_all" in state else transitions[:1]:
            self._of_all.load_state_dict(of_all)
        for group, saved in enumerate(transitions):
            self._of_group(group).load_state_dict(saved)
