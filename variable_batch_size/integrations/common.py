"""What the integrations share: steps as a framework counts them, checks of its settings, and saved optimizer state."""

import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

from variable_batch_size.data.sampler import MinibatchSource
from variable_batch_size.optim.consistency import differences
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.runs.sharded_state import full_optimizer_state, load_full_optimizer_state
from variable_batch_size.schedules.schedule import BaseSchedule

logger = logging.getLogger(__name__)

TRACE_DECIDES = "the trace determines how many minibatches make up a step"
# the number of epochs, including an incomplete last one; of steps; and of steps in the longest epoch
Extent = tuple[int, int, int]
_RUN_KEY = "variable_batch_size_run"


class Steps:
    """Yields an iterator over this rank's minibatches for each step of the epoch; all of them must be consumed."""

    def __init__(self, loader: Iterable[Any], sampler: MinibatchSource) -> None:
        self.loader, self.sampler = loader, sampler

    def __len__(self) -> int:
        """Number of steps left in the epoch."""
        return len(self.sampler.schedule.steps(self.sampler.epoch)) - self.sampler.first_step

    def __iter__(self) -> Iterator[Iterator[Any]]:
        schedule, rank = self.sampler.schedule, self.sampler.rank
        step = schedule.steps(self.sampler.epoch).start + self.sampler.first_step
        minibatches = iter(self.loader)
        for first in minibatches:
            others = islice(minibatches, schedule.rounds_for(step, rank) - 1)
            yield chain((first,), others)
            if next(others, None) is not None:
                raise RuntimeError(f"step {step} of the run ended before all of its minibatches were consumed")
            step += 1


def refuse_open_steps(sampler: MinibatchSource, framework: str) -> None:
    """Raise if the loop ends the steps, as a framework needs their length in advance."""
    if sampler.schedule.is_open:
        rule = f"`trace` must not be OpenSteps with {framework}, which needs the length of steps in advance"
        raise ValueError(f"{rule}: write your own loop")


def extent_of_epochs(schedule: BaseSchedule, num_epochs: float) -> Extent:
    """The length of a run of some epochs; the last one may be a fraction."""
    if schedule.is_live:
        raise ValueError(f"{schedule.name} decides batch sizes during the run: set the number of steps")
    epochs = [schedule.steps(epoch) for epoch in range(math.ceil(num_epochs))]
    last = math.ceil((1 - math.ceil(num_epochs) + num_epochs) * len(epochs[-1]))
    return len(epochs), epochs[-1].start + last, max(map(len, epochs))


def extent_of_steps(schedule: BaseSchedule, num_steps: int) -> Extent:
    """The length of a run of some steps; with a policy the number of epochs is unknown."""
    if schedule.is_live:
        return sys.maxsize, num_steps, num_steps
    schedule.batch_size(num_steps - 1)  # raises if the trace has fewer
    epochs = [schedule.steps(0)]
    while epochs[-1].stop < num_steps:
        epochs.append(schedule.steps(len(epochs)))
    return len(epochs), num_steps, max(map(len, epochs))


def check_setting(name: str, value: object, *allowed: object, because: str) -> None:
    """Reject a setting of the framework that the trace determines, or that would change the result."""
    if value not in allowed:
        raise ValueError(f"{name} must be {allowed[0]!r}, got {value!r}: {because}")


def check_process(sampler: MinibatchSource, rank: int, num_processes: int, framework: str, advice: str) -> None:
    """Raise if the framework and the sampler disagree on the rank of this process."""
    if (sampler.rank, sampler.num_replicas) != (rank, num_processes):
        found = f"the sampler has rank {sampler.rank} of {sampler.num_replicas}"
        raise ValueError(f"{framework} has rank {rank} of {num_processes}, but {found}: {advice}")


def state_of(optimizer: CustomOptimizer) -> dict[str, Any]:
    """The optimizer's state dict, with the description of its run.

    If it is sharded, all ranks must call it, and all but the first get an empty one.
    """
    if optimizer.is_accumulating:
        problem = "a resumed run repeats it, but random generators and buffers were saved after some of its minibatches"
        logger.warning("the optimizer was saved within a step: %s. Save when `optimizer.updated`", problem)
    state = full_optimizer_state(optimizer)
    return {**state, _RUN_KEY: dict(optimizer.description)} if state else {}


def load_state(optimizer: CustomOptimizer, state: Mapping[str, Any]) -> None:
    """Load the result of :func:`state_of`; a state without a description is not compared."""
    check_same_run(optimizer, state.get(_RUN_KEY))
    load_full_optimizer_state(optimizer, {name: value for name, value in state.items() if name != _RUN_KEY})


def check_same_run(optimizer: CustomOptimizer, saved: Mapping[str, object] | None) -> None:
    """Raise if a checkpoint is from another run, whose steps have other samples."""
    if saved is not None and (found := differences(saved, optimizer.description)):
        raise ValueError(f"the checkpoint was saved by another run: {'; '.join(found)}")
