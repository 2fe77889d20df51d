"""When a policy is asked, and the seconds of accumulating and updating minibatches that it sees."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from variable_batch_size.policies.policy import Decision, Policy, Situation

_FEWEST, _MOST = 5, 40


class StepTimes:
    """Medians of the seconds of steps of each depth, and the line through them.

    A step of depth d takes (d − 1)·a + u seconds; the line through two depths or more gives a and u. Only whole steps
    are timed, for a device that runs behind the host shows the time of single minibatches to nobody.

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
        """Take in the seconds of a step in which the busiest core ran `depth` minibatches."""
        self._of_depth.setdefault(depth, deque(maxlen=_MOST)).append(seconds)

    @property
    def seconds(self) -> tuple[float, float] | None:
        """a and u: of an accumulating and of an updating minibatch; None before two depths are known."""
        points = [(d, statistics.median(found)) for d, found in self._of_depth.items() if len(found) >= _FEWEST]
        if len(points) < 2:
            return None
        line = statistics.linear_regression(*zip(*points, strict=True))
        accumulating = max(line.slope, 0.0)
        mean_depth, mean_seconds = (statistics.fmean(column) for column in zip(*points, strict=True))
        return accumulating, max(mean_seconds - (mean_depth - 1) * accumulating, accumulating)

    def num_of(self, depth: int) -> int:
        """How many steps of a depth are known."""
        return len(self._of_depth.get(depth, ()))

    @property
    def is_empty(self) -> bool:
        """Whether no step is known."""
        return not self._of_depth

    def clear(self) -> None:
        self._of_depth = {}

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": {depth: list(found) for depth, found in self._of_depth.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._of_depth = {int(depth): deque(found, maxlen=_MOST) for depth, found in state["seconds"].items()}


_FEWEST = 5


class PolicyTiming:
    """Asks a policy for the batch size of the next steps, `every` at a time and `lead` ahead.

    An answer is decided some steps before it is executed. The policy is not asked again before a few of its steps were
    made: what it goes by would not show yet what it has changed.

    Args:
        policy: who decides.

    Attributes:
        times: the seconds of steps on the present cores.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.times = StepTimes()
        self._batch_size: int | None = None  # decided last
        self._num_made = 0  # steps of it

    def num_rows(self, ahead: int) -> int:
        """How many rows are to be decided now, if so many are and were not executed yet; 0 for none."""
        lead, every = self.policy.lead, self.policy.every
        return lead + every - ahead if ahead <= lead else 0

    def note_steps(self, batch_size: int, depth: int, seconds: float | None, number: int = 1) -> None:
        """Take in steps that were made.

        Args:
            batch_size: of each.
            depth: how many minibatches the busiest core ran in each.
            seconds: of each; None where they tell nothing, such as of a step that waited for a loader to start.
            number: how many.
        """
        if batch_size == self._batch_size:
            self._num_made += number
        for _ in range(min(number, _FEWEST) if seconds is not None else 0):
            self.times.add(depth, seconds)  # type: ignore[arg-type]

    def answer(self, situation: Situation) -> Decision:
        """The batch size of the next rows, and why; the situation needs neither times nor a batch size."""
        if self._batch_size is not None and self._num_made < _FEWEST:
            return Decision(self._batch_size, "no steps of it yet")
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
        """Take a batch size for the one decided last: an answer, perhaps of another core."""
        if batch_size != self._batch_size:
            self._batch_size, self._num_made = batch_size, 0

    def restart(self, batch_size: int | None) -> None:
        """Go on on other cores after steps of a batch size: what was measured no longer holds, and it asks at once."""
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
