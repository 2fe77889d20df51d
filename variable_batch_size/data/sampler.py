"""CustomSampler: a schedule as the `batch_sampler` of a DataLoader."""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sized
from typing import Any, Protocol

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


class Follower(Protocol):
    """What moves with a source of minibatches: an optimizer."""

    def _follow(self) -> None:
        """Go to where the source is."""


class MinibatchSource(ABC):
    """A schedule, this core's rank in it, and the pass over the data that the run is in.

    The source owns the position of a run: optimizers attach to it, and its :meth:`set_epoch` moves them, too.

    The arguments are those of :class:`CustomSampler`. Without a `dataset_size` all steps are one epoch.

    Attributes:
        epoch: the number of the epoch, from 0.
        first_step: how many of the epoch's steps are skipped.
        num_passes: how many passes :meth:`set_epoch` has begun.
        seed: that of the random numbers of minibatches, where they are seeded.
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
        self._has_stepped = False  # whether an optimizer has had a minibatch of this pass
        self._followers: list[weakref.ref[Follower]] = []
        self._on_first_read: Callable[[], None] | None = None
        self._on_request: Callable[[bool], None] | None = None

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
    def has_been_read(self) -> bool:
        """Whether a minibatch of this pass was requested."""

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Go to an epoch. Call it before each pass over the loader, here or on the optimizer: it moves both.

        Until the first minibatch of the pass, calling it again with the same arguments changes nothing.

        Args:
            epoch: its number, from 0.
            first_step: how many of the epoch's steps to skip, for a run that was stopped after them.
        """
        has_begun = self.has_been_read or self._has_stepped
        if has_begun or not self.is_at(epoch, first_step):
            self.begin_pass(epoch, first_step)
        else:
            self._move_followers()

    def is_at(self, epoch: int, first_step: int) -> bool:
        """Whether :meth:`set_epoch` has begun the latest pass with these arguments."""
        return self.num_passes > 0 and (self.epoch, self.first_step) == (epoch, first_step)

    def begin_pass(self, epoch: int, first_step: int) -> None:
        """Begin a pass over the loader, and let the optimizers of this source follow."""
        self.schedule.begin_epoch(epoch)
        check_within(len(self.schedule.steps(epoch)), first_step=first_step)
        self.epoch = int(epoch)
        self.first_step = int(first_step)
        self.num_passes += 1
        self._has_stepped = False
        self._on_first_read = None
        self._move_followers()

    def attach(self, follower: Follower) -> None:
        """Let an optimizer follow, as long as it exists."""
        self._followers = [one for one in self._followers if one() is not None] + [weakref.ref(follower)]

    def _move_followers(self) -> None:
        for reference in self._followers:
            follower = reference()
            if follower is not None:
                follower._follow()

    def note_step(self) -> None:
        """An optimizer has had its first minibatch of this pass."""
        self._has_stepped = True

    def __getstate__(self) -> dict[str, Any]:
        # optimizers attach themselves again to a copy that is theirs
        return {**self.__dict__, "_followers": []}

    def run_in_lockstep(self) -> None:
        """Give all cores the same number of minibatches in each step from now on; before the first one is read."""
        if self.schedule.lockstep:
            return
        if self.has_been_read:
            raise ValueError(
                "the model is in fully_shard, which needs the same number of minibatches on all cores in a step, but "
                "the sampler has been read already: make it with `lockstep=True`"
            )
        self.schedule.lockstep = True

    def on_first_read(self, callback: Callable[[], None]) -> None:
        """Call something when the first minibatch of this pass is requested: after the loader has set itself up, which
        draws a random number, and before anything is done with a sample."""
        self._on_first_read = callback

    def on_request(self, callback: Callable[[bool], None]) -> None:
        """Call something whenever a minibatch is requested, in every pass from now on, also where none is left.

        Its argument is whether the request is the first of a pass. A loader requests one whenever it returns one, even
        if its workers are ahead.
        """
        self._on_request = callback

    def _begin_reading(self) -> None:
        if self._on_first_read is not None:
            self._on_first_read()

    def _refuse_second_pass(self) -> None:
        raise RuntimeError(
            f"epoch {self.epoch} is read for the second time: call set_epoch() before each pass over the loader"
        )

    def __len__(self) -> int:
        """How many minibatches this core gets in the epoch, padding included."""
        return self.schedule.num_minibatches_for(self.epoch, self.rank, self.first_step)


