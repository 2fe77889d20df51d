"""OpenStep: the part of a core in a step whose number of minibatches is not known in advance."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from variable_batch_size.cores import devices
from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.data.cursor import Cursor
from variable_batch_size.data.sampler import MinibatchSource
from variable_batch_size.data.shares import PassCounter
from variable_batch_size.optim.gradients.accumulator import Counts
from variable_batch_size.schedules.open_steps import OpenSchedule

_SECONDS_FOR_OTHERS = 1.0  # in which cores that wait, too, write their positions


class OpenStep:
    """Counts what a core contributes to a step, lets cores in lockstep agree on its end, and names one that has none.

    A core that has ended its step waits for the others in the reduction. After `timeout` seconds it reads from the
    store where they are. They write that there only in steps that take long.
    """

    def __init__(
        self, sampler: MinibatchSource, cursor: Cursor, communicator: Communicator, device: torch.device
    ) -> None:
        schedule: Any = sampler.schedule
        assert isinstance(schedule, OpenSchedule)
        assert sampler.counter is not None
        self._sampler, self._cursor, self._communicator, self._device = sampler, cursor, communicator, device
        self._counter: PassCounter = sampler.counter
        self._timeout = schedule.timeout
        self._num_reduced = 0  # steps, with those that no core had a minibatch in
        self.is_epoch_over = True  # False while this core waits for the ends of the others' epochs
        if communicator.num_replicas > 1:
            communicator.timeout = timedelta(seconds=self._timeout)
        self.begin()

    def begin(self, *, keeps_reads: bool = False) -> None:
        """Before a step, or when the position was moved; after a step without minibatches, reads count for the next."""
        self._num_weighted = 0
        if not keeps_reads:
            self._num_read_before = self._sampler.num_read
        self._published = time.monotonic()
        self._is_done = (
            True  # whether this core has no more minibatches; in lockstep it waits for others before that, too
        )
        self._waits_since: float | None = None  # in lockstep, since this core has no more minibatches

    def close(self, *, has_minibatches: bool) -> None:
        """After the reduction of a step."""
        self._num_reduced += 1
        self.begin(keeps_reads=not has_minibatches)

    def note_minibatch(self, *, is_weighted: bool) -> None:
        """Count a minibatch of this core, and write its position if the step takes long."""
        self._num_weighted += is_weighted
        if time.monotonic() - self._published > self._timeout / 4 and self._counter.store is not None:
            self._publish(f"has run {self._cursor.num_own} minibatches of it and has not ended it")

    def counts(self) -> Counts:
        """What is summed with the gradients."""
        num_read = self._sampler.num_read - self._num_read_before
        return Counts(self._cursor.num_own, None, num_read, self._num_weighted)

    def agree(self, is_done: bool) -> bool:
        """In lockstep: whether no core has a further minibatch. Every core must call it in each round."""
        self._is_done = is_done
        if self._communicator.num_replicas == 1:
            return is_done
        with self.waiting(), devices.preserve_rng(self._device):
            more = int(self._communicator.total(torch.tensor([not is_done], dtype=torch.int64).to(self._device)))
        now = time.monotonic()
        if more and is_done:
            self._waits_since = now if self._waits_since is None else self._waits_since
            if now - self._waits_since > self._timeout:
                raise RuntimeError(self._who_is_missing())
        return not more

    def end_epoch(self, end_step: Callable[[], Any]) -> None:
        """Take part in the steps of cores that still have minibatches of the epoch. Every core must call it.

        It is over with a step before which all cores were here, for which each has left its mark.
        """
        store, self.is_epoch_over = self._counter.store, self._counter.store is None
        while not self.is_epoch_over:
            mark = f"{self._counter.run}/over/{self._num_reduced}"
            store.add(mark, 1)
            end_step()
            self.is_epoch_over = store.add(mark, 0) == self._communicator.num_replicas

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within, a wait for the other cores that exceeds the time-out raises with their positions."""
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if self._counter.store is None or time.monotonic() - began < self._timeout:
                raise
            raise RuntimeError(self._who_is_missing()) from error

    def _publish(self, text: str) -> None:
        self._counter.store.set(self._key(self._sampler.rank), f"{self._cursor.plan.step},{text}")
        self._published = time.monotonic()

    def _key(self, rank: int) -> str:
        return f"{self._counter.run}/position/{rank}"

    def _who_is_missing(self) -> str:
        """The positions of all cores in the step."""
        step, store = self._cursor.plan.step, self._counter.store
        number = f"{self._cursor.num_own} minibatches"
        self._publish(
            f"has ended it after {number}" if self._is_done else f"has run {number} of it and has not ended it"
        )
        time.sleep(_SECONDS_FOR_OTHERS)
        found = []
        for rank in range(self._sampler.num_replicas):
            text = "has not ended it"
            if store.check([self._key(rank)]):
                of, written = store.get(self._key(rank)).decode().split(",", 1)
                text = written if int(of) == step else text
            found.append(f"core {rank} {text}")
        waited = f"step {step} of the run, in epoch {self._cursor.epoch}, did not end within {self._timeout:g} seconds"
        advice = "pass last=True with the last minibatch of each core, or call end_step()"
        return f"{waited}: {'; '.join(found)}. On every core, {advice}."
