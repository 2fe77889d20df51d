"""Dealer: what deals a core its minibatches, as optimizers and checkpoints know it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from variable_batch_size.checks import check_within
from variable_batch_size.cores.running import running_cores
from variable_batch_size.policies.policy import Policy, policy_of
from variable_batch_size.policies.situation import Situation
from variable_batch_size.schedules.batch_sizes import OnEnd
from variable_batch_size.schedules.layout import Layout
from variable_batch_size.schedules.live import LiveSchedule
from variable_batch_size.schedules.schedule import Schedule
from variable_batch_size.traces.trace import Trace, TraceLike

Description = dict[str, str | int | bool | None]


class Dealer(ABC):
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

    def call_when_read(self, callback: Callable[[], None]) -> None:
        """Call something when the first minibatch of this pass is asked for: after the loader has set itself up, which
        draws a random number, and before anything is done with a sample."""
        self._when_read = callback

    def call_when_asked(self, callback: Callable[[bool], None]) -> None:
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
        return self.schedule.num_yielded(self.epoch, self.rank, self.first_step)


def is_decided(trace: Any) -> bool:
    """Whether what was given as a trace decides it while the run goes on."""
    return isinstance(trace, Policy) or (callable(trace) and not isinstance(trace, type))


def _schedule_of(
    trace: Any, *, dataset_size: int | None, minibatch_size: int, num_replicas: int, on_end: OnEnd, lockstep: bool
) -> Layout:
    if is_decided(trace):
        return LiveSchedule(
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
