"""Attachments: the schedulers, logs, checkpoints and other parts that a user has attached to an optimizer."""

import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from variable_batch_size.checks import check_one_of, check_positive_number, is_integer
from variable_batch_size.data.cursor import StepPlan
from variable_batch_size.optim.lr_scheduler import Stateful, load_schedulers, position_of, state_of_schedulers, step_to
from variable_batch_size.optim.parts.part import Part
from variable_batch_size.optim.proxy import OptimizerProxy
from variable_batch_size.optim.run import Limit, Run

Per = Literal["update", "epoch", "samples", "tokens", "progress"]
PER: tuple[Per, ...] = get_args(Per)

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

    def follow(self, run: Run) -> None:
        """Step the scheduler to the position of the run."""
        if self.reached not in (None, position_of(self.scheduler)):
            kind, found = type(self.scheduler).__name__, position_of(self.scheduler)
            raise RuntimeError(
                f"{kind} has made {found} steps, but the optimizer has stepped it to {self.reached}: "
                "don't call step() of an attached scheduler"
            )
        if self.per == "update":
            done: float = run.steps_done
        elif self.per == "epoch":
            done = run.epoch + run.has_completed_epoch
        elif self.per == "samples":
            done = run.samples_done
        elif self.per == "tokens":
            done = run.weight_done('per="tokens"')
        else:
            done = run.late_progress  # without a wait
        is_exact = is_integer(done) and is_integer(self.every)
        step_to(self.scheduler, int(done // self.every if is_exact else done / self.every + _ROUNDING))
        self.reached = position_of(self.scheduler)

    def __str__(self) -> str:
        return f"{type(self.scheduler).__name__} with per={self.per!r}, every={self.every:g}"


class EpochLoop(Part):
    """A part that has the loop over epochs, as a checkpoint does."""

    @abstractmethod
    def epochs(
        self,
        num_epochs: int | None = None,
        *,
        progress: float | None = None,
        samples: float | None = None,
        tokens: float | None = None,
    ) -> Iterator[int]:
        """The remaining epochs of the run."""

    @abstractmethod
    def check_attached(self, attached: Sequence[Stateful]) -> None:
        """Raise if not all that must be attached is, before training continues."""


class Followers(Part):
    """Steps the attached schedulers after each step, and at the end of an epoch, which may be left early."""

    def __init__(self) -> None:
        self.all: list[Follower] = []

    def begin_pass(self, run: Run) -> None:
        self._run = run
        for follower in self.all:
            if follower.per == "epoch":
                follower.follow(run)

    def after_minibatch(self, plan: StepPlan, loss: Any) -> None:
        for follower in self.all if plan.is_last else ():
            follower.follow(self._run)


class Attachments:
    """What was attached to an optimizer: schedulers, and parts such as logs and checkpoints."""

    def __init__(self) -> None:
        self._followers = Followers()
        self._parts: list[Part] = []
        self._loaded: list[Mapping[str, Any]] = []  # states of schedulers that are not attached yet
        self._loaded_settings: list[dict[str, Any]] = []  # of the parameter groups, when these were loaded
        self._loaded_parts: list[Mapping[str, Any]] = []  # states of parts, which may be attached later

    @property
    def parts(self) -> list[Part]:
        """These, in the order in which they are stepped: a checkpoint saves what the others have done."""
        return [*([self._followers] if self._followers.all else []), *self._parts]

    def add(self, part: Any, optimizer: OptimizerProxy, run: Run, *, per: Per, every: float | None) -> None:
        """Attach a scheduler or another part, which continues from its loaded state if there is one."""
        if isinstance(part, LRScheduler):
            self._add_scheduler(part, optimizer, run, per, every)
        elif isinstance(part, Part):
            if any(part is other for other in self._parts):
                raise ValueError(f"{type(part).__name__} is attached already")
            if isinstance(part, EpochLoop) and self._loop is not None:
                raise ValueError(f"another {type(part).__name__} is attached already, and a run has one position")
            part.on_attach(optimizer)
            self._load_part(part)
            self._parts.append(part)
            self._parts.sort(key=lambda one: isinstance(one, EpochLoop))
            part.begin_pass(run)
        else:
            kinds = "a scheduler of torch, a vbs.Log, a vbs.Checkpoint or another vbs.Part"
            raise ValueError(f"attach() takes {kinds}, got {type(part).__name__}")

    def _add_scheduler(
        self, scheduler: LRScheduler, optimizer: OptimizerProxy, run: Run, per: Per, every: float | None
    ) -> None:
        if every is None:
            if per == "tokens":
                raise ValueError('`every` must be given with per="tokens": the number of tokens per scheduler step')
            every = run.ref_batchsize if per == "samples" else 1
        follower = Follower.checked(scheduler, per, every)
        if any(scheduler is other.scheduler for other in self._followers.all):
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
            follower.follow(run)
        self._followers.all.append(follower)
        self._followers.begin_pass(run)

    def check(self) -> None:
        """Raise if a scheduler of the loaded state or of the checkpoint is not attached, before training continues."""
        if self._loaded:
            names = ", ".join(saved["kind"] for saved in self._loaded)
            raise RuntimeError(f"the loaded state has a scheduler that was attached ({names}): attach it again first")
        self._loaded_parts = []  # of parts that this run does not have
        if (loop := self._loop) is not None:
            loop.check_attached(self.schedulers)

    @property
    def _loop(self) -> EpochLoop | None:
        return next((part for part in self._parts if isinstance(part, EpochLoop)), None)

    @property
    def names(self) -> list[str]:
        """What is attached, in words."""
        of_parts = [name for part in self._parts for name in (type(part).__name__, *part.names)]
        return [*map(str, self._followers.all), *of_parts]

    def epochs(self, run: Run, num_epochs: int | None, limit: Limit) -> Iterator[int]:
        """The remaining epochs of a run: those of the checkpoint, if there is one."""
        limit.num_epochs(num_epochs, run.sampler.schedule)
        if (loop := self._loop) is None:
            return self._closing(run.epochs(num_epochs, limit))
        return self._closing(loop.epochs(num_epochs, **asdict(limit)))

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
            for one, state in zip(self._followers.all, state_of_schedulers(self.schedulers), strict=True)
        ]
        return {"schedulers": saved} if saved else {}

    def load_state_dict(self, saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Load the states of attached schedulers; those of others are kept until they are attached."""
        for follower in self._followers.all:
            follower.reached = None
        for follower, one in zip(self._followers.all, saved, strict=False):
            _load(follower, one)
        self._loaded = list(saved[len(self._followers.all) :])
        self._loaded_settings = [{name: value for name, value in one.items() if name != "params"} for one in groups]

    def state_of_parts(self) -> list[dict[str, Any]]:
        """The state of the parts that have one. Every core must call it, as a log sums over all cores."""
        states = [(part, part.state_dict()) for part in self._parts]
        return [{**_kind_of(part), "state": state} for part, state in states if state]

    def load_state_of_parts(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Load the states of parts that are attached, or will be before the next minibatch."""
        self._loaded_parts = list(saved)
        for part in self._parts:
            self._load_part(part)

    def _load_part(self, part: Part) -> None:
        """Load the first state of a part of the same kind, if there is one."""
        kind = _kind_of(part)
        saved = next((one for one in self._loaded_parts if {name: one[name] for name in kind} == kind), None)
        if saved is not None:
            self._loaded_parts.remove(saved)
            part.load_state_dict(saved["state"])

    @property
    def schedulers(self) -> list[LRScheduler]:
        """The attached schedulers."""
        return [follower.scheduler for follower in self._followers.all]


def _kind_of(part: Part) -> dict[str, Any]:
    return {"kind": type(part).__name__, "every": getattr(part, "every", None)}


def _load(follower: Follower, saved: Mapping[str, Any]) -> None:
    found = (saved["kind"], saved["per"], saved["every"])
    if found != (type(follower.scheduler).__name__, follower.per, follower.every):
        before = f"{saved['kind']} with per={saved['per']!r}, every={saved['every']:g}"
        raise ValueError(f"the scheduler was {before} when the state was saved, but is now {follower}")
    load_schedulers([follower.scheduler], [saved["state"]])
