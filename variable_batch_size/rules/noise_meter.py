"""NoiseMeter: the gradient noise of a run, averaged over its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from variable_batch_size.rules.noise import Noise, NoiseAverage
from variable_batch_size.rules.rule import Norms, Step


class NoiseMeter:
    """Averages the gradient noise of each parameter group over steps, and tells the gain of a batch size.

    A step of a single minibatch gives no estimate and leaves the averages as they are. As long as there is none at
    all, the gain is min(1, S), the smaller of the two ends between which it can lie. Where minibatches have weights the
    noise is per unit of weight, as per token; batch sizes stay in samples, and what a sample weighs on average is taken
    from the steps so far.

    Args:
        starts_with_mean: average the first steps as the paper does; debiased otherwise (:class:`NoiseAverage`).

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
        self._weight = 0.0  # of all steps that had one, and their samples
        self._samples = 0

    def observe(self, step: Step, norms: Sequence[Norms | None]) -> None:
        """Take in what was measured in a step: for each parameter group its norms, None where there are none yet."""
        while len(self.averages) < len(norms):
            self.averages.append(NoiseAverage(starts_with_mean=self.starts_with_mean))
        size, num_minibatches = step.batch_size, step.num_minibatches
        if step.weight is not None and step.num_weighted is not None:
            size, num_minibatches = step.weight, step.num_weighted  # type: ignore[assignment]
            self._weight += step.weight
            self._samples += step.batch_size
        if num_minibatches < 2:
            return
        for average, measured in zip(self.averages, norms, strict=True):
            if measured is not None:
                noise = Noise.from_norms(*measured, batch_size=size, num_minibatches=num_minibatches)
                average.add(noise, step.scale)

    def noise(self, group: int | None = None) -> Noise | None:
        """The averaged noise of a parameter group, or of all together; None before the first estimate."""
        chosen = self.averages if group is None else self.averages[group : group + 1]
        known = [noise for average in chosen if (noise := average.noise) is not None]
        return sum(known[1:], start=known[0]) if known else None

    def gain(self, batch_size: int, ref_batchsize: int, group: int | None = None) -> float:
        """How many steps at the reference batch size one step of this batch size is worth."""
        noise = self.noise(group)
        if noise is None:
            return min(1.0, batch_size / ref_batchsize)
        return noise.gain(batch_size * self._weight_of_a_sample, ref_batchsize * self._weight_of_a_sample)

    def scale_in_samples(self) -> float | None:
        """V/G² in the units of batch sizes, also where minibatches have weights; None before the first estimate."""
        noise = self.noise()
        return None if noise is None else noise.scale / self._weight_of_a_sample

    @property
    def _weight_of_a_sample(self) -> float:
        return self._weight / self._samples if self._weight else 1.0

    def report(self, step: Step) -> dict[str, float]:
        """What there is to tell a log about a step."""
        noise = self.noise()
        return {
            "gain": self.gain(step.batch_size, step.ref_batchsize),
            "noise_scale": math.nan if noise is None else noise.scale,
        }

    def state_dict(self) -> dict[str, Any]:
        """Numbers, lists and dictionaries."""
        averages = [average.state_dict() for average in self.averages]
        return {"averages": averages, "weight": self._weight, "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.averages = [NoiseAverage(starts_with_mean=self.starts_with_mean) for _ in state["averages"]]
        for average, saved in zip(self.averages, state["averages"], strict=True):
            average.load_state_dict(saved)
        self._weight = state.get("weight", 0.0)
        self._samples = state.get("samples", 0)
