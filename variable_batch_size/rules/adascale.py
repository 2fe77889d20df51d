"""AdaScale: rules whose factor follows from the gradient noise that a run measures."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

from variable_batch_size.rules.adam import check_adam
from variable_batch_size.rules.noise import Noise, NoiseAverage
from variable_batch_size.rules.rule import Norms, Rule, Step


class NoiseRule(Rule):
    """A rule that averages the gradient noise of each parameter group over steps, and scales by the gain.

    A step of a single minibatch gives no estimate and leaves the averages as they are. As long as there is none at
    all, the gain is min(1, S), the smaller of the two ends between which it can lie.

    Args:
        starts_with_mean: average the first steps as the paper does; debiased otherwise (:class:`NoiseAverage`).
    """

    measures_noise = True

    def __init__(self, *, starts_with_mean: bool = False) -> None:
        self.starts_with_mean = starts_with_mean
        self.averages: list[NoiseAverage] = []

    @abstractmethod
    def scaled(self, gain: float, step: Step) -> float:
        """The factor that the gain of a step makes."""

    def observe(self, step: Step, norms: Sequence[Norms | None]) -> None:
        while len(self.averages) < len(norms):
            self.averages.append(NoiseAverage(starts_with_mean=self.starts_with_mean))
        if step.num_minibatches == 1:
            return
        for average, measured in zip(self.averages, norms, strict=True):
            if measured is not None:
                noise = Noise.from_norms(*measured, batch_size=step.batch_size, num_minibatches=step.num_minibatches)
                average.add(noise, step.scale)

    def noise(self, group: int | None = None) -> Noise | None:
        """The averaged noise of a parameter group, or of all together; None before the first estimate."""
        chosen = self.averages if group is None else self.averages[group : group + 1]
        known = [noise for average in chosen if (noise := average.noise) is not None]
        return sum(known[1:], start=known[0]) if known else None

    def gain(self, batch_size: int, ref_batchsize: int, group: int | None = None) -> float:
        """How many steps at the reference batch size one step of this batch size is worth."""
        noise = self.noise(group)
        return noise.gain(batch_size, ref_batchsize) if noise else min(1.0, batch_size / ref_batchsize)

    def factor(self, step: Step) -> float:
        return self.scaled(self.gain(step.batch_size, step.ref_batchsize), step)

    def factor_of_group(self, step: Step, group: int) -> float:
        return self.scaled(self.gain(step.batch_size, step.ref_batchsize, group), step)

    def report(self, step: Step) -> dict[str, float]:
        noise = self.noise()
        return {
            "gain": self.gain(step.batch_size, step.ref_batchsize),
            "noise_scale": math.nan if noise is None else noise.scale,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"averages": [average.state_dict() for average in self.averages]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.averages = [NoiseAverage(starts_with_mean=self.starts_with_mean) for _ in state["averages"]]
        for average, saved in zip(self.averages, state["averages"], strict=True):
            average.load_state_dict(saved)


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
