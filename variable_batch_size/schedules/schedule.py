"""Schedule: assigns the steps of a trace to epochs and cores; ScheduleHistory: the part a run has completed."""

import copy
import hashlib
import itertools
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from typing_extensions import NotRequired, TypedDict

from variable_batch_size.checks import check_not_negative, check_one_of, check_positive
from variable_batch_size.traces.trace import Trace, TraceLike

Integers = npt.NDArray[np.int64]
OnEnd = Literal["stop", "hold", "cycle"]
ON_END: tuple[OnEnd, ...] = get_args(OnEnd)

_ALL = 2**62  # more samples than any run has, and within int64
_ROWS_PER_MARK = 64
_STEPS_AT_ONCE, _ROWS_PER_SEARCH = 4096, 512


class ScheduleHistory(NamedTuple):
    """The completed part of a run, which does not change if the run resumes with another trace."""

    sizes: Integers  # of the completed rows, run-length encoded
    counts: Integers  # number of consecutive rows with each of these sizes
    starts: tuple[int, ...]  # the first row of each epoch begun so far, the current one last
    has_ended: bool  # whether the trace has no rows after these

    @property
    def num_rows(self) -> int:
        """Number of completed rows, including those of epochs that ended early."""
        return int(self.counts.sum())

    def rows(self) -> Integers:
        return np.repeat(self.sizes, self.counts)


def run_lengths(rows: Integers) -> tuple[Integers, Integers]:
    """Run-length encoding of batch sizes: the sizes, and the number of consecutive rows with each."""
    changes = np.flatnonzero(np.diff(rows, prepend=0))
    return rows[changes], np.diff(changes, append=len(rows))


class Minibatches(NamedTuple):
    """Minibatches of the same size."""

    starts: Integers  # of each in the samples of the epoch
    size: int  # samples in each


class Layout(TypedDict):
    """The arguments that every schedule takes, as :class:`Schedule` describes them."""

    dataset_size: int | None
    minibatch_size: int
    num_replicas: NotRequired[int]
    lockstep: NotRequired[bool]
    max_minibatch_size: NotRequired[int | None]
    unit: NotRequired[str]


