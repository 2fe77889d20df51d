"""Stream: iterable data without a length, assigned to the cores."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info
from torch.utils.data import _utils as loading

from variable_batch_size.checks import check_integer
from variable_batch_size.data.sampler import Description, MinibatchSource, is_decided
from variable_batch_size.policies.policy import Policy, Situation
from variable_batch_size.schedules.batch_sizes import OnEnd
from variable_batch_size.schedules.schedule import BaseSchedule, Schedule
from variable_batch_size.traces.trace import TraceLike


class WorkerShare(NamedTuple):
    """The turns of a worker: a loader asks its workers one after the other, for number i worker ``i % num_workers``.

    Attributes:
        worker: which worker this is; 0 without workers.
        num_workers: of the loader; 1 without workers.

    >>> turns = WorkerShare(worker=1, num_workers=3)
    >>> 4 in turns, 5 in turns, turns.next_from(5)
    (True, False, 7)
    """

    worker: int = 0
    num_workers: int = 1

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and number % self.num_workers == self.worker

    def next_from(self, number: int) -> int:
        """Its first turn from a number on."""
        return number + (self.worker - number) % self.num_workers


def number_behind(state: Mapping[str, Any], schedule: Schedule, first_step: int, turns: WorkerShare) -> int:
    """The number of the first minibatch of a step, where the turns of a loader's workers go on.

    Args:
        state: of this worker's reader when the loader was saved, perhaps by another core and on another number of them.
        schedule: of this run.
        first_step: which step it is, of the epoch of the state.
        turns: of this worker.
    """
    saved = Schedule(
        schedule.trace,
        dataset_size=schedule.dataset_size,
        minibatch_size=schedule.minibatch_size,
        num_replicas=state["num_replicas"],
        on_end=schedule.on_end,
        lockstep=state["lockstep"],
    )
    epoch = state["epoch"]
    first, behind = (
        saved.num_minibatches_for(epoch, state["rank"], step) for step in (state["first_step"], first_step)
    )
    number: int = state["first_number"] + first - behind
    if not state["num_dealt"] <= number <= turns.next_from(state["num_dealt"]):
        refuse_state(epoch, first_step)
    return number


def refuse_state(epoch: int, first_step: int) -> NoReturn:
    """Say that a loader was not saved where a pass is to begin."""
    raise RuntimeError(
        f"the loader's state is not that of step {first_step} of epoch {epoch}, where this pass begins: save it "
        "between two steps, with snapshot_every_n_steps=1"
    )


Samples: TypeAlias = Iterable[Any] | Callable[[], Iterable[Any]]
"""What may be read as a stream: an iterable, an iterator, or a function that makes one."""


class SampleSource:
    """Reads a stream from its beginning or from a state that it had, and counts.

    The stream does not see that it is read in a loader worker: one that deals itself out to the workers would give each
    of them another part, and every worker must see all of it to know which minibatch is which.

    Args:
        samples: an iterable, an iterator, which can be read once, or a function that makes one.

    Attributes:
        num_read: samples read in this pass, skipped ones included.
        has_ended: whether there were fewer samples than were asked for.

    >>> source = SampleSource(range(7))
    >>> source.begin(epoch=0)
    >>> source.skip(2)
    >>> source.take(3), source.num_read
    ([2, 3, 4], 5)
    >>> source.take(3), source.num_read, source.has_ended
    ([5, 6], 7, True)
    """

    def __init__(self, samples: Samples) -> None:
        if not isinstance(samples, Iterable) and not callable(samples):
            raise ValueError(
                f"`samples` must be an iterable or a function that makes one, got {type(samples).__name__}"
            )
        self._samples = samples
        self._is_iterator = isinstance(samples, Iterator)
        self._has_state = hasattr(samples, "state_dict") and hasattr(samples, "load_state_dict")
        self._first_state: Any = None  # of the stream at its beginning, once it has been in another
        self._has_begun = False
        self._iterator: Iterator[Any] = iter(())
        self._ahead: list[Any] = []  # samples that were looked at and not yet read
        self.num_read = 0
        self.has_ended = False

    def begin(self, *, epoch: int, state: dict[str, Any] | None = None) -> None:
        """Go to the beginning, or to where :meth:`state_dict` was called.

        Args:
            epoch: told to a stream that has ``set_epoch``.
            state: of such a stream; None for its beginning.
        """
        if self._is_iterator and self._has_begun:
            raise RuntimeError(
                "the stream is an iterator, which can be read once: pass an iterable, or a function that makes one"
            )
        with _as_outside_of_workers():
            if hasattr(self._samples, "set_epoch"):
                self._samples.set_epoch(epoch)
            if self._has_state:
                self._load(None if state is None else state["stream"])
            made = self._samples if isinstance(self._samples, Iterable) else self._samples()
            self._iterator = iter(made)
        self._has_begun = True
        self._ahead = []
        self.num_read = 0 if state is None else state["num_read"]
        self.has_ended = False

    def _load(self, state: Any) -> None:
        stream: Any = self._samples
        if not self._has_begun:
            self._first_state = stream.state_dict()
        if state is not None or self._has_begun:
            stream.load_state_dict(self._first_state if state is None else state)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, for :meth:`begin`."""
        stream: Any = self._samples
        with _as_outside_of_workers():
            state = stream.state_dict() if self._has_state and self._has_begun else None
        return {"num_read": self.num_read + len(self._ahead), "stream": state}

    def take(self, number: int) -> list[Any]:
        """The next samples; fewer if the stream ends."""
        found = self.peek(number)
        self._ahead = self._ahead[number:]
        self._count(number, len(found))
        return found

    def peek(self, number: int) -> list[Any]:
        """The next samples, which stay the next ones."""
        with _as_outside_of_workers():
            self._ahead += islice(self._iterator, max(0, number - len(self._ahead)))
        return self._ahead[:number]

    def skip(self, number: int) -> None:
        """Leave out the next samples."""
        if not number:
            return
        from_ahead = min(number, len(self._ahead))
        self._ahead = self._ahead[from_ahead:]
        with _as_outside_of_workers():
            self._count(number, from_ahead + sum(1 for _ in islice(self._iterator, number - from_ahead)))

    def _count(self, asked: int, found: int) -> None:
        self.num_read += found
        self.has_ended = self.has_ended or found < asked


