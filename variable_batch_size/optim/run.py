"""Run: the position of a run, what it has done so far, its limit, and the loop over its epochs."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import final

import torch

from variable_batch_size.checks import check_not_negative, check_positive_number
from variable_batch_size.cores.communicator import Communicator
from variable_batch_size.cores.detect import everyone_for
from variable_batch_size.data.cursor import Cursor, RunCount
from variable_batch_size.data.sampler import MinibatchSource
from variable_batch_size.optim.flow import Flow
from variable_batch_size.optim.token_weights import TokenWeights
from variable_batch_size.rules.numbers import Number
from variable_batch_size.schedules.schedule import BaseSchedule

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limit:
    """Where a run ends within an epoch: after the first step that reaches one of these."""

    progress: float | None = None
    samples: float | None = None
    tokens: float | None = None

    def __post_init__(self) -> None:
        check_positive_number(**{name: value for name, value in asdict(self).items() if value is not None})

    def num_epochs(self, given: int | None, schedule: BaseSchedule) -> int | None:
        """The most epochs that a run can have; None if this limit is its only end."""
        number = schedule.num_epochs if given is None else given
        if number is None:
            if self == Limit():
                raise ValueError("`num_epochs` or a limit such as `samples` must be given: the trace has no end")
            return None
        check_not_negative(num_epochs=number)
        if number:
            schedule.steps(number - 1)  # raises if the trace has fewer
        return number

    def epochs_now(self, given: int | None, schedule: BaseSchedule) -> int | None:
        """The same during the run: a watched trace may have become shorter or longer."""
        numbers = [number for number in (given, schedule.num_epochs) if number is not None]
        return min(numbers, default=None)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value:g}" for name, value in asdict(self).items() if value is not None)


@final
class Run:
    """What an optimizer has done so far, and where it is: what its parts may know of it.

    Attributes:
        sampler: the source of the minibatches.
        cursor: the position; set before the first minibatch, as a policy decides the first batch sizes.
        weights: of minibatches, and their sum so far.
        steps_done: steps so far, skipped ones included.
        samples_done: samples in these.
        steps_made: steps with this object, whatever state was loaded in between.
        limit: within epochs() that have one.
        num_epochs: likewise.
        minibatches: how many of the pass have run.
        is_over: whether the run has reached its limit in this pass.
        restart_seconds: to save and to resume, measured by a checkpoint.
    """

    cursor: Cursor

    def __init__(
        self,
        sampler: MinibatchSource,
        parameters: Callable[[], Iterable[torch.nn.Parameter]],
        flow: Flow,
        ref_batchsize: int,
    ) -> None:
        self.sampler, self._parameters, self._flow, self.ref_batchsize = sampler, parameters, flow, ref_batchsize
        self.like = next(iter(parameters()))  # whose device is that of all
        self.weights = TokenWeights(self.like.device, is_required=sampler.needs_weights)
        self.steps_done = self.samples_done = self.steps_made = 0
        self.limit: Limit | None = None
        self.num_epochs: int | None = None
        self.restart_seconds: float | None = None
        self.begin_pass()

    def begin_pass(self) -> None:
        """Count the minibatches of another pass over the loader."""
        self.minibatches: RunCount = self.sampler.new_count()
        self.is_over = False

    @property
    def epoch(self) -> int:
        """The number of the epoch."""
        return self.cursor.epoch

    @property
    def epoch_step(self) -> int:
        """How many steps of the epoch are done."""
        return self.cursor.epoch_step

    @property
    def has_completed_epoch(self) -> bool:
        """Whether all steps of the epoch are done."""
        return self.cursor.next is None

    @property
    def batch_size(self) -> int:
        """The batch size of the step that the latest minibatch belongs to; at first, of the epoch's first step."""
        return self.cursor.plan.batch_size

    @property
    def progress(self) -> float:
        """How many steps at `ref_batchsize` the run is worth so far; may wait for the device."""
        self._flow.settle()
        return float(self._flow.scaler.progress)

    @property
    def late_progress(self) -> float:
        """The progress that the host has without waiting: on an accelerator, it might not include the latest step."""
        return self._flow.late_progress

    @property
    def rule_name(self) -> str:
        return type(self._flow.rule).__name__

    def everyone(self) -> Communicator:
        """All ranks of the run, those with other shards of the parameters as well."""
        return everyone_for(self._parameters(), self.sampler.process_group)

    def noise_scale_in_samples(self) -> float | None:
        """The measured noise scale; None before the first estimate. Raises RuntimeError if nothing measures it."""
        return self._flow.noise_meter().scale_in_samples()

    def weight_done(self, what: str) -> float:
        """The sum of the weights of all minibatches so far, which waits for the device; raises if there are none."""
        if self.weights.is_weighted is False:
            raise ValueError(
                f"{what} needs the number of tokens of each minibatch: pass it as optimizer.step(weight=…)"
            )
        return self.weights.done

    def count(self, samples: int, weight: Number | None) -> None:
        """Count a step that is complete."""
        if not self.sampler.schedule.is_live:  # otherwise the next one may change
            self.cursor.look_ahead()
        self.steps_done += 1
        self.steps_made += 1
        self.samples_done += samples
        if weight is not None:
            self.weights.add(weight)

    def is_at(self, limit: Limit) -> bool:
        """Whether the run has reached a limit: the same answer on all cores."""
        if limit.samples is not None and self.samples_done >= limit.samples:
            return True
        if limit.tokens is not None and self.weight_done("a limit of `tokens`") >= limit.tokens:
            return True
        if limit.progress is None:
            return False
        # a step is worth at most its scale, so only the last steps need to wait for the device
        most = max(1.0, self.batch_size / self.ref_batchsize)
        return bool(self.late_progress + most >= limit.progress and self.progress >= limit.progress)

    @property
    def has_ended(self) -> bool:
        """Whether the run has reached its limit, if it has one."""
        return self.limit is not None and self.is_at(self.limit)

    def end_if_due(self) -> None:
        """After a step: if the run has reached its limit, let the loader have no more minibatches."""
        if self.has_ended:
            self.is_over = True
            self.sampler.end_run(self.minibatches.number)

    @contextmanager
    def limited(self, limit: Limit, num_epochs: int | None) -> Iterator[None]:
        """In this context, the run ends at the limit, and has at most `num_epochs` epochs."""
        self.limit, self.num_epochs = None if limit == Limit() else limit, num_epochs
        self.sampler.may_end_early = limit != Limit()
        try:
            yield
        finally:
            self.limit = self.num_epochs = None
            self.sampler.may_end_early = False

    def epochs(self, num_epochs: int | None, limit: Limit) -> Iterator[int]:
        """The remaining epochs, with ``set_epoch`` called for each."""
        epoch, first_step, sampler = self.epoch, self.epoch_step, self.sampler
        # whether the epoch has a minibatch left is looked up in the schedule, as a policy decides where its epochs end
        if next(sampler.schedule.steps_from(epoch, first_step), None) is None:
            epoch, first_step = epoch + 1, 0
        most = limit.num_epochs(num_epochs, sampler.schedule)
        with self.limited(limit, most):
            while (most is None or epoch < most) and not self.has_ended:
                sampler.set_epoch(epoch, first_step)
                yield epoch
                sampler.end_epoch()
                epoch, first_step = epoch + 1, 0
                most = limit.epochs_now(num_epochs, sampler.schedule)
        self.warn_unless_at(limit, num_epochs)

    def warn_unless_at(self, limit: Limit, num_epochs: int | None) -> None:
        """After all epochs of a trace: warn if it was too short for the limit."""
        if num_epochs is None and limit != Limit() and not self.is_at(limit) and self.sampler.rank == 0:
            done = f"{self.samples_done} samples, progress {self.progress:g}"
            logger.warning("%s ended before reaching %s, after %s", self.sampler.schedule.name, limit, done)
