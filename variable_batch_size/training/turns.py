"""Turns: which worker of a loader reads which of a core's minibatches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from variable_batch_size.schedules.schedule import Schedule


class Turns(NamedTuple):
    """The turns of a worker: a loader asks its workers one after the other, for number i worker ``i % num_workers``.

    Attributes:
        worker: which worker this is; 0 without workers.
        num_workers: of the loader; 1 without workers.

    >>> turns = Turns(worker=1, num_workers=3)
    >>> 4 in turns, 5 in turns, turns.next_from(5)
    (True, False, 7)
    """

    worker: int = 0
    num_workers: int = 1

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and number % self.num_workers == self.worker

    def next_from(self, number: int) -> int:
        """Its first turn from a number on."""
        return number + (self.worker - number) % self.num_workers


def number_behind(state: Mapping[str, Any], schedule: Schedule, first_step: int, turns: Turns) -> int:
    """The number of the first minibatch of a step, where the turns of a loader's workers go on.

    Args:
        state: of this worker's reader when the loader was saved, perhaps by another core and on another number of them.
        schedule: of this run.
        first_step: which step it is, of the epoch of the state.
        turns: of this worker.
    """
    saved = Schedule(
        schedule.trace,
        dataset_size=schedule.dataset_size,
        minibatch_size=schedule.minibatch_size,
        num_replicas=state["num_replicas"],
        on_end=schedule.on_end,
        lockstep=state["lockstep"],
    )
    epoch = state["epoch"]
    first, behind = (saved.num_yielded(epoch, state["rank"], step) for step in (state["first_step"], first_step))
    number: int = state["first_number"] + first - behind
    if not state["num_dealt"] <= number <= turns.next_from(state["num_dealt"]):
        refuse_state(epoch, first_step)
    return number


def refuse_state(epoch: int, first_step: int) -> NoReturn:
    """Say that a loader was not saved where a pass is to begin."""
    raise RuntimeError(
        f"the loader's state is not that of step {first_step} of epoch {epoch}, where this pass begins: save it "
        "between two steps, with snapshot_every_n_steps=1"
    )
