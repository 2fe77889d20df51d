"""Rules whose factor follows from the measured gradient noise: AdaScale, AdamScale, surge."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

from variable_batch_size.rules.adam import check_adam
from variable_batch_size.rules.noise import Noise, NoiseMeter
from variable_batch_size.rules.rule import Norms, Rule, Step


class NoiseRule(Rule):
    """A rule that averages the gradient noise over steps (:class:`NoiseMeter`), and scales by the gain.

    Args:
        starts_with_mean: average the first steps as the paper does; debiased otherwise.

    Attributes:
        meter: the noise of the run.
    """

    measures_noise = True

    def __init__(self, *, starts_with_mean: bool = False) -> None:
        self.starts_with_mean = starts_with_mean
        self.meter = NoiseMeter(starts_with_mean=starts_with_mean)

    @abstractmethod
    def scaled(self, gain: float, step: Step) -> float:
        """The factor that the gain of a step makes."""

    def observe(self, step: Step, norms: Sequence[Norms | None]) -> None:
        self.meter.observe(step, norms)

    def noise(self, group: int | None = None) -> Noise | None:
        """The averaged noise of a parameter group, or of all together; None before the first estimate."""
        return self.meter.noise(group)

    def gain(self, batch_size: int, ref_batchsize: int, group: int | None = None) -> float:
        """How many steps at the reference batch size one step of this batch size is worth."""
        return self.meter.gain(batch_size, ref_batchsize, group)

    def factor(self, step: Step) -> float:
        return self.scaled(self.gain(step.batch_size, step.ref_batchsize), step)

    def group_factor(self, step: Step, group: int) -> float:
        return self.scaled(self.gain(step.batch_size, step.ref_batchsize, group), step)

    def report(self, step: Step) -> dict[str, float]:
        return self.meter.report(step)

    def state_dict(self) -> dict[str, Any]:
        return self.meter.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.meter.load_state_dict(state)


@final
class AdaScaleRule(NoiseRule):
    """lr = lr0 · gain, one for each parameter group (Johnson et al. 2020, "AdaScale SGD").

    The gain (:meth:`Noise.gain`) comes from averages of the gradient noise that the optimizer measures.
    """

    def scaled(self, gain: float, step: Step) -> float:
        return gain


@final
class AdamScaleRule(NoiseRule):
    """lr = lr0 · √gain, for Adam: the gain from gradients divided by the root of Adam's second moment.

    Adam divides by that root, so the noise that counts is that of the divided gradients; and the learning rate grows
    with the root of the progress that a step makes, as in the square root rule. A parameter that Adam has not updated
    yet has no second moment and is left out of the norms.
    """

    preconditions = True

    def check(self, optimizer: str, groups: Sequence[Mapping[str, Any]]) -> None:
        check_adam(optimizer, groups)

    def scaled(self, gain: float, step: Step) -> float:
        return math.sqrt(gain)

    def worth(self, step: Step, factor: float) -> float:
        return factor**2


@final
class SurgeRule(NoiseRule):
    """The best learning rate of an optimizer that goes by signs, from the noise scale that a run measures.

        lr ∝ 1 / (√(Bn/B) + √(B/Bn)),   Bn = V/G²

    so that it rises as √B below the noise scale Bn, is largest there, and falls as 1/√B beyond (Li et al. 2024, "Surge
    phenomenon in optimal learning rate and batch size scaling", for Adam and its kind). Against its value at B0, with
    AdaScale's gain (:meth:`Noise.gain`), that is

        lr = lr0 · √S · (Bn + B0)/(Bn + B) = lr0 · gain/√S

    one for each parameter group. A step is worth its gain here, too. As long as nothing has been measured, the factor
    is the smaller of √S and 1/√S, the two ends between which it can lie.

    Bn is the simple noise scale of the gradients as they are; the paper's weighs coordinates by the curvature, too, and
    was fitted to sweeps of the learning rate.

    Args:
        starts_with_mean: average the noise of the first steps as AdaScale's paper does; debiased otherwise.

    >>> rule, step = SurgeRule(), Step(batch_size=400, minibatch_size=100, ref_batchsize=100)
    >>> rule.scaled(1.6, step)  # the gain at Bn = B0
    0.8
    """

    def scaled(self, gain: float, step: Step) -> float:
        return gain / math.sqrt(step.scale)

    def worth(self, step: Step, factor: float) -> float:
        return factor * math.sqrt(step.scale)
