"""Rules whose factor follows from the batch size and the step: linear, root, constant, linear-momentum, LEGW, Muon."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

from variable_batch_size.rules.rule import Rule, Step

_DIVIDE_BY_THE_SIZE = ("Adadelta", "Adafactor", "Adagrad", "Muon", "RMSprop", "Rprop")
"""Optimizers that divide gradients by what they measure of their size, besides those with betas."""


@final
class LinearRule(Rule):
    """lr = lr0 · S (Goyal et al. 2017, "Accurate, large minibatch SGD").

    >>> LinearRule().factor(Step(batch_size=512, minibatch_size=32, ref_batchsize=128))
    4.0
    """

    def factor(self, step: Step) -> float:
        return step.scale


@final
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

    def check(self, optimizer: str, groups: Sequence[Mapping[str, Any]]) -> None:
        if optimizer in _DIVIDE_BY_THE_SIZE or any("betas" in group for group in groups):
            raise ValueError(
                f"`inner` must be SGD or of its kind, got {optimizer}, whose updates do not grow with gradients, which "
                "the rule sums: use LinearRule, RootRule or AdamRule"
            )

    def factor(self, step: Step) -> float:
        return step.scale

    def settings(self, group: Mapping[str, Any], step: Step, factor: float) -> dict[str, Any]:
        changed = super().settings(group, step, factor / step.num_minibatches)
        if "weight_decay" in group:
            changed["weight_decay"] = group["weight_decay"] * step.num_minibatches
        return changed


@final
class LEGWRule(Rule):
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

    needs = ("warmup_samples",)
    text_setting = ("warmup_samples", int)

    def __init__(self, *, warmup_samples: int) -> None:
        if not warmup_samples > 0:
            raise ValueError(f"`warmup_samples` must be positive, got {warmup_samples!r}")
        self.warmup_samples = warmup_samples

    def factor(self, step: Step) -> float:
        return math.sqrt(step.scale) * min(1.0, (step.steps_done + 1) * step.ref_batchsize / self.warmup_samples)


def ema_decay(rho: float, batch_size: int, ref_batchsize: int) -> float:
    """The decay of an exponential moving average of the weights for one step: ρ^κ, κ = batch size / reference.

    The average so spans as many samples as with ρ at the reference batch size (Busbridge et al. 2023, "How to scale
    your EMA").

    >>> ema_decay(0.99, 256, 128)
    0.9801
    """
    return float(rho ** (batch_size / ref_batchsize))


@final
class MuonRule(Rule):
    """lr = lr0 · √κ and weight decay = wd0 · √κ, for Muon (``torch.optim.Muon``, Jordan et al. 2024).

    κ is S, or the square of the factor where that is smoothed or bounded. Muon makes every update equally large, as
    sign-like optimizers do. While noise dominates, the part of it that points along the true gradient grows with the
    root of the batch size. So an update of √κ times the size gets as far as κ reference updates, and its noise adds up
    to that of κ of them. Muon decays weights by lr · wd in each update, apart from the gradient: with both multiplied
    by √κ, the decay per sample stays. Momentum stays as it is.

    Args:
        scales_weight_decay: whether the weight decay is multiplied by √κ; if not, it falls per sample as 1/√κ.

    >>> rule, step = MuonRule(), Step(batch_size=512, minibatch_size=32, ref_batchsize=128)
    >>> rule.settings({"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}, step, rule.factor(step))
    {'lr': 0.04, 'weight_decay': 0.2}
    """

    def __init__(self, *, scales_weight_decay: bool = True) -> None:
        self.scales_weight_decay = scales_weight_decay

    def check(self, optimizer: str, groups: Sequence[Mapping[str, Any]]) -> None:
        if "muon" not in optimizer.lower():
            raise ValueError(f"`inner` must be Muon, got {optimizer}")
        if any("betas" in group for group in groups):
            raise ValueError(
                f"`inner` must have no groups with betas, which are Adam's and need AdamRule, got {optimizer}"
            )

    def factor(self, step: Step) -> float:
        return math.sqrt(step.scale)

    def worth(self, step: Step, factor: float) -> float:
        return factor**2

    def settings(self, group: Mapping[str, Any], step: Step, factor: float) -> dict[str, Any]:
        changed = super().settings(group, step, factor)
        if self.scales_weight_decay and "weight_decay" in group:
            changed["weight_decay"] = group["weight_decay"] * factor
        return changed
