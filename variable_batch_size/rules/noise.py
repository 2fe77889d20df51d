"""Gradient noise, estimated from the norms of minibatch gradients and averaged over the steps of a run.

Let a sample's gradient have mean G and covariance Σ, V = tr Σ, and G² = ‖G‖². The gradient g_i of a minibatch of b_i
samples then has E‖g_i‖² = G² + V/b_i. With weights w_i = b_i/B, the mean ḡ = Σ w_i g_i has E‖ḡ‖² = G² + V/B, and the
measured L = Σ w_i ‖g_i‖² and T = ‖ḡ‖² of n minibatches satisfy

    E L = G² + V · n/B,   E T = G² + V/B,   solved without bias by   V = (L − T) · B/(n − 1),   G² = T − V/B

Both are *per sample*: they do not depend on the batch size, minibatch size or number of cores, and are never rescaled
when one of these changes. If b_i are numbers of tokens, B is the number of tokens of the step, and V is *per token*.

An epoch draws from N samples without replacement, which is known for a shuffled data set, but not for a stream. Let G
be the mean gradient of these N, and V their covariance with the divisor N − 1. The mean of b of them then has
E‖g_i‖² = G² + V/b − V/N, so that for any b_i

    E L = G² + V · n/B − V/N,   E T = G² + V/B − V/N,   solved without bias by the same V,   G² = T − V/B + V/N

Without the last term, G² would be too low by V/N, and the noise scale V/G² twice too large at N/2. It is exact for
samples whose gradients are the same in each epoch; random augmentation and dropout make it too large by their part of
V/N.

The gradients of the B samples themselves, where they are known for some parameters, are those of minibatches of one
sample: n = B, so that one minibatch in a step is enough.

All numbers may be scalar tensors on a device: then every estimate is computed there, and the host waits for none.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add, and_, or_
from typing import Any

from variable_batch_size.rules.numbers import Condition, Number, at_least, at_most, is_tensor, where
from variable_batch_size.rules.rule import Norms, Step

logger = logging.getLogger(__name__)

Smoothing = float | str | Callable[[Number], Number] | None

_LEAST_DECAY = 0.95  # remembers 20 steps
_LEAST_STEPS = 4.0  # independent ones, for an interval
_TINY = 1e-30  # keeps V/B positive: a gradient of exactly 0 then has gain S instead of 0/0
_OUTLIER = (
    "step %d makes up %.0f %% of the gradient noise averaged over %d steps, and dominates the noise scale and the gain "
    "for a long time: look for an outlier in its loss or gradients"
)


@dataclass(frozen=True)
class Noise:
    """Trace V of the covariance of per-sample gradients, and squared norm G² of their mean."""

    variance: Number
    square_norm: Number

    @classmethod
    def from_norms(
        cls,
        mean_of_squares: float,
        square_of_mean: float,
        *,
        batch_size: float,
        num_minibatches: int,
        population: float | None = None,
    ) -> Noise:
        """Estimate from the norms of a step.

        Args:
            mean_of_squares: L = Σ w_i ‖g_i‖².
            square_of_mean: T = ‖ḡ‖².
            batch_size: B, samples or tokens in all minibatches.
            num_minibatches: n, at least 2.
            population: N, samples or tokens from which the step's are drawn without replacement; None for no end.

        >>> Noise.from_norms(2.0, 1.0, batch_size=2, num_minibatches=2)
        Noise(variance=2.0, square_norm=0.0)
        >>> Noise.from_norms(2.0, 1.0, batch_size=2, num_minibatches=2, population=4)
        Noise(variance=2.0, square_norm=0.5)
        """
        variance = (mean_of_squares - square_of_mean) * batch_size / (num_minibatches - 1)
        square_norm = square_of_mean - variance / batch_size
        return cls(variance, square_norm if population is None else square_norm + variance / population)

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


NO_NOISE = Noise(0.0, 0.0)


def check_smoothing(smoothing: Smoothing) -> None:
    """Raise unless it is None, ``"paper"``, a decay, or a function that returns one."""
    is_decay = isinstance(smoothing, int | float) and not isinstance(smoothing, bool) and 0 <= smoothing < 1
    if not (smoothing is None or smoothing == "paper" or is_decay or callable(smoothing)):
        rule = "`smoothing` must be None, 'paper', a number from 0 to below 1, or a function of the scale"
        raise ValueError(f"{rule}, got {smoothing!r}")


def decay_at(scale: Number, smoothing: Smoothing) -> Number:
    """θ, the weight of the average before a step at scale S, where the step has 1 − θ.

    By default θ = max(1 − S/1000, 0.95): a step at a large scale carries more information and makes more progress, but
    no average remembers less than 20 steps. ``"paper"`` is max(1 − S/1000, 0), which averages nothing for S ≥ 1000.

    >>> decay_at(4.0, None), decay_at(2000.0, None), decay_at(2000.0, "paper"), decay_at(4.0, 0.9)
    (0.996, 0.95, 0.0, 0.9)
    """
    if smoothing is None or smoothing == "paper":
        return at_least(1.0 - scale / 1000, _LEAST_DECAY if smoothing is None else 0.0)
    if not callable(smoothing):
        return smoothing
    decay = smoothing(scale)
    if not is_tensor(decay) and not 0 <= decay < 1:
        raise ValueError(f"`smoothing` must return a number from 0 to below 1, got {decay!r} at scale {scale:g}")
    return decay


class NoiseAverage:
    """Exponential moving average of noise estimates, with the decay θ of :func:`decay_at`.

    The average is debiased: the weighted sum is divided by the sum of the weights. With ``starts_with_mean`` it is the
    plain mean for the first 1/(1 − θ) steps, as in the AdaScale paper (Johnson et al. 2020).

    >>> average = NoiseAverage()
    >>> average.noise is None
    True
    >>> average.add(Noise(2.0, 1.0), scale=2.0)  # the first estimate is all of the average
    1.0
    >>> average.noise
    Noise(variance=2.0, square_norm=1.0)
    """

    def __init__(self, *, starts_with_mean: bool = False, smoothing: Smoothing = None) -> None:
        self.starts_with_mean, self.smoothing = starts_with_mean, smoothing
        self._sum, self._weight, self.count = NO_NOISE, 0.0, 0

    def add(self, noise: Noise, scale: Number, is_counted: Condition = True, *, steps: Number = 1) -> Number:
        """Add the estimate of one step at scale S, if it counts; returns the part of the average that it makes.

        It counts as the estimate of `steps` steps, if only one in that many has an estimate. The part is 0 unless it is
        clearly more than the weight of the step.
        """
        decay = decay_at(scale, self.smoothing) ** steps
        if self.starts_with_mean:
            decay = at_most(decay, 1 - 1 / (self.count + 1))
        rest, old = 1 - decay, self._sum
        variance = old.variance * decay + noise.variance * rest
        square_norm = old.square_norm * decay + noise.square_norm * rest
        weight = decay * self._weight + rest
        if is_counted is not True:
            variance = where(is_counted, variance, old.variance)
            square_norm = where(is_counted, square_norm, old.square_norm)
            weight = where(is_counted, weight, self._weight)
        self._sum, self._weight, self.count = Noise(variance, square_norm), weight, self.count + is_counted
        if is_tensor(variance):
            return 0.0
        part = abs(noise.variance * rest / variance) if variance else 0.0
        return part if part > 2.5 * rest else 0.0

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


class NoiseSpread:
    """How far the estimates of single steps are from their average, for a confidence interval of the noise scale.

    The covariance of the averages V and G² follows from the weighted second moments of the estimates and the sum of the
    squared weights. Fieller's theorem turns it into an interval of V/G²: all φ with (V − φ·G²)² within t² variances. It
    has no upper end where G² may be 0. Estimates that drift make it wider.
    """

    def __init__(self, *, smoothing: Smoothing = None) -> None:
        self.smoothing = smoothing
        self._moments = [0.0] * 5  # weighted sums of V, G², V², G²·G², V·G²
        self._weight = self._square_weight = 0.0  # the sum of the weights, and of their squares

    def add(self, noise: Noise, scale: Number, is_counted: Condition = True, *, steps: Number = 1) -> None:
        """Add the estimate of one step at scale S, if it counts, as that of several steps."""
        decay = decay_at(scale, self.smoothing) ** steps
        v, g, rest = noise.variance, noise.square_norm, 1 - decay
        values = (v, g, v * v, g * g, v * g)
        after = [old * decay + value * rest for old, value in zip(self._moments, values, strict=True)]
        after += [self._weight * decay + rest, self._square_weight * decay * decay + rest * rest]
        if is_counted is not True:
            before = [*self._moments, self._weight, self._square_weight]
            after = [where(is_counted, new, old) for new, old in zip(after, before, strict=True)]
        *self._moments, self._weight, self._square_weight = after

    def interval(self, noise: Noise) -> tuple[float, float]:
        """The ends of the 95 % interval of V/G² around averages V and G²; NaN with less than 4 independent steps.

        >>> spread = NoiseSpread()
        >>> for variance in (90.0, 100.0, 110.0) * 4:
        ...     spread.add(Noise(variance, 1.0), scale=1.0)
        >>> [round(end) for end in spread.interval(Noise(100.0, 1.0))]
        [95, 105]
        """
        number = self._weight**2 / self._square_weight if self._weight else 0.0
        if number < _LEAST_STEPS:
            return math.nan, math.nan
        v, g, vv, gg, vg = (moment / self._weight for moment in self._moments)
        scale = _t_quantile(number - 1) ** 2 / (number - 1)
        vv, gg, vg = max(vv - v * v, 0.0) * scale, max(gg - g * g, 0.0) * scale, (vg - v * g) * scale
        variance, square_norm = noise.variance, noise.square_norm
        # the roots of a·φ² − 2·b·φ + c
        a, b, c = square_norm**2 - gg, variance * square_norm - vg, variance**2 - vv
        upper = b + math.sqrt(max(b * b - a * c, 0.0))
        low = c / upper if c > 0 and upper > 0 else 0.0
        return low, upper / a if a > 0 and square_norm > 0 else math.inf

    def map_(self, function: Callable[[Number], Number]) -> None:
        """Replace each number by a function of it."""
        self._moments = [function(moment) for moment in self._moments]
        self._weight, self._square_weight = function(self._weight), function(self._square_weight)

    def state_dict(self) -> dict[str, Any]:
        return {"moments": list(self._moments), "weight": self._weight, "square_weight": self._square_weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._moments = list(state["moments"])
        self._weight, self._square_weight = state["weight"], state["square_weight"]


def _t_quantile(degrees: float) -> float:
    """The 97.5 % quantile of Student's t by its expansion around the normal one; 1 % off at 3 degrees of freedom."""
    z = 1.959964
    parts = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return sum(part / degrees**power for power, part in enumerate(parts))


