"""Stream: iterable data without a length, assigned to the cores."""

import contextlib
import copy
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NoReturn, TypeAlias

import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info
from torch.utils.data import _utils as loading

from variable_batch_size.data.sampler import Description, MinibatchSource, TraceOrPolicy, is_decided
from variable_batch_size.schedules.open_steps import OpenSteps
from variable_batch_size.schedules.schedule import BaseSchedule, OnEnd, Schedule
from variable_batch_size.traces.watched import WatchedTrace

logger = logging.getLogger(__name__)

Samples: TypeAlias = Iterable[Any] | Callable[[], Iterable[Any]]  # or an iterator, or a function that returns one


class SampleSource:
    """Reads a stream from its beginning or from a saved state, and counts samples.

    The stream does not see that a loader worker reads it, as it might then yield only a part of its samples.
    """

    def __init__(self, samples: Samples) -> None:
        if not isinstance(samples, Iterable) and not callable(samples):
            raise ValueError(
                f"`samples` must be an iterable or a function that returns one, got {type(samples).__name__}"
            )
        self._samples: Any = samples
        self._has_state = hasattr(samples, "state_dict") and hasattr(samples, "load_state_dict")
        self._first_state: Any = None  # of the stream at its beginning
        self._has_begun = False
        self._iterator: Iterator[Any] = iter(())
        self._ahead: list[Any] = []  # peeked samples
        self.num_read = 0  # in this pass, including skipped samples
        self.has_ended = False  # whether fewer samples were left than requested

    def begin(self, *, epoch: int, state: dict[str, Any] | None = None) -> None:
        """Go to the beginning of the stream, or to a state of :meth:`state_dict`."""
        samples = self._samples
        if self._has_begun and isinstance(samples, Iterator):
            advice = "pass an iterable, or a function that returns one"
            raise RuntimeError(f"the stream is an iterator, which can be read once: {advice}")
        with _outside_of_worker():
            if hasattr(samples, "set_epoch"):
                samples.set_epoch(epoch)
            if self._has_state and not self._has_begun:
                self._first_state = samples.state_dict()
            if self._has_state and (self._has_begun or state is not None):
                samples.load_state_dict(self._first_state if state is None else state["stream"])
            self._iterator = iter(samples if isinstance(samples, Iterable) else samples())
        self._has_begun, self._ahead, self.has_ended = True, [], False
        self.num_read = 0 if state is None else state["num_read"]

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream, for :meth:`begin`."""
        with _outside_of_worker():
            state = self._samples.state_dict() if self._has_state and self._has_begun else None
        return {"num_read": self.num_read + len(self._ahead), "stream": state}

    def take(self, number: int) -> list[Any]:
        """The next samples; fewer if the stream ends."""
        found = self.peek(number)
        self._ahead = self._ahead[number:]
        self._count(number, len(found))
        return found

    def peek(self, number: int) -> list[Any]:
        """The next samples, which stay the next ones."""
        with _outside_of_worker():
            self._ahead += islice(self._iterator, max(0, number - len(self._ahead)))
        return self._ahead[:number]

    def skip(self, number: int) -> None:
        """Skip the next samples."""
        if number:
            from_ahead = min(number, len(self._ahead))
            self._ahead = self._ahead[from_ahead:]
            with _outside_of_worker():
                self._count(number, from_ahead + sum(1 for _ in islice(self._iterator, number - from_ahead)))

    def _count(self, requested: int, found: int) -> None:
        self.num_read += found
        self.has_ended = self.has_ended or found < requested


@contextlib.contextmanager
def _outside_of_worker() -> Iterator[None]:
    """Within, ``get_worker_info()`` returns None."""
    info = loading.worker._worker_info
    loading.worker._worker_info = None
    try:
        yield
    finally:
        loading.worker._worker_info = info


@dataclass
class StreamReader:
    """Reads a core's minibatches of successive steps of an epoch.

    Unless the stream is sharded, every core reads all of it and skips what is assigned to others. A core's last
    minibatch of a step is yielded once the full step has been read: if the stream ends within a step, no core completes
    it, without communication. In lockstep, a minibatch is yielded once those of the other cores in the same round have
    been read, as a forward pass that one core begins must be begun by all.
    """

    source: SampleSource
    schedule: BaseSchedule
    rank: int
    epoch: int
    first_step: int
    is_sharded: bool  # whether the stream has only this core's samples
    worker: int  # of the loader; it reads the core's minibatches with number % num_workers == worker
    num_workers: int  # 1 without workers
    state: dict[str, Any] | None = None  # of an earlier reader, to start from instead of the stream's beginning
    places: Sequence[int] = ()  # of the minibatches of the step before the first one that this core runs before it

    def __post_init__(self) -> None:
        self._first_number = 0
        self._has_begun = self._is_elsewhere = False
        self._start: dict[str, Any] | None = None
        if self.state is not None:
            self._resume(self.state)
        self._number = self._first_number  # of the next minibatch, whichever worker reads it

    def _resume(self, state: dict[str, Any]) -> None:
        is_here = state["epoch"] == self.epoch
        # not raised at once: a loader that was at an epoch's end restores its workers before it begins the next epoch
        self._is_elsewhere = state["in_worker"] and not is_here
        if state["in_worker"] and is_here:
            self._first_number = self._number_after(state)
        # a state of this core's stream, at the first sample of the pass or before
        is_own = (state["rank"], state["num_replicas"]) == (self.rank, self.schedule.num_replicas)
        source = state["source"]
        if is_here and source["num_read"] <= self._num_before() and (is_own or not self.is_sharded):
            self._start = None if source["stream"] is None else source

    def _number_after(self, state: dict[str, Any]) -> int:
        """The number of the first minibatch, after those of a loader that was saved, perhaps on other cores."""
        saved = copy.copy(self.schedule)
        saved.num_replicas, saved.lockstep = state["num_replicas"], state["lockstep"]
        from_step = partial(saved.num_minibatches_for, self.epoch, state["rank"])
        number: int = state["first_number"] + from_step(state["first_step"]) - from_step(self.first_step)
        read = state["num_dealt"]
        self._is_elsewhere = not read <= number <= read + (self.worker - read) % self.num_workers
        self.check_state()
        return number

    def check_state(self) -> None:
        """Raise if this pass begins elsewhere than the state of its loader."""
        if self._is_elsewhere:
            where = f"step {self.first_step} of epoch {self.epoch}, where this pass begins"
            advice = "save it between two steps, with snapshot_every_n_steps=1"
            raise RuntimeError(f"the loader's state is not that of {where}: {advice}")

    def _num_before(self) -> int:
        """Samples of the stream before the first step."""
        schedule, steps = self.schedule, self.schedule.steps(self.epoch)
        if self.is_sharded:
            assert isinstance(schedule, Schedule)  # Stream refuses a policy
            return int(schedule.core_minibatches(steps[: self.first_step])[self.rank]) * schedule.minibatch_size
        first_step = self.first_step - bool(self.places)
        return schedule.samples_before(steps.start + first_step) - schedule.samples_before(steps.start)

    def state_dict(self) -> dict[str, Any]:
        """What a reader of any core needs to begin after a step from here on."""
        return {
            "epoch": self.epoch,
            "first_step": self.first_step,
            "rank": self.rank,
            "num_replicas": self.schedule.num_replicas,
            "lockstep": self.schedule.lockstep,
            "first_number": self._first_number,
            "num_dealt": self._number,
            "source": self.source.state_dict() if self._has_begun else self._start or {"num_read": 0, "stream": None},
        }

    def minibatches(self) -> Iterator[list[Any]]:
        """The minibatches of this process, including padding, each a list of samples."""
        source, num_before = self.source, self._num_before()
        source.begin(epoch=self.epoch, state=self._start)
        self._has_begun = True
        source.skip(num_before - source.num_read)
        if source.has_ended:
            where = f"step {self.first_step} of epoch {self.epoch}, after {num_before} samples"
            raise RuntimeError(f"the stream ended after {source.num_read} samples, but this pass begins at {where}")
        for minibatch in self._from_shard() if self.is_sharded else self._from_full():
            is_own, self._number = self._is_own(self._number), self._number + 1
            if is_own:
                yield minibatch

    def _from_full(self) -> Iterator[Any]:
        source, schedule = self.source, self.schedule
        yield from self._of_step_before()
        for step in schedule.steps_from(self.epoch, self.first_step):
            begin, number = source.num_read, schedule.num_minibatches(step)
            size = schedule.batch_size(step) // number
            num_rounds = schedule.rounds_for(step, self.rank)
            for round in range(num_rounds):
                place = self.rank + round * schedule.num_replicas
                if place < number or not round:  # otherwise padding repeats the core's last minibatch
                    source.skip(begin + place % number * size - source.num_read)
                    is_repeated = round + 1 < num_rounds and place + schedule.num_replicas >= number
                    minibatch = self._take_or_skip(size, times=1 + is_repeated)
                in_round = (round + 1) * schedule.num_replicas if schedule.lockstep else 0
                num_needed = number if round + 1 == num_rounds else in_round
                source.skip(max(0, begin + num_needed * size - source.num_read))
                if source.has_ended:
                    self._log_end(step, source.num_read - begin)
                    return
                yield minibatch

    def _of_step_before(self) -> Iterator[Any]:
        """Minibatches of a step that other cores have read already."""
        source, size, begin = self.source, self.schedule.minibatch_size, self.source.num_read
        for place in sorted(self.places):
            source.skip(begin + place * size - source.num_read)
            yield source.take(size)
        if self.places:
            step = self.schedule.steps(self.epoch)[self.first_step - 1]
            source.skip(begin + self.schedule.batch_size(step) - source.num_read)

    def _from_shard(self) -> Iterator[Any]:
        source, schedule = self.source, self.schedule
        latest: list[Any] | None = None
        for step in schedule.steps_from(self.epoch, self.first_step):
            own = schedule.minibatches(step, self.rank)
            for _ in own:
                minibatch = self._take_or_skip(schedule.minibatch_size)
                if source.has_ended:
                    self._raise_ended(step)
                latest = minibatch or latest
                yield minibatch
            if len(own) < schedule.rounds_for(step, self.rank):
                # padding: the latest minibatch, or the next one, which stays the next one
                padding = latest
                if padding is None and self._is_own(self._number):
                    padding = source.peek(schedule.minibatch_size)
                    if len(padding) < schedule.minibatch_size:
                        self._raise_ended(step)
                yield padding

    def _take_or_skip(self, size: int, times: int = 1) -> list[Any] | None:
        """The next minibatch, or None if this process yields it in none of the next `times` rounds."""
        if any(self._is_own(self._number + time) for time in range(times)):
            return self.source.take(size)
        self.source.skip(size)
        return None

    def _log_end(self, step: int, num_left_over: int) -> None:
        left_over = f"; the last {num_left_over} samples do not fill a step and are not used" if num_left_over else ""
        message = "the stream ended after %d samples, so epoch %d ends after %d steps%s"
        if not self.rank and not self.worker:
            level = logging.WARNING if num_left_over or self.schedule.on_end == "stop" else logging.INFO
            logger.log(level, message, self.source.num_read, self.epoch, self._epoch_step(step), left_over)

    def _raise_ended(self, step: int) -> NoReturn:
        where = f"after {self.source.num_read} samples, in step {self._epoch_step(step)} of epoch {self.epoch}"
        advice = "which the other cores still run: repeat the shard, or shorten the trace"
        raise RuntimeError(f"the shard of core {self.rank} ended {where}, {advice}")

    def _is_own(self, number: int) -> bool:
        return number % self.num_workers == self.worker

    def _epoch_step(self, step: int) -> int:
        return step - self.schedule.steps(self.epoch).start


class Stream(MinibatchSource, IterableDataset[Any]):
    """Yields this core's minibatches of every step, from samples that come one after another.

        stream = vbs.Stream(samples, trace="trace.csv", minibatch_size=32)
        loader = DataLoader(stream, batch_size=None, num_workers=2)
        optimizer = vbs.Optimizer(inner, loader, rule="linear", ref_batchsize=128)

    Steps take samples in the order of the stream, as a :class:`CustomSampler` with
    ``shuffle=False`` does: the same on any number of cores, with any number of loader workers. Every core and every
    worker reads the full stream and skips what is assigned to others. So samples must come in the same order wherever
    they are read, and costly work belongs in `collate_fn`, which sees only a core's own minibatches. If the stream ends
    within a step, no core makes that step; the epoch ends there, with a warning.

    A run resumes by skipping what was read before. If `samples` have ``state_dict`` and ``load_state_dict``, it can
    resume without skipping: pass the stream, or instead the ``StatefulDataLoader`` of torchdata that reads it, to the
    checkpoint as one of its `schedulers`.

    Args:
        samples: an iterable such as an ``IterableDataset`` or a stream of Hugging Face ``datasets``, an iterator, which
            can be read once, or a function that returns one. Its ``set_epoch`` is called if it has one.
        trace: the batch size of every step. This, `minibatch_size`, `max_minibatch_size`, `num_replicas`, `rank`,
            `process_group`, `on_end` and `lockstep` are as for :class:`CustomSampler`. With a policy, the loader must
            have no workers, as decisions do not reach them.
        dataset_size: samples in an epoch; each epoch reads the stream from its beginning. None for a single epoch.
        seed: of the random numbers of minibatches, with ``seed_minibatches=True``; it shuffles nothing.
        collate_fn: makes a minibatch from a list of samples; the default of DataLoader if not given.
        is_sharded: whether `samples` are only this core's part of the data, as from ``split_dataset_by_node``. The
            samples of a step then depend on the number of cores, which must stay the same, and every core's part must
            last until the trace ends.

    >>> stream = Stream(range(7), trace=[4, 2], minibatch_size=2, num_replicas=2, rank=0)
    >>> list(stream)
    [tensor([0, 1]), tensor([4, 5])]
    """

    _loader = "DataLoader(stream, batch_size=None)"
    _is_pickled_for_workers = True

    def __init__(
        self,
        samples: Samples,
        *,
        trace: TraceOrPolicy,
        minibatch_size: int,
        dataset_size: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        process_group: Any = None,
        seed: int = 0,
        on_end: OnEnd | None = None,
        lockstep: bool = False,
        max_minibatch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        is_sharded: bool = False,
    ) -> None:
        if isinstance(trace, OpenSteps):
            rule = "`trace` of a Stream must not be OpenSteps, as it reads full steps"
            raise ValueError(f"{rule}: read the stream yourself, and pass the optimizer a CustomSampler")
        if (is_decided(trace) or isinstance(trace, WatchedTrace)) and is_sharded:
            kind = "watched trace" if isinstance(trace, WatchedTrace) else "policy"
            raise ValueError(f"`is_sharded` must be False with a {kind}, which decides how many samples a core reads")
        if max_minibatch_size is not None and is_sharded:
            raise ValueError("`max_minibatch_size` must be None with `is_sharded`, which counts equal minibatches")
        where = (num_replicas, rank, process_group)
        super().__init__(trace, dataset_size, minibatch_size, *where, seed, on_end, lockstep, max_minibatch_size)
        self.collate_fn = collate_fn
        self.is_sharded = is_sharded
        self._samples = samples
        self._source = SampleSource(samples)
        self._reader: StreamReader | None = None
        self._loaded: dict[str, Any] | None = None
        # shared with workers: epoch, first step, number of the pass, and of the latest passes that were read and that a
        # limit of the run has ended
        self._shared = torch.tensor([0, 0, 0, -1, -1]).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def description(self) -> Description:
        """What the samples of a step depend on, besides the trace and the minibatch size."""
        depends: Description = {"dataset_size": self.schedule.dataset_size, "seed": self.seed, "data": "stream"}
        return depends | {"data": "sharded stream", "cores": self.num_replicas} if self.is_sharded else depends

    @property
    def can_be_reread(self) -> bool:
        """Whether any core can read any part of the stream, at any time."""
        return not self.is_sharded and not isinstance(self._samples, Iterator)

    @property
    def has_been_read(self) -> bool:
        return bool(self._shared.numpy()[3] == self.num_passes)  # comparing an element of a tensor is slow

    def begin_pass(self, epoch: int, first_step: int) -> None:
        super().begin_pass(epoch, first_step)
        self._shared[:3] = torch.tensor([self.epoch, self.first_step, self.num_passes])

    def _reassign(self, rank: int, num_replicas: int, first_step: int, places: list[int]) -> None:
        super()._reassign(rank, num_replicas, first_step, sorted(places))
        self._shared[:3] = torch.tensor([self.epoch, self.first_step, self.num_passes])

    def end_run(self, num_to_run: int) -> None:
        super().end_run(num_to_run)
        self._shared[4] = self.num_passes

    def on_first_read(self, callback: Callable[[], None]) -> None:
        """Call a function now and, without loader workers, again when the first minibatch of this pass is requested."""
        super().on_first_read(callback)
        callback()

    def __len__(self) -> int:
        """How many minibatches this core gets in the epoch, padding included, if the stream has enough samples."""
        if self.schedule.is_endless:
            raise TypeError(f'a stream with on_end="{self.schedule.on_end}" is endless and has no length')
        return super().__len__()

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None and self.schedule.is_live:
            advice = "pass num_workers=0 to its loader, and let `samples` prefetch if necessary"
            kind = "watched trace" if isinstance(self.schedule, Schedule) else "policy"
            raise ValueError(f"a stream with a {kind} must be read in the main process: {advice}")
        if info is not None and self.is_elastic:
            advice = "pass num_workers=0 to its loader"
            raise ValueError(f"a stream must be read in the main process with `elastic`: {advice}")
        return self._while_cores_change(info) if self.is_elastic else self._minibatches(*self._new_reader(info))

    def _new_reader(self, info: Any) -> tuple[StreamReader, int]:
        """A reader of this pass, and the number of the pass."""
        epoch, first_step, number = self._shared[:3].tolist()
        where = (self.rank, epoch, first_step, self.is_sharded)
        of_loader: tuple[int, int] = (0, 1) if info is None else (info.id, info.num_workers)
        state, self._loaded = self._loaded, None
        self._reader = StreamReader(self._source, self.schedule, *where, *of_loader, state, places=self.places)
        return self._reader, number

    def _while_cores_change(self, info: Any) -> Iterator[Any]:
        """The minibatches of a pass, and of those that follow when cores join or leave."""
        self._settle()
        is_reassigned = True
        while is_reassigned:
            reader, number = self._new_reader(info)
            yield from self._minibatches(reader, number)
            is_reassigned = self._is_reassigned(number)

    def _minibatches(self, reader: StreamReader, number: int) -> Iterator[Any]:
        """The minibatches of a pass, by its number. Nothing happens before the first request."""
        caller = sys._getframe(2 if self.is_elastic else 1)
        if getattr(caller.f_locals.get("self"), "auto_collation", False):  # a loader that batches
            raise ValueError("a stream yields full minibatches: pass batch_size=None to its loader")
        is_main = get_worker_info() is None
        if is_main:
            if self._on_first_read is not None:
                self._on_first_read()
            self._on_request(True)
        if reader.first_step >= len(self.schedule.steps(reader.epoch)) and not reader.places:
            return
        reader.check_state()
        shared = self._shared.numpy()
        if reader.worker == 0:  # which every loader has
            if shared[3] == number:
                self._refuse_second_pass()
            shared[3] = number
        for minibatch in reader.minibatches():
            if shared[2] != number:
                raise RuntimeError("set_epoch() was called after the loader was set up: call it before each pass")
            if shared[4] == number:
                return
            self.num_read += 1
            yield self.collate_fn(minibatch)
            if is_main:
                self._on_request(False)
            if self.is_elastic:
                self._settle()
                if self._is_reassigned(number):
                    return
        self._end_reading()

    def __getstate__(self) -> dict[str, Any]:
        """For a loader worker that is not forked."""
        dropped = dict.fromkeys(("_reader", "_on_first_read"))
        return {**super().__getstate__(), **dropped, "_source": SampleSource(self._samples)}

    def state_dict(self) -> dict[str, Any]:
        """The position of this process in the stream, with the state of `samples`, if they have one."""
        return {} if self._reader is None else self._reader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Start the next pass from a state instead of skipping; ``set_epoch`` determines where it begins."""
        self._loaded = {**state_dict, "in_worker": get_worker_info() is not None} if state_dict else None
