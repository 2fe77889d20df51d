"""The other policies (PerCore, NormTest, CriticalBatch, OnPlateau), and all policies by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

from typing_extensions import Unpack

from variable_batch_size.checks import check_one_of, check_positive
from variable_batch_size.policies.autoscale import Autoscale
from variable_batch_size.policies.policy import BoundsOptions, FunctionPolicy, Policy, Situation


@final
class PerCore(Policy):
    """As many samples for every core, however many there are.

    Args:
        samples: of each core in a step; None for one minibatch.
        every: steps from one decision to the next.
        lead: how many steps ahead batch sizes are decided.
        bounds: as of :class:`Bounds`.

    >>> PerCore(64).answer(Situation(cores=3, minibatch_size=32, ref_batchsize=128)).batch_size
    192
    """

    def __init__(
        self, samples: int | None = None, *, every: int = 20, lead: int = 16, **bounds: Unpack[BoundsOptions]
    ) -> None:
        super().__init__(every=every, lead=lead, **bounds)
        if samples is not None:
            check_positive(samples=samples)
        self.samples = samples

    def decide(self, situation: Situation) -> float:
        self.why = f"{situation.cores} cores"
        return (self.samples or situation.minibatch_size) * situation.cores


@final
class NormTest(Policy):
    """Grows when V/B > η²·‖ḡ‖², the variance of a step's mean gradient against its square (Byrd et al. 2012).

    On average ‖ḡ‖² is G² + V/B, so the smallest batch size that passes is B = φ·(1 − η²)/η², with φ = V/G². It
    never shrinks.

    Args:
        eta: η, between 0 and 1; the smaller, the larger the batch size.
        every: steps from one decision to the next.
        lead: how many steps ahead batch sizes are decided.
        bounds: as of :class:`Bounds`.

    >>> policy = NormTest(eta=0.5)
    >>> policy.answer(Situation(cores=2, minibatch_size=32, ref_batchsize=64, batch_size=64, noise_scale=100.0))
    Decision(batch_size=320, reason='the noise is above 0.5 of the gradient')
    """

    needs_noise = True

    def __init__(self, *, eta: float, every: int = 20, lead: int = 16, **bounds: Unpack[BoundsOptions]) -> None:
        super().__init__(every=every, lead=lead, **bounds)
        if not 0 < eta < 1:
            raise ValueError(f"`eta` must be between 0 and 1, got {eta!r}")
        self.eta = eta

    def decide(self, situation: Situation) -> float:
        now = situation.batch_size or situation.ref_batchsize
        if situation.noise_scale is None or not situation.knows_noise:
            return self._until_known(situation, now)
        m = situation.minibatch_size
        passing = situation.noise_scale * (1 - self.eta**2) / self.eta**2
        if passing <= now:
            return now
        self.why = f"the noise is above {self.eta:g} of the gradient"
        return passing if math.isinf(passing) else math.ceil(passing / m) * m

    def _until_known(self, situation: Situation, now: int) -> float:
        """At least two minibatches, for one tells no noise."""
        if now < 2 * situation.minibatch_size:
            self.why = "one minibatch tells no noise"
        return max(now, 2 * situation.minibatch_size)


@final
class CriticalBatch(Policy):
    """Doubles when a step of twice the batch size makes nearly twice the progress (McCandlish et al. 2018).

    Steps of 2B make as much progress with (φ + 2B)/(φ + B) times the samples, where φ = V/G² is the noise scale. It
    doubles while this is at most 1 + `cost`.

    Args:
        cost: how many more samples, as a share, doubling may take.
        every: steps from one decision to the next.
        lead: how many steps ahead batch sizes are decided.
        bounds: as of :class:`Bounds`.

    >>> policy = CriticalBatch(cost=0.25)
    >>> policy.answer(Situation(cores=2, minibatch_size=32, ref_batchsize=64, batch_size=64, noise_scale=200.0))
    Decision(batch_size=128, reason='doubling takes 24 % more samples')
    """

    needs_noise = True

    def __init__(self, *, cost: float = 0.2, every: int = 20, lead: int = 16, **bounds: Unpack[BoundsOptions]) -> None:
        super().__init__(every=every, lead=lead, **bounds)
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


@final
class OnPlateau(Policy):
    """Multiplies the batch size when a metric has stopped improving.

    The metric is what :meth:`tell` was told last, such as a validation loss; before it is told anything, the loss that
    a :class:`Log` records.

    Args:
        factor: what each growth multiplies by.
        patience: how many values in a row may be no better before it grows.
        min_delta: by what share of the best a value must be better.
        is_higher_better: whether a larger value is the better one, as of an accuracy.
        every: steps from one decision to the next.
        lead: how many steps ahead batch sizes are decided.
        bounds: as of :class:`Bounds`.

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
        every: int = 20,
        lead: int = 16,
        **bounds: Unpack[BoundsOptions],
    ) -> None:
        super().__init__(every=every, lead=lead, **bounds)
        check_positive(patience=patience)
        if not 1 < factor < math.inf:
            raise ValueError(f"`factor` must be above 1, got {factor!r}")
        if not 0 <= min_delta < 1:
            raise ValueError(f"`min_delta` must be a share from 0 to 1, got {min_delta!r}")
        self.factor = factor
        self.patience = patience
        self.min_delta = min_delta
        self.is_higher_better = is_higher_better
        self._best: float | None = None
        self._num_worse = 0
        self._is_told = False
        self._latest: float | None = None  # of the losses, each of which counts once

    def tell(self, value: float) -> None:
        """Take in a value of the metric, as a scheduler's ``step(metric)`` does; from now on it goes by these."""
        if not self._is_told:
            self._best, self._num_worse, self._is_told = None, 0, True
        self._take_in(float(value))

    def decide(self, situation: Situation) -> float:
        now = situation.batch_size or situation.ref_batchsize
        if not self._is_told and situation.loss is not None and situation.loss != self._latest:
            self._latest = situation.loss
            self._take_in(situation.loss)
        if self._num_worse < self.patience:
            return now
        self.why = f"{self._num_worse} values no better than {self._best:g}"
        self._num_worse = 0
        return now * self.factor

    def _take_in(self, value: float) -> None:
        if self._best is None or self._is_better(value, self._best):
            self._best, self._num_worse = value, 0
        else:
            self._num_worse += 1

    def _is_better(self, value: float, best: float) -> bool:
        if math.isnan(best):
            return not math.isnan(value)
        margin = self.min_delta * abs(best) if math.isfinite(best) else 0.0
        return value > best + margin if self.is_higher_better else value < best - margin

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self._best,
            "num_worse": self._num_worse,
            "is_told": self._is_told,
            "latest": self._latest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._num_worse = state["best"], state["num_worse"]
        self._is_told, self._latest = state["is_told"], state["latest"]


