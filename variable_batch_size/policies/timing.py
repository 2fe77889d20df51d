"""When a policy decides, and the measured times of accumulating and updating minibatches."""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from variable_batch_size.policies.policy import Decision, Policy, Situation

_FEWEST, _MOST = 5, 40
_MOST_DEPTHS = 8  # that are kept for each number of cores
# the factors by which steps are longer or shorter if they are those of another machine, and the fraction of earlier
# steps that must be on the other side; the line through other depths is less certain
_CHANGED, _CHANGED_FROM_LINE, _MOST_STEPS = 1.25, 1.5, 0.9
_HALF_LIFE = 1000  # timed steps after which the times of a depth count half, and are replaced when it recurs
_MOST_HALVED = 30


@dataclass
class _Timed:
    """The latest steps of one depth on one number of cores."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST))
    median: float | None = None  # of earlier steps until enough are timed
    at: int = 0  # the number of the latest one among all timed steps

    def append(self, seconds: float) -> None:
        self.seconds.append(seconds)
        if len(self.seconds) >= _FEWEST:
            self.median = statistics.median(self.seconds)


class _Point(NamedTuple):
    depth: int
    seconds: float
    weight: float


class Times(NamedTuple):
    """Seconds of an accumulating minibatch, a, and of the one that completes a step, u."""

    accumulating: float
    updating: float

    def step(self, depth: Any) -> Any:
        """Seconds of a step in which the busiest core runs `depth` minibatches; depths may be an array."""
        return (depth - 1) * self.accumulating + self.updating


class StepTimes:
    """Fits a line to the median step times of each number of cores: a step of depth d takes (d − 1)·a + u seconds.

    Only full steps are timed, because asynchronous devices don't expose the time of single minibatches. But a single
    core without such a device also times its updates, u − a, so one depth is enough. Times are kept when the number of
    cores changes. A number of cores with one timed depth has the a of all others. One without any has an overhead u − a
    between those of fewer and of more cores, and a single core has none. Times count half after 1,000 timed steps, and
    are then measured anew at the next step of that kind. If steps take much longer or shorter than before, at the same
    depth and number of cores, the machines have changed, and all earlier times are forgotten.
    """

    def __init__(self) -> None:
        self._of: dict[int, dict[int, _Timed]] = {}  # by number of cores and depth
        self._latest: deque[tuple[tuple[int, int], float]] = deque(maxlen=_FEWEST)  # cores and depth, and seconds
        self._num = 0  # number of timed steps
        self._overheads: deque[float] = deque(maxlen=_MOST)  # u − a of steps of one core, where it was timed

    def add(self, cores: int, depth: int, seconds: float, overhead: float | None = None) -> None:
        """Add the duration of a step in which the busiest of these cores ran `depth` minibatches, and of its update."""
        self._num += 1
        if overhead is not None and 0 < overhead < seconds:  # unless a clock stood still, or was set
            self._overheads.append(overhead)
        depths = self._of.setdefault(cores, {})
        timed = depths.setdefault(depth, _Timed(at=self._num))
        if self._num - timed.at > _HALF_LIFE:
            timed.seconds.clear()  # its median remains until enough are timed
        expected, timed.at = timed.median, self._num  # a few steps unlike the others don't change a median
        timed.append(seconds)
        if len(depths) > _MOST_DEPTHS:
            del depths[min(depths, key=lambda depth: depths[depth].at)]
        self._latest.append(((cores, depth), seconds))
        if len(self._latest) < _FEWEST or any(where != (cores, depth) for where, _ in self._latest):
            return
        latest, factor = [found for _, found in self._latest], _CHANGED
        if expected is None:
            others = [point for point in self._points(cores) if point.depth != depth]
            expected, factor = _line(others).step(depth) if len(others) > 1 else 0.0, _CHANGED_FROM_LINE
        if expected and _have_changed(list(timed.seconds)[:-_FEWEST], expected, latest, factor):
            self._of = {cores: {depth: _Timed(deque(latest, maxlen=_MOST), statistics.median(latest), self._num)}}
            while len(self._overheads) > _FEWEST:
                self._overheads.popleft()

    def seconds(self, cores: int) -> Times | None:
        """a and u on this many cores, the times of an accumulating and an updating minibatch.

        None before two depths were timed on any number of cores, or one depth and the updates of one core.
        """
        own = self._points(cores)
        if len(own) > 1:
            return _line(own)
        of_cores = {number: points for number in sorted(self._of) if (points := self._points(number))}
        accumulating = _slope(of_cores.values())
        if accumulating is None and 1 in of_cores and len(self._overheads) >= _FEWEST:
            overhead, (point,) = statistics.median(self._overheads), of_cores[1]
            if overhead < point.seconds:  # else they are of other machines
                accumulating = (point.seconds - overhead) / point.depth
        if accumulating is None:
            return None
        if own:
            return _line(own, accumulating)
        if cores == 1:
            return Times(accumulating, accumulating)
        lines = [_line(points, accumulating) for points in of_cores.values()]
        overhead = float(np.interp(cores, list(of_cores), [updating - a for a, updating in lines]))
        return Times(accumulating, accumulating + overhead)

    @property
    def cores(self) -> tuple[int, ...]:
        """The numbers of cores that were timed."""
        return tuple(number for number in sorted(self._of) if self._points(number))

    def depths(self, cores: int) -> tuple[int, ...]:
        """The depths that were timed on this many cores."""
        return tuple(point.depth for point in self._points(cores))

    def _points(self, cores: int) -> list[_Point]:
        """Each depth that was timed often enough, with its median time."""
        return [
            _Point(depth, timed.median, 0.5 ** min((self._num - timed.at) // _HALF_LIFE, _MOST_HALVED))
            for depth, timed in self._of.get(cores, {}).items()
            if timed.median is not None
        ]

    def clear(self) -> None:
        """Forget all times, because minibatches of another size take other times."""
        self._of.clear()
        self._latest.clear()
        self._overheads.clear()

    def state_dict(self) -> dict[str, Any]:
        rows = [
            [cores, depth, timed.at, timed.median, list(timed.seconds)]
            for cores, depths in self._of.items()
            for depth, timed in depths.items()
        ]
        return {"rows": rows, "num": self._num, "overheads": list(self._overheads)}

    def load_state_dict(self, state: Mapping[str, Any], *, cores: int) -> None:
        """Restore the times; a state of earlier versions has those of one number of `cores`."""
        self.clear()
        self._num = state.get("num", 0)
        self._overheads.extend(state.get("overheads", ()))
        old = ([cores, int(depth), 0, None, found] for depth, found in state.get("seconds", {}).items())
        for number, depth, at, median, found in state.get("rows", old):
            timed = self._of.setdefault(number, {})[depth] = _Timed(median=median, at=at)
            for seconds in found:
                timed.append(seconds)


def _have_changed(earlier: Sequence[float], expected: float, latest: Sequence[float], factor: float) -> bool:
    """Whether the latest steps all took longer, or all shorter, than expected and than most of the earlier ones."""
    most = _MOST_STEPS * len(earlier)
    if min(latest) >= factor * expected:
        return sum(seconds < min(latest) for seconds in earlier) >= most
    return max(latest) <= expected / factor and sum(seconds > max(latest) for seconds in earlier) >= most


def _slope(of_cores: Iterable[Sequence[_Point]]) -> float | None:
    """The slope that lines through the points of each number of cores have in common, by least squares."""
    square, product = 0.0, 0.0
    for points in of_cores:
        mean_depth, mean_seconds = _means(points)
        square += sum(point.weight * (point.depth - mean_depth) ** 2 for point in points)
        product += sum(point.weight * (point.depth - mean_depth) * (point.seconds - mean_seconds) for point in points)
    return max(product / square, 0.0) if square else None


def _line(points: Sequence[_Point], accumulating: float = 0.0) -> Times:
    """a and u of the line through the points; through a single one, of the line with the slope `accumulating`."""
    mean_depth, mean_seconds = _means(points)
    slope = _slope([points])
    accumulating = min(accumulating, mean_seconds / mean_depth) if slope is None else slope
    return Times(accumulating, max(mean_seconds - (mean_depth - 1) * accumulating, accumulating))


def _means(points: Sequence[_Point]) -> tuple[float, float]:
    weights = [point.weight for point in points]
    return (
        statistics.fmean([point.depth for point in points], weights),
        statistics.fmean([point.seconds for point in points], weights),
    )


class PolicyTiming:
    """Lets a policy decide the next `every` steps, `lead` steps ahead, after some steps of its last decision."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.times = policy, StepTimes()
        self._batch_size: int | None = None  # of the last decision
        self._num_made = 0  # its executed steps
        self._largest = 0  # of all executed steps
        self._is_fresh = True  # whether no step was made yet on the current cores

    def num_rows(self, ahead: int) -> int:
        """Number of rows to decide now, if `ahead` rows are decided but not executed."""
        lead, every = self.policy.lead, self.policy.every
        if self._is_fresh:  # what is not known on these cores is known soon
            every = min(every, 2 * _FEWEST)
        return lead + every - ahead if ahead <= lead else 0

    def note_steps(
        self,
        batch_size: int,
        cores: int,
        seconds: float | None,
        *,
        depth: int,
        number: int = 1,
        overhead: float | None = None,
    ) -> None:
        """Record steps in which the busiest of the cores ran `depth` minibatches.

        `seconds`, and `overhead` for the update, are None if not timed.
        """
        self._is_fresh, self._largest = False, max(self._largest, batch_size)
        if batch_size == self._batch_size:
            self._num_made += number
        for _ in range(min(number, _FEWEST) if seconds is not None else 0):
            self.times.add(cores, depth, seconds, overhead)  # type: ignore[arg-type]

    def answer(self, situation: Situation) -> Decision:
        """The batch size of the next rows, and why; fills in batch size and times of the situation."""
        if self._batch_size is not None and self._num_made < _FEWEST:
            return Decision(self._batch_size, "last decision not executed yet")
        decision = self.policy.answer(self.complete(situation))
        self.take_over(decision.batch_size)
        return decision

    def complete(self, situation: Situation) -> Situation:
        """A situation with the batch size and the times."""
        a, u = self.times.seconds(situation.cores) or (None, None)
        return replace(
            situation,
            batch_size=self._batch_size,
            largest_batch_size=self._largest,
            seconds_accumulating=a,
            seconds_updating=u,
            timed_depths=self.times.depths(situation.cores),
            is_fresh=self._is_fresh,
        )

    def take_over(self, batch_size: int) -> None:
        """Set the last decision, which may come from another core."""
        if batch_size != self._batch_size:
            self._batch_size, self._num_made = batch_size, 0

    def restart(self, batch_size: int | None, *, on_same_minibatches: bool = True) -> None:
        """Resume on other cores after steps of this batch size: decide immediately."""
        if not on_same_minibatches:
            self.times.clear()
        self._batch_size, self._num_made, self._is_fresh = batch_size, _FEWEST, True

    def state_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy.state_dict(),
            "times": self.times.state_dict(),
            "batch_size": self._batch_size,
            "num_made": self._num_made,
            "largest": self._largest,
            "is_fresh": self._is_fresh,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, cores: int) -> None:
        """Restore the result of :meth:`state_dict`, which was saved on this many cores."""
        self.policy.load_state_dict(state["policy"])
        self.times.load_state_dict(state["times"], cores=cores)
        self._batch_size, self._num_made = state["batch_size"], state["num_made"]
        self._largest, self._is_fresh = state.get("largest", 0), state.get("is_fresh", False)
