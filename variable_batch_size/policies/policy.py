"""Policy: chooses the batch size of the next steps, within bounds, from a snapshot of the run."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypedDict, final

from typing_extensions import Unpack

from variable_batch_size.checks import check_positive, copy_for_run, is_integer


def depth_of(batch_size: Any, minibatch_size: int, cores: int) -> Any:
    """Number of minibatches of the busiest core in a step; of each one, if batch sizes are an array."""
    return -(-batch_size // (minibatch_size * cores))


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The inputs of a policy's decision; None for unknown values.

    >>> situation = Situation(cores=4, minibatch_size=32, ref_batchsize=128, batch_size=320)
    >>> situation.depth, situation.knows_noise
    (3, False)
    """

    cores: int  # number of cores
    machines: int = 1  # of these cores, if a simulation has machines
    minibatch_size: int  # samples per forward and backward pass of one core
    max_minibatch_size: int | None = None  # the largest, if they grow with the batch size
    ref_batchsize: int  # the batch size for which the inner optimizer's settings were chosen
    batch_size: int | None = None  # of the last decision; None before the first
    largest_batch_size: int = 0  # of all steps so far
    noise_scale: float | None = None  # V/G² of the gradient, in samples; infinite if the estimate of G² is not positive
    seconds_accumulating: float | None = None  # of an accumulating minibatch
    seconds_updating: float | None = None  # of the minibatch that completes a step, including all-reduce and update
    timed_depths: tuple[int, ...] = ()  # minibatches of the busiest core in the steps timed on this number of cores
    is_fresh: bool = False  # whether no step was made yet since the run began or resumed on these cores
    steps_done: int = 0  # steps so far
    samples_done: int = 0  # samples so far
    progress: float = 0.0  # steps at `ref_batchsize` that these are worth
    loss: float | None = None  # the last loss recorded by a log
    capacity: int | None = None  # the most samples in a step, which is the capacity of an epoch

    @property
    def depth(self) -> int | None:
        """Number of minibatches of the busiest core in a step of the current batch size."""
        return None if self.batch_size is None else depth_of(self.batch_size, self.minibatch_size, self.cores)

    @property
    def knows_noise(self) -> bool:
        """Whether the noise scale is known; it may be infinite."""
        return self.noise_scale is not None and not math.isnan(self.noise_scale) and self.noise_scale >= 0


class BoundsOptions(TypedDict, total=False):
    """The arguments of :class:`Bounds`, which all policies take."""

    min_batch_size: int | None
    max_batch_size: int | None
    min_per_core: int | None
    max_per_core: int | None
    max_growth: float
    threshold: float