@contextlib.contextmanager
def _as_outside_of_workers() -> Iterator[None]:
    """Let ``get_worker_info()`` say for a while that this is no loader worker."""
    info = loading.worker._worker_info
    loading.worker._worker_info = None
    try:
        yield
    finally:
        loading.worker._worker_info = info


logger = logging.getLogger(__name__)

_BEGINNING = {"num_read": 0, "stream": None}


class StreamReader:
    """Deals from a stream what a core runs in successive steps of an epoch.

    Without `is_sharded`, every core reads the whole stream and skips what is not its own. A step's last minibatch of a
    core is handed out once the whole step has been read: so if the stream ends within a step, no core completes it,
    none waits for another, and no word passes between them. In lockstep, a minibatch is handed out once those that the
    other cores run at the same time have been read, too.

    Args:
        source: the stream.
        schedule: batch sizes, laid out over cores; where it is a policy's, the whole stream is read by one process.
        rank: of this core.
        epoch: in which the pass is.
        first_step: how many of the epoch's steps were left out.
        is_sharded: whether the stream holds this core's samples only.
        turns: which of the core's minibatches this process reads.
        state: of a reader before, from which to go on instead of from the stream's beginning.
    """

    def __init__(
        self,
        source: SampleSource,
        schedule: BaseSchedule,
        *,
        rank: int,
        epoch: int,
        first_step: int,
        is_sharded: bool,
        turns: WorkerShare,
        state: dict[str, Any] | None = None,
    ) -> None:
        self._source = source
        self._schedule = schedule
        self._rank = rank
        self._epoch = epoch
        self._first_step = first_step
        self._is_sharded = is_sharded
        self._turns = turns
        self._first_number = 0
        self._is_elsewhere = False
        self._begins_at: dict[str, Any] | None = None
        if state is not None:
            self._take_up(state)
        self._num_dealt = self._first_number  # the number of the next minibatch, of this process or of another worker
        self._has_begun = False

    # ----------------------------------------------------------------------------------------------- where it begins

    def _take_up(self, state: dict[str, Any]) -> None:
        # not refused at once: a loader that had come to an epoch's end is set up as it was before it begins the next
        self._is_elsewhere = state["goes_on"] and state["epoch"] != self._epoch
        if state["goes_on"] and not self._is_elsewhere:
            assert isinstance(self._schedule, Schedule)
            self._first_number = number_behind(state, self._schedule, self._first_step, self._turns)
        if self._can_use(state):
            self._begins_at = state["source"]

    def _num_before(self) -> int:
        """The samples of the stream before the first step."""
        steps = self._schedule.steps(self._epoch)
        if self._is_sharded:
            assert isinstance(self._schedule, Schedule)
            before = self._schedule.core_minibatches(steps[: self._first_step])[self._rank]
            return int(before) * self._schedule.minibatch_size
        first = steps.start + self._first_step
        return self._schedule.samples_before(first) - self._schedule.samples_before(steps.start)

    def _can_use(self, state: dict[str, Any]) -> bool:
        """Whether it is a state that this core's stream had, at this pass's first sample or before."""
        is_own = (state["rank"], state["num_replicas"]) == (self._rank, self._schedule.num_replicas)
        is_here = state["epoch"] == self._epoch and state["source"]["num_read"] <= self._num_before()
        return is_here and state["source"]["stream"] is not None and (is_own or not self._is_sharded)

    def refuse_other_epoch(self) -> None:
        """Raise if this is to go on from the state of a loader that was left within another epoch."""
        if self._is_elsewhere:
            refuse_state(self._epoch, self._first_step)

    def _begin(self) -> None:
        num_before = self._num_before()
        self._source.begin(epoch=self._epoch, state=self._begins_at)
        self._has_begun = True
        self._source.skip(num_before - self._source.num_read)
        if self._source.has_ended:
            raise RuntimeError(
                f"the stream ended after {self._source.num_read} samples, and step {self._first_step} of epoch "
                f"{self._epoch}, where this pass begins, has {num_before} before it"
            )

    def state_dict(self) -> dict[str, Any]:
        """What a reader of any core needs to begin behind a step from here."""
        return {
            "epoch": self._epoch,
            "first_step": self._first_step,
            "rank": self._rank,
            "num_replicas": self._schedule.num_replicas,
            "lockstep": self._schedule.lockstep,
            "first_number": self._first_number,
            "num_dealt": self._num_dealt,
            "source": self._source.state_dict() if self._has_begun else self._begins_at or _BEGINNING,
        }

    # ----------------------------------------------------------------------------------------------------- minibatches

    @property
    def has_steps(self) -> bool:
        """Whether there is anything to deal."""
        return self._first_step < len(self._schedule.steps(self._epoch))

    def minibatches(self) -> Iterator[list[Any]]:
        """The minibatches of this process, stand-ins included, each as a list of samples."""
        self._begin()
        yield from self._from_shard() if self._is_sharded else self._from_whole()

    def _from_whole(self) -> Iterator[list[Any]]:
        source, size = self._source, self._schedule.minibatch_size
        for step in self._schedule.steps_from(self._epoch, self._first_step):
            number = self._schedule.num_minibatches(step)
            stand_in = self._rank % number
            own = self._schedule.minibatches(step, self._rank) or range(stand_in, stand_in + 1)
            num_rounds, begin = self._schedule.rounds_for(step, self._rank), source.num_read
            for i, j in enumerate(own):
                source.skip(begin + j * size - source.num_read)
                # in lockstep it may be its own stand-in
                rounds = range(i, num_rounds if j == own[-1] else i + 1)
                found = self._take_or_skip(size, len(rounds))
                for round in rounds:
                    source.skip(max(0, begin + self._num_needed(step, round) * size - source.num_read))
                    if source.has_ended:
                        self._say_ended(step, source.num_read - begin)
                        return
                    yield from self._deal(found)

    def _num_needed(self, step: int, round: int) -> int:
        """How many minibatches of a step must be there for a round of it to be handed out.

        In lockstep those of all cores: where a forward pass waits for all, a round that one core begins must be begun
        by each.
        """
        if round + 1 == self._schedule.rounds_for(step, self._rank):
            return self._schedule.num_minibatches(step)
        return (round + 1) * self._schedule.num_replicas if self._schedule.lockstep else 0

    def _from_shard(self) -> Iterator[list[Any]]:
        source, size = self._source, self._schedule.minibatch_size
        latest: list[Any] | None = None
        for step in self._schedule.steps_from(self._epoch, self._first_step):
            own = self._schedule.minibatches(step, self._rank)
            for _ in own:
                found = self._take_or_skip(size)
                if source.has_ended:
                    self._refuse_end(step)
                latest = found or latest
                yield from self._deal(found)
            if len(own) < self._schedule.rounds_for(step, self._rank):
                yield from self._deal(self._stand_in(latest, step))

    def _stand_in(self, latest: list[Any] | None, step: int) -> list[Any] | None:
        """The core's latest minibatch, or its next one, which stays the next one."""
        if self._num_dealt not in self._turns:
            return None
        stand_in = latest or self._source.peek(self._schedule.minibatch_size)
        if len(stand_in) < self._schedule.minibatch_size:
            self._refuse_end(step)
        return stand_in

    def _take_or_skip(self, size: int, times: int = 1) -> list[Any] | None:
        if any(self._num_dealt + time in self._turns for time in range(times)):
            return self._source.take(size)
        self._source.skip(size)
        return None

    def _deal(self, minibatch: list[Any] | None) -> Iterator[list[Any]]:
        is_own, self._num_dealt = self._num_dealt in self._turns, self._num_dealt + 1
        if is_own and minibatch is not None:
            yield minibatch

    def _say_ended(self, step: int, num_left_over: int) -> None:
        if self._rank or self._turns.worker:
            return
        is_short = num_left_over > 0 or self._schedule.on_end == "stop"
        level = logging.WARNING if is_short else logging.INFO
        done = step - self._schedule.steps(self._epoch).start
        left_over = f"; the last {num_left_over} make no whole step and are not used" if num_left_over else ""
        message = "the stream ended after %d samples, and epoch %d with it, after %d steps%s"
        logger.log(level, message, self._source.num_read, self._epoch, done, left_over)

    def _refuse_end(self, step: int) -> None:
        done = step - self._schedule.steps(self._epoch).start
        raise RuntimeError(
            f"core {self._rank}'s part of the stream ended after {self._source.num_read} samples, in step {done} of "
            f"epoch {self._epoch}, for which the other cores wait: let it repeat, or end the trace before that"
        )


