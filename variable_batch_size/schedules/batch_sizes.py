"""BatchSizes: the batch size of every step, including those after the last row of a trace."""

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from variable_batch_size.checks import check_one_of
from variable_batch_size.traces.trace import Trace

Integers = npt.NDArray[np.int64]

OnEnd = Literal["stop", "hold", "cycle"]
ON_END: tuple[OnEnd, ...] = get_args(OnEnd)

_ROWS_PER_MARK = 64


class BatchSizes:
    """The batch sizes of a run: the rows of a trace, then as `on_end` says: stop, hold the last one, or cycle.

    Lookups take the same time at any step, and repeated rows are not stored.
    """

    def __init__(self, trace: Trace, on_end: OnEnd) -> None:
        check_one_of(ON_END, on_end=on_end)
        self.trace = trace
        self.on_end: OnEnd = "hold" if trace.is_endless else on_end
        self.rows = trace.sizes
        # samples before each block of rows; one entry per row would take as much memory as the trace
        of_blocks = np.add.reduceat(self.rows, np.arange(0, len(self.rows), _ROWS_PER_MARK))
        self._marks = np.cumsum(of_blocks) - of_blocks
        self._total = int(of_blocks.sum())
        self._repeated = range(len(self.rows) - 1 if self.on_end == "hold" else 0, len(self.rows))
        self._before_repeated = self._samples_before_row(self._repeated.start)

    def row_of(self, step: int) -> int:
        """The row of the trace that has the batch size of a step."""
        beyond = step - len(self.rows)
        return step if beyond < 0 else self._repeated[beyond % len(self._repeated)]

    def of_step(self, step: int) -> int:
        """The batch size of a step."""
        num_rows = len(self.rows)
        if step < 0:
            raise ValueError(f"`step` must be a non-negative integer, got {step}")
        if step >= num_rows and self.on_end == "stop":
            raise ValueError(f"{self.trace.name} holds {counted(num_rows, 'step')}, got step {step} (counting from 0)")
        return int(self.rows[self.row_of(step)])

    def of_steps(self, steps: range) -> Integers:
        """The batch sizes of consecutive steps."""
        num_rows = len(self.rows)
        if steps.stop <= num_rows:
            return self.rows[steps.start : steps.stop]
        numbers = np.arange(steps.start, steps.stop)
        repeated = self._repeated.start + (numbers - num_rows) % len(self._repeated)
        return self.rows[np.where(numbers < num_rows, numbers, repeated)]

    def runs(self, num_steps: int) -> tuple[Integers, Integers]:
        """Run-length encoding of the first steps: batch sizes, and number of consecutive steps with each."""
        num_held = max(0, num_steps - len(self.rows)) if self.on_end == "hold" else 0
        sizes = self.of_steps(range(num_steps - num_held))
        changes = np.flatnonzero(np.diff(sizes, prepend=0))
        counts = np.diff(changes, append=len(sizes))
        if num_held:
            counts[-1] += num_held
        return sizes[changes], counts

    def samples_before(self, step: int) -> int:
        """The samples used by all steps before this one."""
        beyond = step - len(self.rows)
        if beyond <= 0:
            return self._samples_before_row(step)
        cycles, rest = divmod(beyond, len(self._repeated))
        before = self._samples_before_row(self._repeated.start + rest) - self._before_repeated
        return self._total + cycles * (self._total - self._before_repeated) + before

    def step_at(self, samples: int) -> int:
        """The last step that has at most this many samples before it."""
        beyond = samples - self._total
        if beyond < 0 or self.on_end == "stop":
            return self._row_at(samples)
        cycles, rest = divmod(beyond, self._total - self._before_repeated)
        row = self._row_at(self._before_repeated + rest) - self._repeated.start
        return len(self.rows) + cycles * len(self._repeated) + row

    def _samples_before_row(self, row: int) -> int:
        mark = min(row // _ROWS_PER_MARK, len(self._marks) - 1)
        return int(self._marks[mark] + self.rows[mark * _ROWS_PER_MARK : row].sum())

    def _row_at(self, samples: int) -> int:
        """Like :meth:`step_at`, within the trace; the number of rows if `samples` is its total or more."""
        mark = int(self._marks.searchsorted(samples, side="right")) - 1
        start = mark * _ROWS_PER_MARK
        used = self.rows[start : start + _ROWS_PER_MARK].cumsum()
        return start + int(used.searchsorted(samples - self._marks[mark], side="right"))

    def counts(self, steps: range) -> tuple[Integers, Integers]:
        """The distinct batch sizes of consecutive steps, ascending, and the number of steps with each."""
        if not steps:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        self.of_step(steps[-1])  # raises beyond the end
        found = [(times, *np.unique(self.of_steps(part), return_counts=True)) for times, part in self._parts(steps)]
        sizes, where = np.unique(np.concatenate([sizes for _, sizes, _ in found]), return_inverse=True)
        counts = np.zeros(len(sizes), dtype=np.int64)
        np.add.at(counts, where, np.concatenate([times * counts for times, _, counts in found]))
        return sizes, counts

    def _parts(self, steps: range) -> list[tuple[int, range]]:
        """Short ranges of steps, with multiplicities, that have the same batch sizes as these steps in any order."""
        within = range(steps.start, min(steps.stop, len(self.rows)))
        cycles, rest = divmod(len(steps) - len(within), len(self._repeated))
        parts = ((1, within), (cycles, self._repeated), (1, range(steps.stop - rest, steps.stop)))
        return [(times, part) for times, part in parts if times and part]


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural unless the number is 1."""
    return f"{number} {noun}" + ("s" if number != 1 else "")