POLICIES: Mapping[str, type[Policy]] = {
    "autoscale": Autoscale,
    "per_core": PerCore,
    "norm_test": NormTest,
    "critical_batch": CriticalBatch,
    "on_plateau": OnPlateau,
}


def make_policy(name: str, **settings: Any) -> Policy:
    """A new policy by its name, with the settings that it takes.

    >>> make_policy("autoscale", max_batch_size=1024).bounds.max_batch_size
    1024
    """
    check_one_of(POLICIES, policy=name)
    return POLICIES[name](**settings)


def parse_policy(text: str) -> Policy:
    """A policy as a command line gives it: its name, then settings; or a number, for always that batch size.

    >>> parse_policy("norm_test:eta=0.5,max_batch_size=1024").bounds.max_batch_size
    1024
    >>> parse_policy("512").answer(Situation(cores=3, minibatch_size=32, ref_batchsize=128)).batch_size
    512
    """
    name, _, settings = text.partition(":")
    if name.isdecimal() and not settings:
        return FunctionPolicy(_Always(int(name)))
    try:
        return make_policy(name, **dict(map(_setting, settings.split(",") if settings else ())))
    except TypeError as error:  # a setting that there is not, or one that is missing
        reason = str(error).partition("() ")[2] or str(error)
        raise ValueError(f"`policy` {name} {reason}, got {text!r}") from None


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name.strip(), int(value) if value.strip().lstrip("-").isdecimal() else float(value)
    except ValueError:
        raise ValueError(f"a setting of a policy must be name=number, got {text!r}") from None


class _Always:
    """The same batch size in every situation; one that would have to be another is refused."""

    def __init__(self, size: int) -> None:
        self.__qualname__ = f"always {size}"
        self._size = size

    def __call__(self, situation: Situation) -> float:
        if not self._size or self._size % situation.minibatch_size:
            raise ValueError(
                f"`policy` must be a multiple of {situation.minibatch_size} (the minibatch size), got {self._size}"
            )
        if situation.capacity is not None and self._size > situation.capacity:
            raise ValueError(
                f"`policy` must be at most {situation.capacity} (the samples of an epoch), got {self._size}"
            )
        return self._size
