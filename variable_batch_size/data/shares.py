"""Shares: which minibatches of a step a core runs, where that is decided during the run and not by round robin."""

import statistics
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import Any, Literal, final, get_args

import torch

from variable_batch_size.cores import devices
from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.cores.detect import ProcessGroups, shared_store
from variable_batch_size.schedules.schedule import BaseSchedule

Assign = Literal["round robin", "as free", "by speed"]
ASSIGN: tuple[Assign, ...] = get_args(Assign)

MOST_AHEAD = 8  # minibatches that a loader may claim ahead: a slow core keeps the others waiting for these
_EVERY = 8  # steps from one measurement of the speeds to the next


class Shares(ABC):
    """The places, in each step of a pass, of the minibatches that this core runs.

    The sampler requests them to yield the minibatches; the cursor of each optimizer requests one more, to learn whether
    a minibatch is the core's last one in its step. Which samples make up a step does not depend on them.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.num_run, self.seconds = 0, 0.0  # minibatches of this core so far without padding, and their time
        self._own: dict[int, list[int]] = {}  # the places in each step
        self._records = False  # whether those of completed steps are kept
        self._since: float | None = None
        self._lock = threading.RLock()  # a loader may read in another thread
        self._pace: devices.Pace | None = None

    def connect(self, communicator: Communicator, device: torch.device) -> None:
        """Before the first minibatch. Every core must call it."""
        self._communicator, self._device, self._pace = communicator, device, devices.Pace(device)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_pace": None if self._pace is None else devices.Pace(self._device)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    @property
    def is_connected(self) -> bool:
        """Whether :meth:`connect` was called."""
        return self._pace is not None

    def begin(self, schedule: BaseSchedule, epoch: int, first_step: int) -> None:
        """Begin a pass. Every core must call it equally often."""
        steps = schedule.steps(epoch)
        with self._lock:
            self._schedule, self._steps = schedule, range(steps.start + first_step, steps.stop)
            self._own = {
                step: places for step, places in self._own.items() if self._records and step < self._steps.start
            }
            self._since = None
            self._begin()

    def place(self, step: int, number: int) -> int | None:
        """The place in a step of the core's minibatch of this number, from 0; None if it has no more in the step."""
        if self._pace is None:
            raise RuntimeError("no minibatch is assigned yet: make the optimizer before reading the sampler")
        with self._lock:
            return self._place(step, number)

    @abstractmethod
    def _begin(self) -> None:
        """Begin a pass over the steps in `_steps`."""

    @abstractmethod
    def _place(self, step: int, number: int) -> int | None: ...

    def await_device(self) -> None:
        """Before the next minibatch is requested: wait for the device, whose speed is what counts."""
        if self._pace is not None:
            self._pace.wait()

    def begin_minibatch(self) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    def end_minibatch(self, *, is_padding: bool) -> None:
        """Stop the clock; the first minibatch of a pass, in which a loader starts, does not count."""
        seconds, self._since = None if self._since is None else time.perf_counter() - self._since, None
        if seconds is not None:
            self._note(seconds, is_padding=is_padding)

    def _note(self, seconds: float, *, is_padding: bool) -> None:
        if not is_padding:
            self.num_run += 1
            self.seconds += seconds

    def after_step(self, step: int) -> None:
        """After a step, by its number in the run. Every core must call it."""
        with self._lock:
            if not self._records:
                self._own = {other: places for other, places in self._own.items() if other >= step}

    def keep_record(self) -> None:
        """From now on, keep what :meth:`take_record` returns."""
        self._records = True

    def take_record(self, steps: range) -> list[list[int]]:
        """The core of each minibatch of some completed steps, which are then forgotten. Every core must call it."""
        numbers = [self._schedule.num_minibatches(step) for step in steps]
        owners = torch.zeros(sum(numbers) + 1, dtype=torch.int64)
        begin, rank = 0, self._communicator.rank
        for step, number in zip(steps, numbers, strict=True):
            places = self._own.pop(step, [])
            owners[[begin + place for place in places]] = rank
            begin += number
        found, ends = self._total(owners).tolist(), accumulate(numbers)
        return [found[end - number : end] for number, end in zip(numbers, ends, strict=True)]

    def _total(self, numbers: torch.Tensor) -> torch.Tensor:
        with devices.preserve_rng(self._device):
            return self._communicator.total(numbers.to(self._device))


