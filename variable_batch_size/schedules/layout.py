"""Layout: steps laid out over epochs of a data set and over cores, however their batch sizes come about."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

from variable_batch_size.checks import check_not_negative, check_positive
from variable_batch_size.schedules.batch_sizes import Integers, OnEnd
from variable_batch_size.schedules.past import Past
from variable_batch_size.traces.trace import Trace

_ALL = 2**62  # more samples than any run has, and still a number that numpy can count with


class Layout(ABC):
    """Which steps make up an epoch, and which minibatches of a step go to which core.

    An epoch takes steps while their batch sizes still fit into its capacity, `dataset_size` rounded down to whole
    minibatches; the step that does not fit opens the next epoch. Minibatch j of a step goes to core
    ``j % num_replicas``. Steps are numbered through the whole run, from 0.

    Args:
        dataset_size: samples in the data set; None for data without a length, which are one epoch with room for all
            steps.
        minibatch_size: samples that one core runs at once.
        num_replicas: cores that share the work.
        lockstep: whether all cores run as many minibatches in a step as the busiest one, for models whose forward pass
            waits for all of them; who has fewer runs a stand-in in the last round.

    Attributes:
        capacity: the most samples of an epoch.
        on_end: what follows the last row of the trace.
    """

    on_end: OnEnd

    def __init__(
        self, *, dataset_size: int | None, minibatch_size: int, num_replicas: int, lockstep: bool = False
    ) -> None:
        room = _ALL if dataset_size is None else dataset_size
        check_positive(dataset_size=room, minibatch_size=minibatch_size, num_replicas=num_replicas)
        if room < minibatch_size:
            raise ValueError(f"`dataset_size` must be at least one minibatch of {minibatch_size}, got {room}")
        self.dataset_size = None if dataset_size is None else int(dataset_size)
        self.minibatch_size = int(minibatch_size)
        self.num_replicas = int(num_replicas)
        self.lockstep = lockstep
        self.capacity = int(room) // self.minibatch_size * self.minibatch_size

    # ------------------------------------------------------------------------------------------------ what may differ

    @property
    @abstractmethod
    def trace(self) -> Trace:
        """The batch sizes, as far as they are known."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Where they come from."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What must be the same on all cores, and when a run goes on."""

    @property
    @abstractmethod
    def num_epochs(self) -> int | None:
        """How many epochs there are, the last one perhaps in part; None if they go on forever."""

    @abstractmethod
    def steps(self, epoch: int) -> range:
        """The steps of an epoch."""

    @property
    def is_endless(self) -> bool:
        """Whether its only epoch goes on forever."""
        return self.dataset_size is None and self.on_end != "stop"

    @abstractmethod
    def samples_before(self, step: int) -> int:
        """The samples used by all steps before this one."""

    @abstractmethod
    def past(self, epoch: int, first_step: int) -> Past:
        """What a run has behind it that stands before the step number `first_step` of an epoch."""

    @abstractmethod
    def after(self, past: Past) -> Layout:
        """This layout for a run that has begun with another: what is past stays, and the next step is the next row."""

    @abstractmethod
    def batch_size(self, step: int) -> int:
        """The samples of a step, over all cores."""

    @abstractmethod
    def num_yielded(self, epoch: int, rank: int, first_step: int = 0) -> int:
        """How many minibatches a core runs in an epoch from its `first_step` on, stand-ins included."""

    @abstractmethod
    def offsets(self, epoch: int, rank: int, *, at_once: int, first_step: int = 0) -> Iterator[Integers]:
        """Where each minibatch of a core starts in the epoch's order of samples, `at_once` of them at a time.

        A stand-in is a minibatch of another core, or one that this core has run.
        """

    def steps_from(self, epoch: int, first_step: int) -> Iterator[int]:
        """The steps of an epoch one after another, from its `first_step` on."""
        return iter(self.steps(epoch)[first_step:])

    def begin_epoch(self, epoch: int) -> None:  # noqa: B027 (known batch sizes know their epochs)
        """Note that an epoch begins, on every core."""

    def was_left(self, epoch: int, num_steps: int) -> bool:
        """Whether an epoch of which so many steps were made was left before its end."""
        return num_steps < len(self.steps(epoch))

    def _check_epoch(self, epoch: int) -> None:
        check_not_negative(epoch=epoch)
        if self.dataset_size is None and epoch:
            raise ValueError(f"data without a `dataset_size` are one epoch, got epoch {epoch} (counting from 0)")

    # ------------------------------------------------------------------------------------------------------ the cores

    def num_minibatches(self, step: int) -> int:
        """The minibatches of a step, over all cores."""
        return self.batch_size(step) // self.minibatch_size

    def minibatches(self, step: int, rank: int) -> range:
        """The minibatches of a step that a core runs, by their number in the step; none if it is idle."""
        return range(rank, self.num_minibatches(step), self.num_replicas)

    def is_idle(self, step: int, rank: int) -> bool:
        """Whether a core has no minibatch in a step, and so runs a stand-in."""
        return rank >= self.num_minibatches(step)

    def num_rounds(self, step: int, rank: int) -> int:
        """How many minibatches a core runs in a step, stand-ins included."""
        first = 0 if self.lockstep else rank  # in lockstep all run as many as core 0, which has most
        return max(1, -((first - self.num_minibatches(step)) // self.num_replicas))

    def stands_in(self, step: int, rank: int, round: int) -> bool:
        """Whether what a core runs in a round of a step, from 0, is a stand-in."""
        return rank + round * self.num_replicas >= self.num_minibatches(step)

    def _offsets_of(self, sizes: Integers, rank: int, *, begin: int, at_once: int) -> Iterator[Integers]:
        """The offsets of a core's minibatches in successive steps, the first of which begins at an offset."""
        begins = begin + sizes.cumsum() - sizes
        in_step = sizes // self.minibatch_size
        yielded = self._num_yielded(sizes, rank)
        ends = yielded.cumsum()
        for first in range(0, int(ends[-1]), at_once):
            number = np.arange(first, min(first + at_once, int(ends[-1])))
            step = ends.searchsorted(number, side="right")
            places = rank + (number - (ends - yielded)[step]) * self.num_replicas
            yield begins[step] + places % in_step[step] * self.minibatch_size

    def _num_yielded(self, sizes: Integers, rank: int) -> Integers:
        first = 0 if self.lockstep else rank
        rounded_down = (first - sizes // self.minibatch_size) // self.num_replicas
        return np.maximum(-rounded_down, 1)
