"""What a step's batch size makes of the learning rate and other settings; numbers in, numbers out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from variable_batch_size.checks import check_not_negative
from variable_batch_size.rules.noise import Noise, NoiseAverage


@dataclass(frozen=True)
class Step:
    """One step, as a rule sees it.

    Args:
        batch_size: samples in the step, over all cores.
        minibatch_size: samples that one core runs at once.
        ref_batchsize: the batch size for which the inner optimizer's settings are right.
        steps_done: steps before this one.
    """

    batch_size: int
    minibatch_size: int
    ref_batchsize: int
    steps_done: int = 0

    @property
    def scale(self) -> float:
        """S = batch size / reference batch size."""
        return self.batch_size / self.ref_batchsize

    @property
    def num_minibatches(self) -> int:
        """n = batch size / minibatch size."""
        return self.batch_size // self.minibatch_size


class Rule(ABC):
    """How the settings of a step follow from its batch size.

    A rule of your own needs one method:

    >>> class CappedLinearRule(Rule):
    ...     def factor(self, step):
    ...         return min(step.scale, 8.0)
    >>> step = Step(batch_size=2048, minibatch_size=32, ref_batchsize=128)
    >>> rule = CappedLinearRule()
    >>> rule.settings({"lr": 0.5}, step, rule.factor(step))
    {'lr': 4.0}
    """

    sums_gradients = False
    """Whether the update gets the sum of the minibatches' gradients, instead of their mean."""

    measures_noise = False
    """Whether the norms of gradients are to be measured and given to :meth:`observe`."""

    preconditions = False
    """Whether those norms are of gradients divided by the root of Adam's second moment."""

    @abstractmethod
    def factor(self, step: Step) -> float:
        """What the learning rate of the mean gradient is multiplied by."""

    def factor_of_group(self, step: Step, group: int) -> float:
        """The factor of one parameter group, for a rule that gives each its own."""
        return self.factor(step)

    def observe(self, step: Step, norms: Sequence[tuple[float, float]]) -> None:  # noqa: B027 (most rules need none)
        """Take in what was measured in a step: for each parameter group, the mean of ‖g_i‖² and ‖mean g_i‖²."""

    def state_dict(self) -> dict[str, Any]:
        """What the rule has to remember from one step to the next: numbers, lists and dictionaries."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Take over what :meth:`state_dict` returned."""

    def settings(self, group: Mapping[str, Any], step: Step, factor: float) -> dict[str, Any]:
        """The settings of a parameter group that are different for this step, with the values they take."""
        return {"lr": group["lr"] * factor}


@final
class LinearRule(Rule):
    """lr = lr0 · S (Goyal et al. 2017, "Accurate, large minibatch SGD").

    >>> LinearRule().factor(Step(batch_size=512, minibatch_size=32, ref_batchsize=128))
    4.0
    """

    def factor(self, step: Step) -> float:
        return step.scale


class RootRule(Rule):
    """lr = lr0 · √S (Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks").

    >>> RootRule().factor(Step(batch_size=512, minibatch_size=32, ref_batchsize=128))
    2.0
    """

    def factor(self, step: Step) -> float:
        return math.sqrt(step.scale)


@final
class ConstantRule(Rule):
    """lr = lr0, whatever the batch size.

    >>> ConstantRule().factor(Step(batch_size=512, minibatch_size=32, ref_batchsize=128))
    1.0
    """

    def factor(self, step: Step) -> float:
        return 1.0


@final
class LinearMomentumRule(Rule):
    """The linear rule for SGD with momentum, whose momentum does not jump with the batch size.

    With n minibatches of size b the gradients are summed, Σg = n · mean, and the learning rate is that of one:

        lr = lr0 · S/n = lr0 · b/B0,   weight decay = wd0 · n   (of the sum, as wd0 is of the mean)

    A plain step is that of the linear rule, lr0 · S · mean; but momentum, which is kept in units of the gradient, is
    then taken at the same learning rate in every step.

    >>> rule, step = LinearMomentumRule(), Step(batch_size=512, minibatch_size=32, ref_batchsize=128)
    >>> rule.settings({"lr": 0.1, "weight_decay": 1e-4}, step, rule.factor(step))
    {'lr': 0.025, 'weight_decay': 0.0016}
    """

    sums_gradients = True

    def factor(self, step: Step) -> float:
        return step.scale

    def settings(self, group: Mapping[str, Any], step: Step, factor: float) -> dict[str, Any]:
        changed = super().settings(group, step, factor / step.num_minibatches)
        if "weight_decay" in group:
            changed["weight_decay"] = group["weight_decay"] * step.num_minibatches
        return changed


