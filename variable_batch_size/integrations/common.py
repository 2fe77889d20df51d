"""What the integrations share: steps as a framework counts them, and optimizer state with a run's fingerprint."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple

from variable_batch_size.data.sampler import MinibatchSource
from variable_batch_size.optim.consistency import differences
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.schedules.schedule import BaseSchedule, Schedule


class Steps:
    """Yields an iterator over this core's minibatches for each step of the epoch, as the sampler's ``set_epoch`` says.

    So a framework that takes what it gets from a loader for a step counts updates. The minibatches are loaded as they
    are asked for, and all of a step must be read before the next one is.

    Args:
        loader: what yields the minibatches that the sampler deals.
        sampler: that of the loader.
    """

    def __init__(self, loader: Iterable[Any], sampler: MinibatchSource) -> None:
        self.loader = loader
        self.sampler = sampler

    def __len__(self) -> int:
        """The steps that are left of the epoch."""
        return len(self.sampler.schedule.steps(self.sampler.epoch)) - self.sampler.first_step

    def __iter__(self) -> Iterator[Iterator[Any]]:
        schedule, rank = self.sampler.schedule, self.sampler.rank
        step = schedule.steps(self.sampler.epoch).start + self.sampler.first_step
        minibatches = iter(self.loader)
        for first in minibatches:
            others = islice(minibatches, schedule.rounds_for(step, rank) - 1)
            yield chain((first,), others)
            if next(others, None) is not None:
                raise RuntimeError(f"step {step} of the run was left before all its minibatches were run")
            step += 1


class Extent(NamedTuple):
    """How long a run is.

    Attributes:
        num_epochs: epochs, the last one perhaps in part.
        num_steps: steps in all of them.
        most_steps: steps of the epoch that has most.
    """

    num_epochs: int
    num_steps: int
    most_steps: int


def extent_of_epochs(schedule: BaseSchedule, num_epochs: float) -> Extent:
    """How long a run of some epochs is, of which the last one may be a fraction.

    >>> from variable_batch_size.traces.trace import Trace
    >>> schedule = Schedule(Trace.of([4, 4, 2, 2, 2]), dataset_size=8, minibatch_size=2)
    >>> extent_of_epochs(schedule, 2)
    Extent(num_epochs=2, num_steps=5, most_steps=3)
    >>> extent_of_epochs(schedule, 1.5)
    Extent(num_epochs=2, num_steps=4, most_steps=3)
    """
    if not isinstance(schedule, Schedule):
        raise ValueError(f"{schedule.name} decides batch sizes as the run goes on: set the number of steps")
    epochs = [schedule.steps(epoch) for epoch in range(math.ceil(num_epochs))]
    last = math.ceil((1 - math.ceil(num_epochs) + num_epochs) * len(epochs[-1]))
    return Extent(len(epochs), epochs[-1].start + last, max(map(len, epochs)))


def extent_of_steps(schedule: BaseSchedule, num_steps: int) -> Extent:
    """How long a run of some steps is; with a policy as many epochs as these take.

    >>> from variable_batch_size.traces.trace import Trace
    >>> extent_of_steps(Schedule(Trace.of([4, 4, 2, 2, 2]), dataset_size=8, minibatch_size=2), 4)
    Extent(num_epochs=2, num_steps=4, most_steps=3)
    """
    if not isinstance(schedule, Schedule):
        return Extent(sys.maxsize, num_steps, num_steps)
    schedule.batch_size(num_steps - 1)  # raises if the trace holds fewer
    epochs = [schedule.steps(0)]
    while epochs[-1].stop < num_steps:
        epochs.append(schedule.steps(len(epochs)))
    return Extent(len(epochs), num_steps, max(map(len, epochs)))


_RUN_KEY = "variable_batch_size_run"


def state_of(optimizer: CustomOptimizer) -> dict[str, Any]:
    """The optimizer's state, and what its run is."""
    return {**optimizer.state_dict(), _RUN_KEY: dict(optimizer.description)}


def load_state(optimizer: CustomOptimizer, state: Mapping[str, Any]) -> None:
    """Take over such a state, if it is of the same run; one without a description is taken as it is."""
    refuse_another_run(optimizer, state.get(_RUN_KEY))
    optimizer.load_state_dict({name: value for name, value in state.items() if name != _RUN_KEY})


def refuse_another_run(optimizer: CustomOptimizer, saved: Mapping[str, object] | None) -> None:
    """Raise if what was saved is of another run than the optimizer's, whose steps would have other samples."""
    found = differences(saved, optimizer.description) if saved is not None else []
    if found:
        raise ValueError(f"the checkpoint was saved by another run: {'; '.join(found)}")
