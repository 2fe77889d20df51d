"""OpenStep: the part of a core in a step whose number of minibatches is not known in advance."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, final

import torch

from variable_batch_size.cores import devices
from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.data.cursor import Cursor, StepPlan
from variable_batch_size.data.sampler import MinibatchSource
from variable_batch_size.data.shares import PassCounter
from variable_batch_size.optim.buffers import Buffers
from variable_batch_size.optim.gradients.accumulator import Counts, GradientAccumulator, StepGradient
from variable_batch_size.optim.loss_scale import LossScale
from variable_batch_size.optim.norm_layers import MEASURES
from variable_batch_size.optim.own_norms import OWN_NORM
from variable_batch_size.optim.steps import Steps
from variable_batch_size.optim.token_weights import TokenWeights
from variable_batch_size.rules.rule import Rule
from variable_batch_size.schedules.open_steps import OpenSchedule

logger = logging.getLogger(__name__)

Data = TypeVar("Data")

_SECONDS_FOR_OTHERS = 1.0  # in which other waiting cores write their positions
_END: Any = object()  # after the last minibatch


def refuse_options(
    options: Mapping[str, Any], sampler: MinibatchSource, rule: Rule, communicator: Communicator
) -> None:
    """Raise in open steps for what needs the number of minibatches before a step is complete."""
    if not sampler.schedule.is_open:
        return
    names = ("gradient_as_bucket_view", "reduce_scatter_once", "seed_minibatches")
    wrong = {f"`{name}`": "False" for name in names if options[name]}
    if options["measure_noise"] in (MEASURES, OWN_NORM):
        wrong["`measure_noise`"] = "True or False"
    if communicator.is_one_program:
        wrong["the device"] = "one that is not XLA's, where cores run the same graphs,"
    if rule.sums_gradients:
        wrong["`rule`"] = "one of mean gradients"
    for name, allowed in wrong.items():
        raise ValueError(f"{name} must be {allowed} with OpenSteps, whose minibatches are not known in advance")


@final
class OpenStep(Steps):
    """Counts what a core contributes to a step, agrees on its end in lockstep, and names cores that have not ended it.

    A core that has ended its step waits for the others in the reduction. After `timeout` seconds it reads the positions
    of the others from the store. They write these only in steps that take long.
    """

    def __init__(
        self,
        sampler: MinibatchSource,
        cursor: Cursor,
        accumulator: GradientAccumulator,
        weights: TokenWeights,
        loss_scale: LossScale,
        buffers: Buffers,
        *,
        skips: bool,  # whether updates are skipped without a GradScaler, too
        device: torch.device,
    ) -> None:
        assert sampler.counter is not None
        communicator = accumulator.communicator
        self._sampler, self._cursor, self._communicator, self._device = sampler, cursor, communicator, device
        self._accumulator, self._weights = accumulator, weights
        self._loss_scale, self._buffers, self._skips = loss_scale, buffers, skips
        self._counter: PassCounter = sampler.counter
        self._timeout = self._schedule.timeout
        self._is_last = False  # whether the next minibatch is the core's last one in the step, according to the user
        self._is_last_in_loop: bool | None = None  # the same within minibatches(); None outside of it
        self._is_at_end = False  # whether this core has no more minibatches in the epoch
        if communicator.num_replicas > 1:
            communicator.timeout = timedelta(seconds=self._timeout)
        self.begin()

    def begin(self, *, keeps_reads: bool = False) -> None:
        """Before a step, or when the position was moved; after a step without minibatches, reads count for the next."""
        self._num_weighted = 0
        if not keeps_reads:
            self._num_read_before = self._sampler.num_read
        self._published = time.monotonic()
        self._waits_since: float | None = None  # in lockstep, since this core has no more minibatches
        self._ends_with_next = False  # in lockstep, whether the step does: the cores agree on it before each minibatch

    def follow(self) -> None:
        self._is_last, self._is_last_in_loop = False, None
        self.begin()

    def end_with_next(self, is_last: bool) -> None:
        if self._is_last_in_loop is not None:
            raise ValueError(f"`last` must be None within minibatches(), which determines it, got {is_last}")
        self._is_last = is_last

    def end(self) -> None:
        if self._cursor.schedule.lockstep:
            rule = "end_step() must not be called in lockstep, as with fully_shard, where cores run padding minibatches"
            raise RuntimeError(f"{rule}: loop over optimizer.minibatches(…, padding=…)")
        if self._accumulator.has_gradients():
            raise RuntimeError("end_step() was called after backward(): pass last=True to step() instead")
        self._cursor.is_done, self._is_last_in_loop = True, None

    def minibatches(
        self, own: Iterable[Data], padding: Data | None, optimizer: Any, prepare_next: Callable[[], None]
    ) -> Iterator[Data]:
        cursor, is_lockstep = self._cursor, self._cursor.schedule.lockstep
        if optimizer._runs.has_reached(self._sampler.num_to_run):  # the run has ended, and step() would do nothing
            return
        if cursor.is_accumulating:
            rule = "minibatches() must begin a step, but this core has run minibatches of one that it has not ended"
            raise RuntimeError(f"{rule}: call end_step() before leaving a loop")
        left = iter(own)
        data = next(left, _END)
        if data is _END:
            if not is_lockstep:
                optimizer.end_step()
                return
            if padding is None:
                raise ValueError("`padding` must be given in lockstep: it is what a core without minibatches runs")
            cursor.is_done, data = True, padding
            prepare_next()
        following = data
        try:
            while True:
                following = following if cursor.is_done else next(left, _END)
                self._is_last_in_loop, number = following is _END, optimizer._runs.number
                if is_lockstep:
                    self._agree(is_done=cursor.is_done or self._is_last_in_loop)
                yield data
                if optimizer._runs.number != number + 1:
                    raise RuntimeError("step() must be called once for each minibatch that minibatches() yields")
                if not optimizer.is_accumulating:
                    return
                data = data if cursor.is_done else following
        finally:
            self._is_last_in_loop = None

    def advance(self) -> StepPlan:
        """Advance to a minibatch, with which all cores may have ended the step."""
        cursor = self._cursor
        if self._sampler.is_shared:
            raise RuntimeError("open steps need a sampler of one optimizer, but several are attached to this one")
        if cursor.schedule.lockstep and self._is_last_in_loop is None:
            rule = "step() must be called within minibatches() in lockstep, as with fully_shard"
            advice = "loop over optimizer.minibatches(…, padding=…)"
            raise RuntimeError(f"{rule}, where cores that are done run padding minibatches: {advice}")
        is_done = cursor.is_done or self._is_last or bool(self._is_last_in_loop)
        is_last, self._is_last = self._ends_with_next if cursor.schedule.lockstep else is_done, False
        plan = cursor.advance_open(is_done=is_done, is_last=is_last)
        self._num_weighted += bool(self._weights.is_weighted) and not plan.is_padding
        if time.monotonic() - self._published > self._timeout / 4 and self._counter.store is not None:
            self._publish(f"has run {self._cursor.num_own} minibatches of it and has not ended it")
        return plan

    def reduce(self, plan: StepPlan) -> StepGradient | None:
        """The gradient of a step, whose number of minibatches is known by then; None if no core has had any."""
        num_read, is_scaled = self._sampler.num_read - self._num_read_before, self._loss_scale.is_used
        of_own = num_read, self._num_weighted, int(is_scaled), int(self._is_at_end)
        self._accumulator.counts = Counts(self._cursor.num_own, None, *of_own)
        with self._waiting():
            gradient = self._accumulator.reduce(plan)
        totals = self._accumulator.totals
        assert totals is not None
        size = self._schedule.append(totals.own, totals.read) if totals.own else 0
        self._cursor.close(totals.own, size)
        self.begin(keeps_reads=not totals.own)
        if self._is_at_end:
            self._is_at_end = totals.at_end < self._communicator.num_replicas
        elif not totals.own and self._sampler.rank == 0:
            logger.warning("%s: no core has a minibatch, so there is no update", str(self._cursor))
        if not totals.own:
            return None
        # a core without minibatches learns from the others
        self._weights.is_weighted, self._loss_scale.is_used = totals.weighted > 0, totals.scaled > 0
        self._buffers.expect_skips(self._skips or totals.scaled > 0 or not self._loss_scale.is_absent)
        return gradient

    def _agree(self, *, is_done: bool) -> None:
        """In lockstep, before a minibatch: whether it is the last one of all cores. Every core must call it each time.

        Cores wait for each other here, and not in the forward pass, where the time-out is that of the process group.
        """
        more = int(not is_done)
        if self._communicator.num_replicas > 1:
            with self._waiting(), devices.preserve_rng(self._device):
                more = int(self._communicator.total(torch.tensor([more], dtype=torch.int64).to(self._device)))
        self._ends_with_next, now = not more, time.monotonic()
        if more and is_done:
            self._waits_since = now if self._waits_since is None else self._waits_since
            if now - self._waits_since > self._timeout:
                raise RuntimeError(self._who_is_missing())

    def end_epoch(self, end_step: Callable[[], Any]) -> None:
        """End the step, and take part in the steps of cores that have more minibatches of the epoch, until none has.

        The number of cores that are here is summed with the gradients of each step. In lockstep, no core may have more
        than others.
        """
        if self._cursor.schedule.lockstep:
            return
        self._is_at_end = self._communicator.num_replicas > 1 or self._cursor.is_accumulating
        try:
            while self._is_at_end:
                end_step()
        finally:
            self._is_at_end = False

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """In this context, waiting for the other cores beyond the time-out raises an error with their positions."""
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if self._counter.store is None or time.monotonic() - began < self._timeout:
                raise
            raise RuntimeError(self._who_is_missing()) from error

    def state_dict(self) -> dict[str, Any]:
        return {"open": self._schedule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "open" in state:
            self._schedule.load_state_dict(state["open"])

    @property
    def _schedule(self) -> OpenSchedule:
        schedule: Any = self._sampler.schedule  # a checkpoint may replace it
        assert isinstance(schedule, OpenSchedule)
        return schedule

    def _publish(self, text: str) -> None:
        self._counter.store.set(self._key(self._sampler.rank), f"{self._cursor.plan.step},{text}")
        self._published = time.monotonic()

    def _key(self, rank: int) -> str:
        return f"{self._counter.run}/position/{rank}"

    def _who_is_missing(self) -> str:
        """The positions of all cores in the step."""
        step, store = self._cursor.plan.step, self._counter.store
        has_ended = self._cursor.is_done or not self._cursor.schedule.lockstep
        own = "has ended it" if has_ended else "has not ended it and waits"
        self._publish(f"{own} after {self._cursor.num_own} minibatches")
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
