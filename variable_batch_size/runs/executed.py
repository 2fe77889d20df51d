"""The trace that a run has really executed, in a file that grows with the run and can be replayed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from variable_batch_size.schedules.schedule import BaseSchedule
from variable_batch_size.traces.csv import COLUMNS

_HEADER = f"{','.join(COLUMNS)}\n"


class ExecutedTrace:
    """Appends a row for each step that was made; what is in the file stays as it is.

    A crash may leave a part of a line, or rows of steps that the checkpoint does not have: :meth:`cut_back` drops them.
    If somebody else has changed or removed the file, it is written anew.

    Args:
        path: the CSV file.
        schedule: of the run.
        origin: what the run is, in one line; it is the comment on top.
        changes: after how many steps the run became another, and in what; comments, too.
    """

    def __init__(
        self, path: Path, schedule: BaseSchedule, *, origin: str, changes: Sequence[tuple[int, str]] = ()
    ) -> None:
        self.path = path
        self._schedule = schedule
        self._changes = changes
        self._top = f"# executed from {schedule.name}: {origin}\n{_HEADER}"
        self._num_rows = 0
        self._num_bytes = 0

    def cut_back(self, steps_of_epochs: Sequence[int]) -> None:
        """Keep the rows of the steps that were made, as far as there are rows.

        Args:
            steps_of_epochs: how many steps of each epoch were made, from epoch 0 on.
        """
        if self.path.exists():
            self._num_rows, self._num_bytes = _whole_rows(self.path, most=sum(steps_of_epochs))
            os.truncate(self.path, self._num_bytes)

    def extend(self, steps_of_epochs: Sequence[int]) -> None:
        """Append the rows of the steps that were made and have none."""
        if not self.path.exists() or self.path.stat().st_size != self._num_bytes:
            self._num_rows = self._num_bytes = 0
        lines = "".join(self._lines(steps_of_epochs))
        if lines:
            self._append(lines if self._num_rows else self._top + lines)
            self._num_rows = sum(steps_of_epochs)

    def _lines(self, steps_of_epochs: Sequence[int]) -> Iterator[str]:
        row = 0  # that of the epoch's first step
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
        """Which of the epochs since the row before were left early."""
        first = next((e for e in reversed(range(epoch)) if steps_of_epochs[e]), 0)
        for before in range(first, epoch):
            number, whole = steps_of_epochs[before], len(self._schedule.steps(before))
            if self._schedule.ended_early(before, number):
                of_its = f" of its {whole}" if number < whole else ""
                yield f"# epoch {before} was left after {number}{of_its} steps: replayed, the epochs begin elsewhere\n"

    def _append(self, text: str) -> None:
        content = text.encode()
        try:
            with open(self.path, "ab") as file:
                file.truncate(self._num_bytes)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(f"{self.path} could not be written: {error}") from error
        self._num_bytes += len(content)


def _whole_rows(path: Path, *, most: int) -> tuple[int, int]:
    """How many rows there are, up to a number, and in how many bytes from the top; none is 0 in 0 bytes."""
    content = path.read_bytes()
    beyond = content.find(b"\n%d," % most)
    end = 1 + (beyond if beyond >= 0 else content.rfind(b"\n"))
    last = b""
    while end:
        start = 1 + content.rfind(b"\n", 0, end - 1)
        last = content[start:end]
        if not last.startswith(b"#"):  # a comment belongs to the row behind it
            break
        end = start
    step = last.partition(b",")[0]
    return (int(step) + 1, end) if step.isdigit() and int(step) < most else (0, 0)
