"""Transition: bounds a factor and spreads its jumps over steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from variable_batch_size.checks import check_not_negative


class Transition:
    """Bounds a factor and spreads its jumps over steps, because momentum outlives a jump of the learning rate.

    When the batch size changes, the factor goes from where it is to where the rule wants it in `smooth_steps` equal
    parts (Lin et al. 2019, "Dynamic mini-batch SGD for elastic distributed training"); a goal that itself moves is
    reached in as many.

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
        self.smooth_steps = smooth_steps
        self.max_factor = max_factor
        self._factor: float | None = None
        self._batch_size = 0
        self._steps_left = 1

    def preview(self, goal: float, batch_size: int) -> float:
        """The factor of a step of this batch size, given what the rule wants it to be."""
        goal = float(goal if self.max_factor is None else min(goal, self.max_factor))
        steps_left = self._steps_left_at(batch_size)
        return goal if self._factor is None or steps_left == 1 else self._factor + (goal - self._factor) / steps_left

    def move(self, goal: float, batch_size: int) -> float:
        """The same, and the step is made."""
        self._factor, self._steps_left = self.preview(goal, batch_size), max(1, self._steps_left_at(batch_size) - 1)
        self._batch_size = batch_size
        return self._factor

    def _steps_left_at(self, batch_size: int) -> int:
        has_jumped = self._factor is not None and batch_size != self._batch_size
        return max(1, self.smooth_steps) if has_jumped else self._steps_left

    def state_dict(self) -> dict[str, Any]:
        """Where a jump under way stands."""
        return {"factor": self._factor, "batch_size": self._batch_size, "steps_left": self._steps_left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._factor, self._batch_size = state["factor"], state["batch_size"]
        self._steps_left = state["steps_left"]