def is_decided(trace: Any) -> bool:
    """Whether what was passed as a trace decides batch sizes during the run."""
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
    """Yields this core's minibatches of every step, in the order of the steps.

    Which samples make up a step, and in which order, depends on the trace, the seed and the epoch only, never on the
    number of cores. A core without a minibatch in a step gets a padding minibatch, a copy of another core's, to which
    the optimizer gives the weight 0. The loader must keep the order, as it does unless made with ``in_order=False``.

    Args:
        dataset: the data set, of which only the length is used, or its length; or else
        dataset_size: its length.
        trace: the batch size of every step: a path, a sequence, an array, a pandas column, or an integer for a constant
            one; multiples of `minibatch_size`. Or a policy, or a function of the situation, that decides it during the
            run.
        num_replicas: cores that share the work; those of the running backend if None.
        rank: which of them this is; that of the running backend if None.
        process_group: the cores that share the work, where they are not all processes of torch.distributed: a group, or
            the dimension of a DeviceMesh along which samples differ, as ``mesh["data"]``. The optimizer, checkpoint and
            log of the run take it from here.
        minibatch_size: samples that one core runs at once.
        seed: selects the order of the samples, together with the epoch.
        shuffle: whether samples are shuffled, differently in each epoch.
        on_end: what follows the last row of the trace: ``"stop"``, ``"hold"`` the last size or ``"cycle"``.
        lockstep: whether all cores get the same number of minibatches in a step, the last one perhaps padding, for
            models whose forward pass waits for all cores; the optimizer turns it on for models in ``fully_shard``.
        verbose: log on core 0 how many epochs the trace has.

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
    def has_been_read(self) -> bool:
        return self._has_started

    def get_epochtrace(self, epoch: int) -> list[int]:
        """The batch sizes of an epoch's steps."""
        return [self.schedule.batch_size(step) for step in self.schedule.steps(epoch)]

    def begin_pass(self, epoch: int, first_step: int) -> None:
        super().begin_pass(epoch, first_step)
        self._has_started = False

    def _warn_if_truncated(self) -> None:
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
        return minibatches if self._on_request is None else _Requested(minibatches, self._on_request)

    def _minibatches(self) -> Iterator[list[int]]:
        # a DataLoader may make several iterators and use one: nothing happens before the first request
        if self._has_started:
            self._refuse_second_pass()
        self._has_started, number = True, self.num_passes
        self._begin_reading()
        self._warn_if_truncated()
        within = np.arange(self.minibatch_size)
        order = Permutation(self.dataset_size, key=(self.seed, self.epoch)) if self.shuffle else None
        at_once = max(1, _SAMPLES_AT_ONCE // self.minibatch_size)
        for offsets in self.schedule.offsets(self.epoch, self.rank, at_once=at_once, first_step=self.first_step):
            positions = offsets[:, None] + within
            for minibatch in (order(positions) if order else positions).tolist():
                if self.num_passes != number:
                    raise RuntimeError(
                        "set_epoch() was called in the middle of a pass: begin another one, as with iter(loader)"
                    )
                yield minibatch


class _Requested(Iterator[list[int]]):
    """Minibatches, with a callback after each request."""

    def __init__(self, minibatches: Iterator[list[int]], callback: Callable[[bool], None]) -> None:
        self._minibatches = minibatches
        self._callback = callback
        self._is_first = True

    def __next__(self) -> list[int]:
        try:
            return next(self._minibatches)
        finally:
            is_first, self._is_first = self._is_first, False
            self._callback(is_first)
