"""Observer: what is seen of a step's gradients before the update, which they may rule out."""

from __future__ import annotations

import dataclasses

from variable_batch_size.rules.noise_meter import NoiseMeter
from variable_batch_size.rules.rule import Rule, Step
from variable_batch_size.training.gradients import Gradients

_NO_WEIGHT = "all minibatches have the weight 0"


class Observer:
    """Looks at the gradients of a step between their reduction and the update.

    Args:
        gradients: of the optimizer.
        rule: that may want to know their norms.
        meter: likewise; None if the rule measures by itself, or nobody does.
        skip_nonfinite: whether no update is to be made where they are not finite.
    """

    def __init__(self, gradients: Gradients, rule: Rule, meter: NoiseMeter | None, *, skip_nonfinite: bool) -> None:
        self._gradients = gradients
        self._rule = rule
        self._meter = meter
        self._skips = skip_nonfinite

    def reason_to_skip(self, step: Step) -> str | None:
        """Why no update is to be made, if so; else rule and meter have seen what was measured."""
        if self._gradients.weighs_nothing():
            return _NO_WEIGHT
        if not (self._skips or self._rule.measures_noise or self._meter is not None):
            return None
        measured = self._gradients.measured()
        if self._skips and not measured.is_finite:
            return "the gradient is not finite"
        if measured.weight == 0:
            return _NO_WEIGHT
        step = dataclasses.replace(step, weight=measured.weight, num_weighted=measured.num_weighted)
        for observing in (self._rule, self._meter):
            if observing is not None:
                observing.observe(step, measured.norms)
        return None
