"""Cursor: the position of a core in a run, in integers."""

from __future__ import annotations

from variable_batch_size.checks import check_within
from variable_batch_size.schedules.schedule import BaseSchedule


class Position:
    """The step and minibatch that a core is at, moved on by one minibatch at a time.

    Args:
        schedule: batch sizes, laid out over epochs and cores.
        rank: of this core.

    Attributes:
        epoch: the number of the epoch, from 0.
        first_step: how many of the epoch's steps were left out.
        step: the number in the run of the step that the latest minibatch belongs to; at first, of the epoch's first.
    """

    def __init__(self, schedule: BaseSchedule, rank: int) -> None:
        self._rank = rank
        self.take(schedule)

    def take(self, schedule: BaseSchedule) -> None:
        """Go to the start of another schedule."""
        self._schedule = schedule
        self.set_epoch(0)

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Go to an epoch, and leave out so many of its steps."""
        self._schedule.begin_epoch(epoch)
        steps = self._schedule.steps(epoch)
        check_within(len(steps), first_step=first_step)
        self.epoch = int(epoch)
        self.first_step = int(first_step)
        self.step = steps[min(self.first_step, len(steps) - 1)]
        self._begin = self._schedule.samples_before(self.step) - self._schedule.samples_before(steps.start)
        self._share = self._share_of_step()
        self._minibatches_left = self._share if first_step < len(steps) else 0

    def advance(self) -> None:
        """Note one more minibatch, which begins the next step if the latest is complete."""
        if not self._minibatches_left:
            if self.step == self._steps[-1]:
                raise RuntimeError(
                    f"epoch {self.epoch} has {len(self._steps)} steps and all are done: call set_epoch on the sampler "
                    "and the optimizer before the next pass over the loader"
                )
            self._begin += self.batch_size
            self.step += 1
            self._minibatches_left = self._share = self._share_of_step()
        self._minibatches_left -= 1

    @property
    def _steps(self) -> range:
        """Of the epoch; asked for anew, as those of a policy become known while it goes on."""
        return self._schedule.steps(self.epoch)

    def _share_of_step(self) -> int:
        """How many minibatches this core runs in the step: at least a stand-in."""
        return self._schedule.rounds_for(self.step, self._rank)

    @property
    def next_minibatch(self) -> int:
        """The number of the minibatch that the core runs next, among all of the epoch; of a stand-in, its own."""
        begin, step, place = self._begin, self.step, self._rank
        if self.is_complete:
            begin, step = begin + self.batch_size, step + 1
        else:
            place += self._num_run * self._schedule.num_replicas
        if step not in self._steps:
            return begin // self._schedule.minibatch_size
        return begin // self._schedule.minibatch_size + place % self._schedule.num_minibatches(step)

    @property
    def _num_run(self) -> int:
        """How many of the step's minibatches this core has run, stand-ins included."""
        return self._share - self._minibatches_left

    @property
    def is_complete(self) -> bool:
        """Whether the latest minibatch was the core's last one in its step."""
        return not self._minibatches_left

    @property
    def is_accumulating(self) -> bool:
        """Whether this core has run some of its minibatches of a step, and not all."""
        return self._minibatches_left not in (0, self._share)

    @property
    def epoch_step(self) -> int:
        """How many steps of the epoch are done."""
        return self.step - self._steps.start + self.is_complete

    @property
    def num_epoch_steps(self) -> int | None:
        """How many steps the epoch has; None if it goes on forever."""
        return None if self._schedule.is_endless else len(self._steps)

    def __str__(self) -> str:
        of_all = "" if self.num_epoch_steps is None else f"/{self.num_epoch_steps}"
        return f"epoch {self.epoch}, step {self.epoch_step}{of_all}"

    @property
    def batch_size(self) -> int:
        """The batch size of the step."""
        return self._schedule.batch_size(self.step)

    @property
    def is_idle(self) -> bool:
        """Whether this core has no minibatch in the step, and so runs a stand-in."""
        return self._schedule.is_idle(self.step, self._rank)

    @property
    def is_idle_next(self) -> bool:
        """Whether it is so in the step after this one, if the epoch has one."""
        return self.step < self._steps[-1] and self._schedule.is_idle(self.step + 1, self._rank)

    @property
    def is_padding_minibatch(self) -> bool:
        """Whether the latest minibatch was a stand-in: in lockstep a core may have others in the step."""
        return self._schedule.is_padding(self.step, self._rank, max(0, self._num_run - 1))

    @property
    def is_next_padding(self) -> bool:
        """Whether the next one is, if the epoch has one."""
        if not self.is_complete:
            return self._schedule.is_padding(self.step, self._rank, self._num_run)
        return self.is_idle_next

    @property
    def is_last_next(self) -> bool:
        """Whether the next one is the core's last of its step, if the epoch has one."""
        if not self.is_complete:
            return self._minibatches_left == 1
        return self.step == self._steps[-1] or self._schedule.rounds_for(self.step + 1, self._rank) == 1
