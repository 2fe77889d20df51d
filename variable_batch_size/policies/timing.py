"""When a policy decides, and the measured times of accumulating and updating minibatches."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from variable_batch_size.policies.policy import Decision, Policy, Situation

_FEWEST, _MOST = 5, 40


class StepTimes:
    """Fits a line to the median step times of each depth.

    A step of depth d takes (d − 1)·a + u seconds; a line through two or more depths gives a and u. Only full steps are
    timed, because asynchronous devices don't expose the time of single minibatches.

    >>> times = StepTimes()
    >>> for _ in range(5):
    ...     times.add(1, 4.0)
    ...     times.add(2, 5.0)
    >>> times.seconds
    (1.0, 4.0)
    """

    def __init__(self) -> None:
        self._of_depth: dict[int, deque[float]] = {}

    def add(self, depth: int, seconds: float) -> None:
        """Add the duration of a step in which the busiest core ran `depth` minibatches."""
        self._of_depth.setdefault(depth, deque(maxlen=_MOST)).append(seconds)

    @property
    def seconds(self) -> tuple[float, float] | None:
        """a and u, the times of an accumulating and an updating minibatch; None before two depths were timed."""
        points = [(d, statistics.median(found)) for d, found in self._of_depth.items() if len(found) >= _FEWEST]
        if len(points) < 2:
            return None
        line = statistics.linear_regression(*zip(*points, strict=True))
        accumulating = max(line.slope, 0.0)
        mean_depth, mean_seconds = (statistics.fmean(column) for column in zip(*points, strict=True))
        return accumulating, max(mean_seconds - (mean_depth - 1) * accumulating, accumulating)

    def num_of(self, depth: int) -> int:
        """Number of timed steps of a depth."""
        return len(self._of_depth.get(depth, ()))

    @property
    def is_empty(self) -> bool:
        """Whether no step was timed."""
        return not self._of_depth

    def clear(self) -> None:
        self._of_depth = {}

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": {depth: list(found) for depth, found in self._of_depth.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._of_depth = {int(depth): deque(found, maxlen=_MOST) for depth, found in state["seconds"].items()}


class PolicyTiming:
    """Lets a policy decide the batch size of the next `every` steps, `lead` steps ahead.

    A decision is executed some steps later. The policy does not decide again until a few steps of its last decision
    were executed and its measurements reflect the change.

    Attributes:
        times: step times on the current cores.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.times = StepTimes()
        self._batch_size: int | None = None  # of the last decision
        self._num_made = 0  # its executed steps

    def num_rows(self, ahead: int) -> int:
        """Number of rows to decide now, if `ahead` rows are decided but not executed."""
        lead, every = self.policy.lead, self.policy.every
        return lead + every - ahead if ahead <= lead else 0

    def note_steps(self, batch_size: int, depth: int, seconds: float | None, number: int = 1) -> None:
        """Record executed steps.

        Args:
            batch_size: of each step.
            depth: number of minibatches of the busiest core in each step.
            seconds: of each step; None if not representative, as when a step waited for a DataLoader to start.
            number: of steps.
        """
        if batch_size == self._batch_size:
            self._num_made += number
        for _ in range(min(number, _FEWEST) if seconds is not None else 0):
            self.times.add(depth, seconds)  # type: ignore[arg-type]

    def answer(self, situation: Situation) -> Decision:
        """The batch size of the next rows, and why; fills in batch size and times of the situation."""
        if self._batch_size is not None and self._num_made < _FEWEST:
            return Decision(self._batch_size, "last decision not executed yet")
        accumulating, updating = self.times.seconds or (None, None)
        known = replace(
            situation,
            batch_size=self._batch_size,
            seconds_accumulating=accumulating,
            seconds_updating=updating,
            is_fresh=self.times.is_empty,
        )
        decision = self.policy.answer(known)
        self.take_over(decision.batch_size)
        return decision

    def take_over(self, batch_size: int) -> None:
        """Set the last decision, which may come from another core."""
        if batch_size != self._batch_size:
            self._batch_size, self._num_made = batch_size, 0

    def restart(self, batch_size: int | None) -> None:
        """Resume on other cores after steps of this batch size: drop the measured times, and decide immediately."""
        self.times.clear()
        self._batch_size, self._num_made = batch_size, _FEWEST

    def state_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy.state_dict(),
            "times": self.times.state_dict(),
            "batch_size": self._batch_size,
            "num_made": self._num_made,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.times.load_state_dict(state["times"])
        self._batch_size, self._num_made = state["batch_size"], state["num_made"]
