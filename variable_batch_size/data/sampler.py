"""CustomSampler: a schedule as the `batch_sampler` of a DataLoader."""

import itertools
import logging
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch.utils.data
from torch.utils.data import BatchSampler, Sampler

from variable_batch_size.checks import (
    check_flag,
    check_integer,
    check_one_of,
    check_positive,
    check_within,
    is_integer,
)
from variable_batch_size.cores.communicator import SharedGroup
from variable_batch_size.cores.detect import is_elastic, running_cores
from variable_batch_size.cores.messages import show
from variable_batch_size.data.cursor import RunCount
from variable_batch_size.data.shares import ASSIGN, MOST_AHEAD, SHARES, AsFree, Assign, PassCounter, Shares
from variable_batch_size.policies.policy import Policy, Situation, policy_of
from variable_batch_size.schedules.open_steps import OpenSchedule, OpenSteps
from variable_batch_size.schedules.permutation import Permutation
from variable_batch_size.schedules.policy_schedule import PolicySchedule
from variable_batch_size.schedules.schedule import BaseSchedule, Minibatches, OnEnd, Schedule
from variable_batch_size.schedules.watched import WatchedSchedule
from variable_batch_size.traces.trace import TraceLike
from variable_batch_size.traces.watched import WatchedTrace

logger = logging.getLogger(__name__)

Description = dict[str, str | int | bool | None]
TraceOrPolicy: TypeAlias = TraceLike | WatchedTrace | OpenSteps | Policy | Callable[[Situation], float]

_SAMPLES_AT_ONCE = 8192
_ROUND_ROBIN = '`assign` must be "round robin"'
_IN_LOCKSTEP = "each round waits for the slowest core, and uneven shares only add rounds"
_OUT_OF_ORDER = "`in_order` must be True: which step a minibatch belongs to depends on the order"


def is_decided(trace: Any) -> bool:
    """Whether what was passed as a trace decides batch sizes during the run."""
    return isinstance(trace, Policy) or (callable(trace) and not isinstance(trace, type))


