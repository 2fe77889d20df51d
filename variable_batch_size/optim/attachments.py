"""Attachments: what an optimizer steps after each minibatch, and the epochs of a run, up to its Limit."""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from variable_batch_size.checks import check_not_negative, check_one_of, check_positive_number, is_integer
from variable_batch_size.optim.lr_scheduler import load_schedulers, position_of, state_of_schedulers, step_to
from variable_batch_size.schedules.schedule import BaseSchedule

Per = Literal["update", "epoch", "samples", "tokens", "progress"]
PER: tuple[Per, ...] = get_args(Per)

logger = logging.getLogger(__name__)

_ROUNDING = 1e-9  # how far a sum of fractions may fall short of the whole number that it represents


@dataclass
class Follower:
    """A scheduler that makes a step whenever the run has advanced by `every` units."""

    scheduler: LRScheduler
    per: Per
    every: float
    reached: int | None = None  # the scheduler's steps when it was stepped here; None if that is unknown

    @classmethod
    def checked(cls, scheduler: LRScheduler, per: Per, every: float) -> "Follower":
        """A follower with valid arguments."""
        check_one_of(PER, per=per)
        check_positive_number(every=every)
        if isinstance(scheduler, ReduceLROnPlateau):
            found = "ReduceLROnPlateau, which depends on a metric: call its step(metric) yourself"
            raise ValueError(f"a scheduler that is attached must depend on its steps only, got {found}")
        return cls(scheduler, per, every)

    def follow(self, optimizer: Any) -> None:
        """Step the scheduler to the position of the run."""
        if self.reached not in (None, position_of(self.scheduler)):
            kind, found = type(self.scheduler).__name__, position_of(self.scheduler)
            raise RuntimeError(
                f"{kind} has made {found} steps, but the optimizer has stepped it to {self.reached}: "
                "don't call step() of an attached scheduler"
            )
        if self.per == "update":
            done: float = optimizer.steps_done
        elif self.per == "epoch":
            done = optimizer.epoch + optimizer.has_completed_epoch
        elif self.per == "samples":
            done = optimizer.samples_done
        elif self.per == "tokens":
            _check_weighted(optimizer, 'per="tokens"')
            done = optimizer.weight_done
        else:
            done = optimizer.late_progress  # without a wait
        is_exact = is_integer(done) and is_integer(self.every)
        step_to(self.scheduler, int(done // self.every if is_exact else done / self.every + _ROUNDING))
        self.reached = position_of(self.scheduler)

    def __str__(self) -> str:
        return f"{type(self.scheduler).__name__} with per={self.per!r}, every={self.every:g}"


@dataclass(frozen=True)
class Limit:
    """Where a run ends within an epoch: after the first step that reaches one of these."""

    progress: float | None = None
    samples: float | None = None
    tokens: float | None = None

    def __post_init__(self) -> None:
        check_positive_number(**{name: value for name, value in asdict(self).items() if value is not None})

    def is_reached(self, optimizer: Any) -> bool:
        """Whether the run has reached it: the same answer on all cores."""
        if self.samples is not None and optimizer.samples_done >= self.samples:
            return True
        if self.tokens is not None:
            _check_weighted(optimizer, "a limit of `tokens`")
            if optimizer.weight_done >= self.tokens:
                return True
        if self.progress is None:
            return False
        # a step is worth at most its scale, so only the last steps need to wait for the device
        most = max(1.0, optimizer.batch_size / optimizer.ref_batchsize)
        return bool(optimizer.late_progress + most >= self.progress and optimizer.progress >= self.progress)

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

    @contextmanager
    def applied(self, optimizer: Any, num_epochs: int | None) -> Iterator[None]:
        """In this context, the optimizer ends the run at the limit; the run has at most `num_epochs` epochs."""
        optimizer.limit, optimizer.num_epochs = None if self == Limit() else self, num_epochs
        optimizer.sampler.may_end_early = self != Limit()
        try:
            yield
        finally:
            optimizer.limit = optimizer.num_epochs = None
            optimizer.sampler.may_end_early = False

    def warn_unless_reached(self, optimizer: Any, num_epochs: int | None) -> None:
        """After all epochs of a trace: warn if it was too short."""
        if num_epochs is None and self != Limit() and not self.is_reached(optimizer) and optimizer.sampler.rank == 0:
            limit = ", ".join(f"{name}={value:g}" for name, value in asdict(self).items() if value is not None)
            done = f"{optimizer.samples_done} samples, progress {optimizer.progress:g}"
            logger.warning("%s ended before reaching %s, after %s", optimizer.sampler.schedule.name, limit, done)


def _check_weighted(optimizer: Any, what: str) -> None:
    if optimizer.minibatch_weights.is_weighted is False:
        raise ValueError(f"{what} needs the number of tokens of each minibatch: pass it as optimizer.step(weight=…)")


class Attachments:
    """The schedulers, logs and checkpoints of an optimizer, stepped in this order."""

    def __init__(self) -> None:
        self.is_empty = True
        self._followers: list[Follower] = []
        self._parts: list[Any] = []
        self._loaded: list[Mapping[str, Any]] = []  # states of schedulers that are not attached yet
        self._loaded_settings: list[dict[str, Any]] = []  # of the parameter groups, when these were loaded
        self._loaded_logs: list[Mapping[str, Any]] = []  # states of logs, which may be attached later

    def add(self, part: Any, optimizer: Any, *, per: Per, every: float | None) -> None:
        """Attach a scheduler, which continues from its loaded state if there is one, or another part."""
        self.is_empty = False
        if isinstance(part, LRScheduler):
            self._add_scheduler(part, optimizer, per, every)
        elif hasattr(part, "on_minibatch"):
            if any(part is other for other in self._parts):
                raise ValueError(f"{type(part).__name__} is attached already")
            if _has_epochs(part) and any(map(_has_epochs, self._parts)):
                raise ValueError(f"another {type(part).__name__} is attached already, and a run has one position")
            part.on_attach(optimizer)
            self._load_log(part)
            self._parts.append(part)
            self._parts.sort(key=_has_epochs)  # a checkpoint saves what the others have done
        else:
            kinds = "a scheduler of torch, a vbs.Log or a vbs.Checkpoint"
            raise ValueError(f"attach() takes {kinds}, got {type(part).__name__}")

    def _add_scheduler(self, scheduler: LRScheduler, optimizer: Any, per: Per, every: float | None) -> None:
        if every is None:
            if per == "tokens":
                raise ValueError('`every` must be given with per="tokens": the number of tokens per scheduler step')
            every = optimizer.ref_batchsize if per == "samples" else 1
        follower = Follower.checked(scheduler, per, every)
        if any(scheduler is other.scheduler for other in self._followers):
            raise ValueError(f"{type(scheduler).__name__} is attached already")
        if all(scheduler.optimizer is not one for one in optimizer.wrapped()):
            raise ValueError(f"{type(scheduler).__name__} belongs to another optimizer: attach it there")
        if self._loaded:
            saved, *self._loaded = self._loaded
            _load(follower, saved)
            for group, settings in zip(optimizer.param_groups, self._loaded_settings, strict=True):
                group.update(settings)  # a scheduler made after loading has already made its first step
        with (
            warnings.catch_warnings()
        ):  # torch expects an update before the first step, which may be in another session
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            follower.follow(optimizer)
        self._followers.append(follower)

    def check(self) -> None:
        """Raise if a scheduler of the loaded state or of the checkpoint is not attached, before training continues."""
        if self._loaded:
            names = ", ".join(saved["kind"] for saved in self._loaded)
            raise RuntimeError(f"the loaded state has a scheduler that was attached ({names}): attach it again first")
        self._loaded_logs = []  # of logs that this run does not have
        for checkpoint in filter(_has_epochs, self._parts):
            checkpoint.check_attached(self.schedulers)

    @property
    def names(self) -> list[str]:
        """What is attached, in words."""
        return [*map(str, self._followers), *(type(part).__name__ for part in self._parts)]

    def begin_pass(self, optimizer: Any) -> None:
        """The run has moved to an epoch: an epoch may have been left early."""
        for follower in self._followers:
            if follower.per == "epoch":
                follower.follow(optimizer)

    def after_minibatch(self, optimizer: Any, loss: Any, *, is_complete: bool) -> None:
        """Step everything after a minibatch, which may have completed a step."""
        for follower in self._followers if is_complete else ():
            follower.follow(optimizer)
        for part in self._parts:
            part.on_minibatch(loss)

    def epochs(self, optimizer: Any, num_epochs: int | None, limit: Limit) -> Iterator[int]:
        """The remaining epochs of a run: those of the checkpoint, if there is one."""
        limit.num_epochs(num_epochs, optimizer.sampler.schedule)
        checkpoint = next(filter(_has_epochs, self._parts), None)
        if checkpoint is None:
            return self._closing(_epochs(optimizer, num_epochs, limit))
        return self._closing(checkpoint.epochs(num_epochs, **asdict(limit)))

    def _closing(self, epochs: Iterator[int]) -> Iterator[int]:
        try:
            yield from epochs
        finally:  # also where a loop is left early
            for part in self._parts:
                if hasattr(part, "close"):
                    part.close()

    def state_dict(self) -> dict[str, Any]:
        """The state of the schedulers; empty if there are none."""
        saved = [
            {"kind": type(one.scheduler).__name__, "per": one.per, "every": one.every, "state": state}
            for one, state in zip(self._followers, state_of_schedulers(self.schedulers), strict=True)
        ]
        return {"schedulers": saved} if saved else {}

    def load_state_dict(self, saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Load the states of attached schedulers; those of others are kept until they are attached."""
        for follower in self._followers:
            follower.reached = None
        for follower, one in zip(self._followers, saved, strict=False):
            _load(follower, one)
        self._loaded = list(saved[len(self._followers) :])
        self._loaded_settings = [{name: value for name, value in one.items() if name != "params"} for one in groups]

    def state_of_logs(self) -> list[dict[str, Any]]:
        """What attached logs have summed since their last records, over all cores. Every core must call it."""
        return [{"every": part.every, "state": part.state_dict()} for part in filter(_is_log, self._parts)]

    def load_state_of_logs(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Load the states of logs that are attached, or will be before the next minibatch."""
        self._loaded_logs = list(saved)
        for part in self._parts:
            self._load_log(part)

    def _load_log(self, part: Any) -> None:
        """Load the first state of a log that makes a record as often as this one, if it is one."""
        saved = next((one for one in self._loaded_logs if _is_log(part) and one["every"] == part.every), None)
        if saved is not None:
            self._loaded_logs.remove(saved)
            part.load_state_dict(saved["state"])

    @property
    def schedulers(self) -> list[LRScheduler]:
        """The attached schedulers."""
        return [follower.scheduler for follower in self._followers]


def _has_epochs(part: Any) -> bool:
    return hasattr(part, "epochs")


def _is_log(part: Any) -> bool:
    return hasattr(part, "load_state_dict") and hasattr(part, "every")


def _load(follower: Follower, saved: Mapping[str, Any]) -> None:
    found = (saved["kind"], saved["per"], saved["every"])
    if found != (type(follower.scheduler).__name__, follower.per, follower.every):
        before = f"{saved['kind']} with per={saved['per']!r}, every={saved['every']:g}"
        raise ValueError(f"the scheduler was {before} when the state was saved, but is now {follower}")
    load_schedulers([follower.scheduler], [saved["state"]])


def _epochs(optimizer: Any, num_epochs: int | None, limit: Limit) -> Iterator[int]:
    epoch, first_step, sampler = optimizer.epoch, optimizer.epoch_step, optimizer.sampler
    # whether the epoch has a minibatch left is looked up in the schedule, as a policy decides where its epochs end
    if next(sampler.schedule.steps_from(epoch, first_step), None) is None:
        epoch, first_step = epoch + 1, 0
    most = limit.num_epochs(num_epochs, sampler.schedule)
    with limit.applied(optimizer, most):
        while (most is None or epoch < most) and not limit.is_reached(optimizer):
            sampler.set_epoch(epoch, first_step)
            yield epoch
            sampler.end_epoch()
            epoch, first_step = epoch + 1, 0
            most = limit.epochs_now(num_epochs, sampler.schedule)
    limit.warn_unless_reached(optimizer, num_epochs)
