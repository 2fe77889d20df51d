"""The position of a rank: a Cursor in its steps, with the plan of each, and a RunCount of a pass over the loader."""

import sys
from dataclasses import dataclass
from typing import NamedTuple

from variable_batch_size.checks import check_within
from variable_batch_size.data.shares import Shares
from variable_batch_size.schedules.schedule import BaseSchedule


class StepPlan(NamedTuple):
    """A minibatch of a rank and the step that it belongs to."""

    num_minibatches: int  # of the step, over all ranks
    is_last: bool = True  # whether the minibatch is the rank's last one in the step
    is_idle: bool = False  # whether the rank has no minibatch in the step, only padding
    is_padding: bool = False  # whether the minibatch is padding; in lockstep it may follow others of the step
    epoch: int = 0
    step: int = 0  # its number in the run
    batch_size: int = 0  # of the step, over all ranks
    num_rounds: int = 1  # minibatches that this rank runs in the step, padding included; 1 while that is not known
    has_first: bool = True  # whether the rank has the first minibatch of the step
    is_open: bool = False  # whether batch size and number of minibatches, here the most, are not known yet


MOST_IN_OPEN_STEP = 2**13  # minibatches: a limit of exact sums, whose rounding depends on it


@dataclass
class RunCount:
    """How many minibatches of a pass an optimizer has run, compared with how many were read.

    A loader that reads ahead keeps its distance: where that has grown between two steps, minibatches were left out.
    """

    is_late: bool  # whether other optimizers had run minibatches of the pass already
    number: int = 0
    ahead: int = 0  # minibatches that had been read beyond the latest one, when it was run
    first_ahead: int = 0  # likewise for the first one
    least_ahead: int = sys.maxsize
    number_at_end: int = 0  # `number` when all minibatches had been read

    def add(self, num_read: int) -> None:
        """Count a minibatch, after `num_read` have been read."""
        self.number += 1
        self.ahead = num_read - self.number
        if self.number == 1:
            self.first_ahead = self.ahead
        self.least_ahead = min(self.least_ahead, self.ahead)

    def has_reached(self, num_to_run: int | None) -> bool:
        """Whether the run has reached its limit, if there is one, before the latest minibatch that was read."""
        return num_to_run is not None and self.number >= num_to_run


