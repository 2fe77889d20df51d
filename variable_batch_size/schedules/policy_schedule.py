"""PolicySchedule: batch sizes chosen by a policy during the run, assigned to epochs and cores."""

import itertools
from collections.abc import Mapping
from typing import Any, final

import numpy as np
from typing_extensions import Unpack

from variable_batch_size.policies.policy import Policy
from variable_batch_size.schedules.schedule import BaseSchedule, Integers, Layout, ScheduleHistory, run_lengths
from variable_batch_size.traces.trace import Trace


@final
class PolicySchedule(BaseSchedule):
    """A schedule whose rows are appended as the policy decides them; executed rows never change.

    Epochs depend on the rows as in :class:`Schedule`, so the rows of a run replayed as a trace give the same epochs.
    The end of the current epoch is unknown until it is reached: :meth:`steps` and :meth:`num_minibatches_for` assume
    that all further steps have the batch size decided last.
    """

    on_end, is_live = "hold", True

    def __init__(self, policy: Policy, **layout: Unpack[Layout]) -> None:
        super().__init__(**layout)
        self.policy, self.name = policy, type(policy).__name__
        self.num_done = 0  # executed rows
        self._rows: list[int] = []
        self._ends: list[int] = []  # cumulative sum of _rows
        self._used = 0  # samples in the last epoch opened so far
        self._left: set[int] = set()  # epochs ended early

    def append(self, batch_size: int, *, number: int) -> None:
        """Append `number` rows of this batch size."""
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
        """Mark a step and all steps before it as executed."""
        self.num_done = step + 1

    @property
    def num_ahead(self) -> int:
        """Number of rows that are decided but not executed."""
        return len(self._rows) - self.num_done

    def cut(self) -> None:
        """Drop the rows that were not executed, except one that ended an epoch because it did not fit.

        A smaller one might fit, and a replay would then have other epochs. It must be a multiple of the minibatch size.
        """
        first = self._rows[self.num_done : self.num_done + 1] if 0 < self.num_done in self._starts else []
        kept = [size for size in first if size % self.minibatch_size == 0]
        self._restore(self._rows[: self.num_done] + kept, self._starts)

    @property
    def latest(self) -> int | None:
        """The batch size of the last executed row; None before the first."""
        return self._rows[self.num_done - 1] if self.num_done else None

    def _restore(self, rows: list[int], starts: list[int]) -> None:
        self._rows, self._ends = rows, list(itertools.accumulate(rows))
        self._starts = [start for start in starts if start < len(rows)] or [0]
        self._used = sum(rows[self._starts[-1] :])

    @property
    def trace(self) -> Trace:
        return Trace.from_sequence(self._rows)

    @property
    def description(self) -> str:
        return f"decided by {self.policy.description}"

    @property
    def num_epochs(self) -> int | None:
        return 1 if self.dataset_size is None else None

    def steps(self, epoch: int) -> range:
        """The steps of an epoch; an estimate for the current and future epochs."""
        self._check_epoch(epoch)
        # read once: a checkpoint thread may call this while rows are appended
        starts, number = self._starts, len(self._starts)
        if epoch + 1 < number:
            return range(starts[epoch], starts[epoch + 1])
        like_last = self._rows[-1] if self._rows else self.minibatch_size
        if epoch + 1 == number:
            return range(starts[epoch], len(self._rows) + max(0, self.capacity - self._used) // like_last)
        return range(len(self._rows), len(self._rows) + self.capacity // like_last)

    def begin_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Open an epoch if it is not open yet: end the previous one here and move the rows ahead into the new one."""
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
        return ScheduleHistory(*run_lengths(rows), starts, has_ended=False)

    def after(self, past: ScheduleHistory) -> "PolicySchedule":
        """This schedule, with its rows replaced by those of the history; later rows are decided by the policy."""
        self.num_done = past.num_rows
        self._restore(past.rows().tolist(), list(past.starts))
        return self

    def ended_early(self, epoch: int, num_steps: int) -> bool:
        return epoch in self._left or (epoch + 1 < len(self._starts) and super().ended_early(epoch, num_steps))

    def samples_before(self, step: int) -> int:
        return self._ends[min(step, len(self._rows)) - 1] if step and self._rows else 0

    def batch_size(self, step: int) -> int:
        """The samples of a step, summed over cores; RuntimeError if it is not decided yet."""
        if step < len(self._rows):
            return self._rows[step]
        if not self._rows:
            raise RuntimeError("no batch size is decided yet: create the optimizer before iterating over the sampler")
        rule = "the policy's `lead` must be at least the DataLoader's num_workers * prefetch_factor"
        raise RuntimeError(f"step {step} was read before its batch size was decided: {rule}, got {self.policy.lead}")

    def num_minibatches_for(self, epoch: int, rank: int, first_step: int = 0) -> int:
        """An estimate for the current epoch, as for :meth:`steps`."""
        steps = self.steps(epoch)[first_step:]
        known = np.array(self._rows[steps.start : steps.stop], dtype=np.int64)
        last = np.array(self._rows[-1:] or [self.minibatch_size], dtype=np.int64)
        to_come = (len(steps) - len(known)) * int(self._num_yielded(last, rank)[0])
        return int(self._num_yielded(known, rank).sum()) + to_come

    def _next_sizes(self, epoch: int, step: int, used: int) -> Integers:
        # an epoch ends where the next one has begun, or no minibatch fits
        has_next = epoch + 1 < len(self._starts)
        if step >= self._starts[epoch + 1] if has_next else self.capacity - used < self.minibatch_size:
            return np.empty(0, dtype=np.int64)
        self.batch_size(step)  # raises if undecided
        return np.array(self._rows[step : (*self._starts, len(self._rows))[epoch + 1]], dtype=np.int64)

    def state_dict(self) -> dict[str, Any]:
        """The rows, including those decided ahead, and their epochs."""
        rows, starts, left = list(self._rows), list(self._starts), sorted(self._left)
        return {"rows": rows, "starts": starts, "left": left, "num_done": self.num_done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._left, self.num_done = set(state["left"]), state["num_done"]
        self._restore(list(state["rows"]), state["starts"])