class SampleNoise:
    """Noise of normalization layers by their samples' gradients, and the noise of each group that it predicts.

    Let ψ = G²/V be the inverse of the noise scale. In steps of several minibatches, ψ of each group is measured
    together with ψ' of the layers. The slope is the ratio ψ'/ψ of averages over these steps, and 1 before there are
    any. In a step of one minibatch a group then has ψ = ψ'/slope, and with T = ‖ḡ‖² = G² + V/B − V/N

        V = T / (ψ + 1/B − 1/N),   G² = ψ·V
    """

    def __init__(self, new_average: Callable[[], NoiseAverage]) -> None:
        self._new_average = new_average
        self.average = new_average()  # of the layers
        self.beside = new_average()  # the same, in steps of several minibatches
        self.of_groups: list[NoiseAverage] = []  # of each group, in these steps

    @property
    def averages(self) -> list[NoiseAverage]:
        """All averages."""
        return [self.average, self.beside, *self.of_groups]

    def add(self, noise: Noise, step: Step, has_several: Condition, is_counted: Condition, num_groups: int) -> None:
        """Add the noise of the layers in a step, if it counts."""
        self.average.add(noise, step.scale, is_counted, steps=step.samples_every)
        if is_tensor(has_several) or has_several:
            self.beside.add(noise, step.scale, has_several & is_counted, steps=step.samples_every)
        while len(self.of_groups) < num_groups:
            self.of_groups.append(self._new_average())

    def slope(self, group: int | None = None) -> Number:
        """The noise scale of a group, or of all, over that of the layers."""
        parts = [one for one in self.of_groups if is_tensor(one.count) or one.count]
        parts = parts if group is None else [self.of_groups[group]]
        known = [one.count > 0 for one in parts]
        if not known or not (is_tensor(known[0]) or all(known)):
            return 1.0
        noises = [one.mean for one in parts]
        own, layers = _inverse_scale(reduce(add, noises)), _inverse_scale(self.beside.mean)
        is_known = reduce(and_, known) & (own > 0) & (layers > 0)
        return where(is_known, layers / where(own > 0, own, 1.0), 1.0)

    def predict(self, square_of_mean: Number, group: int, *, batch_size: Number, population: Number | None) -> Noise:
        """The noise of a group in a step of one minibatch."""
        inverse = at_least(_inverse_scale(self.average.mean), 0.0) / self.slope(group)
        rest = 1 / batch_size if population is None else 1 / batch_size - 1 / population
        variance = square_of_mean / at_least(inverse + rest, _TINY)
        return Noise(variance, inverse * variance)

    def spread(self, noise: Noise, predicted: Noise) -> Noise:
        """The noise of the layers in one step, in proportion to what was predicted by the average."""
        mean = self.average.mean
        variance = predicted.variance * noise.variance / at_least(mean.variance, _TINY)
        has_signal = mean.square_norm > 0
        ratio = noise.square_norm / where(has_signal, mean.square_norm, 1.0)
        return Noise(variance, where(has_signal, predicted.square_norm * ratio, noise.square_norm))

    def map_(self, function: Callable[[Number], Number]) -> None:
        """Replace each number by a function of it."""
        for average in self.averages:
            average.map_(function)

    def state_dict(self) -> dict[str, Any]:
        of_groups = [average.state_dict() for average in self.of_groups]
        return {"average": self.average.state_dict(), "beside": self.beside.state_dict(), "of_groups": of_groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.of_groups = [self._new_average() for _ in state["of_groups"]]
        saved = (state["average"], state["beside"], *state["of_groups"])
        for average, one in zip(self.averages, saved, strict=True):
            average.load_state_dict(one)


def _either(condition: Condition, one: Noise, other: Noise) -> Noise:
    if not is_tensor(condition):
        return one if condition else other
    parts = ((one.variance, other.variance), (one.square_norm, other.square_norm))
    return Noise(*(where(condition, *pair) for pair in parts))


def _is_something(measured: Norms | Noise | None) -> Condition:
    """Whether a group has a gradient."""
    if measured is None:
        return False
    return (measured.variance if isinstance(measured, Noise) else measured.mean_of_squares) != 0


def _inverse_scale(noise: Noise) -> Number:
    return noise.square_norm / at_least(noise.variance, _TINY)


class NoiseMeter:
    """Averages the gradient noise of each parameter group over steps, and computes the gain of a batch size.

    A step with a single minibatch gives no estimate and leaves the averages unchanged, unless the gradients of samples
    were measured, which predict it (:class:`SampleNoise`). Before the first estimate the gain is min(1, S), its lower
    bound. A parameter group without a gradient, such as a frozen one, is not measured, and is not part of the noise of
    all groups until it has one again. A step in which no group has one gives no estimate, either. With weighted
    minibatches the noise is per unit of weight, such as a token. Batch sizes remain in samples and are converted with
    the mean weight of a sample so far.

    >>> meter = NoiseMeter()
    >>> step = Step(batch_size=64, minibatch_size=32, ref_batchsize=32)
    >>> meter.observe(step, [Norms(mean_of_squares=3.0, square_of_mean=2.0)])
    >>> meter.noise()
    Noise(variance=64.0, square_norm=1.0)
    >>> meter.gain(64, 32)
    1.5
    """

    def __init__(self, *, starts_with_mean: bool = False, smoothing: Smoothing = None) -> None:
        check_smoothing(smoothing)
        self.starts_with_mean, self.smoothing = starts_with_mean, smoothing
        self.averages: list[NoiseAverage] = []
        self._spread = NoiseSpread(smoothing=smoothing)  # of all groups
        self.of_samples: SampleNoise | None = None  # once they were measured
        self._active: list[bool] = []  # whether each group was measured in the latest step
        self._has_warned = False
        self._weight = 0.0  # of all weighted steps, which had _samples samples
        self._samples = 0

    def observe(self, step: Step, norms: Sequence[Norms | Noise | None], is_counted: Condition = True) -> None:
        """Add a step's norms or noise, one entry per parameter group, if it counts; None for a group without any."""
        while len(self.averages) < len(norms):
            self.averages.append(self._new_average())
            self._active.append(False)
        size, num_minibatches = step.batch_size, step.num_minibatches
        if step.weight is not None and step.num_weighted is not None:
            size, num_minibatches = step.weight, step.num_weighted  # type: ignore[assignment]
            self._weight = where(is_counted, self._weight + step.weight, self._weight)
            self._samples = where(is_counted, self._samples + step.batch_size, self._samples)
        population = None if step.population is None else step.population * self._weight_of_a_sample
        sizes: dict[str, Any] = {"batch_size": size, "population": population}
        has_several = num_minibatches >= 2
        samples = None if step.of_samples is None else self._observe_samples(step, sizes, has_several, is_counted)
        if samples is None and not is_tensor(has_several) and not has_several:
            return
        active = [_is_something(measured) for measured in norms]
        is_estimate = reduce(or_, active) & is_counted & (has_several if samples is None else True)
        if not is_tensor(is_estimate) and not is_estimate:
            return
        self._active = [where(is_estimate, now, was) for now, was in zip(active, self._active, strict=True)]
        steps: Number = 1
        if samples is not None and step.samples_every > 1:  # a step of several minibatches has an estimate of its own
            steps = step.samples_every - (step.samples_every - 1) * has_several * (size * 0 + 1.0)  # of its dtype
        found: list[Noise] = []
        for group, (measured, is_active) in enumerate(zip(norms, active, strict=True)):
            if (is_tensor(is_active) or is_active) and measured is not None:
                if isinstance(measured, Noise):
                    noise = measured
                else:
                    noise = Noise.from_norms(*measured, num_minibatches=at_least(num_minibatches, 2), **sizes)
                if samples is not None and isinstance(measured, Norms):
                    noise = self._with_samples(
                        noise, group, step, measured, sizes, has_several, is_estimate & is_active
                    )
                found.append(noise)  # 0 for a group that is not active
                average = self.averages[group]
                part = average.add(noise, step.scale, is_estimate & is_active, steps=steps)
                if part > 0.5 and average.count >= 10 and not self._has_warned:
                    self._has_warned = True
                    logger.warning(_OUTLIER, step.steps_done, 100 * part, average.count)
        if not found:
            return
        total = reduce(add, found)
        if samples is not None:
            total = _either(has_several, total, self.of_samples.spread(samples, total))  # type: ignore[union-attr]
        self._spread.add(total, step.scale, is_estimate, steps=steps)

    def _observe_samples(
        self, step: Step, sizes: Mapping[str, Any], has_several: Condition, is_counted: Condition
    ) -> Noise:
        """Add the norms of the samples' gradients; returns their noise."""
        if self.of_samples is None:
            self.of_samples = SampleNoise(self._new_average)
        of_samples: Norms = step.of_samples  # type: ignore[assignment]
        noise = Noise.from_norms(*of_samples, num_minibatches=at_least(step.batch_size, 2), **sizes)
        self.of_samples.add(noise, step, has_several, is_counted, len(self.averages))
        return noise

    def _with_samples(
        self,
        noise: Noise,
        group: int,
        step: Step,
        measured: Norms,
        sizes: Mapping[str, Any],
        has_several: Condition,
        is_counted: Condition,
    ) -> Noise:
        """The noise of a group: by its minibatches if there are several, which also give the slope, or predicted."""
        samples: SampleNoise = self.of_samples  # type: ignore[assignment]
        if is_tensor(has_several) or has_several:
            samples.of_groups[group].add(noise, step.scale, is_counted & has_several, steps=step.samples_every)
        if not is_tensor(has_several) and has_several:
            return noise
        return _either(has_several, noise, samples.predict(measured.square_of_mean, group, **sizes))

    def _new_average(self) -> NoiseAverage:
        return NoiseAverage(starts_with_mean=self.starts_with_mean, smoothing=self.smoothing)

    def noise(self, group: int | None = None) -> Noise | None:
        """The average noise of one parameter group, or of all groups; None before the first estimate."""
        known = [average.mean for average, is_known in self._known(group) if is_known]
        return reduce(add, known) if known else None

    def gain(self, batch_size: Number, ref_batchsize: Number, group: int | None = None) -> Number:
        """How many steps at the reference batch size one step of this batch size is worth."""
        known = [(average.mean, is_) for average, is_ in self._known(group) if is_tensor(is_) or is_]
        lower_bound = at_most(batch_size / ref_batchsize, 1.0)
        if not known:
            return lower_bound
        of_all, weight = reduce(add, [_either(is_, mean, NO_NOISE) for mean, is_ in known]), self._weight_of_a_sample
        gain = of_all.gain(batch_size * weight, ref_batchsize * weight)
        return where(reduce(or_, [is_known for _, is_known in known]), gain, lower_bound)

    def _known(self, group: int | None) -> list[tuple[NoiseAverage, Condition]]:
        """The averages of one group, or of all, and whether each is part of the noise."""
        if group is None:
            pairs = zip(self.averages, self._active, strict=True)
            return [(average, is_active & (average.count > 0)) for average, is_active in pairs]
        return [(average, average.count > 0) for average in self.averages[group : group + 1]]

    def use_decay(self, decay: Number) -> None:
        """Average with this decay from now on, whatever the scale."""
        self.smoothing = lambda _: decay
        of_samples = [] if self.of_samples is None else self.of_samples.averages
        for average in (*self.averages, *of_samples):
            average.smoothing = self.smoothing
        self._spread.smoothing = self.smoothing

    def has_observed(self, num_groups: int, *, is_weighted: bool, has_samples: bool) -> bool:
        """Whether a step of `num_groups` groups was observed, with or without weights, and with samples if any."""
        samples = self.of_samples
        if has_samples and (samples is None or len(samples.of_groups) != num_groups):
            return False
        return len(self.averages) == num_groups and self._is_weighted == is_weighted

    def map_(self, function: Callable[[Number], Number]) -> None:
        """Replace every number that a step may change by a function of it, always in the same order."""
        for average in self.averages:
            average.map_(function)
        self._spread.map_(function)
        if self.of_samples is not None:
            self.of_samples.map_(function)
        self._active = [function(is_active) for is_active in self._active]
        if self._is_weighted:
            self._weight, self._samples = function(self._weight), function(self._samples)

    def scale_in_samples(self) -> float | None:
        """V/G² in samples, with weighted minibatches as well; None before the first estimate."""
        noise = self.noise()
        return None if noise is None else noise.scale / self._weight_of_a_sample

    @property
    def _is_weighted(self) -> bool:
        """Whether minibatches have had weights; otherwise there is nothing to compute with them."""
        return is_tensor(self._weight) or bool(self._weight)

    @property
    def _weight_of_a_sample(self) -> Number:
        if not self._is_weighted:
            return 1.0
        return where(self._weight != 0, self._weight / at_least(self._samples, 1), 1.0)

    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the noise scale V/G² of all groups; NaN with too few estimates."""
        noise = self.noise()
        return (math.nan, math.nan) if noise is None else self._spread.interval(noise)

    def gain_interval(self, batch_size: float, ref_batchsize: float) -> tuple[float, float]:
        """The 95 % confidence interval of the gain, which is monotonic in the noise scale."""
        weight = self._weight_of_a_sample
        noises = [Noise(1.0, 0.0) if math.isinf(end) else Noise(end, 1.0) for end in self.interval()]
        low, high = sorted(noise.gain(batch_size * weight, ref_batchsize * weight) for noise in noises)
        return low, high

    def cosine(self, step: Step) -> float:
        """The mean cosine between two minibatches of a step: (n·T − L)/((n − 1)·L) of averaged norms, G²/(G² + V/b)."""
        noise, weight = self.noise(), self._weight_of_a_sample
        if noise is None:
            return math.nan
        square = noise.square_norm
        if step.population is not None:  # minibatches of one step have no sample in common
            square = square - noise.variance / (step.population * weight)
        of_one = square + noise.variance / (step.minibatch_size * weight)
        return square / of_one if of_one > 0 else math.nan

    def report(self, step: Step) -> dict[str, float]:
        """The values to log for a step: S, gain, efficiency gain/S, noise scale, intervals, and the mean cosine."""
        noise, sizes = self.noise(), (step.batch_size, step.ref_batchsize)
        gain = self.gain(*sizes)
        gain_low, gain_high = self.gain_interval(*sizes)
        low, high = self.interval()
        of_samples = {}
        if self.of_samples is not None and self.of_samples.average.noise is not None:
            of_layers = self.of_samples.average.mean.scale
            of_samples = {"norm_layers_noise_scale": of_layers, "norm_layers_slope": self.of_samples.slope()}
        return {
            "scale": step.scale,
            "gain": gain,
            "gain_low": gain_low,
            "gain_high": gain_high,
            "efficiency": gain / step.scale,
            "noise_scale": math.nan if noise is None else noise.scale,
            "noise_scale_low": low,
            "noise_scale_high": high,
            "cosine": self.cosine(step),
            **of_samples,
        }

    def state_dict(self) -> dict[str, Any]:
        """The averages of all groups, which of them count, and the totals for the mean weight of a sample."""
        averages = [average.state_dict() for average in self.averages]
        own = {"active": list(self._active), "weight": self._weight, "samples": self._samples}
        of_samples = None if self.of_samples is None else self.of_samples.state_dict()
        return {"averages": averages, **own, "spread": self._spread.state_dict(), "of_samples": of_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.averages = [self._new_average() for _ in state["averages"]]
        for average, saved in zip(self.averages, state["averages"], strict=True):
            average.load_state_dict(saved)
        self._spread = NoiseSpread(smoothing=self.smoothing)
        if "spread" in state:  # not of version 1.0
            self._spread.load_state_dict(state["spread"])
        self.of_samples = SampleNoise(self._new_average) if state.get("of_samples") else None
        if self.of_samples is not None:
            self.of_samples.load_state_dict(state["of_samples"])
        self._active, self._weight, self._samples = list(state["active"]), state["weight"], state["samples"]
        self._active += [False] * (len(self.averages) - len(self._active))
