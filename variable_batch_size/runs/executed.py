"""ExecutedTrace: the batch sizes that a run has executed, in a CSV file that grows with it and can be replayed."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from variable_batch_size.schedules.schedule import BaseSchedule
from variable_batch_size.traces.trace import COLUMNS


class ExecutedTrace:
    """Appends a row for each completed step, and leaves existing rows as they are.

    A crash may leave rows of steps that the checkpoint does not have: :meth:`truncate` drops them. Comments name the
    run at the top (`origin`) and, after each number of completed steps in `changes`, what changed then.
    """

    def __init__(
        self, path: Path, schedule: BaseSchedule, *, origin: str, changes: Sequence[tuple[int, str]] = ()
    ) -> None:
        self.path, self._schedule, self._changes = path, schedule, changes
        self._header = f"# executed from {schedule.name}: {origin}\n{','.join(COLUMNS)}\n"
        self._num_rows = self._num_bytes = 0

    def truncate(self, steps_of_epochs: Sequence[int]) -> None:
        """Drop the rows beyond the completed steps of each epoch, and comments without a row after them."""
        if self.path.exists():
            self._num_rows = self._num_bytes = position = 0
            for line in self.path.read_bytes().splitlines(keepends=True):
                position += len(line)
                step = line.partition(b",")[0]
                if step.isdigit() and int(step) < sum(steps_of_epochs) and line.endswith(b"\n"):
                    self._num_rows, self._num_bytes = int(step) + 1, position
            os.truncate(self.path, self._num_bytes)

    def append(self, steps_of_epochs: Sequence[int]) -> None:
        """Append rows for those completed steps of each epoch that have none."""
        if not self.path.exists() or self.path.stat().st_size != self._num_bytes:
            self._num_rows = self._num_bytes = 0
        lines = "".join(self._lines(steps_of_epochs))
        if lines:
            self._write(lines if self._num_rows else self._header + lines)
            self._num_rows = sum(steps_of_epochs)

    def _lines(self, steps_of_epochs: Sequence[int]) -> Iterator[str]:
        row = 0  # of the epoch's first step
        for epoch, number in enumerate(steps_of_epochs):
            first = max(0, self._num_rows - row)
            if first < number:
                if not first:
                    yield from self._comments_before(epoch, steps_of_epochs)
                steps = self._schedule.steps(epoch)
                for step in range(first, number):
                    yield from (f"# from here on: {text}\n" for after, text in self._changes if after == row + step)
                    yield f"{row + step},{self._schedule.batch_size(steps[step])}\n"
            row += number

    def _comments_before(self, epoch: int, steps_of_epochs: Sequence[int]) -> Iterator[str]:
        """A comment for each epoch since the last row that ended early."""
        for before in range(next((e for e in reversed(range(epoch)) if steps_of_epochs[e]), 0), epoch):
            number, full = steps_of_epochs[before], len(self._schedule.steps(before))
            if self._schedule.ended_early(before, number):
                of_its = f" of its {full}" if number < full else ""
                yield f"# epoch {before} was left after {number}{of_its} steps: replayed, the epochs begin elsewhere\n"

    def _write(self, text: str) -> None:
        try:
            with open(self.path, "ab") as file:
                file.truncate(self._num_bytes)
                num_written = file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(f"{self.path} could not be written: {error}") from error
        self._num_bytes += num_written