class Stream(MinibatchSource, IterableDataset[Any]):
    """Deals this core its minibatches of every step from samples that come one after another.

        stream = vbs.Stream(samples, trace="trace.csv", minibatch_size=32)
        loader = DataLoader(stream, batch_size=None, num_workers=2)
        optimizer = vbs.LinearRuleOptimizer(inner, stream, ref_batchsize=128)

    It takes the place of the sampler, and yields whole minibatches. Steps take samples in the order of the stream, as a
    :class:`CustomSampler` with ``shuffle=False`` does: the same on any number of cores, with any number of loader
    workers. Each of these reads the whole stream and skips what is not its own, so samples must come in the same order
    wherever they are read, and what is costly belongs into `collate_fn`, which sees a core's own minibatches only.

    All steps are one epoch, unless `dataset_size` is given. If the stream ends within a step, that step is not made, on
    no core; the epoch ends there, and a warning says so.

    A run goes on after ``set_epoch(epoch, first_step)``, which :class:`Checkpoint` calls, by skipping what was read
    before. Where `samples` have ``state_dict`` and ``load_state_dict``, a stream has a state to go on from without
    skipping: pass it to the checkpoint as one of its `schedulers`, or instead the ``StatefulDataLoader`` of torchdata
    that reads it.

    Args:
        samples: an iterable such as an ``IterableDataset`` or a stream of Hugging Face ``datasets``, an iterator, which
            can be read once, or a function that makes one. Its ``set_epoch`` is called if it has one.
        trace: the batch size of every step: a path, a sequence, an array, a pandas column, or an integer for always
            the same; multiples of `minibatch_size`. Or a policy, or a function of the situation, that decides it while
            the run goes on; then the loader has no workers, as these do not learn of decisions.
        minibatch_size: samples that one core runs at once.
        dataset_size: samples in an epoch, each of which reads the stream from its beginning; None for a single epoch.
        num_replicas: cores that share the work; those of the running backend if None.
        rank: which of them this is; as the running backend knows it if None.
        process_group: the cores that share the work, where they are not all processes of torch.distributed: a group, or
            the dimension of a DeviceMesh along which samples differ, as ``mesh["data"]``.
        seed: what random numbers of minibatches follow from, with ``seed_minibatches=True``; it shuffles nothing.
        on_end: what follows the last row of the trace: ``"stop"``, ``"hold"`` the last size or ``"cycle"``.
        lockstep: whether all cores get as many minibatches in a step, the last perhaps a stand-in, for models whose
            forward pass waits for all cores; the optimizer sees to that by itself where the model is in
            ``fully_shard``.
        collate_fn: makes a minibatch of a list of samples; as a DataLoader does by default.
        is_sharded: whether `samples` are this core's part of the data only, as of ``split_dataset_by_node``. Then the
            samples of a step depend on the number of cores, which must stay the same, and the part of every core must
            last until the trace ends.

    >>> stream = Stream(range(7), trace=[4, 2], minibatch_size=2, num_replicas=2, rank=0)
    >>> list(stream)
    [tensor([0, 1]), tensor([4, 5])]
    """

    def __init__(
        self,
        samples: Samples,
        *,
        trace: TraceLike | Policy | Callable[[Situation], float],
        minibatch_size: int,
        dataset_size: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        process_group: Any = None,
        seed: int = 0,
        on_end: OnEnd = "stop",
        lockstep: bool = False,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        is_sharded: bool = False,
    ) -> None:
        if is_decided(trace) and is_sharded:
            raise ValueError(
                "`is_sharded` must be False with a policy, which decides how much of the stream a core reads"
            )
        check_integer(seed=seed)
        super().__init__(
            trace,
            dataset_size=dataset_size,
            minibatch_size=minibatch_size,
            num_replicas=num_replicas,
            rank=rank,
            process_group=process_group,
            on_end=on_end,
            lockstep=lockstep,
        )
        self.seed = int(seed)
        self.collate_fn = collate_fn
        self.is_sharded = is_sharded
        self._samples = samples
        self._source = SampleSource(samples)
        self._reader: StreamReader | None = None
        self._loaded: dict[str, Any] | None = None
        # workers that live on from pass to pass know of set_epoch by memory that they share: epoch, first step, number
        # of the pass, and number of the latest pass that was read
        self._told = torch.tensor([0, 0, 0, -1]).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def description(self) -> Description:
        """What the samples of a step depend on, besides the trace and the minibatch size."""
        depends: Description = {"dataset_size": self.schedule.dataset_size, "seed": self.seed, "data": "stream"}
        return depends | {"data": "sharded stream", "cores": self.num_replicas} if self.is_sharded else depends

    @property
    def has_been_read(self) -> bool:
        return bool(self._told.numpy()[3] == self.num_passes)  # an element of a tensor takes long to compare

    def begin_pass(self, epoch: int, first_step: int) -> None:
        super().begin_pass(epoch, first_step)
        self._told[:3] = torch.tensor([self.epoch, self.first_step, self.num_passes])

    def on_first_read(self, callback: Callable[[], None]) -> None:
        """Call something now, and again when the first minibatch of this pass is asked for in this process.

        With loader workers it is asked for in these: then what the loader draws to set itself up comes in between.
        """
        super().on_first_read(callback)
        callback()

    def __len__(self) -> int:
        """How many minibatches this core gets in the epoch, stand-ins included, if the stream lasts so long."""
        if self.schedule.is_endless:
            raise TypeError(f'a stream with on_end="{self.schedule.on_end}" is endless and has no length')
        return super().__len__()

    # -------------------------------------------------------------------------------------------------------- reading

    def __iter__(self) -> Iterator[Any]:
        self._refuse_to_decide_in_workers()
        epoch, first_step, number, _ = self._told.tolist()
        state, self._loaded = self._loaded, None
        self._reader = StreamReader(
            self._source,
            self.schedule,
            rank=self.rank,
            epoch=epoch,
            first_step=first_step,
            is_sharded=self.is_sharded,
            turns=_turns(),
            state=state,
        )
        return self._minibatches(self._reader, number)

    def _refuse_to_decide_in_workers(self) -> None:
        if get_worker_info() is not None and not isinstance(self.schedule, Schedule):
            raise ValueError(
                "a stream with a policy is read where that decides: pass num_workers=0 to its loader, and let "
                "`samples` read ahead themselves if need be"
            )

    def _minibatches(self, reader: StreamReader, number: int) -> Iterator[Any]:
        """What a reader deals in the pass of this number; nothing happens before the first minibatch is asked for."""
        _refuse_merging(sys._getframe(1))
        tell = self._on_request if get_worker_info() is None else None
        if get_worker_info() is None:
            self._begin_reading()
        if tell is not None:
            tell(True)
        if not reader.has_steps:
            return
        reader.refuse_other_epoch()
        if _turns().worker == 0:  # which every loader has
            if self._told[3] == number:
                self._refuse_second_pass()
            self._told[3] = number
        told = self._told.numpy()  # an element of a tensor takes long to compare
        for minibatch in reader.minibatches():
            if told[2] != number:
                raise RuntimeError("set_epoch was called after the loader had been set up: call it before each pass")
            yield self.collate_fn(minibatch)
            if tell is not None:
                tell(False)

    def __getstate__(self) -> dict[str, Any]:
        """What a loader worker needs that is not forked."""
        return {
            **super().__getstate__(),
            "_source": SampleSource(self._samples),
            "_reader": None,
            "_on_first_read": None,
            "_on_request": None,
            "process_group": None,
        }

    # ---------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Where this process has come in the stream, and the state of `samples` there, if they have one."""
        return {} if self._reader is None else self._reader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass go on from a state instead of skipping all before; it begins where ``set_epoch`` says."""
        self._loaded = {**state_dict, "goes_on": get_worker_info() is not None} if state_dict else None


def _turns() -> WorkerShare:
    worker = get_worker_info()
    return WorkerShare() if worker is None else WorkerShare(worker.id, worker.num_workers)


def _refuse_merging(frame: FrameType) -> None:
    """Raise if it is a loader that asks for a minibatch, to make one of several."""
    if getattr(frame.f_locals.get("self"), "auto_collation", False):
        raise ValueError("a stream yields whole minibatches: pass batch_size=None to its loader")