class BaseSchedule(ABC):
    """Assigns steps to epochs, and the minibatches of a step to cores.

    An epoch contains as many steps as fit into its capacity, `dataset_size` rounded down to a multiple of
    `minibatch_size`; the first step that does not fit starts the next epoch. Minibatch j of a step is assigned to core
    ``j % num_replicas``. Steps are numbered from 0 through the whole run.

    With a `max_minibatch_size`, the minibatches of a step have the largest size of 1, 2, 4, … times `minibatch_size`
    that divides the batch size, makes at least two of them, and gives no core more samples than the smallest would.
    """

    is_open = False  # whether the sizes of steps are known only when these are complete
    on_end: OnEnd  # the continuation after the last row of the trace
    name: str  # that of the trace or policy, for messages
    is_live = False  # whether steps are decided during the run

    def __init__(
        self,
        *,
        dataset_size: int | None,
        minibatch_size: int,
        num_replicas: int = 1,
        lockstep: bool = False,
        max_minibatch_size: int | None = None,
        unit: str = "samples",
    ) -> None:
        room = _ALL if dataset_size is None else dataset_size
        check_positive(dataset_size=room, minibatch_size=minibatch_size, num_replicas=num_replicas)
        if room < minibatch_size:
            raise ValueError(f"`dataset_size` must be at least one minibatch of {minibatch_size}, got {room}")
        self.max_minibatch_size = minibatch_size if max_minibatch_size is None else max_minibatch_size
        check_positive(max_minibatch_size=self.max_minibatch_size)
        if self.max_minibatch_size < minibatch_size:
            rule = f"at least `minibatch_size`, which is {minibatch_size}"
            raise ValueError(f"`max_minibatch_size` must be {rule}, got {max_minibatch_size}")
        self.dataset_size, self.unit = None if dataset_size is None else int(dataset_size), unit
        self.minibatch_size, self.num_replicas, self.lockstep = int(minibatch_size), int(num_replicas), lockstep
        self.capacity = int(room) // self.minibatch_size * self.minibatch_size
        self._starts = [0]  # first step of each epoch found so far

    @property
    @abstractmethod
    def trace(self) -> Trace:
        """The batch sizes known so far."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Fingerprint that must match on all cores and when a run resumes."""

    @property
    @abstractmethod
    def num_epochs(self) -> int | None:
        """Number of epochs, including an incomplete last one; None if unlimited."""

    @abstractmethod
    def steps(self, epoch: int) -> range:
        """The steps of an epoch."""

    @abstractmethod
    def samples_before(self, step: int) -> int:
        """The samples used by all steps before this one."""

    @abstractmethod
    def past(self, epoch: int, first_step: int) -> ScheduleHistory:
        """The history of a run whose next step is number `first_step` of an epoch."""

    @abstractmethod
    def after(self, past: ScheduleHistory) -> "BaseSchedule":
        """This schedule for a run that began with another one: completed steps stay."""

    @abstractmethod
    def batch_size(self, step: int) -> int:
        """The samples of a step, summed over cores."""

    @abstractmethod
    def num_minibatches_for(self, epoch: int, rank: int, first_step: int = 0) -> int:
        """Number of minibatches a core runs in an epoch from its `first_step` on, including padding."""

    @abstractmethod
    def _next_sizes(self, epoch: int, step: int, used: int) -> Integers:
        """The batch sizes of an epoch's steps from `step` on, as far as known; none if it ends after `used` samples."""

    @property
    def is_endless(self) -> bool:
        """Whether its only epoch is unlimited."""
        return self.dataset_size is None and self.on_end != "stop"

    def steps_from(self, epoch: int, first_step: int) -> Iterator[int]:
        """Iterate over the steps of an epoch from its `first_step` on."""
        for step, _, sizes in self._blocks(epoch, first_step):
            yield from range(step, step + len(sizes))

    def _blocks(self, epoch: int, first_step: int) -> Iterator[tuple[int, int, Integers]]:
        """Consecutive steps: the first one, the samples of the epoch before it, and their batch sizes."""
        start = self.steps(epoch).start
        step = start + first_step
        used = self.samples_before(step) - self.samples_before(start)
        while len(sizes := self._next_sizes(epoch, step, used)):
            yield step, used, sizes
            used, step = used + int(sizes.sum()), step + len(sizes)

    def begin_epoch(self, epoch: int, first_step: int = 0) -> None:  # noqa: B027 (only live schedules need it)
        """Called on every core when an epoch begins, with the number of its steps that are skipped."""

    def ended_early(self, epoch: int, num_steps: int) -> bool:
        """Whether an epoch with `num_steps` completed steps ended before its last step."""
        return num_steps < len(self.steps(epoch))

    def _check_epoch(self, epoch: int) -> None:
        check_not_negative(epoch=epoch)
        if self.dataset_size is None and epoch:
            raise ValueError(f"data without a `dataset_size` have only epoch 0, got epoch {epoch}")

    def offsets(self, epoch: int, rank: int, *, at_once: int, first_step: int = 0) -> Iterator[Minibatches]:
        """The minibatches of a core, several at once; padding repeats one of its step."""
        for _, begin, sizes in self._blocks(epoch, first_step):
            begins = begin + sizes.cumsum() - sizes
            of_minibatches = self.minibatch_sizes(sizes)
            in_step = self._in_step(sizes)
            yielded = self._num_yielded(sizes, rank)
            ends = yielded.cumsum()
            changes = ends[np.flatnonzero(np.diff(of_minibatches))].tolist()
            for start, stop in itertools.pairwise([0, *changes, int(ends[-1])]):
                for first in range(start, stop, at_once):
                    number = np.arange(first, min(first + at_once, stop))
                    row = ends.searchsorted(number, side="right")
                    places = rank + (number - (ends - yielded)[row]) * self.num_replicas
                    starts = begins[row] + places % in_step[row] * of_minibatches[row]
                    yield Minibatches(starts, int(of_minibatches[row[0]]))

    def minibatch_sizes(self, sizes: Integers) -> Integers:
        """The samples of a minibatch in steps of these batch sizes."""
        found: Integers = np.full_like(sizes, self.minibatch_size)
        units = sizes // self.minibatch_size
        most, factor = -(-units // self.num_replicas), 2  # of the busiest core
        while factor * self.minibatch_size <= self.max_minibatch_size:
            number = units // factor
            is_fit = (units % factor == 0) & (number >= 2) & (-(-number // self.num_replicas) * factor <= most)
            found[is_fit] = factor * self.minibatch_size
            factor *= 2
        return found

    def _in_step(self, sizes: Integers) -> Integers:
        """Number of minibatches of steps of these batch sizes, summed over cores."""
        numbers: Integers = sizes // self.minibatch_sizes(sizes)
        return numbers

    def minibatch_size_of(self, batch_size: int) -> int:
        """The samples of a minibatch in a step of this batch size."""
        if self.max_minibatch_size < 2 * self.minibatch_size:
            return self.minibatch_size
        return int(self.minibatch_sizes(np.array([batch_size]))[0])

    def num_minibatches(self, step: int) -> int:
        """Number of minibatches of a step, summed over cores."""
        size = self.batch_size(step)
        return size // self.minibatch_size_of(size)

    def minibatches(self, step: int, rank: int) -> range:
        """Indices of the minibatches of a step assigned to a core; empty if it is idle."""
        return range(rank, self.num_minibatches(step), self.num_replicas)

    def is_idle(self, step: int, rank: int) -> bool:
        """Whether a core has no minibatch in a step and runs a padding minibatch."""
        return rank >= self.num_minibatches(step)

    def rounds_for(self, step: int, rank: int) -> int:
        """Number of minibatches a core runs in a step, including padding."""
        first = 0 if self.lockstep else rank  # in lockstep all run as many as core 0, the busiest
        return max(1, -((first - self.num_minibatches(step)) // self.num_replicas))

    def _num_yielded(self, sizes: Integers, rank: int) -> Integers:
        """Like :meth:`rounds_for`, for many steps of the given batch sizes."""
        first = 0 if self.lockstep else rank
        return np.maximum(-((first - self._in_step(sizes)) // self.num_replicas), 1)


class Schedule(BaseSchedule):
    """Assigns the steps of a trace to epochs and cores, as described at :class:`BaseSchedule`.

    Lookups take the same time at any step, and rows that `on_end` repeats are not stored.

    Args:
        trace: the batch size of every step, as for :class:`CustomSampler`; multiples of `minibatch_size`, at most the
            capacity of an epoch.
        on_end: after the last row of the trace, ``"stop"`` ends the last epoch, ``"hold"`` repeats the last batch size
            forever, and ``"cycle"`` starts over; None for ``"hold"`` with stages without an end, else ``"stop"``.
        dataset_size: samples in the data set; None for data without a length, which form a single unlimited epoch.
        minibatch_size: samples per forward and backward pass of one core.
        num_replicas: number of cores.
        lockstep: whether all cores run as many minibatches in a step as the busiest one, for models whose forward pass
            communicates; cores with fewer run a padding minibatch in the last round.
        max_minibatch_size: let steps with more samples have larger minibatches, up to this size; None for equal ones.
        unit: what batch sizes count, for error messages.

    >>> schedule = Schedule([64, 96, 32, 256], dataset_size=300, minibatch_size=32, num_replicas=4)
    >>> schedule.steps(epoch=0), schedule.steps(epoch=1), schedule.num_epochs
    (range(0, 3), range(3, 4), 2)
    >>> [schedule.minibatches(step=1, rank=rank) for rank in range(4)]
    [range(0, 3, 4), range(1, 3, 4), range(2, 3, 4), range(3, 3, 4)]
    >>> schedule.is_idle(step=1, rank=3)
    True
    """

    def __init__(
        self,
        trace: TraceLike,
        *,
        on_end: OnEnd | None = None,
        dataset_size: int | None,
        minibatch_size: int,
        num_replicas: int = 1,
        lockstep: bool = False,
        max_minibatch_size: int | None = None,
        unit: str = "samples",
    ) -> None:
        super().__init__(
            dataset_size=dataset_size,
            minibatch_size=minibatch_size,
            num_replicas=num_replicas,
            lockstep=lockstep,
            max_minibatch_size=max_minibatch_size,
            unit=unit,
        )
        trace = Trace.of(trace)
        on_end = ("hold" if trace.is_open else "stop") if on_end is None else on_end
        check_one_of(ON_END, on_end=on_end)
        if trace.is_open and on_end != "hold":
            rule = "`on_end` must be 'hold' or None with stages without an end"
            raise ValueError(f"{rule}, got {on_end!r}: give them an end with vbs.traces.Stages.parse(…, until=N)")
        self.name, self.on_end = trace.name, "hold" if trace.is_endless else on_end
        self.check_sizes(trace)
        self._epoch_of_row: dict[int, int] = {}  # epoch by the row it starts at, to find a period
        self._set_trace(trace)

    def check_sizes(self, trace: Trace) -> None:
        """Raise at the first batch size that is not possible here."""
        whole = f"at most {self.capacity} (all full minibatches in {self.dataset_size} {self.unit})"
        for is_wrong, rule in (
            (trace.sizes % self.minibatch_size != 0, f"a multiple of {self.minibatch_size} (the minibatch size)"),
            (trace.sizes > self.capacity, whole),
        ):
            if is_wrong.any():
                row = int(is_wrong.argmax())
                raise ValueError(f"{trace.place(row)}: batchsize must be {rule}, got {trace.sizes[row]}")

    def _set_trace(self, trace: Trace) -> None:
        self._trace, self._rows = trace, trace.sizes
        # samples before each block of rows; one entry per row would take as much memory as the trace
        of_blocks = np.add.reduceat(self._rows, np.arange(0, len(self._rows), _ROWS_PER_MARK))
        self._marks = np.cumsum(of_blocks) - of_blocks
        self._total = int(of_blocks.sum())
        self._repeated = range(len(self._rows) - 1 if self.on_end == "hold" else 0, len(self._rows))
        self._before_repeated = self._samples_before_row(self._repeated.start)

    @property
    def trace(self) -> Trace:
        return self._trace

    @property
    def description(self) -> str:
        return self.fingerprint(self.trace)

    @staticmethod
    def fingerprint(trace: Trace) -> str:
        """Distinguishes a trace from others."""
        if trace.is_endless:
            return f"always {trace[0]}"
        digest = hashlib.sha256(trace.sizes.astype("<i8").tobytes()).hexdigest()
        return f"{len(trace)} steps, sha256 {digest[:16]}"

    def steps(self, epoch: int) -> range:
        self._check_epoch(epoch)
        start, stop = self._start(epoch), self._start(epoch + 1)
        if start == stop:
            found = f"{self.name} holds {_counted(self.num_epochs or 0, 'epoch')} of {self.dataset_size} {self.unit}"
            advice = 'train for fewer epochs, or pass on_end="hold" or "cycle" to continue after the last row'
            raise ValueError(f"{found}, got epoch {epoch} (counting from 0): {advice}")
        return range(start, stop)

    @property
    def num_epochs(self) -> int | None:
        if self.dataset_size is None:
            return 1
        if self.on_end != "stop":
            return None
        while self._starts[-1] < len(self.trace):
            self._append_starts()
        return len(self._starts) - 1

    def _start(self, epoch: int) -> int:
        """The first step of an epoch; cached, and found by bisection."""
        while epoch >= len(self._starts):
            last = self._starts[-1]
            if self.on_end == "stop" and last == len(self._rows):
                return last
            if self.on_end != "stop":
                # once two epochs have started at the same row, everything repeats
                first = self._epoch_of_row.setdefault(self._row_of(last), len(self._starts) - 1)
                period = len(self._starts) - 1 - first
                if period:
                    cycles, rest = divmod(epoch - first, period)
                    return cycles * (last - self._starts[first]) + self._starts[first + rest]
            self._append_starts()
        return self._starts[epoch]

    def _append_starts(self) -> None:
        """Find all epochs that start in the next block of rows, or else the next epoch."""
        last = self._starts[-1]
        ends = self._rows[last : last + _ROWS_PER_SEARCH].cumsum().tolist()
        used = row = 0
        while (row := bisect_right(ends, used + self.capacity, row)) < len(ends):
            self._starts.append(last + row)
            used = ends[row - 1]
        if self._starts[-1] == last:
            self._starts.append(self._step_at(self.samples_before(last) + self.capacity))

    def batch_size(self, step: int) -> int:
        num_rows = len(self._rows)
        if step < 0:
            raise ValueError(f"`step` must be a non-negative integer, got {step}")
        if step >= num_rows and self.on_end == "stop":
            raise ValueError(f"{self.name} holds {_counted(num_rows, 'step')}, got step {step} (counting from 0)")
        return int(self._rows[self._row_of(step)])

    def _row_of(self, step: int) -> int:
        beyond = step - len(self._rows)
        return step if beyond < 0 else self._repeated[beyond % len(self._repeated)]

    def _batch_sizes(self, steps: range) -> Integers:
        num_rows = len(self._rows)
        if steps.stop <= num_rows:
            return self._rows[steps.start : steps.stop]
        numbers = np.arange(steps.start, steps.stop)
        repeated = self._repeated.start + (numbers - num_rows) % len(self._repeated)
        return self._rows[np.where(numbers < num_rows, numbers, repeated)]

    def samples_before(self, step: int) -> int:
        beyond = step - len(self._rows)
        if beyond <= 0:
            return self._samples_before_row(step)
        cycles, rest = divmod(beyond, len(self._repeated))
        before = self._samples_before_row(self._repeated.start + rest) - self._before_repeated
        return self._total + cycles * (self._total - self._before_repeated) + before

    def _step_at(self, samples: int) -> int:
        """The last step that has at most this many samples before it."""
        beyond = samples - self._total
        if beyond < 0 or self.on_end == "stop":
            return self._row_at(samples)
        cycles, rest = divmod(beyond, self._total - self._before_repeated)
        row = self._row_at(self._before_repeated + rest) - self._repeated.start
        return len(self._rows) + cycles * len(self._repeated) + row

    def _samples_before_row(self, row: int) -> int:
        mark = min(row // _ROWS_PER_MARK, len(self._marks) - 1)
        return int(self._marks[mark] + self._rows[mark * _ROWS_PER_MARK : row].sum())

    def _row_at(self, samples: int) -> int:
        """Like :meth:`_step_at`, within the trace; the number of rows if `samples` is its total or more."""
        mark = int(self._marks.searchsorted(samples, side="right")) - 1
        start = mark * _ROWS_PER_MARK
        used = self._rows[start : start + _ROWS_PER_MARK].cumsum()
        return start + int(used.searchsorted(samples - self._marks[mark], side="right"))

    def num_minibatches_for(self, epoch: int, rank: int, first_step: int = 0) -> int:
        sizes, counts = self.size_counts(self.steps(epoch)[first_step:])
        return int(self._num_yielded(sizes, rank) @ counts)

    def _next_sizes(self, epoch: int, step: int, used: int) -> Integers:
        return self._batch_sizes(range(step, max(step, min(step + _STEPS_AT_ONCE, self.steps(epoch).stop))))

    def past(self, epoch: int, first_step: int) -> ScheduleHistory:
        starts = tuple(self._start(number) for number in range(epoch + 1))
        num_rows = starts[-1] + first_step
        has_ended = self.on_end == "stop" and num_rows == len(self.trace)
        return ScheduleHistory(*self._runs(num_rows), starts, has_ended)

    def _runs(self, num_steps: int) -> tuple[Integers, Integers]:
        """Run-length encoding of the first steps, without a row for each step that `on_end` holds."""
        num_held = max(0, num_steps - len(self._rows)) if self.on_end == "hold" else 0
        sizes, counts = run_lengths(self._batch_sizes(range(num_steps - num_held)))
        if num_held:
            counts[-1] += num_held
        return sizes, counts

    def after(self, past: ScheduleHistory) -> "Schedule":
        """The schedule whose first steps are those of the history and whose step r is row r of this trace otherwise.

        The current epoch continues after the samples it has used. If these exceed the capacity, the next one begins.
        """
        num_rows, rows = past.num_rows, self._rows
        done = _counted(num_rows, "step")
        if self.on_end == "stop" and num_rows > len(rows):
            found = f"{self.name} has {_counted(len(rows), 'row')}"
            raise ValueError(f"{found}, but the run has already completed {done}")
        schedule = copy.copy(self)
        sizes, counts = self._runs(num_rows)
        if not (np.array_equal(sizes, past.sizes) and np.array_equal(counts, past.counts)):
            if self.on_end == "cycle":
                rule = f"{self.name} must begin with the {done} that the run has completed"
                raise ValueError(f'{rule}, because on_end="cycle" repeats them')
            first = min(num_rows, len(rows) - (self.on_end == "hold"))
            schedule._set_trace(self.trace.with_rows(np.concatenate([past.rows(), rows[first:]])))
        schedule._starts, schedule._epoch_of_row = list(past.starts), {}
        if schedule.samples_before(num_rows) - schedule.samples_before(past.starts[-1]) > self.capacity:
            schedule._starts.append(num_rows)
        return schedule

    def size_counts(self, steps: range) -> tuple[Integers, Integers]:
        """The distinct batch sizes of consecutive steps, ascending, and the number of steps with each."""
        if not steps:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        self.batch_size(steps[-1])  # raises beyond the end
        # short ranges that together have the same batch sizes as these steps, in any order, and how often each counts
        within = range(steps.start, min(steps.stop, len(self._rows)))
        cycles, rest = divmod(len(steps) - len(within), len(self._repeated))
        parts = ((1, within), (cycles, self._repeated), (1, range(steps.stop - rest, steps.stop)))
        used = [(times, part) for times, part in parts if times and part]
        found = [(times, *np.unique(self._batch_sizes(part), return_counts=True)) for times, part in used]
        sizes, where = np.unique(np.concatenate([sizes for _, sizes, _ in found]), return_inverse=True)
        counts = np.zeros(len(sizes), dtype=np.int64)
        np.add.at(counts, where, np.concatenate([times * counts for times, _, counts in found]))
        return sizes, counts

    def core_minibatches(self, steps: range) -> Integers:
        """Number of minibatches each core runs in consecutive steps, excluding padding."""
        sizes, counts = self.size_counts(steps)
        for_all, for_some = np.divmod(self._in_step(sizes), self.num_replicas)
        return int(for_all @ counts) + self._num_steps_above(for_some, counts)

    def core_idle_steps(self, steps: range) -> Integers:
        """Number of consecutive steps in which each core is idle."""
        sizes, counts = self.size_counts(steps)
        return len(steps) - self._num_steps_above(np.minimum(self._in_step(sizes), self.num_replicas), counts)

    def _num_steps_above(self, cores: Integers, counts: Integers) -> Integers:
        """For each rank, the number of steps with work for more than `rank` cores."""
        by_cores = np.zeros(self.num_replicas + 1, dtype=np.int64)
        np.add.at(by_cores, cores, counts)
        return by_cores[::-1].cumsum()[-2::-1]


def require_equal_minibatches(schedule: BaseSchedule, option: str) -> None:
    """Raise if the size of minibatches depends on the number of cores."""
    if schedule.max_minibatch_size >= 2 * schedule.minibatch_size:
        rule = f"`max_minibatch_size` of the sampler must be None with {option}"
        raise ValueError(f"{rule}: the size of minibatches would depend on the number of cores")


def _counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural unless the number is 1."""
    return f"{number} {noun}" + ("s" if number != 1 else "")
