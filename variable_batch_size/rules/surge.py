"""The surge rule: a learning rate that rises up to the measured noise scale and falls beyond it."""

from __future__ import annotations

import math
from typing import final

from variable_batch_size.rules.adascale import NoiseRule
from variable_batch_size.rules.rule import Step


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
