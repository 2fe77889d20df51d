"""PolicySchedule: batch sizes that a policy decides while the run goes on, laid out over epochs and cores."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, final

import numpy as np

from variable_batch_size.policies.policy import Policy
from variable_batch_size.schedules.batch_sizes import Integers
from variable_batch_size.schedules.schedule import BaseSchedule, ScheduleHistory
from variable_batch_size.traces.trace import Trace


@final
class PolicySchedule(BaseSchedule):
    """Rows that are appended as they are decided, and never changed once they were executed.

    Epochs follow from the rows by the same rule as always, so that the rows of a run, replayed as a trace, give the
    same epochs. Where the open epoch ends is not known yet: until then :meth:`steps` and :meth:`num_minibatches_for`
    tell where it would end if all further steps were like the last one decided.

    Args:
        policy: who decides.
        dataset_size: samples in the data set.
        minibatch_size: samples that one core runs at once.
        num_replicas: cores that share the work.
        lockstep: whether all cores run as many minibatches in a step as the busiest one.

    Attributes:
        num_done: how many rows were executed.

    >>> from variable_batch_size.policies.builtin import PerCore
    >>> schedule = PolicySchedule(PerCore(), dataset_size=300, minibatch_size=32, num_replicas=4)
    >>> schedule.append(128, number=3)
    >>> schedule.steps(epoch=0), schedule.steps(epoch=1), schedule.num_ahead
    (range(0, 2), range(2, 4), 3)
    """

    on_end = "hold"

    def __init__(
        self,
        policy: Policy,
        *,
        dataset_size: int | None,
        minibatch_size: int,
        num_replicas: int = 1,
        lockstep: bool = False,
    ) -> None:
        super().__init__(
            dataset_size=dataset_size, minibatch_size=minibatch_size, num_replicas=num_replicas, lockstep=lockstep
        )
        self.policy = policy
        self.num_done = 0
        self._rows: list[int] = []
        self._ends: list[int] = []  # samples up to and with each
        self._starts = [0]  # first row of each epoch that was opened
        self._used = 0  # samples of the latest
        self._left: set[int] = set()  # epochs that were left before they were full

    # --------------------------------------------------------------------------------------------------------- rows

    def append(self, batch_size: int, *, number: int) -> None:
        """Decide the batch size of the next rows."""
        assert batch_size % self.minibatch_size == 0
        assert 0 < batch_size <= self.capacity
        for _ in range(number):
            if self._used + batch_size > self.capacity:
                self._starts.append(len(self._rows))
                self._used = 0
            self._rows.append(batch_size)
            self._ends.append(batch_size + (self._ends[-1] if self._ends else 0))
            self._used += batch_size

    def note_done(self, step: int) -> None:
        """Take a step, and so all before it, as executed."""
        self.num_done = step + 1

    @property
    def num_ahead(self) -> int:
        """How many rows are decided and were not executed yet."""
        return len(self._rows) - self.num_done

    def cut(self) -> None:
        """Forget the rows that were not executed.

        But not the one at which an epoch has ended because it did not fit: another one might, and the run, replayed,
        would have other epochs. (One that was decided for other minibatches goes, too.)
        """
        first = self._rows[self.num_done : self.num_done + 1] if 0 < self.num_done in self._starts else []
        kept = [size for size in first if size % self.minibatch_size == 0]
        self._restore(self._rows[: self.num_done] + kept, self._starts)

    @property
    def latest(self) -> int | None:
        """The batch size of the row executed last; None before the first."""
        return self._rows[self.num_done - 1] if self.num_done else None

    def _restore(self, rows: list[int], starts: list[int]) -> None:
        self._rows, self._ends = rows, list(itertools.accumulate(rows))
        self._starts = [start for start in starts if start < len(rows)] or [0]
        self._used = sum(rows[self._starts[-1] :])

    # ------------------------------------------------------------------------------------------------------- epochs

    @property
    def trace(self) -> Trace:
        """The rows decided so far."""
        return Trace.from_sequence(self._rows)

    @property
    def name(self) -> str:
        return type(self.policy).__name__

    @property
    def description(self) -> str:
        return f"decided by {self.policy.description}"

    @property
    def num_epochs(self) -> int | None:
        """They go on forever, where the data have a length."""
        return 1 if self.dataset_size is None else None

    def steps(self, epoch: int) -> range:
        """The steps of an epoch; of the open one, and of those to come, as it looks now."""
        self._check_epoch(epoch)
        starts, number = self._starts, len(self._starts)  # read once: a checkpoint asks while rows are appended
        if epoch + 1 < number:
            return range(starts[epoch], starts[epoch + 1])
        like_last = self._rows[-1] if self._rows else self.minibatch_size
        if epoch + 1 == number:
            return range(starts[epoch], len(self._rows) + max(0, self.capacity - self._used) // like_last)
        return range(len(self._rows), len(self._rows) + self.capacity // like_last)

    def begin_epoch(self, epoch: int) -> None:
        """Open an epoch if it is not: the one before ends where it was left, and rows ahead come into the new one."""
        if epoch < len(self._starts) and self._starts[epoch] <= self.num_done:
            return
        ahead, self._rows = self._rows[self.num_done :], self._rows[: self.num_done]
        self._ends = self._ends[: self.num_done]
        self._starts = [start for start in self._starts if start <= self.num_done]
        self._used = sum(self._rows[self._starts[-1] :])
        while epoch >= len(self._starts):
            if self.capacity - self._used >= self.minibatch_size:
                self._left.add(len(self._starts) - 1)
            self._starts.append(self.num_done)
            self._used = 0
        for size in ahead:
            self.append(size, number=1)

    def past(self, epoch: int, first_step: int) -> ScheduleHistory:
        opened = [min(start, self.num_done) for start in self._starts[: epoch + 1]]
        starts = (*opened, *[self.num_done] * (epoch + 1 - len(opened)))
        rows = np.array(self._rows[: starts[-1] + first_step], dtype=np.int64)
        changes = np.flatnonzero(np.diff(rows, prepend=0))
        return ScheduleHistory(rows[changes], np.diff(changes, append=len(rows)), starts, has_ended=False)

    def after(self, past: ScheduleHistory) -> PolicySchedule:
        """This one, whose rows so far are the past ones; what comes is decided from there on."""
        self.num_done = past.num_rows
        self._restore(past.rows().tolist(), list(past.starts))
        return self

    def ended_early(self, epoch: int, num_steps: int) -> bool:
        return epoch in self._left or (epoch + 1 < len(self._starts) and super().ended_early(epoch, num_steps))

    # -------------------------------------------------------------------------------------------------------- steps

    def samples_before(self, step: int) -> int:
        """The samples used by all steps before this one, of those that are decided."""
        return self._ends[min(step, len(self._rows)) - 1] if step and self._rows else 0

    def batch_size(self, step: int) -> int:
        """The samples of a step, over all cores.

        Raises:
            RuntimeError: if it is not decided yet.
        """
        if step < len(self._rows):
            return self._rows[step]
        if not self._rows:
            raise RuntimeError("no batch size is decided yet: make the optimizer before the sampler is read")
        raise RuntimeError(
            f"step {step} is read before it is decided: the `lead` of a policy must be at least the minibatches that a "
            f"loader reads ahead, its num_workers times its prefetch_factor, got {self.policy.lead}"
        )

    def num_minibatches_for(self, epoch: int, rank: int, first_step: int = 0) -> int:
        """As it looks now."""
        steps = self.steps(epoch)[first_step:]
        known = np.array(self._rows[steps.start : steps.stop], dtype=np.int64)
        to_come = len(steps) - len(known)
        last = np.array(self._rows[-1:] or [self.minibatch_size], dtype=np.int64)
        return int(self._num_yielded(known, rank).sum()) + to_come * int(self._num_yielded(last, rank)[0])

    def steps_from(self, epoch: int, first_step: int) -> Iterator[int]:
        """As always; whether there is one more is seen when it is asked for."""
        start = self.steps(epoch).start
        step = start + first_step
        used = sum(self._rows[start:step])
        while not self._is_end(epoch, step, used):
            used += self.batch_size(step)  # refuses what is not decided
            yield step
            step += 1

    def offsets(self, epoch: int, rank: int, *, at_once: int, first_step: int = 0) -> Iterator[Integers]:
        """As always, for the rows that are decided when they are asked for."""
        start = self.steps(epoch).start
        step = start + first_step
        begin = sum(self._rows[start:step])
        while not self._is_end(epoch, step, begin):
            self.batch_size(step)  # refuses what is not decided
            end = self._starts[epoch + 1] if epoch + 1 < len(self._starts) else len(self._rows)
            sizes = np.array(self._rows[step:end], dtype=np.int64)
            yield from self._offsets_of(sizes, rank, begin=begin, at_once=at_once)
            begin += int(sizes.sum())
            step = end

    def _is_end(self, epoch: int, step: int, used: int) -> bool:
        """Whether an epoch is over before a step: the next one has begun, or nothing more would fit."""
        if epoch + 1 < len(self._starts):
            return step >= self._starts[epoch + 1]
        return self.capacity - used < self.minibatch_size

    # -------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The rows, those decided ahead included, and their epochs."""
        return {
            "rows": list(self._rows),
            "starts": list(self._starts),
            "left": sorted(self._left),
            "num_done": self.num_done,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._left, self.num_done = set(state["left"]), state["num_done"]
        self._restore(list(state["rows"]), state["starts"])