@final
class AdamRule(RootRule):
    """The square root rule for Adam with all of its settings (Malladi et al. 2022, "On the SDEs and scaling rules").

    With κ = S, or the square of the factor where that is smoothed or bounded:

        lr = lr0 · √κ,   1 − β = κ · (1 − β0),   ε = ε0/√κ

    A β cannot go below 0, where Adam averages nothing: from κ = 1/(1 − β0) on, it is 0. β1 = 0.9 gets there at S = 10;
    beyond, the rule is out of its range.

    >>> rule, step = AdamRule(), Step(batch_size=512, minibatch_size=32, ref_batchsize=128)
    >>> rule.settings({"lr": 0.1, "betas": (0.75, 0.875), "eps": 1e-8}, step, rule.factor(step))
    {'lr': 0.2, 'betas': (0.0, 0.5), 'eps': 5e-09}
    """

    def settings(self, group: Mapping[str, Any], step: Step, factor: float) -> dict[str, Any]:
        betas = tuple(max(0.0, 1 - factor**2 * (1 - beta)) for beta in group["betas"])
        return super().settings(group, step, factor) | {"betas": betas, "eps": group["eps"] / factor}


@final
class LEGWRule(RootRule):
    """The root rule behind a warm-up stretched with the scale (You et al. 2019, "Large-batch training for LSTM").

        lr = lr0 · √S · min(1, (t + 1) · B0/W)

    with W the samples that a warm-up at the reference batch size takes. At scale S it takes S · W, which is as many
    steps. So where the scale changes during the warm-up, each step still brings it forward by the same amount.

    Args:
        warmup_samples: W.

    >>> rule = LEGWRule(warmup_samples=1280)
    >>> [rule.factor(Step(512, 32, 128, steps_done)) for steps_done in (0, 4, 9, 20)]
    [0.2, 1.0, 2.0, 2.0]
    """

    def __init__(self, *, warmup_samples: int) -> None:
        if not warmup_samples > 0:
            raise ValueError(f"`warmup_samples` must be positive, got {warmup_samples!r}")
        self.warmup_samples = warmup_samples

    def factor(self, step: Step) -> float:
        return super().factor(step) * min(1.0, (step.steps_done + 1) * step.ref_batchsize / self.warmup_samples)


class AdaScaleRule(Rule):
    """lr = lr0 · gain, one for each parameter group (Johnson et al. 2020, "AdaScale SGD").

    The gain (:meth:`Noise.gain`) comes from averages of the gradient noise that the optimizer measures. A step of a
    single minibatch gives no estimate and leaves the averages as they are. As long as there is none at all, the gain is
    min(1, S), the smaller of the two ends between which it can lie. `progress` is the sum of the gains of all steps.

    Args:
        starts_with_mean: average the first steps as the paper does; debiased otherwise (:class:`NoiseAverage`).
    """

    measures_noise = True

    def __init__(self, *, starts_with_mean: bool = False) -> None:
        self.starts_with_mean = starts_with_mean
        self.averages: list[NoiseAverage] = []
        self.progress = 0.0

    def observe(self, step: Step, norms: Sequence[tuple[float, float]]) -> None:
        while len(self.averages) < len(norms):
            self.averages.append(NoiseAverage(starts_with_mean=self.starts_with_mean))
        if step.num_minibatches > 1:
            for average, (mean_of_squares, square_of_mean) in zip(self.averages, norms, strict=True):
                noise = Noise.from_norms(
                    mean_of_squares, square_of_mean, batch_size=step.batch_size, num_minibatches=step.num_minibatches
                )
                average.add(noise, step.scale)
        self.progress += self.gain(step.batch_size, step.ref_batchsize)

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
        return self.gain(step.batch_size, step.ref_batchsize)

    def factor_of_group(self, step: Step, group: int) -> float:
        return self.gain(step.batch_size, step.ref_batchsize, group)

    def state_dict(self) -> dict[str, Any]:
        return {"averages": [average.state_dict() for average in self.averages], "progress": self.progress}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.progress = state["progress"]
        self.averages = [NoiseAverage(starts_with_mean=self.starts_with_mean) for _ in state["averages"]]
        for average, saved in zip(self.averages, state["averages"], strict=True):
            average.load_state_dict(saved)