class PassCounter:
    """Numbers 0, 1, 2 … in each pass, each for one core, from the store of torch.distributed.

    A single core counts by itself. A copy counts apart from the original; every core must copy equally often.
    """

    def __init__(self, rank: int) -> None:
        self.run = ""  # the beginning of the keys, the same on all cores of a run
        self.store: Any = None
        self._rank, self._num_passes, self._number, self._num_copies = rank, 0, 0, 0

    def __getstate__(self) -> dict[str, Any]:
        self._num_copies += 1
        run = self.run and f"{self.run}/copy {self._num_copies}"
        return {**self.__dict__, "run": run, "store": self.store is not None, "_num_copies": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.store = shared_store() if self.store else None

    def connect(self, communicator: Communicator, device: torch.device, what: str) -> None:
        """Before the first number. Every core must call it."""
        self.run, self._num_passes = "alone", 0
        if communicator.num_replicas == 1:
            return
        if not isinstance(communicator, ProcessGroups):
            advice = ': use assign="by speed"' if "assign" in what else ""
            raise ValueError(f"{what} needs the store of torch.distributed, which XLA cores lack{advice}")
        token = torch.tensor(list(uuid.uuid4().bytes), dtype=torch.uint8).to(device)
        communicator.broadcast([token])
        self.run = f"variable_batch_size/{bytes(token.tolist()).hex()}"
        self.store = shared_store()

    def begin(self) -> None:
        """Begin a pass. Every core must call it equally often."""
        self._num_passes += 1
        self._number = 0
        if self.store is not None and self._rank == 0 and self._num_passes > 2:
            # the key of the pass before may still be in use on other cores
            self.store.delete_key(f"{self.run}/{self._num_passes - 2}")

    def next(self) -> int:
        """The next number of the pass."""
        if not self.run:
            raise RuntimeError("no minibatch is assigned yet: make the optimizer before reading the sampler")
        if self.store is None:
            self._number += 1
            return self._number - 1
        return int(self.store.add(f"{self.run}/{self._num_passes}", 1)) - 1


@final
class AsFree(Shares):
    """A core that is ready takes the next minibatch, from a counter in the store of torch.distributed.

    The counter runs through all minibatches of a pass: the first one that a core takes beyond its step is its first one
    of a later step, and the core is idle in those between.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._counter = PassCounter(rank)

    def connect(self, communicator: Communicator, device: torch.device) -> None:
        self._counter.connect(communicator, device, 'assign="as free"')
        super().connect(communicator, device)

    def _begin(self) -> None:
        self._step, self._num_before, self._num_in_step = self._steps.start, 0, 0
        if self._steps:
            self._num_in_step = self._schedule.num_minibatches(self._step)
        self._counter.begin()

    def _place(self, step: int, number: int) -> int | None:
        assert step <= self._step, f"step {step} was requested before step {self._step} was complete"
        while self._step == step and len(self._own.get(step, ())) <= number:
            self._claim()
        own = self._own.get(step, ())
        return own[number] if number < len(own) else None

    def _claim(self) -> None:
        """Take the next minibatch, which may be one of a later step; after the last one, only note the end."""
        claimed = self._counter.next()
        while claimed >= self._num_before + self._num_in_step:
            self._num_before += self._num_in_step
            self._step += 1
            if self._step >= self._steps.stop:
                return
            self._num_in_step = self._schedule.num_minibatches(self._step)
        self._own.setdefault(self._step, []).append(claimed - self._num_before)


@final
class BySpeed(Shares):
    """Cores get shares of a step in proportion to their measured speed; the shares are known before the step.

    Every few steps the cores sum their seconds for a minibatch, or for padding, so that an idle core may get a share
    again. The resulting shares hold from a step on that no loader has read yet.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._tables: list[tuple[int, tuple[float, ...]]] = []  # seconds of the cores, each from a step on
        self._timed: list[float] = []
        self._owners: dict[tuple[int, tuple[float, ...]], list[int]] = {}

    def connect(self, communicator: Communicator, device: torch.device) -> None:
        super().connect(communicator, device)
        self._tables = [(0, (1.0,) * communicator.num_replicas)]

    def _begin(self) -> None:
        self._tables = [(0, table) for _, table in self._tables[-1:]]  # when a pass begins, nothing has been read

    def _note(self, seconds: float, *, is_padding: bool) -> None:
        super()._note(seconds, is_padding=is_padding)
        self._timed.append(seconds)

    def _place(self, step: int, number: int) -> int | None:
        if step not in self._own:
            table = next(table for first, table in reversed(self._tables) if first <= step)
            key = self._schedule.num_minibatches(step), table
            if key not in self._owners:
                self._owners[key] = share_by_speed(*key)
            self._own[step] = [place for place, rank in enumerate(self._owners[key]) if rank == self.rank]
        own = self._own[step]
        return own[number] if number < len(own) else None

    def after_step(self, step: int) -> None:
        super().after_step(step)
        if (step + 1) % _EVERY:
            return
        cores = self._communicator.num_replicas
        sent = torch.zeros(2, cores, dtype=torch.float64 if self._device.type in ("cpu", "cuda") else torch.float32)
        with self._lock:
            num_ahead = max(self._own, default=step) - step  # steps of which this core's loader has read minibatches
        sent[:, self.rank] = torch.tensor([statistics.median(self._timed) if self._timed else 0.0, num_ahead])
        seconds, ahead = self._total(sent).tolist()
        self._timed = []
        known = self._tables[-1][1]
        if not all(seconds):  # a core without a measurement keeps its speed relative to the others
            known_sum = sum(old for old, new in zip(known, seconds, strict=True) if new)
            ratio = sum(seconds) / known_sum if known_sum else 1.0
            seconds = [new or old * ratio for old, new in zip(known, seconds, strict=True)]
        if not _are_close(seconds, known):
            self._change(step + 1 + round(max(ahead)), tuple(seconds))

    def _change(self, first_step: int, seconds: tuple[float, ...]) -> None:
        """From a step on, share by other speeds."""
        with self._lock:
            if max(self._own, default=-1) >= first_step:  # other cores, which are in the sum, would not learn of it
                rule = 'assign="by speed" needs a loader that is read by the loop itself'
                raise RuntimeError(f'{rule}, and not in another thread while cores agree: use assign="as free"')
            self._owners = {}
            self._tables = [*self._tables[-1:], (first_step, seconds)]


def _are_close(seconds: Sequence[float], known: Sequence[float]) -> bool:
    """Whether ratios of the times differ by less than a twentieth, so that shares need not change."""
    ratios = [new / old for new, old in zip(seconds, known, strict=True)]
    return max(ratios) <= 1.05 * min(ratios)


def share_by_speed(number: int, seconds: tuple[float, ...]) -> list[int]:
    """The rank of each minibatch of a step, so that the step takes the least time; round robin at equal speeds.

    >>> share_by_speed(5, (1.0, 3.0))
    [0, 0, 0, 1, 0]

    Args:
        number: how many minibatches the step has.
        seconds: how long a minibatch takes on each rank.
    """
    ends = [(one, rank) for rank, one in enumerate(seconds)]  # of its next minibatch
    heapify(ends)
    found = []
    for _ in range(number):
        end, rank = ends[0]
        found.append(rank)
        heapreplace(ends, (end + seconds[rank], rank))
    return found


SHARES: dict[Assign, type[Shares]] = {"as free": AsFree, "by speed": BySpeed}


def connect_cores(source: Any, communicator: Communicator, device: torch.device) -> None:
    """Let the cores of a :class:`MinibatchSource` share steps, unless by round robin. Every core must call it."""
    shares, counter = source.shares, source.counter
    if shares is not None and not shares.is_connected:
        shares.connect(communicator, device)
        shares.begin(source.schedule, source.epoch, source.first_step)
    if counter is not None and not counter.run:
        counter.connect(communicator, device, "OpenSteps")
        counter.begin()
