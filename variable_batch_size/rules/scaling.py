"""Rules whose factor depends only on batch size and step: linear, root, constant, linear-momentum, LEGW, Muon."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

from variable_batch_size.rules.rule import Rule, Step
from variable_batch_size.stability import experimental

# without betas, but normalizing the size of gradients
_DIVIDE_BY_THE_SIZE = ("Adadelta", "Adafactor", "Adagrad", "Muon", "RMSprop", "Rprop")


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
    """lr = lr0 at any batch size.

    >>> ConstantRule().factor(Step(batch_size=512, minibatch_size=32, ref_batchsize=128))
    1.0
    """

    scales_lr = False

    def factor(self, step: Step) -> float:
        return 1.0


@final
class LinearMomentumRule(Rule):
    """The linear rule for SGD with momentum, without jumps of the momentum when the batch size changes.

    The gradients of the n minibatches of size b are summed, at lr = lr0 · b/B0 and weight decay = wd0 · n. Without
    momentum the update is that of the linear rule. With momentum, which is in units of the gradient, the learning rate
    applied to the buffer is the same in every step.

    >>> rule, step = LinearMomentumRule(), Step(batch_size=512, minibatch_size=32, ref_batchsize=128)
    >>> rule.settings({"lr": 0.1, "weight_decay": 1e-4}, step, rule.factor(step))
    {'lr': 0.025, 'weight_decay': 0.0016}
    """

    sums_gradients = True

    def check(self, optimizer: str, groups: Sequence[Mapping[str, Any]]) -> None:
        if optimizer in _DIVIDE_BY_THE_SIZE or any("betas" in group for group in groups):
            reason = f"the rule sums gradients, but updates of {optimizer} do not grow with them"
            advice = "Use LinearRule, RootRule or AdamRule"
            raise ValueError(f"`inner` must be an SGD-style optimizer, got {optimizer}: {reason}. {advice}")

    def factor(self, step: Step) -> float:
        return step.scale

    def settings(self, group: Mapping[str, Any], step: Step, factor: float) -> dict[str, Any]:
        changed = super().settings(group, step, factor / step.num_minibatches)
        if "weight_decay" in group:
            changed["weight_decay"] = group["weight_decay"] * step.num_minibatches
        return changed


@experimental
@final
class LEGWRule(Rule):
    """The root rule with a warm-up of a fixed number of steps (You et al. 2019, "Large-batch training for LSTM").

        lr = lr0 · √S · min(1, (t + 1) · B0/W),   W = `warmup_samples` at the reference batch size

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
    """The decay of a moving average of the weights that spans as many samples as with ρ at the reference batch size.

    It is ρ^κ, κ = batch size / reference batch size (Busbridge et al. 2023, "How to scale your EMA").

    >>> ema_decay(0.99, 256, 128)
    0.9801
    """
    return float(rho ** (batch_size / ref_batchsize))


@experimental
@final
class MuonRule(Rule):
    """lr = lr0 · √κ and weight decay = wd0 · √κ, for Muon (``torch.optim.Muon``, Jordan et al. 2024).

    κ is S, or the square of the factor if the factor is smoothed or bounded. Muon makes updates of constant size. While
    noise dominates, an update √κ times as large progresses as far as κ reference updates. Multiplying the decoupled
    weight decay, too, preserves the decay per sample. Momentum is unchanged.

    Args:
        scales_weight_decay: multiply the weight decay by √κ; otherwise the decay per sample falls as 1/√κ.

    >>> rule, step = MuonRule(), Step(batch_size=512, minibatch_size=32, ref_batchsize=128)
    >>> rule.settings({"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}, step, rule.factor(step))
    {'lr': 0.04, 'weight_decay': 0.2}
    """

    def __init__(self, *, scales_weight_decay: bool = True) -> None:
        self.scales_weight_decay = scales_weight_decay

    def check(self, optimizer: str, groups: Sequence[Mapping[str, Any]]) -> None:
        if "muon" not in optimizer.lower():
            raise ValueError(f"`inner` must be Muon, got {optimizer}: use AdamRule for Adam, and LinearRule for SGD")
        if any("betas" in group for group in groups):
            advice = "use AdamRule for Adam's groups"
            raise ValueError(f"`inner` must have no parameter groups with betas, got {optimizer}: {advice}")

    def factor(self, step: Step) -> float:
        return math.sqrt(step.scale)

    def worth(self, step: Step, factor: float) -> float:
        return factor**2

    def settings(self, group: Mapping[str, Any], step: Step, factor: float) -> dict[str, Any]:
        changed = super().settings(group, step, factor)
        if self.scales_weight_decay and "weight_decay" in group:
            changed["weight_decay"] = group["weight_decay"] * factor
        return changed
