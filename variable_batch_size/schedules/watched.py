"""WatchedSchedule: the schedule of a trace whose later rows may be replaced during the run."""

import logging
import os
from collections.abc import Mapping
from typing import Any, final

import numpy as np
from typing_extensions import Unpack

from variable_batch_size.schedules.schedule import Integers, Layout, OnEnd, Schedule, ScheduleHistory
from variable_batch_size.traces.trace import Trace
from variable_batch_size.traces.watched import WatchedFile, WatchedTrace

logger = logging.getLogger(__name__)


@final
class WatchedSchedule(Schedule):
    """A :class:`Schedule` of which the first `num_fixed` steps can be read, and the others replaced.

    The end of the trace is fixed like a row. An epoch ends before a fixed row that does not fit, so the executed rows
    as a trace give the same epochs.
    """

    is_live = True

    def __init__(self, watched: WatchedTrace, *, on_end: OnEnd | None = None, **layout: Unpack[Layout]) -> None:
        if on_end == "cycle":
            raise ValueError("`on_end` must be 'stop' or 'hold' with a watched trace, got 'cycle'")
        super().__init__(os.fspath(watched.path), on_end=on_end, **layout)
        self.watched = watched
        self.num_fixed = watched.lead + watched.every

    @property
    def description(self) -> str:
        return f"{os.path.basename(self.name)}, watched"

    def begin_epoch(self, epoch: int, first_step: int = 0) -> None:
        self.fix_after(self._start(epoch) + first_step)

    def fix_after(self, num_done: int) -> None:
        """Fix the steps that may be read before the next look at the file, after `num_done` completed steps."""
        self.num_fixed = max(self.num_fixed, num_done + self.watched.lead + self.watched.every)

    def file(self) -> WatchedFile:
        """The file, which should have the rows of this schedule."""
        return WatchedFile(self.watched.path, self.trace)

    def edited(self, file: WatchedFile, num_done: int) -> Integers | None:
        """The rows of the file, if it has changed; logs what cannot be used of them."""
        try:
            trace = file.changed()
            if trace is None:
                return None
            self._check_edit(trace)
        except (ValueError, OSError) as error:
            logger.warning("after step %d: %s; the rows of the run stay as they were", num_done, error)
            return None
        before, file.trace = file.trace, trace
        number = min(self.num_fixed, len(before), len(trace))
        late = np.flatnonzero(before.sizes[:number] != trace.sizes[:number])
        if len(late):
            row = int(late[0])
            message = "%s: batchsize was changed to %d, but the steps before %d are done or fixed; %d such rows stay"
            logger.warning(message, trace.place(row), trace.sizes[row], self.num_fixed, len(late))
        logger.warning("%s has changed: its %d rows count from step %d on", self.name, len(trace), self.num_fixed)
        return trace.sizes

    def _check_edit(self, trace: Trace) -> None:
        """Raise if a new content of the file cannot replace the rows that are not fixed."""
        self.check_sizes(trace)
        if self.on_end == "stop" and len(trace) < min(self.num_fixed, len(self._rows)):
            raise ValueError(f"{self.name} has {len(trace)} rows, but {self.num_fixed} steps are fixed already")
        if self.on_end == "stop" and len(self._rows) < self.num_fixed and len(trace) != len(self._rows):
            raise ValueError(f"{self.name} has {len(trace)} rows, but its end after {len(self._rows)} is fixed already")

    def replace_rows(self, sizes: Integers, *, all_rows: bool = False) -> None:
        """Replace the rows that are not fixed, or all before the run begins, by those of the file."""
        number = 0 if all_rows else self._num_fixed_rows
        first = min(number, len(sizes) - (self.on_end == "hold"))
        self._set_first(self._batch_sizes(range(number)), list(self._starts), sizes[first:])

    @property
    def _num_fixed_rows(self) -> int:
        return min(self.num_fixed, len(self._rows)) if self.on_end == "stop" else self.num_fixed

    def _set_first(self, fixed: Integers, starts: list[int], rest: Integers) -> None:
        self._set_trace(Trace(np.concatenate([fixed, rest]), source=self.name))
        # whether an epoch starts at a row depends on that row
        self._starts = [start for start in starts if start < len(fixed)] or [0]
        self._epoch_of_row = {}

    def _next_sizes(self, epoch: int, step: int, used: int) -> Integers:
        if step < self.num_fixed:
            return super()._next_sizes(epoch, step, used)[: self.num_fixed - step]
        if self.capacity - used < self.minibatch_size:
            return np.empty(0, dtype=np.int64)
        rule = "`lead` of the watched trace must be at least the DataLoader's num_workers * prefetch_factor"
        raise RuntimeError(f"step {step} was read before its batch size was fixed: {rule}, got {self.watched.lead}")

    def fixed_state(self) -> dict[str, Any]:
        """The fixed rows, which a run that resumes keeps although the file has changed."""
        sizes, counts = self._runs(self._num_fixed_rows)
        starts = [start for start in self._starts if start < self._num_fixed_rows]
        return {"of": self._meaning, "sizes": sizes, "counts": counts, "starts": starts}

    def load_fixed_state(self, state: Mapping[str, Any]) -> None:
        """Restore the fixed rows, unless they are of another file or for other data; the end is that of the file."""
        if list(state["of"]) != self._meaning:
            return
        fixed = ScheduleHistory(state["sizes"], state["counts"], tuple(state["starts"]), False).rows()
        first = min(len(fixed), len(self._rows) - (self.on_end == "hold"))
        self._set_first(fixed, list(state["starts"]), self._rows[first:])
        self.num_fixed = len(fixed)

    @property
    def _meaning(self) -> list[str | int]:
        return [self.description, self.on_end, self.minibatch_size, self.capacity]