class MinibatchSource(ABC):
    """A schedule, this core's rank in it, and the current pass over the data.

    The source owns the epoch, and the step at which a pass starts. Optimizers attach to it, each with a cursor of its
    own in the steps, and its :meth:`set_epoch` moves them, too. It counts the minibatches that are read, and compares
    them with those that each optimizer runs. The arguments are those of :class:`CustomSampler`. Without a
    `dataset_size` all steps are one epoch.
    """

    # whether step() raises for a minibatch that was not read from here. Set it to False for a loop that calls step() as
    # often as the schedule requires, without iterating over a loader or the sampler
    must_be_read = True
    needs_weights = False  # whether step() needs a weight, as minibatches hold different numbers of samples
    unit = "samples"  # of batch sizes
    _is_pickled_for_workers = False  # a stream is the data set of a loader
    shares: Shares | None = None  # of the cores in a step; None for round robin
    counter: PassCounter | None = None  # of the minibatches that the cores read, in open steps only
    _loader: str  # that reads this source, for errors

    def __init__(
        self,
        trace: TraceOrPolicy,
        dataset_size: int | None,
        minibatch_size: int,
        num_replicas: int | None,
        rank: int | None,
        process_group: Any,
        seed: int,
        on_end: OnEnd | None,
        lockstep: bool,
        max_minibatch_size: int | None,
    ) -> None:
        check_integer(seed=seed)
        self.detects_cores = num_replicas is None or rank is None
        if num_replicas is None or rank is None:
            running_rank, running_replicas = running_cores(process_group)
            num_replicas = running_replicas if num_replicas is None else num_replicas
            rank = running_rank if rank is None else rank
        how: Any = {"dataset_size": dataset_size, "minibatch_size": minibatch_size, "num_replicas": num_replicas}
        how |= {"lockstep": lockstep, "max_minibatch_size": max_minibatch_size, "unit": self.unit}
        self.schedule: BaseSchedule
        if isinstance(trace, OpenSteps):
            self.schedule, self.counter = OpenSchedule(trace, **how), PassCounter(int(rank))
        elif is_decided(trace):
            self.schedule = PolicySchedule(policy_of(trace), **how)  # type: ignore[arg-type]
        elif isinstance(trace, WatchedTrace):
            self.schedule = WatchedSchedule(trace, on_end=on_end, **how)
        else:
            self.schedule = Schedule(trace, on_end=on_end, **how)  # type: ignore[arg-type]
        check_within(num_replicas - 1, rank=rank)
        self.rank = int(rank)
        self._group = SharedGroup(process_group, is_for_workers=self._is_pickled_for_workers)
        self.seed = int(seed)
        self.epoch = 0
        self.first_step = 0  # how many of the epoch's steps are skipped
        self.num_passes = 0  # how many passes set_epoch() has begun
        self._pass_read = -1  # the latest pass of which a minibatch was requested
        self.num_read = 0  # minibatches of this pass, in this process
        self._is_read = False  # whether these are all
        self.num_prefetched = 0  # how many of these the workers of the loader may be ahead
        self.num_yielded = 0  # how many of these a loader with workers has yielded, where cores may join and leave
        self._thread: int | None = None  # in which an optimizer has run a minibatch of this pass
        self._followers: list[weakref.ref[Any]] = []  # optimizers that are attached
        self.is_shared = False  # whether several optimizers are attached
        self._on_first_read: Callable[[], None] | None = None
        self.may_end_early = False  # whether a limit of the run may be reached within a pass
        self.num_to_run: int | None = None  # how many minibatches of this pass are run, once the limit is reached
        self.is_elastic = is_elastic()  # whether cores may join and leave
        self.places: list[int] = []  # of the minibatches of the step before `first_step` that this pass begins with
        self._pass_reassigned = -1  # the latest pass that _reassign() has begun

    @property
    def process_group(self) -> Any:
        return self._group.given

    @property
    def num_replicas(self) -> int:
        return self.schedule.num_replicas

    @property
    def minibatch_size(self) -> int:
        return self.schedule.minibatch_size

    @property
    def policy(self) -> Policy | None:
        """The policy that decides the batch sizes, a copy of the one that was passed; None with a trace."""
        return self.schedule.policy if isinstance(self.schedule, PolicySchedule) else None

    @property
    def population(self) -> int | None:
        """The number of samples from which a step's are drawn at random, without replacement; None if unknown."""
        return None

    @property
    @abstractmethod
    def description(self) -> Description:
        """What the samples of a step depend on, besides the trace and the minibatch size."""

    @property
    def has_been_read(self) -> bool:
        """Whether a minibatch of this pass was requested."""
        return self._pass_read == self.num_passes

    @property
    def is_read_ahead(self) -> bool:
        """Whether the latest minibatch was requested by a loader that starts its workers, or in another thread."""
        return self.num_read <= self.num_prefetched or self._thread not in (None, threading.get_ident())

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Go to an epoch. Call it before each pass over the loader, here or on the optimizer: it moves both.

        Until the first minibatch of the pass, calling it again with the same arguments changes nothing.

        Args:
            epoch: its number, from 0.
            first_step: how many of the epoch's steps to skip, for a run that was stopped after them.
        """
        if self.has_been_read or self._thread is not None or not self.is_at(epoch, first_step):
            self.begin_pass(epoch, first_step)
        else:
            for follower in self.followers():
                follower._follow()

    def is_at(self, epoch: int, first_step: int) -> bool:
        """Whether :meth:`set_epoch` has begun the latest pass with these arguments."""
        return self.num_passes > 0 and (self.epoch, self.first_step) == (epoch, first_step)

    def begin_pass(self, epoch: int, first_step: int) -> None:
        """Begin a pass over the loader, and move the attached optimizers."""
        self.end_pass()
        self.schedule.begin_epoch(epoch, first_step)
        check_within(len(self.schedule.steps(epoch)), first_step=first_step)
        if isinstance(self.schedule, OpenSchedule):
            self.schedule.check_position(epoch, first_step)
        self.epoch, self.first_step = int(epoch), int(first_step)
        self.num_passes += 1
        self.num_read, self._is_read, self._thread, self._on_first_read = 0, False, None, None
        self.num_to_run, self.places = None, []
        if self.shares is not None:
            self.shares.begin(self.schedule, self.epoch, self.first_step)
        if self.counter is not None:
            self.counter.begin()
        for follower in self.followers():
            follower._follow()

    def _reassign(self, rank: int, num_replicas: int, first_step: int, places: list[int]) -> None:
        """After cores have joined or left: let the loader continue as another rank, in a pass of its own.

        Args:
            rank: of this core from now on.
            num_replicas: likewise, the number of cores.
            first_step: the step of the epoch from which on minibatches are assigned to these cores.
            places: of the minibatches of the step before it that this core runs first.
        """
        self.rank, self.schedule.num_replicas = rank, num_replicas
        self.first_step, self.places = first_step, places
        self.num_passes += 1
        self.num_read, self._is_read, self._thread, self._on_first_read = 0, False, None, None
        self._pass_reassigned = self.num_passes

    def _settle(self) -> None:
        """When the loop requests a minibatch: admit waiting cores, and reassign minibatches if others have left."""
        for follower in self.followers() if self.is_elastic else ():
            follower._settle()

    def _is_reassigned(self, number: int) -> bool:
        """Whether :meth:`_reassign` has begun another pass after the one with this number."""
        return self.num_passes != number and self._pass_reassigned == self.num_passes

    def attach(self, follower: Any) -> None:
        """Move an optimizer with this source, as long as it exists."""
        self._followers = [one for one in self._followers if one() is not None] + [weakref.ref(follower)]
        self.is_shared = len(self._followers) > 1

    def followers(self) -> list[Any]:
        """The optimizers that move with this source."""
        return [follower for reference in self._followers if (follower := reference()) is not None]

    def new_count(self) -> RunCount:
        """For an optimizer that begins with the first minibatch of this pass."""
        return RunCount(is_late=self._thread is not None)

    def check_run(self, runs: RunCount) -> None:
        """Raise if an optimizer must not run a minibatch: before the first one, and if no more were read."""
        if self.schedule.is_open:  # in these, any number of minibatches may be made of what is read
            self._thread = threading.get_ident()
            return
        if not self.has_been_read and self.must_be_read:
            raise RuntimeError(
                f"step() was called, but no loader reads this {type(self).__name__}: train with {self._loader}, "
                "iterate over it alongside a loader of your own, or set its `must_be_read` to False"
            )
        if runs.is_late:
            raise RuntimeError(
                f"the optimizer was made, or set to epoch {self.epoch}, when minibatches of this pass had already "
                "been run: call set_epoch(), with `first_step` to resume within the epoch, and start another pass"
            )
        if self.must_be_read and self.num_read and runs.number >= self.num_read:
            raise RuntimeError(
                f"step() was called for minibatch {runs.number + 1} of epoch {self.epoch}, but this pass has read only "
                f"{self.num_read}: call it once after each minibatch, and set_epoch() before each pass over the loader"
            )
        self._thread = threading.get_ident()

    def _end_reading(self) -> None:
        """Raise if an optimizer has left out minibatches of a pass that was read to its end."""
        self._is_read = not self.schedule.is_open
        for follower in self.followers() if self._is_read else ():
            runs = follower._runs
            runs.number_at_end = runs.number
            # a thread that reads ahead of the loop may be at any distance
            if runs.ahead > runs.least_ahead and self._thread == threading.get_ident():
                self._refuse_left_out(follower, runs.ahead - runs.least_ahead)

    def end_pass(self) -> None:
        """Raise if an optimizer has left out the first minibatches of a pass that was read to its end."""
        for follower in self.followers() if self.num_to_run is None else ():
            runs = follower._runs
            number = runs.first_ahead - self.num_prefetched
            if runs.number_at_end and 0 < number <= self.num_read - runs.number:
                runs.number_at_end = 0  # refused once
                self._refuse_left_out(follower, number)

    def end_run(self, num_to_run: int) -> None:
        """The run ends in this pass, after `num_to_run` minibatches: those that a loader has read ahead are padding."""
        self.num_to_run = num_to_run

    def end_epoch(self) -> None:
        """Raise as :meth:`end_pass` does, and if all minibatches were read to train, but no optimizer has run one."""
        for follower in self.followers():
            follower._end_open_epoch()
        self.end_pass()
        runs = [follower._runs.number for follower in self.followers()]
        # workers may have read the rest of an epoch that was left early
        if self._is_read and self.num_read > self.num_prefetched + 1 and runs and not any(runs):
            raise RuntimeError(
                f"step() was not called in epoch {self.epoch}, although {self.num_read} minibatches were read: call it "
                "once after each minibatch"
            )

    def _refuse_left_out(self, follower: Any, number: int) -> None:
        raise RuntimeError(
            f"step() of {type(follower).__name__} was not called for at least {number} of the {self.num_read} "
            f"minibatches of epoch {self.epoch}: call it once after each minibatch. It accumulates by itself, a "
            "skipped minibatch needs step() without backward(), and an optimizer that makes fewer steps needs its own "
            "sampler"
        )

    def __getstate__(self) -> dict[str, Any]:
        # optimizers attach themselves again to a copy that is theirs
        return {**self.__dict__, "_followers": []}

    def num_updates(self, num_epochs: int) -> int:
        """The number of steps in the first epochs of a run, for example as the length of a learning-rate schedule."""
        check_positive(num_epochs=num_epochs)
        if not isinstance(self.schedule, Schedule):
            raise ValueError(
                "a policy decides the number of updates: let schedules depend on samples, tokens or progress"
                if self.policy is not None
                else "open steps have no number of updates: let schedules depend on samples, tokens or progress"
            )
        return self.schedule.steps(num_epochs - 1).stop

    def run_in_lockstep(self) -> None:
        """Give all cores the same number of minibatches in each step. Call it before the first one is read."""
        if self.has_been_read and not self.schedule.lockstep:
            needs = "a model in fully_shard needs the same number of minibatches on all cores in a step"
            raise ValueError(f"{needs}, but the sampler has been read already: construct it with `lockstep=True`")
        if self.shares is not None:
            raise ValueError(f"{_ROUND_ROBIN} in lockstep, as with fully_shard: {_IN_LOCKSTEP}")
        self.schedule.lockstep = True

    def on_first_read(self, callback: Callable[[], None]) -> None:
        """Call a function at the first request of this pass: after the loader has drawn a random number to set up."""
        self._on_first_read = callback

    def _on_request(self, is_first: bool) -> None:
        """A minibatch is requested, in most cases by a loader whenever it returns one; at the end none is left."""
        for follower in self.followers():
            follower._on_request(is_first)

    def _refuse_second_pass(self) -> None:
        rule = "call set_epoch() before each pass over the loader"
        raise RuntimeError(f"epoch {self.epoch} is read for the second time: {rule}, as optimizer.epochs() does")

    def __len__(self) -> int:
        """How many minibatches this core gets in the epoch, padding included; an estimate unless round robin."""
        return self.schedule.num_minibatches_for(self.epoch, self.rank, self.first_step)


class CustomSampler(MinibatchSource, Sampler[list[int]]):
    """Yields this core's minibatches of every step, in the order of the steps.

    Which samples make up a step, and in which order, depends on the trace, the seed and the epoch only, never on the
    number of cores. A core without a minibatch in a step gets a padding minibatch, a copy of another core's, to which
    the optimizer gives the weight 0. The loader must keep the order, as it does unless made with ``in_order=False``.

    Args:
        dataset: the data set, of which only the length is used, or its length; or else
        dataset_size: its length.
        trace: the batch size of every step: a path, stages such as ``"0:64 20:128 40:256"`` or ``{0: 64, 20: 128}``, a
            sequence, an array, a pandas column, or an integer for a constant one; multiples of `minibatch_size`. Or a
            policy, or a function of the situation, that decides during the run; or :class:`OpenSteps`.
        num_replicas: cores that share the work; those of the running backend if None.
        rank: which of them this is; that of the running backend if None.
        process_group: the cores that share the work, where they are not all processes of torch.distributed: a group, or
            the dimension of a DeviceMesh along which samples differ, such as ``mesh["data"]``. The optimizer,
            checkpoint and log of the run take it from here.
        minibatch_size: samples that one core runs at once.
        seed: selects the order of the samples, together with the epoch.
        shuffle: whether samples are shuffled, differently in each epoch.
        on_end: what follows the last row of the trace: ``"stop"``, ``"hold"`` the last size or ``"cycle"``; None for
            ``"hold"`` with stages without an end, else ``"stop"``.
        lockstep: whether all cores get the same number of minibatches in a step, the last one perhaps padding, for
            models whose forward pass waits for all cores; the optimizer turns it on for models in ``fully_shard``.
        max_minibatch_size: let steps with more samples have larger minibatches, up to this size, so that cores run
            fewer of them: 2, 4, … times `minibatch_size`, where these divide the work among cores as evenly. The
            samples of a step stay the same. None for minibatches of equal size.
        assign: which core runs a minibatch. ``"round robin"``: minibatch j of a step goes to core ``j % num_replicas``.
            ``"as free"``: a core that is ready takes the next one, on torch.distributed; a loader takes what it reads
            ahead. ``"by speed"``: shares in proportion to the measured speed of the cores. The samples of a step stay
            the same.
        verbose: log on core 0 how many epochs the trace has.

    >>> sampler = CustomSampler(dataset_size=7, trace=[4, 2], minibatch_size=2, num_replicas=2, rank=0, shuffle=False)
    >>> list(sampler)
    [[0, 1], [4, 5]]
    """

    _loader = "DataLoader(dataset, batch_sampler=sampler)"

    def __init__(
        self,
        dataset: Sized | int | None = None,
        trace: TraceOrPolicy = "",
        *,
        dataset_size: int | None = None,
        minibatch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        process_group: Any = None,
        seed: int = 0,
        shuffle: bool = True,
        on_end: OnEnd | None = None,
        lockstep: bool = False,
        max_minibatch_size: int | None = None,
        assign: Assign = "round robin",
        verbose: bool = False,
    ) -> None:
        if trace is None or (isinstance(trace, str) and not trace):
            raise ValueError("`trace` must be given: a path, stages such as '0:64 20:128', batch sizes or a policy")
        if (dataset is None) == (dataset_size is None):
            raise ValueError(f"pass either `dataset` or `dataset_size`, got {'neither' if dataset is None else 'both'}")
        check_flag(shuffle=shuffle, lockstep=lockstep, verbose=verbose)
        given: Any = dataset_size if dataset is None else dataset
        if dataset is not None and not is_integer(dataset):
            check_dataset(dataset)
        size: int = len(given) if isinstance(given, Sized) else given
        where = (num_replicas, rank, process_group)
        super().__init__(trace, size, minibatch_size, *where, seed, on_end, lockstep, max_minibatch_size)
        self.dataset_size, self.shuffle = size, shuffle
        self._set_shares(assign)
        if verbose and self.rank == 0:
            num_epochs = self.schedule.num_epochs
            show(logger, "%s: %s epochs", self.schedule.name, "endless" if num_epochs is None else num_epochs)

    def _set_shares(self, assign: Assign) -> None:
        check_one_of(ASSIGN, assign=assign)
        if assign == "round robin":
            return
        for name, is_on, reason in (
            ("OpenSteps", self.schedule.is_open, "cores read whenever they are free in any case"),
            ("lockstep", self.schedule.lockstep, _IN_LOCKSTEP),
            ("max_minibatch_size", self.schedule.max_minibatch_size > self.minibatch_size, "it divides steps evenly"),
            ("a policy", self.policy is not None, "it decides by the time of even shares"),
            ("a watched trace", self.schedule.is_live, "its rows are fixed for equal numbers of steps ahead"),
        ):
            if is_on:
                raise ValueError(f"{_ROUND_ROBIN} with {name}, got {assign!r}: {reason}")
        if self.num_replicas > 1:  # one core runs all
            self.shares = SHARES[assign](self.rank)

    @property
    def num_samples(self) -> int:
        """The length of the data set."""
        return int(self.dataset_size)

    @property
    def population(self) -> int | None:
        return int(self.dataset_size) if self.shuffle else None

    @property
    def description(self) -> Description:
        """What the samples of a step depend on, besides the trace and the minibatch size."""
        return {"dataset_size": int(self.dataset_size), "seed": self.seed, "shuffle": self.shuffle}

    def __repr__(self) -> str:
        core = f"core {self.rank} of {self.num_replicas}"
        of = f"{self.dataset_size:,} samples, minibatches of {self.minibatch_size}, {core}, epoch {self.epoch}"
        return f"<{type(self).__name__} of {self.schedule.name}: {of}>"

    def get_epochtrace(self, epoch: int) -> list[int]:
        """The batch sizes of an epoch's steps."""
        return [self.schedule.batch_size(step) for step in self.schedule.steps(epoch)]

    def _warn_if_truncated(self) -> None:
        """Warn if the trace ends within an epoch, unless it is the only one, whose length is that of the run."""
        schedule, steps = self.schedule, self.schedule.steps(self.epoch)
        if (
            steps.start
            and isinstance(schedule, Schedule)
            and schedule.on_end == "stop"
            and steps.stop == len(schedule.trace)
        ):
            used = schedule.samples_before(steps.stop) - schedule.samples_before(steps.start)
            if used < schedule.capacity and self.rank == 0:
                share = (used, schedule.capacity, 100 * used / schedule.capacity)
                message = f"%s ends in epoch %d, after %d of its %d {self.unit} (%.1f %%)"
                logger.warning(message, schedule.trace.name, self.epoch, *share)

    def __iter__(self) -> Iterator[list[int]]:
        frame = sys._getframe(1)
        # of torch and torchdata only: looking at the variables of a user's function would keep them alive
        caller = frame.f_locals if frame.f_globals["__name__"].startswith("torch") else {}
        if isinstance(caller.get("self"), BatchSampler) and caller["self"].sampler is self:
            raise ValueError(f"the sampler yields full minibatches, not samples: train with {self._loader}")
        loader: Any = caller.get("loader")  # where an iterator of a DataLoader is set up
        self.num_prefetched = 0
        if isinstance(loader, torch.utils.data.DataLoader):
            if not getattr(loader, "in_order", True):
                raise ValueError(_OUT_OF_ORDER)
            self._check_dataset(loader.dataset)
            self.num_prefetched = loader.num_workers * (loader.prefetch_factor or 0)
            self._check_prefetched(loader)
            if self.is_elastic and self.num_prefetched and not isinstance(loader, DataLoader):
                rule = "`num_workers` must be 0 with `elastic`, as minibatches that were read ahead may change"
                raise ValueError(f"{rule}, or use vbs.DataLoader, got {loader.num_workers}")
        return _Requested(self._minibatches(), self._on_request)

    def _check_prefetched(self, loader: "torch.utils.data.DataLoader[Any]") -> None:
        """Raise if a loader reads further ahead than minibatches can be assigned."""
        number = loader.num_workers * (loader.prefetch_factor or 0)
        if isinstance(self.shares, AsFree) and number > MOST_AHEAD:
            rule = f'`num_workers` * `prefetch_factor` must be at most {MOST_AHEAD} with assign="as free"'
            found = f"which takes what is read ahead, got {number}"
            raise ValueError(f'{rule}, {found}: use fewer, or assign="by speed"')
        if self.schedule.is_open and number:
            rule = "`num_workers` must be 0 with OpenSteps"
            raise ValueError(f"{rule}, got {loader.num_workers}: what is read ahead would belong to no step")

    def _check_dataset(self, dataset: Any) -> None:
        """Raise if a loader has another data set than that of the sampler; a part of one may be its `dataset_size`."""

    def _minibatches(self) -> Iterator[list[int]]:
        # a DataLoader may make several iterators and use one: nothing happens before the first request
        if not self.num_prefetched:
            self._settle()
        yield from self._minibatches_of_pass()
        while self._pass_read != self._pass_reassigned == self.num_passes:  # cores have joined or left
            yield from self._minibatches_of_pass()

    def _minibatches_of_pass(self) -> Iterator[list[int]]:
        if self.has_been_read:
            self._refuse_second_pass()
        self._pass_read = number = self.num_passes
        if self._on_first_read is not None:
            self._on_first_read()
        self._warn_if_truncated()
        for minibatch in self._samples():
            if self.num_passes != number:
                advice = "begin another one after it, as with iter(loader)"
                raise RuntimeError(f"set_epoch() was called in the middle of a pass: {advice}")
            if self.num_to_run is not None:
                return
            self.num_read += 1
            yield minibatch
            if self.is_elastic and not self.num_prefetched:
                self._settle()
                if self._is_reassigned(number):
                    return
        self._end_reading()

    def _samples(self) -> Iterator[list[int]]:
        """The samples of each minibatch of this core, from its position on."""
        samples_of = self._order()
        if isinstance(self.schedule, OpenSchedule):
            yield from self._claimed_samples(self.schedule, samples_of)
            return
        for minibatches in self._offsets():
            yield from samples_of(minibatches)

    def _order(self) -> Callable[[Minibatches], Sequence[list[int]]]:
        """A function that returns the samples of some minibatches of the epoch."""
        order = Permutation(self.dataset_size, key=(self.seed, self.epoch)) if self.shuffle else None

        def samples_of(minibatches: Minibatches) -> list[list[int]]:
            positions = minibatches.starts[:, None] + np.arange(minibatches.size)
            return (order(positions) if order else positions).tolist()  # type: ignore[no-any-return]

        return samples_of

    def _claimed_samples(
        self, schedule: OpenSchedule, samples_of: Callable[[Minibatches], Sequence[list[int]]]
    ) -> Iterator[list[int]]:
        """In open steps: a minibatch belongs to the core that requests it first."""
        size, counter = self.minibatch_size, self.counter
        assert counter is not None
        # from those before this pass on: a core may read its first minibatch when others have completed steps
        first = schedule.samples_read(self.epoch, self.first_step)
        number_left, at_once = (schedule.capacity - first) // size, max(1, self._at_once // self.num_replicas)
        computed = range(0)  # the next minibatches, some of which are other cores'
        found: list[list[int]] = []  # their samples
        while (claimed := counter.next()) < number_left:
            if claimed not in computed:
                computed = range(claimed, min(claimed + at_once, number_left))
                found = list(samples_of(Minibatches(first + np.array(computed) * size, size)))
            yield found[claimed - computed.start]

    @property
    def _at_once(self) -> int:
        """How many minibatches are computed together."""
        return max(1, _SAMPLES_AT_ONCE // int(self.minibatch_size))

    def _offsets(self) -> Iterator[Minibatches]:
        """The minibatches of this pass; several at once unless they are assigned while it runs."""
        schedule, size, shares = self.schedule, self.minibatch_size, self.shares
        if shares is None:
            yield from self._first_offsets()
            yield from schedule.offsets(self.epoch, self.rank, at_once=self._at_once, first_step=self.first_step)
            return
        begin = schedule.samples_before(schedule.steps(self.epoch).start)
        for step in schedule.steps_from(self.epoch, self.first_step):
            start, number = schedule.samples_before(step) - begin, 0
            place = shares.place(step, 0)
            if place is None:  # padding
                yield Minibatches(np.array([start + self.rank % schedule.num_minibatches(step) * size]), size)
            while place is not None:
                yield Minibatches(np.array([start + place * size]), size)
                number += 1
                place = shares.place(step, number)

    def _first_offsets(self) -> Iterator[Minibatches]:
        """The offsets of minibatches of the step before the first one."""
        if self.places:
            schedule, steps = self.schedule, self.schedule.steps(self.epoch)
            before = schedule.samples_before(steps[self.first_step - 1]) - schedule.samples_before(steps.start)
            yield Minibatches(before + np.array(self.places) * self.minibatch_size, self.minibatch_size)


class DataLoader(torch.utils.data.DataLoader[Any]):
    """A :class:`torch.utils.data.DataLoader` whose minibatches follow a trace.

        loader = vbs.DataLoader(dataset, trace="0:64 20:128 40:256", minibatch_size=32, num_workers=2)

    Its `sampler` is a :class:`CustomSampler`, which describes the named arguments. The others are those of torch's
    loader.

    Args:
        dataset: a data set with a length.
        trace: the batch size of every step.
        minibatch_size: samples that one core runs at once.
        options: of torch's DataLoader, such as `num_workers`, `collate_fn` and `pin_memory`. A `generator` only seeds
            its workers; `seed` selects the order.
    """

    def __init__(
        self,
        dataset: torch.utils.data.Dataset[Any],
        trace: TraceOrPolicy = "",
        *,
        minibatch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        on_end: OnEnd | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        process_group: Any = None,
        lockstep: bool = False,
        max_minibatch_size: int | None = None,
        assign: Assign = "round robin",
        verbose: bool = False,
        **options: Any,
    ) -> None:
        for name in ("batch_size", "batch_sampler", "drop_last", "sampler"):
            if name in options:
                raise ValueError(f"`{name}` must not be given: `trace` and `minibatch_size` determine the minibatches")
        if not options.get("in_order", True):
            raise ValueError(_OUT_OF_ORDER)
        check_dataset(dataset)
        if issubclass(type(dataset), torch.utils.data.IterableDataset):
            _refuse_without_length(dataset)
        sampler = CustomSampler(
            dataset,  # type: ignore[arg-type]
            trace,
            minibatch_size=minibatch_size,
            seed=seed,
            shuffle=shuffle,
            on_end=on_end,
            num_replicas=num_replicas,
            rank=rank,
            process_group=process_group,
            lockstep=lockstep,
            max_minibatch_size=max_minibatch_size,
            assign=assign,
            verbose=verbose,
        )
        super().__init__(dataset, batch_sampler=sampler, **options)
        sampler._check_prefetched(self)

    def __iter__(self) -> Any:
        if self.sampler.is_elastic:
            return self._while_cores_change()
        iterator = super().__iter__()
        return self._until_end(iterator) if self.num_workers and self.sampler.may_end_early else iterator

    def _while_cores_change(self) -> Iterator[Any]:
        """The minibatches, without those that workers have read ahead when cores join or leave, or the run ends."""
        sampler, is_reassigned = self.sampler, True
        sampler._settle()
        while is_reassigned:
            number, is_reassigned, sampler.num_yielded = sampler.num_passes, False, 0
            for minibatch in super().__iter__():
                sampler.num_yielded += 1
                yield minibatch
                sampler._settle()
                is_reassigned = sampler._is_reassigned(number)
                if is_reassigned or sampler.num_to_run is not None:
                    break

    def _until_end(self, minibatches: Iterator[Any]) -> Iterator[Any]:
        """The minibatches, without those that workers have read ahead when the run ends."""
        for minibatch in minibatches:
            yield minibatch
            if self.sampler.num_to_run is not None:
                return

    @property
    def sampler(self) -> CustomSampler:
        """The sampler, which is the `batch_sampler` of torch's loader."""
        return self.batch_sampler  # type: ignore[return-value]

    @sampler.setter
    def sampler(self, value: object) -> None:
        """Torch's loader sets a sampler of single samples here, which it does not use."""

    def __repr__(self) -> str:
        return f"<DataLoader of {type(self.dataset).__name__} with {self.sampler!r}>"


def check_dataset(dataset: Any) -> None:
    """Raise unless samples can be read by their numbers."""
    if isinstance(dataset, (torch.utils.data.DataLoader, Sampler)):
        found = f"{type(dataset).__name__}, whose samples and order would be ignored"
        advice = "pass the data set that it reads, or use vbs.Stream to keep an order of your own"
        raise ValueError(f"`dataset` must be a data set, got {found}: {advice}")
    if not isinstance(dataset, Sized):
        _refuse_without_length(dataset)
    if isinstance(dataset, Mapping) and 0 not in dataset:
        found = f"{type(dataset).__name__} with the keys {', '.join(map(repr, itertools.islice(dataset, 3)))}"
        advice = "pass a TensorDataset of its tensors, or one of its values"
        raise ValueError(f"`dataset` must have samples with the indices 0, 1, 2 …, got {found}: {advice}")


def _refuse_without_length(dataset: Any) -> NoReturn:
    kind = type(dataset).__name__
    raise ValueError(
        f"`dataset` must have a length, got {kind}: use vbs.Stream for data without one or without indices"
    )


def source_of(loader: Any) -> MinibatchSource:
    """The sampler or stream that was passed, or that a loader reads."""
    for source in (loader, getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)):
        if isinstance(source, MinibatchSource):
            return source
    if isinstance(loader, torch.utils.data.DataLoader):
        found = "a DataLoader without one: make it with vbs.DataLoader(dataset, trace=…), or batch_sampler=sampler"
    else:
        found = type(loader).__name__
    raise ValueError(f"`sampler` must be a CustomSampler, a Stream or a DataLoader that reads one, got {found}")


class _Requested(Iterator[list[int]]):
    """Minibatches, with a callback after each request, also after one that raises."""

    def __init__(self, minibatches: Iterator[list[int]], callback: Callable[[bool], None]) -> None:
        self._minibatches, self._callback, self._is_first = minibatches, callback, True

    def __next__(self) -> list[int]:
        try:
            return next(self._minibatches)
        finally:
            is_first, self._is_first = self._is_first, False
            self._callback(is_first)
