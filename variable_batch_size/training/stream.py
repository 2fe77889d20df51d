"""Stream: data without a length, dealt to the cores as an `IterableDataset`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from variable_batch_size.checks import check_integer
from variable_batch_size.policies.policy import Policy
from variable_batch_size.policies.situation import Situation
from variable_batch_size.schedules.batch_sizes import OnEnd
from variable_batch_size.schedules.schedule import Schedule
from variable_batch_size.traces.trace import TraceLike
from variable_batch_size.training.dealer import Dealer, Description, is_decided
from variable_batch_size.training.reader import Reader
from variable_batch_size.training.source import Samples, Source
from variable_batch_size.training.turns import Turns


class Stream(Dealer, IterableDataset[Any]):
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
        self._source = Source(samples)
        self._reader: Reader | None = None
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
    def _has_been_read(self) -> bool:
        return bool(self._told[3] == self.num_passes)

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Go to an epoch. Call it before each pass over the loader, and on the optimizer too.

        Args:
            epoch: its number, from 0; always 0 without a `dataset_size`.
            first_step: how many of the epoch's steps to leave out, for a run that was stopped after them.
        """
        super().set_epoch(epoch, first_step)
        self._told[:3] = torch.tensor([self.epoch, self.first_step, self.num_passes])

    def call_when_read(self, callback: Callable[[], None]) -> None:
        """Call something now, and again when the first minibatch of this pass is asked for in this process.

        With loader workers it is asked for in these: then what the loader draws to set itself up comes in between.
        """
        super().call_when_read(callback)
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
        self._reader = Reader(
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

    def _minibatches(self, reader: Reader, number: int) -> Iterator[Any]:
        """What a reader deals in the pass of this number; nothing happens before the first minibatch is asked for."""
        _refuse_merging(sys._getframe(1))
        tell = self._when_asked if get_worker_info() is None else None
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
            **self.__dict__,
            "_source": Source(self._samples),
            "_reader": None,
            "_when_read": None,
            "_when_asked": None,
            "process_group": None,
        }

    # ---------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Where this process has come in the stream, and the state of `samples` there, if they have one."""
        return {} if self._reader is None else self._reader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass go on from a state instead of skipping all before; it begins where ``set_epoch`` says."""
        self._loaded = {**state_dict, "goes_on": get_worker_info() is not None} if state_dict else None


def _turns() -> Turns:
    worker = get_worker_info()
    return Turns() if worker is None else Turns(worker.id, worker.num_workers)


def _refuse_merging(frame: FrameType) -> None:
    """Raise if it is a loader that asks for a minibatch, to make one of several."""
    if getattr(frame.f_locals.get("self"), "auto_collation", False):
        raise ValueError("a stream yields whole minibatches: pass batch_size=None to its loader")
