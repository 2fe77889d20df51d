"""CustomSampler: a schedule as the `batch_sampler` of a DataLoader."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sized
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from variable_batch_size.checks import check_integer, check_within
from variable_batch_size.cores.detect import running_cores
from variable_batch_size.policies.policy import Policy, Situation, policy_of
from variable_batch_size.schedules.batch_sizes import OnEnd
from variable_batch_size.schedules.live import PolicySchedule
from variable_batch_size.schedules.permutation import Permutation
from variable_batch_size.schedules.schedule import BaseSchedule, Schedule
from variable_batch_size.traces.trace import Trace, TraceLike

Description = dict[str, str | int | bool | None]


class MinibatchSource(ABC):
    """A schedule, this core's rank in it, and where in it the pass over the data has begun.

    Args:
        trace: the batch size of every step: a path, a sequence, an array, a pandas column, or an integer for always
            the same; multiples of `minibatch_size`. Or a policy, or a function of the situation, that decides it while
            the run goes on.
        dataset_size: samples in an epoch; None for a single epoch with room for all steps.
        minibatch_size: samples that one core runs at once.
        num_replicas: cores that share the work; those of the running backend if None.
        rank: which of them this is; as the running backend knows it if None.
        process_group: the cores that share the work, where they are not all processes of torch.distributed: a group, or
            the dimension of a DeviceMesh along which samples differ.
        on_end: what follows the last row of the trace: ``"stop"``, ``"hold"`` the last size or ``"cycle"``.
        lockstep: whether all cores get as many minibatches in a step, the last perhaps a stand-in.

    Attributes:
        epoch: the number of the epoch, from 0.
        first_step: how many of the epoch's steps were left out.
        num_passes: how often :meth:`set_epoch` was called.
        seed: what random numbers of minibatches follow from, if they are to.
    """

    seed = 0

    def __init__(
        self,
        trace: TraceLike | Policy | Callable[[Situation], float],
        *,
        dataset_size: int | None,
        minibatch_size: int,
        num_replicas: int | None,
        rank: int | None,
        process_group: Any,
        on_end: OnEnd,
        lockstep: bool,
    ) -> None:
        if num_replicas is None or rank is None:
            running_rank, running_replicas = running_cores(process_group)
            num_replicas = running_replicas if num_replicas is None else num_replicas
            rank = running_rank if rank is None else rank
        self.schedule = _schedule_of(
            trace,
            dataset_size=dataset_size,
            minibatch_size=minibatch_size,
            num_replicas=num_replicas,
            on_end=on_end,
            lockstep=lockstep,
        )
        check_within(num_replicas - 1, rank=rank)
        self.rank = int(rank)
        self.process_group = process_group
        self.epoch = 0
        self.first_step = 0
        self.num_passes = 0
        self._when_read: Callable[[], None] | None = None
        self._when_asked: Callable[[bool], None] | None = None

    @property
    def num_replicas(self) -> int:
        return self.schedule.num_replicas

    @property
    def minibatch_size(self) -> int:
        return self.schedule.minibatch_size

    @property
    @abstractmethod
    def description(self) -> Description:
        """What the samples of a step depend on, besides the trace and the minibatch size."""

    @property
    @abstractmethod
    def _has_been_read(self) -> bool:
        """Whether this pass has begun."""

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Go to an epoch. Call it before each pass over the loader, and on the optimizer too.

        Args:
            epoch: its number, from 0.
            first_step: how many of the epoch's steps to leave out, for a run that was stopped after them.
        """
        self.schedule.begin_epoch(epoch)
        steps = self.schedule.steps(epoch)
        check_within(len(steps), first_step=first_step)
        self.epoch = int(epoch)
        self.first_step = int(first_step)
        self.num_passes += 1
        self._when_read = None

    def run_in_lockstep(self) -> None:
        """Let all cores have as many minibatches in each step from now on; before the first one is read."""
        if self.schedule.lockstep:
            return
        if self._has_been_read:
            raise ValueError(
                "the model is in fully_shard, so that all cores must run as many minibatches in a step, and the "
                "sampler has been read already: make it with `lockstep=True`"
            )
        self.schedule.lockstep = True

    def on_first_read(self, callback: Callable[[], None]) -> None:
        """Call something when the first minibatch of this pass is asked for: after the loader has set itself up, which
        draws a random number, and before anything is done with a sample."""
        self._when_read = callback

    def on_request(self, callback: Callable[[bool], None]) -> None:
        """Call something whenever a minibatch is asked for, in every pass from now on, also where none is left.

        It is told whether it is the first of a pass. A loader asks for one whenever it hands one over, even if its
        workers are ahead.
        """
        self._when_asked = callback

    def _begin_reading(self) -> None:
        if self._when_read is not None:
            self._when_read()

    def _refuse_second_pass(self) -> None:
        raise RuntimeError(
            f"epoch {self.epoch} is read for the second time: call set_epoch on the sampler and the optimizer "
            "before each pass over the loader"
        )

    def __len__(self) -> int:
        """How many minibatches this core gets in the epoch, stand-ins included."""
        return self.schedule.num_minibatches_for(self.epoch, self.rank, self.first_step)


