"""The square root rule for Muon."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

from variable_batch_size.rules.rule import Rule, Step


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
