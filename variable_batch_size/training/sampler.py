"""CustomSampler: a schedule as the `batch_sampler` of a DataLoader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sized
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from variable_batch_size.checks import check_within, is_integer
from variable_batch_size.cores.running import running_cores
from variable_batch_size.policies.policy import Policy, policy_of
from variable_batch_size.policies.situation import Situation
from variable_batch_size.schedules.batch_sizes import OnEnd
from variable_batch_size.schedules.layout import Layout
from variable_batch_size.schedules.live import LiveSchedule
from variable_batch_size.schedules.permutation import Permutation
from variable_batch_size.schedules.schedule import Schedule
from variable_batch_size.traces.trace import Trace, TraceLike

logger = logging.getLogger(__name__)

_SAMPLES_AT_ONCE = 8192


class CustomSampler(Sampler[list[int]]):
    """Deals this core its minibatches of every step, in the order of the steps.

    Which samples make up a step, and in which order, depends on the trace, the seed and the epoch only, never on the
    number of cores. A core without a minibatch in a step gets another core's as a stand-in, which the optimizer gives
    the weight 0.

    Args:
        dataset: the data set, of which only the length is used; or else
        dataset_size: its length.
        trace: the batch size of every step: a path, a sequence, an array, a pandas column, or an integer for always
            the same; multiples of `minibatch_size`. Or a policy, or a function of the situation, that decides it while
            the run goes on.
        num_replicas: cores that share the work; those of the running backend if None.
        rank: which of them this is; as the running backend knows it if None.
        minibatch_size: samples that one core runs at once.
        seed: chooses the order of the samples, together with the epoch.
        shuffle: whether samples come in an order of their own in each epoch, or as they are.
        on_end: what follows the last row of the trace: ``"stop"``, ``"hold"`` the last size or ``"cycle"``.

    Attributes:
        num_passes: how often :meth:`set_epoch` was called.

    >>> sampler = CustomSampler(dataset_size=7, trace=[4, 2], minibatch_size=2, num_replicas=2, rank=0, shuffle=False)
    >>> list(sampler)
    [[0, 1], [4, 5]]
    """

    def __init__(
        self,
        dataset: Sized | None = None,
        *,
        dataset_size: int | None = None,
        trace: TraceLike | Policy | Callable[[Situation], float],
        minibatch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        on_end: OnEnd = "stop",
    ) -> None:
        if (dataset is None) == (dataset_size is None):
            given = "neither" if dataset is None else "both"
            raise ValueError(f"pass either `dataset` or `dataset_size`, got {given}")
        if num_replicas is None or rank is None:
            running_rank, running_replicas = running_cores()
            num_replicas = running_replicas if num_replicas is None else num_replicas
            rank = running_rank if rank is None else rank
        if not is_integer(seed):
            raise ValueError(f"`seed` must be an integer, got {seed!r}")
        self.schedule = _schedule_of(
            trace,
            dataset_size=len(dataset) if dataset is not None else dataset_size,  # type: ignore[arg-type]
            minibatch_size=minibatch_size,
            num_replicas=num_replicas,
            on_end=on_end,
        )
        check_within(num_replicas - 1, rank=rank)
        self.rank = int(rank)
        self.seed = int(seed)
        self.shuffle = shuffle
        self.epoch = 0
        self.first_step = 0
        self.num_passes = 0
        self._has_started = False
        self._when_read: Callable[[], None] | None = None

    @property
    def num_replicas(self) -> int:
        return self.schedule.num_replicas

    @property
    def minibatch_size(self) -> int:
        return self.schedule.minibatch_size

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
        self._has_started = False
        self._when_read = None

    def call_when_read(self, callback: Callable[[], None]) -> None:
        """Call something once, when the first minibatch of this pass is asked for: after the loader has set itself up,
        which draws a random number, and before anything is done with a sample."""
        self._when_read = callback

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
        # a DataLoader may make several iterators and use one: nothing happens before the first minibatch is asked for
        if self._has_started:
            raise RuntimeError(
                f"epoch {self.epoch} is read for the second time: call set_epoch on the sampler and the optimizer "
                "before each pass over the loader"
            )
        self._has_started = True
        if self._when_read is not None:
            self._when_read()
        self._tell_if_cut_short()
        within = np.arange(self.minibatch_size)
        order = Permutation(self.schedule.dataset_size, key=(self.seed, self.epoch)) if self.shuffle else None
        at_once = max(1, _SAMPLES_AT_ONCE // self.minibatch_size)
        for offsets in self.schedule.offsets(self.epoch, self.rank, at_once=at_once, first_step=self.first_step):
            positions = offsets[:, None] + within
            yield from (order(positions) if order else positions).tolist()

    def __len__(self) -> int:
        """How many minibatches this core gets in the epoch, stand-ins included."""
        return self.schedule.num_yielded(self.epoch, self.rank, self.first_step)


def _schedule_of(trace: Any, *, dataset_size: int, minibatch_size: int, num_replicas: int, on_end: OnEnd) -> Layout:
    """Of a trace, or of whoever decides one."""
    if isinstance(trace, Policy) or (callable(trace) and not isinstance(trace, type)):
        return LiveSchedule(
            policy_of(trace), dataset_size=dataset_size, minibatch_size=minibatch_size, num_replicas=num_replicas
        )
    return Schedule(
        Trace.of(trace),
        dataset_size=dataset_size,
        minibatch_size=minibatch_size,
        num_replicas=num_replicas,
        on_end=on_end,
    )
