"""The policies PerCore, NormTest, CriticalBatch and OnPlateau, and all policies by name."""

import logging
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, final

from typing_extensions import Unpack

from variable_batch_size.checks import check_one_of, check_positive
from variable_batch_size.plugins import Registry
from variable_batch_size.policies.autoscale import Autoscale
from variable_batch_size.policies.policy import FunctionPolicy, Policy, PolicyOptions, Situation
from variable_batch_size.stability import experimental

logger = logging.getLogger(__name__)
T = TypeVar("T")


@final
class PerCore(Policy):
    """A fixed number of samples per core and step, by default one minibatch; with the options of :class:`Policy`.

    >>> PerCore(64).answer(Situation(cores=3, minibatch_size=32, ref_batchsize=128)).batch_size
    192
    """

    def __init__(self, samples: int | None = None, **options: Unpack[PolicyOptions]) -> None:
        super().__init__(**options)
        if samples is not None:
            check_positive(samples=samples)
        self.samples = samples

    def decide(self, situation: Situation) -> float:
        self.why = f"{situation.cores} cores"
        return self.expected(situation)

    def expected(self, situation: Situation) -> float:
        return (self.samples or situation.minibatch_size) * situation.cores


@final
class NormTest(Policy):
    """Grows when V/B > η²·‖ḡ‖²: the variance of a step's mean gradient against its squared norm (Byrd et al. 2012).

    On average ‖ḡ‖² is G² + V/B, so the smallest batch size that passes is B = φ·(1 − η²)/η², with φ = V/G². The first
    estimates of φ may be far off. So the first decision with a known noise scale changes nothing, a decision at most
    doubles the batch size (`max_growth`), and a size that is more than twice as large as necessary is halved.

    Args:
        eta: η, between 0 and 1; smaller values give larger batch sizes.
        options: see :class:`Policy`.

    >>> policy = NormTest(eta=0.5)
    >>> situation = Situation(cores=2, minibatch_size=32, ref_batchsize=64, batch_size=256, noise_scale=100.0)
    >>> policy.answer(situation)
    Decision(batch_size=256, reason='first estimate of the noise')
    >>> policy.answer(situation)
    Decision(batch_size=320, reason='noise exceeds 0.5 of the gradient')
    """

    needs_noise = True

    def __init__(self, *, eta: float, **options: Unpack[PolicyOptions]) -> None:
        options.setdefault("max_growth", 2.0)
        super().__init__(**options)
        if not 0 < eta < 1:
            raise ValueError(f"`eta` must be between 0 and 1, got {eta!r}")
        self.eta = eta
        self._has_noise = False  # whether the noise was known at an earlier decision

    def decide(self, situation: Situation) -> float:
        now = situation.batch_size or situation.ref_batchsize
        m = situation.minibatch_size
        if situation.noise_scale is None or not situation.knows_noise:
            if now < 2 * m:
                self.why = "estimating noise needs two minibatches"
            return max(now, 2 * m)
        if not self._has_noise:
            self._has_noise, self.why = True, "first estimate of the noise"
            return now
        passing = situation.noise_scale * (1 - self.eta**2) / self.eta**2
        if passing <= now:
            if 2 * passing > now:
                return now
            self.why = f"noise below {self.eta:g} of the gradient at half the size"
            return math.ceil(now / 2 / m) * m
        self.why = f"noise exceeds {self.eta:g} of the gradient"
        return passing if math.isinf(passing) else math.ceil(passing / m) * m

    def state_dict(self) -> dict[str, Any]:
        return {"has_noise": self._has_noise}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._has_noise = state["has_noise"]


@final
class CriticalBatch(Policy):
    """Doubles the batch size while that nearly doubles the progress per step (McCandlish et al. 2018).

    Steps of 2B need (φ + 2B)/(φ + B) times the samples for the same progress, where φ = V/G² is the noise scale. The
    batch size doubles while this is at most 1 + `cost`. With ``measure_noise="own norm"``, φ is measured in the norm
    that fits the steps of Adam, Lion or Muon.

    Args:
        cost: the largest fraction of additional samples for doubling.
        options: see :class:`Policy`.

    >>> policy = CriticalBatch(cost=0.25)
    >>> policy.answer(Situation(cores=2, minibatch_size=32, ref_batchsize=64, batch_size=64, noise_scale=200.0))
    Decision(batch_size=128, reason='doubling takes 24 % more samples')
    """

    needs_noise = True

    def __init__(self, *, cost: float = 0.2, **options: Unpack[PolicyOptions]) -> None:
        super().__init__(**options)
        if not 0 < cost < 1:
            raise ValueError(f"`cost` must be between 0 and 1, got {cost!r}")
        self.cost = cost

    def decide(self, situation: Situation) -> float:
        now = situation.batch_size or situation.ref_batchsize
        if situation.noise_scale is None or not situation.knows_noise:
            self.why = "noise unknown"
            return max(now, 2 * situation.minibatch_size)
        cost = now / (situation.noise_scale + now)  # (φ + 2B)/(φ + B) − 1
        self.why = f"doubling takes {100 * cost:.0f} % more samples"
        return 2 * now if cost <= self.cost else now