class PolicyOptions(BoundsOptions, total=False):
    """The arguments of :class:`Policy`, which all policies take."""

    every: int
    lead: int


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The allowed batch sizes: multiples of the minibatch size within limits.

    >>> bounds = Bounds(max_batch_size=1000, max_growth=2.0)
    >>> situation = Situation(cores=4, minibatch_size=32, ref_batchsize=128, batch_size=320)
    >>> [bounds.nearest(size, situation) for size in (1, 100, 640, 100_000)]
    [32, 96, 640, 640]
    """

    min_batch_size: int | None = None  # the smallest batch size; None for one minibatch
    max_batch_size: int | None = None  # the largest; None for the capacity of an epoch
    min_per_core: int | None = None  # the fewest samples of any core in a step; None if cores may be idle
    max_per_core: int | None = None  # the most samples of any core in a step; None for no bound
    max_growth: float = math.inf  # the largest factor for one decision; see :meth:`reachable` for what is beyond it
    threshold: float = 1.0  # the smallest factor by which a change must affect :meth:`Policy.worth`

    def __post_init__(self) -> None:
        for low, high in (("min_batch_size", "max_batch_size"), ("min_per_core", "max_per_core")):
            least, most = getattr(self, low), getattr(self, high)
            check_positive(**{name: size for name, size in ((low, least), (high, most)) if size is not None})
            if least is not None and most is not None and least > most:
                raise ValueError(f"`{low}` must be at most `{high}`, which is {most}, got {least}")
        if not self.max_growth > 1:
            raise ValueError(f"`max_growth` must be above 1, got {self.max_growth!r}")
        if not 1 <= self.threshold < math.inf:
            raise ValueError(f"`threshold` must be finite and at least 1, got {self.threshold!r}")

    def minibatches(self, situation: Situation) -> range:
        """The allowed numbers of minibatches in a step; ValueError if the bounds allow none."""
        m, cores = situation.minibatch_size, situation.cores
        least = [1, -(-(self.min_batch_size or 1) // m), cores * -(-(self.min_per_core or 0) // m)]
        limits = ((self.max_batch_size, 1), (self.max_per_core, cores), (situation.capacity, 1), (2**62, 1))
        most = min(times * (limit // m) for limit, times in limits if limit is not None)
        if max(least) > most:
            parts = {
                "at least {} in total": self.min_batch_size,
                "at least {} per core": self.min_per_core,
                "at most {} in total": self.max_batch_size,
                "at most {} per core": self.max_per_core,
                "at most {} in an epoch": situation.capacity,
            }
            named = ", ".join(text.format(limit) for text, limit in parts.items() if limit is not None)
            raise ValueError(f"no batch size satisfies all bounds on {cores} cores with minibatches of {m}: {named}")
        return range(max(least), most + 1)

    def reachable(self, situation: Situation) -> range:
        """The allowed numbers of minibatches in the next step, given the current batch size.

        `max_growth` gives way to other bounds; after a restart, also to idle cores and to sizes that were run before.
        """
        allowed = self.minibatches(situation)
        if situation.batch_size is None or math.isinf(self.max_growth):
            return allowed
        # a product such as 1.1 · 320 may be just below an integer by a rounding error
        largest = math.floor(self.max_growth * situation.batch_size / situation.minibatch_size + 1e-9)
        if situation.is_fresh:
            largest = max(largest, situation.cores, situation.largest_batch_size // situation.minibatch_size)
        return range(allowed.start, max(allowed.start, min(largest, allowed.stop - 1)) + 1)

    def nearest(self, size: float, situation: Situation) -> int:
        """The allowed batch size nearest to `size`."""
        if not (is_integer(size) or isinstance(size, float)) or math.isnan(size) or size <= 0:
            raise ValueError(f"a policy must return a positive batch size, got {size!r}")
        reachable, m = self.reachable(situation), situation.minibatch_size
        wish = reachable.stop if math.isinf(size) else math.floor(size / m + 0.5)
        return min(max(wish, reachable.start), reachable.stop - 1) * m

    def is_worth_it(self, worth: float, worth_now: float) -> bool:
        return not worth_now / self.threshold < worth < worth_now * self.threshold


class Decision(NamedTuple):
    """A batch size and the reason for it."""

    batch_size: int
    reason: str


class Policy(ABC):
    """Chooses the batch size of the next steps.

    Every sampler decides with its own copy, which is ``sampler.policy``. The object that was passed is not changed, and
    may be passed again. A custom policy needs one method:

    >>> class HalfTheNoise(Policy):
    ...     def decide(self, situation):
    ...         return situation.noise_scale / 2 if situation.knows_noise else situation.ref_batchsize
    >>> policy = HalfTheNoise(max_batch_size=1024)
    >>> policy.answer(Situation(cores=4, minibatch_size=32, ref_batchsize=128, noise_scale=500.0))
    Decision(batch_size=256, reason='')

    Args:
        every: number of steps between decisions.
        lead: number of steps that batch sizes are decided ahead; at least the DataLoader's
            ``num_workers * prefetch_factor``.
        bounds: `min_batch_size`, `max_batch_size`, `min_per_core`, `max_per_core`, `max_growth` and `threshold`; see
            :class:`Bounds`.
    """

    needs_noise: ClassVar[bool] = False
    """Whether the policy needs the gradient noise."""

    needs_loss: ClassVar[bool] = False
    """Whether the policy needs a loss or another metric, which a simulation does not have."""

    def __init__(self, *, every: int = 20, lead: int = 16, **bounds: Unpack[BoundsOptions]) -> None:
        check_positive(every=every, lead=lead)
        self.every, self.lead = int(every), int(lead)
        self.bounds = Bounds(**bounds)
        self.why = ""
        self._is_recipe = False  # whether samplers use copies of this object

    @abstractmethod
    def decide(self, situation: Situation) -> float:
        """The batch size of the next steps, which is then rounded to the nearest allowed one.

        May set ``self.why`` to a reason for the log.
        """

    def worth(self, situation: Situation, batch_size: int) -> float:
        """The quantity that `threshold` applies to: the batch size by default."""
        return float(batch_size)

    def expected(self, situation: Situation) -> float:
        """The batch size to expect on the cores of a situation, for a forecast that changes nothing in this policy."""
        return float(situation.batch_size or situation.ref_batchsize)

    def knows_enough(self, situation: Situation) -> bool:
        """Whether a forecast is possible: the noise is known, if decisions need it."""
        return situation.knows_noise or not self.needs_noise

    def answer(self, situation: Situation) -> Decision:
        """The batch size of the next steps, within the bounds, and why."""
        self.why = ""
        size, now = self.bounds.nearest(self.decide(situation), situation), situation.batch_size
        if now is None or size == now:
            return Decision(size, self.why)
        minibatches, rest = divmod(now, situation.minibatch_size)
        may_stay = rest == 0 and minibatches in self.bounds.minibatches(situation) and not situation.is_fresh
        if may_stay and not self.bounds.is_worth_it(self.worth(situation, size), self.worth(situation, now)):
            return Decision(now, f"{size} is not worth a change")
        return Decision(size, self.why)

    def state_dict(self) -> dict[str, Any]:
        """The policy's state between decisions: numbers, lists and dictionaries."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore the result of :meth:`state_dict`."""

    @property
    def description(self) -> str:
        """Name and settings; must match on all cores and when a run resumes."""
        settings = ", ".join(f"{name}={value}" for name, value in settings_of(self).items())
        return f"{type(self).__name__}({settings})"