def is_decided(trace: Any) -> bool:
    """Whether what was given as a trace decides it while the run goes on."""
    return isinstance(trace, Policy) or (callable(trace) and not isinstance(trace, type))


def _schedule_of(
    trace: Any, *, dataset_size: int | None, minibatch_size: int, num_replicas: int, on_end: OnEnd, lockstep: bool
) -> BaseSchedule:
    if is_decided(trace):
        return PolicySchedule(
            policy_of(trace),
            dataset_size=dataset_size,
            minibatch_size=minibatch_size,
            num_replicas=num_replicas,
            lockstep=lockstep,
        )
    return Schedule(
        Trace.of(trace),
        dataset_size=dataset_size,
        minibatch_size=minibatch_size,
        num_replicas=num_replicas,
        on_end=on_end,
        lockstep=lockstep,
    )


logger = logging.getLogger(__name__)

_SAMPLES_AT_ONCE = 8192
_NO_TRACE: Any = object()


class CustomSampler(MinibatchSource, Sampler[list[int]]):
    """Deals this core its minibatches of every step, in the order of the steps.

    Which samples make up a step, and in which order, depends on the trace, the seed and the epoch only, never on the
    number of cores. A core without a minibatch in a step gets another core's as a stand-in, which the optimizer gives
    the weight 0. The loader must keep the order, as it does unless it is made with ``in_order=False``.

    Args:
        dataset: the data set, of which only the length is used, or its length; or else
        dataset_size: its length.
        trace: the batch size of every step: a path, a sequence, an array, a pandas column, or an integer for always
            the same; multiples of `minibatch_size`. Or a policy, or a function of the situation, that decides it while
            the run goes on.
        num_replicas: cores that share the work; those of the running backend if None.
        rank: which of them this is; as the running backend knows it if None.
        process_group: the cores that share the work, where they are not all processes of torch.distributed: a group, or
            the dimension of a DeviceMesh along which samples differ, as ``mesh["data"]``. The optimizer, checkpoint and
            log of the run take it from here.
        minibatch_size: samples that one core runs at once.
        seed: chooses the order of the samples, together with the epoch.
        shuffle: whether samples come in an order of their own in each epoch, or as they are.
        on_end: what follows the last row of the trace: ``"stop"``, ``"hold"`` the last size or ``"cycle"``.
        lockstep: whether all cores get as many minibatches in a step, the last perhaps a stand-in, for models whose
            forward pass waits for all cores; the optimizer sees to that by itself where the model is in
            ``fully_shard``.
        verbose: log on core 0 what the trace holds.

    Attributes:
        num_passes: how often :meth:`set_epoch` was called.

    >>> sampler = CustomSampler(dataset_size=7, trace=[4, 2], minibatch_size=2, num_replicas=2, rank=0, shuffle=False)
    >>> list(sampler)
    [[0, 1], [4, 5]]
    """

    def __init__(
        self,
        dataset: Sized | int | None = None,
        trace: TraceLike | Policy | Callable[[Situation], float] = _NO_TRACE,
        *,
        dataset_size: int | None = None,
        minibatch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        process_group: Any = None,
        seed: int = 0,
        shuffle: bool = True,
        on_end: OnEnd = "stop",
        lockstep: bool = False,
        verbose: bool = False,
    ) -> None:
        if trace is _NO_TRACE:
            raise TypeError("`trace` must be given")
        if (dataset is None) == (dataset_size is None):
            given = "neither" if dataset is None else "both"
            raise ValueError(f"pass either `dataset` or `dataset_size`, got {given}")
        check_integer(seed=seed)
        size = dataset_size if dataset is None else dataset
        self.dataset_size: int = len(size) if isinstance(size, Sized) else size  # type: ignore[assignment]
        super().__init__(
            trace,
            dataset_size=self.dataset_size,
            minibatch_size=minibatch_size,
            num_replicas=num_replicas,
            rank=rank,
            process_group=process_group,
            on_end=on_end,
            lockstep=lockstep,
        )
        self.seed = int(seed)
        self.shuffle = shuffle
        self._has_started = False
        if verbose and self.rank == 0:
            num_epochs = self.schedule.num_epochs
            logger.info("%s: %s epochs", self.schedule.name, "endless" if num_epochs is None else num_epochs)

    @property
    def description(self) -> Description:
        """What the samples of a step depend on, besides the trace and the minibatch size."""
        return {"dataset_size": int(self.dataset_size), "seed": self.seed, "shuffle": self.shuffle}

    @property
    def _has_been_read(self) -> bool:
        return self._has_started

    def get_epochtrace(self, epoch: int) -> list[int]:
        """The batch sizes of an epoch's steps."""
        return [self.schedule.batch_size(step) for step in self.schedule.steps(epoch)]

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Go to an epoch. Call it before each pass over the loader, and on the optimizer too.

        Args:
            epoch: its number, from 0.
            first_step: how many of the epoch's steps to leave out, for a run that was stopped after them.
        """
        super().set_epoch(epoch, first_step)
        self._has_started = False

    def _tell_if_cut_short(self) -> None:
        schedule = self.schedule
        if not isinstance(schedule, Schedule):
            return
        steps = schedule.steps(self.epoch)
        if schedule.on_end == "stop" and steps.stop == len(schedule.trace) and self.rank == 0:
            used = schedule.samples_before(steps.stop) - schedule.samples_before(steps.start)
            if used < schedule.capacity:
                logger.warning(
                    "%s ends in epoch %d, after %d of its %d samples (%.1f %%)",
                    schedule.trace.name,
                    self.epoch,
                    used,
                    schedule.capacity,
                    100 * used / schedule.capacity,
                )

    def __iter__(self) -> Iterator[list[int]]:
        minibatches = self._minibatches()
        return minibatches if self._when_asked is None else _Asked(minibatches, self._when_asked)

    def _minibatches(self) -> Iterator[list[int]]:
        # a DataLoader may make several iterators and use one: nothing happens before the first minibatch is asked for
        if self._has_started:
            self._refuse_second_pass()
        self._has_started = True
        self._begin_reading()
        self._tell_if_cut_short()
        within = np.arange(self.minibatch_size)
        order = Permutation(self.dataset_size, key=(self.seed, self.epoch)) if self.shuffle else None
        at_once = max(1, _SAMPLES_AT_ONCE // self.minibatch_size)
        for offsets in self.schedule.offsets(self.epoch, self.rank, at_once=at_once, first_step=self.first_step):
            positions = offsets[:, None] + within
            yield from (order(positions) if order else positions).tolist()


class _Asked(Iterator[list[int]]):
    """Minibatches, and somebody who is told whenever one has been asked for."""

    def __init__(self, minibatches: Iterator[list[int]], tell: Callable[[bool], None]) -> None:
        self._minibatches = minibatches
        self._tell = tell
        self._is_first = True

    def __next__(self) -> list[int]:
        try:
            return next(self._minibatches)
        finally:
            is_first, self._is_first = self._is_first, False
            self._tell(is_first)