@experimental
@final
class OnPlateau(Policy):
    """Multiplies the batch size when a metric has stopped improving.

    The metric, such as a validation loss, is passed to ``sampler.policy.tell(value)``. Until then, it is the loss
    recorded by a :class:`Log`. A non-finite value is not a plateau: it is logged, and the batch size stays until the
    next finite value.

    Args:
        factor: multiplies the batch size on each plateau.
        patience: number of consecutive values without improvement that make a plateau.
        min_delta: minimum improvement, as a fraction of the best value.
        is_higher_better: whether larger values are better, as for an accuracy.
        options: see :class:`Policy`.

    >>> policy = OnPlateau(patience=2)
    >>> for value in (1.0, 0.9, 0.9, 0.95):
    ...     policy.tell(value)
    >>> policy.answer(Situation(cores=1, minibatch_size=32, ref_batchsize=64, batch_size=64))
    Decision(batch_size=128, reason='2 values no better than 0.9')
    """

    needs_loss = True

    def __init__(
        self,
        *,
        factor: float = 2.0,
        patience: int = 10,
        min_delta: float = 1e-4,
        is_higher_better: bool = False,
        **options: Unpack[PolicyOptions],
    ) -> None:
        super().__init__(**options)
        check_positive(patience=patience)
        if not 1 < factor < math.inf:
            raise ValueError(f"`factor` must be above 1, got {factor!r}")
        if not 0 <= min_delta < 1:
            raise ValueError(f"`min_delta` must be at least 0 and below 1, got {min_delta!r}")
        self.factor, self.patience = factor, patience
        self.min_delta, self.is_higher_better = min_delta, is_higher_better
        self._best: float | None = None
        self._num_worse, self._is_told, self._has_diverged = 0, False, False
        self._latest: float | None = None  # loss, so that each counts once

    def tell(self, value: float) -> None:
        """Add a value of the metric, like ``ReduceLROnPlateau.step(metric)``; replaces the loss of the log."""
        if self._is_recipe:
            advice = "pass the value to sampler.policy.tell(value)"
            raise RuntimeError(f"a sampler decides with its own copy of this policy: {advice}")
        if not self._is_told:
            self._best, self._num_worse, self._is_told = None, 0, True
        self._add(float(value))

    def decide(self, situation: Situation) -> float:
        now = situation.batch_size or situation.ref_batchsize
        if not self._is_told and situation.loss is not None and situation.loss != self._latest:
            self._latest = situation.loss
            self._add(situation.loss)
        if self._has_diverged:
            self.why = "the metric is not finite"
            return now
        if self._num_worse < self.patience:
            return now
        self.why = f"{self._num_worse} values no better than {self._best:g}"
        self._num_worse = 0
        return now * self.factor

    def _add(self, value: float) -> None:
        if not math.isfinite(value):
            if not self._has_diverged:
                logger.warning("OnPlateau: the metric is %s, so the run may have diverged; it is not a plateau", value)
            self._has_diverged = True
            return
        self._has_diverged = False
        if self._best is None or self._is_better(value, self._best):
            self._best, self._num_worse = value, 0
        else:
            self._num_worse += 1

    def _is_better(self, value: float, best: float) -> bool:
        margin = self.min_delta * abs(best)
        return value > best + margin if self.is_higher_better else value < best - margin

    def state_dict(self) -> dict[str, Any]:
        own = {"best": self._best, "num_worse": self._num_worse, "is_told": self._is_told, "latest": self._latest}
        return {**own, "has_diverged": self._has_diverged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._num_worse = state["best"], state["num_worse"]
        self._is_told, self._latest = state["is_told"], state["latest"]
        self._has_diverged = state["has_diverged"]


POLICIES: Registry[type[Policy]] = Registry(
    "policies",
    {
        "autoscale": Autoscale,
        "per_core": PerCore,
        "norm_test": NormTest,
        "critical_batch": CriticalBatch,
        "on_plateau": OnPlateau,
    },
)


def make_policy(name: str, **settings: Any) -> Policy:
    """Create a policy by name: ``make_policy("autoscale", max_batch_size=1024)``."""
    check_one_of(POLICIES, policy=name)
    return POLICIES[name](**settings)


def parse_policy(text: str) -> Policy:
    """Create a policy from ``name:setting=value,…``, or from a number for a constant batch size."""
    return FunctionPolicy(_Always(int(text))) if text.isdecimal() else parse_named(text, POLICIES)


def parse_named(text: str, classes: Mapping[str, Callable[..., T]]) -> T:
    """Create an object of one of some classes from ``name:setting=value,…``."""
    name, _, settings = text.partition(":")
    check_one_of(classes, policy=name)
    try:
        return classes[name](**dict(map(_setting, settings.split(",") if settings else ())))
    except TypeError as error:  # an unknown or missing setting
        reason = str(error).partition("() ")[2] or str(error)
        if reason.startswith("missing"):
            needed = [f"{setting}=…" for setting in re.findall(r"'(\w+)'", reason)]
            reason = f"needs settings, as in {name}:{','.join(needed)}"
        raise ValueError(f"`policy` {name} {reason}, got {text!r}") from None


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name.strip(), int(value) if value.strip().lstrip("-").isdecimal() else float(value)
    except ValueError:
        raise ValueError(f"a policy setting must be name=number, got {text!r}") from None


class _Always:
    """A constant batch size; raises instead of rounding it to the bounds."""

    def __init__(self, size: int) -> None:
        self.__qualname__, self._size = f"always {size}", size

    def __call__(self, situation: Situation) -> float:
        size, minibatch_size, capacity = self._size, situation.minibatch_size, situation.capacity
        if not size or size % minibatch_size:
            raise ValueError(f"`policy` must be a multiple of {minibatch_size} (the minibatch size), got {size}")
        if capacity is not None and size > capacity:
            raise ValueError(f"`policy` must be at most {capacity} (the capacity of an epoch), got {size}")
        return size
