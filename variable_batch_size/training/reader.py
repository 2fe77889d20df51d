"""Reader: one pass of a core over a stream, of which it keeps the minibatches that are its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from variable_batch_size.schedules.layout import Layout
from variable_batch_size.schedules.schedule import Schedule
from variable_batch_size.training.source import Source
from variable_batch_size.training.turns import Turns, number_behind, refuse_state

logger = logging.getLogger(__name__)

_BEGINNING = {"num_read": 0, "stream": None}


class Reader:
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
        source: Source,
        schedule: Layout,
        *,
        rank: int,
        epoch: int,
        first_step: int,
        is_sharded: bool,
        turns: Turns,
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
            num_rounds, begin = self._schedule.num_rounds(step, self._rank), source.num_read
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
        if round + 1 == self._schedule.num_rounds(step, self._rank):
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
            if len(own) < self._schedule.num_rounds(step, self._rank):
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