@final
class AdamScaleRule(AdaScaleRule):
    """lr = lr0 · √gain, for Adam: the gain from gradients divided by the root of Adam's second moment.

    Adam divides by that root, so the noise that counts is that of the divided gradients; and the learning rate grows
    with the root of the progress that a step makes, as in the square root rule.
    """

    preconditions = True

    def factor(self, step: Step) -> float:
        return math.sqrt(super().factor(step))

    def factor_of_group(self, step: Step, group: int) -> float:
        return math.sqrt(super().factor_of_group(step, group))


class Transition:
    """Bounds a factor and spreads its jumps over steps, because momentum outlives a jump of the learning rate.

    When the batch size changes, the factor goes from where it is to where the rule wants it in `smooth_steps` equal
    parts (Lin et al. 2019, "Dynamic mini-batch SGD for elastic distributed training"); a goal that itself moves is
    reached in as many.

    Args:
        smooth_steps: steps that a jump is spread over; 0 or 1 for none.
        max_factor: the largest factor; None for no bound.

    >>> transition = Transition(smooth_steps=4)
    >>> [transition.move(goal, batch_size) for goal, batch_size in [(1, 128), (5, 640), (5, 640), (5, 640), (5, 640)]]
    [1.0, 2.0, 3.0, 4.0, 5.0]
    """

    def __init__(self, *, smooth_steps: int = 0, max_factor: float | None = None) -> None:
        check_not_negative(smooth_steps=smooth_steps)
        if max_factor is not None and not max_factor > 0:
            raise ValueError(f"`max_factor` must be positive, got {max_factor!r}")
        self.smooth_steps = smooth_steps
        self.max_factor = max_factor
        self._factor: float | None = None
        self._batch_size = 0
        self._steps_left = 1

    def preview(self, goal: float, batch_size: int) -> float:
        """The factor of a step of this batch size, given what the rule wants it to be."""
        goal = float(goal if self.max_factor is None else min(goal, self.max_factor))
        steps_left = self._steps_left_at(batch_size)
        return goal if self._factor is None or steps_left == 1 else self._factor + (goal - self._factor) / steps_left

    def move(self, goal: float, batch_size: int) -> float:
        """The same, and the step is made."""
        self._factor, self._steps_left = self.preview(goal, batch_size), max(1, self._steps_left_at(batch_size) - 1)
        self._batch_size = batch_size
        return self._factor

    def _steps_left_at(self, batch_size: int) -> int:
        has_jumped = self._factor is not None and batch_size != self._batch_size
        return max(1, self.smooth_steps) if has_jumped else self._steps_left

    def state_dict(self) -> dict[str, Any]:
        """Where a jump under way stands."""
        return {"factor": self._factor, "batch_size": self._batch_size, "steps_left": self._steps_left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._factor, self._batch_size = state["factor"], state["batch_size"]
        self._steps_left = state["steps_left"]


def ema_decay(rho: float, batch_size: int, ref_batchsize: int) -> float:
    """The decay of an exponential moving average of the weights for one step: ρ^κ, κ = batch size / reference.

    The average so spans as many samples as with ρ at the reference batch size (Busbridge et al. 2023, "How to scale
    your EMA").

    >>> ema_decay(0.99, 256, 128)
    0.9801
    """
    return float(rho ** (batch_size / ref_batchsize))
