"""Layout: steps laid out over epochs of a data set and over cores, however their batch sizes come about."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

from variable_batch_size.checks import check_positive
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

    Attributes:
        capacity: the most samples of an epoch.
        on_end: what follows the last row of the trace.
    """

    on_end: OnEnd

    def __init__(self, *, dataset_size: int | None, minibatch_size: int, num_replicas: int) -> None:
        room = _ALL if dataset_size is None else dataset_size
        check_positive(dataset_size=room, minibatch_size=minibatch_size, num_replicas=num_replicas)
        if room < minibatch_size:
            raise ValueError(f"`dataset_size` must be at least one minibatch of {minibatch_size}, got {room}")
        self.dataset_size = None if dataset_size is None else int(dataset_size)
        self.minibatch_size = int(minibatch_size)
        self.num_replicas = int(num_replicas)
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

        In an idle step that is a minibatch of another core, the stand-in.
        """

    def begin_epoch(self, epoch: int) -> None:  # noqa: B027 (known batch sizes know their epochs)
        """Note that an epoch begins, on every core."""

    def was_left(self, epoch: int, num_steps: int) -> bool:
        """Whether an epoch of which so many steps were made was left before its end."""
        return num_steps < len(self.steps(epoch))

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

    def _offsets_of(self, sizes: Integers, rank: int, *, begin: int, at_once: int) -> Iterator[Integers]:
        """The offsets of a core's minibatches in successive steps, the first of which begins at an offset."""
        stride = self.num_replicas * self.minibatch_size
        step_ends = begin + sizes.cumsum()
        first_ones = step_ends - sizes + rank % (sizes // self.minibatch_size) * self.minibatch_size
        yielded = self._num_yielded(sizes, rank)
        ends = yielded.cumsum()
        origins = first_ones - (ends - yielded) * stride  # so that all minibatches of a step lie on one line
        for first in range(0, int(ends[-1]), at_once):
            number = np.arange(first, min(first + at_once, int(ends[-1])))
            yield origins[ends.searchsorted(number, side="right")] + number * stride

    def _num_yielded(self, sizes: Integers, rank: int) -> Integers:
        rounded_down = (rank - sizes // self.minibatch_size) // self.num_replicas
        return np.maximum(-rounded_down, 1)
