"""When a policy decides, and the measured times of accumulating and updating minibatches."""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from variable_batch_size.policies.policy import Decision, Policy, Situation

_FEWEST, _MOST = 5, 40
_CHANGED = 1.5  # the factor from which on steps that take longer or shorter are those of a slower or faster machine


class StepTimes:
    """Fits a line to the median step times of each depth: a step of depth d takes (d − 1)·a + u seconds.

    Only full steps are timed, because asynchronous devices don't expose the time of single minibatches. On other cores
    the time a is assumed to stay until two depths were timed again, and u until one was. If steps take much longer or
    shorter than before, on the same cores, all earlier times are forgotten: a and u then change by the same factor,
    until two depths were timed again.
    """

    def __init__(self) -> None:
        self._of_depth: dict[int, deque[float]] = {}
        self._latest: deque[tuple[int, float]] = deque(maxlen=_FEWEST)  # steps, each with its depth
        self._before: tuple[float, float] | None = None  # a and u on the cores before

    def add(self, depth: int, seconds: float) -> None:
        """Add the duration of a step in which the busiest core ran `depth` minibatches."""
        self._of_depth.setdefault(depth, deque(maxlen=_MOST)).append(seconds)
        self._latest.append((depth, seconds))
        if len(self._latest) == _FEWEST and all(other == depth for other, _ in self._latest):
            self._compare(depth, [found for _, found in self._latest])

    def _compare(self, depth: int, latest: list[float]) -> None:
        """Forget all earlier times if the latest steps, all of one depth, were much slower or faster."""
        earlier = {d: list(found) for d, found in self._of_depth.items()}
        earlier[depth] = earlier[depth][:-_FEWEST]
        expected = statistics.median(earlier[depth]) if len(earlier[depth]) >= _FEWEST else None
        times = _fit(earlier)
        if expected is None and times is not None:
            expected = (depth - 1) * times[0] + times[1]
        ratio = statistics.median(latest) / expected if expected else 1.0
        if not 1 / _CHANGED < ratio < _CHANGED:
            known = times or self._before
            self._before = None if known is None else (known[0] * ratio, known[1] * ratio)
            self._of_depth = {depth: deque(latest, maxlen=_MOST)}

    @property
    def seconds(self) -> tuple[float, float] | None:
        """a and u, the times of an accumulating and an updating minibatch; None before two depths were ever timed."""
        times = _fit(self._of_depth)
        if times is None:
            points = _points(self._of_depth)
            if self._before is None or not points:
                return self._before
            ((depth, seconds),) = points
            accumulating = min(self._before[0], seconds / depth)
            return accumulating, seconds - (depth - 1) * accumulating
        return times

    @property
    def is_empty(self) -> bool:
        return not self._of_depth

    def restart(self, *, on_same_minibatches: bool = True) -> None:
        """Go to other cores; minibatches of another size take other times."""
        self._before, self._of_depth = self.seconds if on_same_minibatches else None, {}
        self._latest.clear()

    def state_dict(self) -> dict[str, Any]:
        of_depth = {depth: list(found) for depth, found in self._of_depth.items()}
        return {"seconds": of_depth, "before": self._before and list(self._before)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._of_depth = {int(depth): deque(found, maxlen=_MOST) for depth, found in state["seconds"].items()}
        self._before = tuple(state["before"]) if state["before"] else None


def _points(of_depth: Mapping[int, Iterable[float]]) -> list[tuple[int, float]]:
    """Each depth that was timed often enough, with its median time."""
    return [(d, statistics.median(found)) for d, found in of_depth.items() if len(list(found)) >= _FEWEST]


def _fit(of_depth: Mapping[int, Iterable[float]]) -> tuple[float, float] | None:
    """a and u of the line through the median times; None for fewer than two depths."""
    points = _points(of_depth)
    if len(points) < 2:
        return None
    line = statistics.linear_regression(*zip(*points, strict=True))
    accumulating = max(line.slope, 0.0)
    mean_depth, mean_seconds = (statistics.fmean(column) for column in zip(*points, strict=True))
    return accumulating, max(mean_seconds - (mean_depth - 1) * accumulating, accumulating)


class PolicyTiming:
    """Lets a policy decide the next `every` steps, `lead` steps ahead, after some steps of its last decision."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.times = policy, StepTimes()
        self._batch_size: int | None = None  # of the last decision
        self._num_made = 0  # its executed steps

    def num_rows(self, ahead: int) -> int:
        """Number of rows to decide now, if `ahead` rows are decided but not executed."""
        lead, every = self.policy.lead, self.policy.every
        return lead + every - ahead if ahead <= lead else 0

    def note_steps(self, batch_size: int, depth: int, seconds: float | None, number: int = 1) -> None:
        """Record steps in which the busiest core ran `depth` minibatches; `seconds` is None if not representative."""
        if batch_size == self._batch_size:
            self._num_made += number
        for _ in range(min(number, _FEWEST) if seconds is not None else 0):
            self.times.add(depth, seconds)  # type: ignore[arg-type]

    def answer(self, situation: Situation) -> Decision:
        """The batch size of the next rows, and why; fills in batch size and times of the situation."""
        if self._batch_size is not None and self._num_made < _FEWEST:
            return Decision(self._batch_size, "last decision not executed yet")
        a, u = self.times.seconds or (None, None)
        situation = replace(situation, seconds_accumulating=a, seconds_updating=u, is_fresh=self.times.is_empty)
        decision = self.policy.answer(replace(situation, batch_size=self._batch_size))
        self.take_over(decision.batch_size)
        return decision

    def take_over(self, batch_size: int) -> None:
        """Set the last decision, which may come from another core."""
        if batch_size != self._batch_size:
            self._batch_size, self._num_made = batch_size, 0

    def restart(self, batch_size: int | None, *, on_same_minibatches: bool = True) -> None:
        """Resume on other cores after steps of this batch size: time steps again, and decide immediately."""
        self.times.restart(on_same_minibatches=on_same_minibatches)
        self._batch_size, self._num_made = batch_size, _FEWEST

    def state_dict(self) -> dict[str, Any]:
        own = {"batch_size": self._batch_size, "num_made": self._num_made}
        return {"policy": self.policy.state_dict(), "times": self.times.state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.policy.load_state_dict(state["policy"])
        self.times.load_state_dict(state["times"])
        self._batch_size, self._num_made = state["batch_size"], state["num_made"]
