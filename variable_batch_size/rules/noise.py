"""Gradient noise, estimated from the norms of minibatch gradients and averaged over the steps of a run.

Let a sample's gradient have mean G and covariance Σ, V = tr Σ, and G² = ‖G‖². The gradient g_i of a minibatch of b_i
samples then has E‖g_i‖² = G² + V/b_i. With weights w_i = b_i/B, the mean ḡ = Σ w_i g_i has E‖ḡ‖² = G² + V/B, and the
measured L = Σ w_i ‖g_i‖² and T = ‖ḡ‖² of n minibatches satisfy

    E L = G² + V · n/B,   E T = G² + V/B,   solved without bias by   V = (L − T) · B/(n − 1),   G² = T − V/B

Both are *per sample*: they do not depend on the batch size, minibatch size or number of cores, and are never rescaled
when one of these changes. If b_i are numbers of tokens, B is the number of tokens of the step, and V is *per token*.

All numbers may be scalar tensors on a device: then every estimate is computed there, and the host waits for none.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import or_
from typing import Any

from variable_batch_size.rules.numbers import Condition, Number, at_least, at_most, is_tensor, where
from variable_batch_size.rules.rule import Norms, Step

logger = logging.getLogger(__name__)

_TINY = 1e-30  # keeps V/B positive: a gradient of exactly 0 then has gain S instead of 0/0
_OUTLIER = (
    "step %d makes %.0f %% of the gradient noise averaged over %d steps: the noise scale and the gain follow this step "
    "for long; look for an outlier in its loss or gradients"
)


@dataclass(frozen=True)
class Noise:
    """Trace V of the covariance of per-sample gradients, and squared norm G² of their mean."""

    variance: Number
    square_norm: Number

    @classmethod
    def from_norms(
        cls, mean_of_squares: float, square_of_mean: float, *, batch_size: float, num_minibatches: int
    ) -> Noise:
        """Estimate from the norms of a step.

        Args:
            mean_of_squares: L = Σ w_i ‖g_i‖².
            square_of_mean: T = ‖ḡ‖².
            batch_size: B, samples or tokens in all minibatches.
            num_minibatches: n, at least 2.

        >>> Noise.from_norms(2.0, 1.0, batch_size=2, num_minibatches=2)
        Noise(variance=2.0, square_norm=0.0)
        """
        variance = (mean_of_squares - square_of_mean) * batch_size / (num_minibatches - 1)
        return cls(variance, square_of_mean - variance / batch_size)

    def gain(self, batch_size: Number, ref_batchsize: Number) -> Number:
        """The worth of a step in steps at the reference batch size: (V/B0 + G²) / (V/B + G²), between 1 and S = B/B0.

        >>> Noise(variance=100.0, square_norm=1.0).gain(400, 100)
        1.6
        """
        variance, square_norm = at_least(self.variance, _TINY), at_least(self.square_norm, 0.0)
        return (variance / ref_batchsize + square_norm) / (variance / batch_size + square_norm)

    @property
    def scale(self) -> float:
        """The simple noise scale V/G²: the batch size at which noise and signal are equal (McCandlish et al. 2018)."""
        return max(self.variance, 0.0) / self.square_norm if self.square_norm > 0 else float("inf")

    def __add__(self, other: Noise) -> Noise:
        """The noise of two disjoint sets of parameters."""
        return Noise(self.variance + other.variance, self.square_norm + other.square_norm)

    def __mul__(self, factor: float) -> Noise:
        return Noise(self.variance * factor, self.square_norm * factor)


class NoiseAverage:
    """Exponential moving average of noise estimates, with decay θ = max(0, 1 − S/1000).

    A step at a large scale S carries more information and makes more progress, so older estimates decay faster. The
    average is debiased: the weighted sum is divided by the sum of the weights. With ``starts_with_mean`` it is the
    plain mean for the first 1/(1 − θ) steps, as in the AdaScale paper (Johnson et al. 2020).

    >>> average = NoiseAverage()
    >>> average.noise is None
    True
    >>> average.add(Noise(2.0, 1.0), scale=2.0)  # the first estimate is all of the average
    1.0
    >>> average.noise
    Noise(variance=2.0, square_norm=1.0)
    """

    def __init__(self, *, starts_with_mean: bool = False) -> None:
        self.starts_with_mean = starts_with_mean
        self._sum, self._weight, self.count = Noise(0.0, 0.0), 0.0, 0

    def add(self, noise: Noise, scale: Number, is_counted: Condition = True) -> Number:
        """Add the estimate of one step at scale S, if it counts; returns the part of the average that it makes."""
        decay = at_least(1.0 - scale / 1000, 0.0)
        if self.starts_with_mean:
            decay = at_most(decay, 1 - 1 / (self.count + 1))
        total = self._sum * decay + noise * (1 - decay)
        self._sum = Noise(
            where(is_counted, total.variance, self._sum.variance),
            where(is_counted, total.square_norm, self._sum.square_norm),
        )
        self._weight = where(is_counted, decay * self._weight + (1 - decay), self._weight)
        self.count = self.count + is_counted
        if is_tensor(total.variance):
            return 0.0
        return abs(noise.variance * (1 - decay) / total.variance) if total.variance else 0.0

    @property
    def noise(self) -> Noise | None:
        """The average, or None before the first estimate."""
        return self.mean if self.count else None

    @property
    def mean(self) -> Noise:
        """The average, once there is an estimate."""
        return self._sum * (1 / self._weight)

    def map_(self, function: Callable[[Number], Number]) -> None:
        """Replace each number by a function of it."""
        self._sum = Noise(function(self._sum.variance), function(self._sum.square_norm))
        self._weight, self.count = function(self._weight), function(self.count)

    def state_dict(self) -> dict[str, float]:
        """The weighted sum, the sum of the weights and the number of estimates."""
        return {**asdict(self._sum), "weight": self._weight, "count": self.count}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._sum = Noise(state["variance"], state["square_norm"])
        self._weight, self.count = state["weight"], int(state["count"])


class NoiseMeter:
    """Averages the gradient noise of each parameter group over steps, and computes the gain of a batch size.

    A step with a single minibatch gives no estimate and leaves the averages unchanged. Before the first estimate the
    gain is min(1, S), its lower bound. A parameter group without a gradient, such as a frozen one, is not measured, and
    is not part of the noise of all groups until it has one again. With weighted minibatches the noise is per unit of
    weight, such as a token. Batch sizes remain in samples and are converted with the mean weight of a sample so far.

    >>> meter = NoiseMeter()
    >>> step = Step(batch_size=64, minibatch_size=32, ref_batchsize=32)
    >>> meter.observe(step, [Norms(mean_of_squares=3.0, square_of_mean=2.0)])
    >>> meter.noise()
    Noise(variance=64.0, square_norm=1.0)
    >>> meter.gain(64, 32)
    1.5
    """

    def __init__(self, *, starts_with_mean: bool = False) -> None:
        self.starts_with_mean = starts_with_mean
        self.averages: list[NoiseAverage] = []
        self._active: list[bool] = []  # whether each group was measured in the latest step
        self._has_warned = False
        self._weight = 0.0  # of all weighted steps, which had _samples samples
        self._samples = 0

    def observe(self, step: Step, norms: Sequence[Norms | None], is_counted: Condition = True) -> None:
        """Add a step's norms, one entry per parameter group, if it counts; None for a group without any yet."""
        while len(self.averages) < len(norms):
            self.averages.append(NoiseAverage(starts_with_mean=self.starts_with_mean))
            self._active.append(False)
        size, num_minibatches = step.batch_size, step.num_minibatches
        if step.weight is not None and step.num_weighted is not None:
            size, num_minibatches = step.weight, step.num_weighted  # type: ignore[assignment]
            self._weight = where(is_counted, self._weight + step.weight, self._weight)
            self._samples = where(is_counted, self._samples + step.batch_size, self._samples)
        is_estimate = num_minibatches >= 2
        if not is_tensor(is_estimate) and not is_estimate:
            return
        active = [measured is not None and measured.mean_of_squares != 0 for measured in norms]
        is_estimate = reduce(or_, active) & is_estimate & is_counted
        if not is_tensor(is_estimate) and not is_estimate:
            return
        self._active = [where(is_estimate, now, was) for now, was in zip(active, self._active, strict=True)]
        for average, measured, is_active in zip(self.averages, norms, active, strict=True):
            if (is_tensor(is_active) or is_active) and measured is not None:
                noise = Noise.from_norms(*measured, batch_size=size, num_minibatches=at_least(num_minibatches, 2))
                part, count = average.add(noise, step.scale, is_estimate & is_active), average.count
                if part > 0.5 and count >= 10 and not self._has_warned:
                    self._has_warned = True
                    logger.warning(_OUTLIER, step.steps_done, 100 * part, count)

    def noise(self, group: int | None = None) -> Noise | None:
        """The average noise of one parameter group, or of all groups; None before the first estimate."""
        known = [average.mean for average, is_known in self._known(group) if is_known]
        return sum(known[1:], start=known[0]) if known else None

    def gain(self, batch_size: Number, ref_batchsize: Number, group: int | None = None) -> Number:
        """How many steps at the reference batch size one step of this batch size is worth."""
        known = [(average.mean, is_) for average, is_ in self._known(group) if is_tensor(is_) or is_]
        lower_bound = at_most(batch_size / ref_batchsize, 1.0)
        if not known:
            return lower_bound
        parts = [Noise(where(is_, mean.variance, 0.0), where(is_, mean.square_norm, 0.0)) for mean, is_ in known]
        of_all, weight = sum(parts[1:], start=parts[0]), self._weight_of_a_sample
        gain = of_all.gain(batch_size * weight, ref_batchsize * weight)
        return where(reduce(or_, [is_known for _, is_known in known]), gain, lower_bound)

    def _known(self, group: int | None) -> list[tuple[NoiseAverage, Condition]]:
        """The averages of one group, or of all, and whether each is part of the noise."""
        if group is None:
            pairs = zip(self.averages, self._active, strict=True)
            return [(average, is_active & (average.count > 0)) for average, is_active in pairs]
        return [(average, average.count > 0) for average in self.averages[group : group + 1]]

    def has_observed(self, num_groups: int, *, is_weighted: bool) -> bool:
        """Whether a step of so many groups was observed, with weights or without."""
        return len(self.averages) == num_groups and (is_tensor(self._weight) or bool(self._weight)) == is_weighted

    def map_(self, function: Callable[[Number], Number]) -> None:
        """Replace every number that a step may change by a function of it, always in the same order."""
        for average in self.averages:
            average.map_(function)
        self._active = [function(is_active) for is_active in self._active]
        if is_tensor(self._weight) or self._weight:  # without weights there is nothing to compute
            self._weight, self._samples = function(self._weight), function(self._samples)

    def scale_in_samples(self) -> float | None:
        """V/G² in samples, with weighted minibatches as well; None before the first estimate."""
        noise = self.noise()
        return None if noise is None else noise.scale / self._weight_of_a_sample

    @property
    def _weight_of_a_sample(self) -> Number:
        return where(self._weight != 0, self._weight / at_least(self._samples, 1), 1.0)

    def report(self, step: Step) -> dict[str, float]:
        """The values to log for a step."""
        noise_scale = math.nan if (noise := self.noise()) is None else noise.scale
        return {"gain": self.gain(step.batch_size, step.ref_batchsize), "noise_scale": noise_scale}

    def state_dict(self) -> dict[str, Any]:
        """The averages of all groups, which of them count, and the totals for the mean weight of a sample."""
        averages = [average.state_dict() for average in self.averages]
        own = {"active": list(self._active), "weight": self._weight, "samples": self._samples}
        return {"averages": averages, **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.averages = [NoiseAverage(starts_with_mean=self.starts_with_mean) for _ in state["averages"]]
        for average, saved in zip(self.averages, state["averages"], strict=True):
            average.load_state_dict(saved)
        self._active, self._weight, self._samples = list(state["active"]), state["weight"], state["samples"]
        self._active += [False] * (len(self.averages) - len(self._active))