def settings_of(policy: Policy) -> dict[str, bool | int | float | str]:
    """The settings of a policy, by name."""
    return {
        name: value
        for name, value in {**vars(policy), **vars(policy.bounds)}.items()
        if not name.startswith("_") and name != "why" and isinstance(value, (bool, int, float, str))
    }


@final
class FunctionPolicy(Policy):
    """A policy from a function of the situation, with the options of :class:`Policy`; the function is not copied.

    >>> policy = FunctionPolicy(lambda situation: 64 * situation.cores, every=5, max_batch_size=512)
    >>> policy.answer(Situation(cores=10, minibatch_size=32, ref_batchsize=128)).batch_size
    512
    """

    def __init__(self, function: Callable[[Situation], float], **options: Unpack[PolicyOptions]) -> None:
        super().__init__(**options)
        self.name = getattr(function, "__qualname__", type(function).__name__)
        self._function = function

    def __deepcopy__(self, memo: dict[int, Any]) -> "FunctionPolicy":
        return copy.copy(self)  # of a bound method, the object would be copied too

    def decide(self, situation: Situation) -> float:
        return self._function(situation)


def policy_of(source: Policy | Callable[[Situation], float]) -> Policy:
    """A copy of a policy, or a :class:`FunctionPolicy` for a function."""
    if not isinstance(source, Policy):
        return FunctionPolicy(source)
    policy = copy_for_run(source)
    source._is_recipe, policy._is_recipe = True, False
    return policy
