"""Hints: what a run is worth on other numbers of cores, in a file that any scheduler can read (docs/cluster.md).

A run that stays on its cores needs (goal − done) / speed more seconds. Its speed is goodput, progress per second, if it
ends at a progress, and samples per second if it ends after a number of samples or epochs.
"""

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from variable_batch_size.checks import is_integer, refuse
from variable_batch_size.policies.autoscale import gain
from variable_batch_size.policies.policy import Policy, Situation
from variable_batch_size.policies.timing import StepTimes
from variable_batch_size.urls import read_bytes

HINTS = "hints.json"  # next to the checkpoints
FORMAT, VERSION = "variable_batch_size.hints", 1
EXPLORED = 2  # times as many cores as were timed: farther, nothing is known


@dataclass(frozen=True, kw_only=True)
class Hints:
    """What a run is worth on 1, 2, … `max_cores` cores.

    >>> hints = Hints(cores=1, min_cores=1, max_cores=2, goodput=(2.0, 3.0), progress=10.0, progress_goal=40.0)
    >>> hints.speed(2), hints.seconds_left(2), hints.seconds_left(1)
    (3.0, 10.0, 15.0)
    """

    cores: int  # on which it runs
    min_cores: int  # fewer have no batch size within the bounds of the policy
    max_cores: int  # with more, cores would be idle, or nothing is known about them
    goodput: tuple[float, ...] | None = None  # progress per second, on 1 to `max_cores`; None until measured
    throughput: tuple[float, ...] | None = None  # samples per second
    batch_sizes: tuple[int, ...] | None = None  # that are expected there
    progress: float = 0.0  # in steps at the reference batch size
    progress_goal: float | None = None  # at which the run ends; None if not known
    samples: int = 0  # done so far
    samples_goal: int | None = None  # at which the run ends
    steps: int = 0  # done so far
    seconds: tuple[float, ...] | None = None  # of these, on 1 to `max_cores`; None if not known
    restart_seconds: float | None = None  # to save and to resume, without waiting for cores; None until measured

    def speed(self, cores: int) -> float:
        """Goodput, or samples per second if they decide the end; 0 for no cores, 1 per core if not measured."""
        table = self.throughput if self._ends_by_samples else self.goodput
        if cores <= 0 or table is None:
            return float(max(cores, 0))
        return table[min(cores, len(table)) - 1]

    def mean_speed(self, cores: int) -> float:
        """From the beginning to the end on this many cores; it is often faster now, as the noise has grown."""
        done, left = self.samples if self._ends_by_samples else self.progress, self.work_left
        now = sum(seconds * self.speed(number) for number, seconds in enumerate(self.seconds or (), 1))
        if not done or not now or left is None:
            return self.speed(cores)
        return self.speed(cores) * (done + left) / (now + left)  # what it has done would take now / speed seconds now

    @property
    def work_left(self) -> float | None:
        """Progress, or samples, until the end; None if that is not known."""
        if self._ends_by_samples:
            assert self.samples_goal is not None
            return float(max(self.samples_goal - self.samples, 0))
        return None if self.progress_goal is None else max(self.progress_goal - self.progress, 0.0)

    def seconds_left(self, cores: int) -> float | None:
        """The seconds until the end on this many cores; None if the end or the speed is not known."""
        if self.goodput is None or self.work_left is None or not self.speed(cores):
            return None
        return self.work_left / self.speed(cores)

    @property
    def _ends_by_samples(self) -> bool:
        return self.progress_goal is None and self.samples_goal is not None

    def as_dict(self) -> dict[str, Any]:
        """The contents of a file for :meth:`read`."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Hints":
        """Read the JSON of :meth:`as_dict` at a path or URL; ValueError if truncated, foreign or of a newer version."""
        name = os.fspath(path)
        try:
            found = json.loads(read_bytes(path))
        except (ValueError, RecursionError):
            refuse(name, "hints must be a JSON object", "a truncated or damaged file")
        return cls.of(found, name)

    @classmethod
    def of(cls, found: Any, name: str = "hints") -> "Hints":
        """Check the result of :meth:`as_dict`; unknown names are ignored, and errors begin with `name`."""
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            refuse(name, f"hints must be a JSON object with the format {FORMAT!r}", _short(found))
        if found.get("version") != VERSION:
            refuse(name, f"this version reads hints of version {VERSION}", f"version {_short(found.get('version'))}")
        given: dict[str, Any] = {key: found[key] for key in cls.__dataclass_fields__ if key in found}
        for key in ("cores", "min_cores", "max_cores"):
            if not is_integer(given.get(key)) or given[key] < 1:
                refuse(f"{name}: {key}", "must be a positive integer", _short(given.get(key)))
        if given["min_cores"] > given["max_cores"]:
            refuse(
                f"{name}: min_cores", f"must be at most max_cores, which is {given['max_cores']}", given["min_cores"]
            )
        for key in ("goodput", "throughput", "batch_sizes", "seconds"):
            row = given.get(key)
            if row is not None:
                if not isinstance(row, list | tuple) or len(row) != given["max_cores"] or not all(map(_is_amount, row)):
                    refuse(
                        f"{name}: {key}", "must be null or a non-negative number for each number of cores", _short(row)
                    )
                given[key] = tuple(row)
        for key in ("progress", "samples", "steps", "progress_goal", "samples_goal", "restart_seconds"):
            may_be_none = cls.__dataclass_fields__[key].default is None
            if key in given and not (_is_amount(given[key]) or (may_be_none and given[key] is None)):
                refuse(f"{name}: {key}", "must be a non-negative number", _short(given[key]))
        if (given.get("goodput") is None) != (given.get("throughput") is None):
            refuse(name, "goodput and throughput must both be measured or both be null", "one of them")
        return cls(**given)


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def hints_of(
    policy: Policy, situation: Situation, times: StepTimes, *, spent: Mapping[int, float] | None = None, **run: Any
) -> Hints:
    """The hints of a run from what its policy has measured.

    Args:
        policy: the policy of the run.
        situation: the situation of the run now.
        times: the times of its steps.
        spent: the seconds of all steps so far on each number of cores.
        run: the goals and the restart time.
    """
    number = _most_cores(policy, situation, times)
    known = policy.knows_enough(situation)
    rows = [_expected(policy, situation, times, cores) if known else None for cores in range(1, number + 1)]
    allowed = [cores for cores in range(1, number + 1) if _is_allowed(policy, situation, cores)]
    lists: dict[str, Any] = {}
    if all(row is not None for row in rows):
        names = ("goodput", "throughput", "batch_sizes")
        lists = dict(zip(names, zip(*rows, strict=True), strict=True))
    seconds = [0.0] * number
    for cores, of_steps in (spent or {}).items():
        seconds[min(cores, number) - 1] += of_steps
    return Hints(
        cores=situation.cores,
        min_cores=min(allowed, default=situation.cores),
        max_cores=number,
        progress=situation.progress,
        samples=situation.samples_done,
        steps=situation.steps_done,
        seconds=tuple(seconds) if spent else None,
        **lists,
        **run,
    )


def _most_cores(policy: Policy, situation: Situation, times: StepTimes) -> int:
    """At most one minibatch per core in the largest step, and not far beyond the numbers of cores that were timed."""
    explored = EXPLORED * max([situation.cores, *times.cores])
    fitting = [cores for cores in range(1, explored + 1) if _is_allowed(policy, situation, cores)]
    return max(fitting, default=situation.cores)


def _is_allowed(policy: Policy, situation: Situation, cores: int) -> bool:
    """Whether the bounds allow a batch size with a minibatch for every core."""
    try:
        return policy.bounds.minibatches(replace(situation, cores=cores))[-1] >= cores
    except ValueError:
        return False


def _expected(policy: Policy, situation: Situation, times: StepTimes, cores: int) -> tuple[float, float, int] | None:
    """Goodput, throughput and batch size on this many cores; zeros if the bounds allow none, None if not known."""
    found = times.seconds(cores)
    if (
        found is None or not found.updating
    ):  # times that vary more than with the depth may leave no time for a minibatch
        return None
    if not _is_allowed(policy, situation, cores):
        return 0.0, 0.0, 0
    there = replace(situation, cores=cores, seconds_accumulating=found.accumulating, seconds_updating=found.updating)
    allowed, m = policy.bounds.minibatches(there), situation.minibatch_size
    number = min(max(math.floor(policy.expected(there) / m + 0.5), allowed[0]), allowed[-1])
    seconds = found.step(-(-number // cores))
    noise = situation.noise_scale if situation.noise_scale is not None and situation.knows_noise else math.inf
    worth = gain(number * m, ref_batchsize=situation.ref_batchsize, noise_scale=noise)
    return worth / seconds, number * m / seconds, number * m
