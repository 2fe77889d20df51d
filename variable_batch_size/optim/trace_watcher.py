"""TraceWatcher: replaces rows of a run's trace when its file changes, with the same rows on all ranks at every step."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.optim.flow import Outcome
from variable_batch_size.optim.parts.part import Part
from variable_batch_size.optim.policy_driver import PolicyDriver, Record, agree
from variable_batch_size.optim.run import Run
from variable_batch_size.rules.rule import Step
from variable_batch_size.schedules.policy_schedule import PolicySchedule
from variable_batch_size.schedules.schedule import BaseSchedule, Integers
from variable_batch_size.schedules.watched import WatchedSchedule


class TraceWatcher(Part):
    """Lets rank 0 look at the file every so many steps, and all ranks replace their rows with those that it has found.

    The ranks sum one integer to agree that nothing has changed, and otherwise the rows. What each rank has read at the
    start is replaced as well, as the file may have changed in between.
    """

    state_key = "watching"

    def __init__(self, run: Run, schedule: WatchedSchedule) -> None:
        self.loss: float | None = None  # not used
        self._run = run
        rank = run.everyone().rank
        self._file = schedule.file() if rank == 0 else None
        self._replace(schedule.trace.sizes if rank == 0 else None, schedule, is_first=True)

    @property
    def _schedule(self) -> WatchedSchedule:
        schedule = self._run.sampler.schedule  # a checkpoint may replace it
        assert isinstance(schedule, WatchedSchedule)
        return schedule

    def after_step(self, plan: StepPlan, step: Step, outcome: Outcome) -> None:
        """Look at the file if it is time."""
        schedule, num_done = self._schedule, plan.step + 1
        if schedule.num_fixed - num_done > schedule.watched.lead:
            if self._file is not None:
                self._file.look()
        else:
            self._replace(None if self._file is None else schedule.edited(self._file, num_done), schedule)
            schedule.fix_after(num_done)
        self._run.cursor.refresh()

    def _replace(self, rows: Integers | None, schedule: WatchedSchedule, *, is_first: bool = False) -> None:
        """Replace the rows on all ranks with those of rank 0, if it has any; at first all of them."""
        (number,) = agree(self._run, [0 if rows is None else len(rows)])
        if number:
            rows = np.zeros(number, dtype=np.int64) if rows is None else rows
            schedule.replace_rows(np.array(agree(self._run, rows)), all_rows=is_first)

    def report(self) -> dict[str, float]:
        return {}

    def on_decision(self, listener: Callable[[Record], Any]) -> None:
        """Changes are logged and not passed to listeners: the executed trace has the rows."""

    def state_dict(self) -> dict[str, Any]:
        """The rows that are fixed."""
        state = self._schedule.fixed_state()
        return {**state, "sizes": torch.from_numpy(state["sizes"].copy()), "counts": torch.from_numpy(state["counts"])}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Resume a run, also one whose trace was not watched."""
        if state is not None:
            rows = {name: state[name].numpy() for name in ("sizes", "counts")}
            self._schedule.load_fixed_state({**state, **rows})


def driver_for(run: Run, schedule: BaseSchedule) -> PolicyDriver | TraceWatcher | None:
    """What changes a live schedule after each step; None for one that is known from the start."""
    if isinstance(schedule, PolicySchedule):
        return PolicyDriver(run, schedule)
    return TraceWatcher(run, schedule) if isinstance(schedule, WatchedSchedule) else None