class Cursor:
    """Moves through the minibatches that a rank runs in an epoch; `plan` is that of the latest one, at first the first.

    Padding is a rank's last minibatch of a step, so a step has at most two plans: of the last one and those before it.
    Which one a minibatch has follows from the schedule, or is requested from the shares, one minibatch ahead. In open
    steps the user determines which one is the last: :meth:`advance_open`, and :meth:`close` at the end of the step.
    """

    def __init__(self, schedule: BaseSchedule, rank: int, shares: Shares | None = None) -> None:
        self.schedule = schedule  # may be replaced before move()
        self.shares = shares  # likewise; None for round robin
        self._rank = rank
        self._places: list[int] | None = None  # of the current step's minibatches, if cores have left in it
        self.move(0)

    def move(self, epoch: int, first_step: int = 0) -> None:
        """Go to an epoch and skip its first steps."""
        self.schedule.begin_epoch(epoch, first_step)
        steps = self.schedule.steps(epoch)
        self.is_done = False  # whether this rank has ended an open step that others have not
        check_within(len(steps), first_step=first_step)
        self.epoch, self._steps = int(epoch), steps
        step = steps[min(int(first_step), len(steps) - 1)] if steps else steps.start
        self._offset = self.schedule.samples_before(step) - self.schedule.samples_before(steps.start)
        self._next: tuple[StepPlan, StepPlan] | None = None
        self._places = None
        is_left = first_step < len(steps)
        self._accumulating, self._last = self._plans(step, self.shares if is_left else None)
        self._num_left = self._last.num_rounds if is_left else 0
        self._num_run = self._num_own = 0  # of the minibatches of the step, with padding and without
        self.plan = self._accumulating if self._num_left > 1 else self._last

    def advance_open(self, *, is_done: bool, is_last: bool) -> StepPlan:
        """The plan of the next minibatch of an open step: padding if this rank had ended the step before.

        Args:
            is_done: whether this rank has no further minibatch in the step.
            is_last: whether the step is complete with this one; in lockstep all ranks must be done.
        """
        if not self._num_left:
            self._num_run = self._num_own = 0
            self._last = self._next_open()
        self._num_run += 1
        self._num_own += not self.is_done
        if self._last.is_last != is_last or self._last.is_padding != self.is_done:
            self._last = self._last._replace(is_last=is_last, is_padding=self.is_done)
        self.plan = self._last
        self._num_left, self.is_done = int(not is_last), is_done and not is_last
        return self.plan

    def _next_open(self) -> StepPlan:
        return StepPlan(MOST_IN_OPEN_STEP, False, False, self.is_done, self.epoch, self.schedule.num_done, is_open=True)  # type: ignore[attr-defined]

    def close(self, num_minibatches: int, batch_size: int) -> StepPlan:
        """The plan of an open step that is complete; without a minibatch on any rank, it is not a step."""
        closed = self._last._replace(num_minibatches=max(1, num_minibatches), batch_size=batch_size)
        self.plan = self._last = closed._replace(is_last=num_minibatches > 0)
        return self.plan

    def advance(self) -> StepPlan:
        """The plan of the next minibatch, which is then the latest one."""
        if self.shares is not None:
            self.shares.await_device()
        if not self._num_left:
            if self._next is None:
                self.look_ahead()
            if self._next is None:
                advice = "call set_epoch() before the next pass over the loader"
                raise RuntimeError(f"epoch {self.epoch} has {len(self._steps)} steps and all are done: {advice}")
            self._offset += self._last.batch_size
            (self._accumulating, self._last), self._next, self._places = self._next, None, None
            self._num_left, self._num_run, self._num_own = self._last.num_rounds, 0, 0
        self._num_run += 1
        if self.shares is None:
            self._num_left -= 1
        else:
            self._num_left = int(self.shares.place(self._last.step, self._num_run) is not None)
        self.plan = self._accumulating if self._num_left else self._last
        self._num_own += not self.plan.is_padding
        if self.shares is not None:
            self.shares.end_minibatch(is_padding=self.plan.is_padding)
        return self.plan

    def look_ahead(self) -> None:
        """Compute the plans of the next step, if the epoch has one, so that its first minibatch need not."""
        step = self._last.step + 1
        if self._next is None and not self.schedule.is_open and step < self._steps.stop:
            self._next = self._plans(step, self.shares)

    def _plans(self, step: int, shares: Shares | None) -> tuple[StepPlan, StepPlan]:
        """The plans of a step's minibatches before the last one, and of the last one."""
        schedule, rank = self.schedule, self._rank
        if schedule.is_open:
            return self._next_open(), self._next_open()
        batch_size = schedule.batch_size(step)
        number = batch_size // schedule.minibatch_size_of(batch_size)
        if shares is not None:
            first = shares.place(step, 0)
            of_step = (self.epoch, step, batch_size, 1, first == 0)
            last = StepPlan(number, True, first is None, first is None, *of_step)
            return last._replace(is_last=False), last
        first = 0 if schedule.lockstep else rank  # in lockstep all run as many as rank 0, which has most
        rounds = max(1, -((first - number) // schedule.num_replicas))
        of_step = (self.epoch, step, batch_size, rounds, rank == 0)
        is_padding = rank + (rounds - 1) * schedule.num_replicas >= number
        last = StepPlan(number, True, rank >= number, is_padding, *of_step)
        return (last if rounds == 1 else StepPlan(number, False, False, False, *of_step)), last

    def reassign(self, rank: int, step: int, places: list[int], *, is_idle: bool = False) -> None:
        """From now on, act as another rank, which first runs more minibatches of the latest step, or those of the next.

        Args:
            rank: its number among the ranks of the schedule.
            step: of these minibatches, by its number in the run.
            places: of these minibatches in the step; none to begin with the next step.
            is_idle: whether these are padding.
        """
        is_begun = self._num_left < self._last.num_rounds
        self._rank, self._next = rank, None
        if not places and is_begun:
            return
        if not places:  # the first step of a pass
            self._accumulating, self._last = self._plans(step, None)
            self._num_left, self._places = self._last.num_rounds, None
            return
        done: list[int] = []
        if step != self._last.step:
            self._offset += self._last.batch_size
        elif is_begun:
            done = self._places or [rank] * self._last.num_rounds  # of these only the number matters
            self.plan = self.plan._replace(is_last=False)
        batch_size = self.schedule.batch_size(step)
        number = batch_size // self.schedule.minibatch_size_of(batch_size)
        self._num_run, self._num_own = len(done), self._num_own if done else 0
        of_step = (self.epoch, step, batch_size, len(done) + len(places), 0 in places)
        self._last = StepPlan(number, True, is_idle, is_idle, *of_step)
        self._accumulating = StepPlan(number, False, False, False, *of_step)
        self._places, self._num_left = [*done, *places], len(places)

    def refresh(self) -> None:
        """After a policy's decision: look up again where the epoch ends and what the next step is."""
        self._steps = self.schedule.steps(self.epoch)
        self._next = None

    @property
    def next(self) -> StepPlan | None:
        """The plan of the next minibatch; None if the epoch has no more."""
        if self.schedule.is_open:
            if not self._num_left:
                return self._next_open()
            return self._last if self._last.is_padding == self.is_done else self._last._replace(is_padding=self.is_done)
        if self._num_left:
            return self._accumulating if self._num_left > 1 else self._last
        if self._next is None:
            self.look_ahead()
        return None if self._next is None else self._next[0]

    @property
    def next_minibatch(self) -> int:
        """The place of the next minibatch in the epoch, over all ranks, in minibatches of the smallest size.

        For padding, the place of the minibatch that it copies.
        """
        plan, number, offset = self.next, 0, self._offset + self._last.batch_size
        if self._num_left:  # of the current step
            number, offset = self._num_run, self._offset
        if plan is None:
            return offset // self.schedule.minibatch_size
        place = self._rank + number * self.schedule.num_replicas
        if self._num_left and self._places:
            place = self._places[number]
        elif self.shares is not None and (own := self.shares.place(plan.step, number)) is not None:
            place = own
        within = place % plan.num_minibatches * (plan.batch_size // plan.num_minibatches)
        return (offset + within) // self.schedule.minibatch_size

    @property
    def is_accumulating(self) -> bool:
        """Whether this rank has run some of its minibatches of a step, but not all."""
        return bool(self._num_left and self._num_run)

    @property
    def num_own(self) -> int:
        """How many minibatches this rank has run in the step of the latest one, without padding."""
        return self._num_own

    @property
    def epoch_step(self) -> int:
        """How many steps of the epoch are done."""
        is_complete = not self._num_left and (self._last.is_last or not self.schedule.is_open)
        return self._last.step - self._steps.start + is_complete

    def __str__(self) -> str:
        of_all = "" if self.schedule.is_endless else f"/{len(self._steps)}"
        return f"epoch {self.epoch}, step {self.epoch_step}{of_all}"
