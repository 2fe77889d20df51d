"""Rules whose factor depends on the measured gradient noise: AdaScale, AdamScale, surge."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

from variable_batch_size.checks import check_positive
from variable_batch_size.rules.adam import check_adam
from variable_batch_size.rules.noise import Noise, NoiseMeter, Smoothing
from variable_batch_size.rules.numbers import Number, sqrt
from variable_batch_size.rules.rule import Norms, Rule, Step
from variable_batch_size.stability import experimental


class NoiseRule(Rule):
    """Base of rules that average the gradient noise over steps (:class:`NoiseMeter`) and scale by the gain.

    Args:
        starts_with_mean: average the first steps as in the AdaScale paper; otherwise debias (:class:`NoiseAverage`).
        smoothing: the decay θ of the average in a step: a number, a function of the scale S, or ``"paper"``; None for
            one that remembers at least 20 steps (:func:`decay_at`). Steps without an estimate do not count: with
            ``measure_noise="own norm"`` it remembers 20 estimates. An estimate of ``"norm layers"``, from all samples
            of a step, counts as those of the 16 steps until the next one.
    """

    measures_noise = True

    def __init__(self, *, starts_with_mean: bool = False, smoothing: Smoothing = None) -> None:
        self.starts_with_mean = starts_with_mean
        self.set_smoothing(smoothing)

    def set_smoothing(self, smoothing: Smoothing) -> None:
        """Average in another way from now on; what was averaged is dropped."""
        self.smoothing = smoothing
        self.meter = NoiseMeter(starts_with_mean=self.starts_with_mean, smoothing=smoothing)

    @abstractmethod
    def scaled(self, gain: Number, step: Step) -> Number:
        """The factor for a step with this gain."""

    def observe(self, step: Step, norms: Sequence[Norms | Noise | None]) -> None:
        self.meter.observe(step, norms)

    def noise(self, group: int | None = None) -> Noise | None:
        """See :meth:`NoiseMeter.noise`."""
        return self.meter.noise(group)

    def gain(self, batch_size: Number, ref_batchsize: Number, group: int | None = None) -> Number:
        """See :meth:`NoiseMeter.gain`."""
        return self.meter.gain(batch_size, ref_batchsize, group)

    def factor(self, step: Step) -> Number:
        return self.scaled(self.gain(step.batch_size, step.ref_batchsize), step)

    def group_factor(self, step: Step, group: int) -> Number:
        return self.scaled(self.gain(step.batch_size, step.ref_batchsize, group), step)

    def report(self, step: Step) -> dict[str, float]:
        return self.meter.report(step)

    def state_dict(self) -> dict[str, Any]:
        return self.meter.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.meter.load_state_dict(state)


@final
class AdaScaleRule(NoiseRule):
    """lr = lr0 · gain (:meth:`Noise.gain`), per parameter group (Johnson et al. 2020, "AdaScale SGD")."""

    def scaled(self, gain: Number, step: Step) -> Number:
        return gain


@experimental
@final
class AdamScaleRule(NoiseRule):
    """lr = lr0 · √gain for Adam, with the gain of preconditioned gradients.

    Adam divides gradients by the root of its second moment, so the noise is measured after the same division.
    Parameters that Adam has not updated often enough are excluded from the norms, and so are elements whose root is
    below a tenth of the root mean square of their tensor.

    Args:
        starts_with_mean: see :class:`NoiseRule`.
        smoothing: see :class:`NoiseRule`.
        min_updates: how many updates a parameter needs before its second moment is used; the inverse of the mean of a
            few squares has no finite variance.
    """

    preconditions = True

    def __init__(self, *, starts_with_mean: bool = False, smoothing: Smoothing = None, min_updates: int = 10) -> None:
        super().__init__(starts_with_mean=starts_with_mean, smoothing=smoothing)
        check_positive(min_updates=min_updates)
        self.min_updates = min_updates

    def check(self, optimizer: str, groups: Sequence[Mapping[str, Any]]) -> None:
        check_adam(optimizer, groups)

    def scaled(self, gain: Number, step: Step) -> Number:
        return sqrt(gain)

    def worth(self, step: Step, factor: Number) -> Number:
        return factor**2


@experimental
@final
class SurgeRule(NoiseRule):
    """The optimal learning rate of sign-like optimizers such as Adam, from the measured noise scale Bn = V/G².

        lr ∝ 1 / (√(Bn/B) + √(B/Bn)),   relative to B0:   lr = lr0 · √S · (Bn + B0)/(Bn + B) = lr0 · gain/√S

    It rises as √B below Bn, peaks there, and falls as 1/√B above it (Li et al. 2024, "Surge phenomenon in optimal
    learning rate and batch size scaling"), per parameter group. A step is worth its gain. Before the first estimate the
    factor is min(√S, 1/√S), its lower bound. With ``measure_noise="own norm"``, Bn is measured in the ℓ1 norm, which
    fits steps by sign, and otherwise in the Euclidean norm.

    >>> rule, step = SurgeRule(), Step(batch_size=400, minibatch_size=100, ref_batchsize=100)
    >>> rule.scaled(1.6, step)  # the gain at Bn = B0
    0.8
    """

    def scaled(self, gain: Number, step: Step) -> Number:
        return gain / sqrt(step.scale)

    def worth(self, step: Step, factor: Number) -> Number:
        return factor * sqrt(step.scale)
