"""The square root rule for Adam, and Adam's correction of its bias under betas that vary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, final, get_args

from variable_batch_size.checks import check_one_of
from variable_batch_size.rules.rule import Rule, Step

Form = Literal["sde", "half-life"]

_OTHER_BIAS = ("NAdam", "RAdam", "Adamax", "SparseAdam")


@final
class AdamRule(Rule):
    """The square root rule for Adam with all of its settings, in one of the forms in use.

    With κ = S, or the square of the factor where that is smoothed or bounded:

        lr = lr0 · √κ,   ε = ε0/√κ,   weight decay = wd0 · √κ where it is decoupled
        1 − β = κ · (1 − β0)    in the form "sde"
        β = β0^κ                in the form "half-life"

    "sde" keeps the stochastic differential equation of which Adam's steps are a discretisation (Malladi et al. 2022,
    "On the SDEs and scaling rules for adaptive gradient algorithms"). A β cannot go below 0, where Adam averages
    nothing: from κ = 1/(1 − β0) on, it is 0. β1 = 0.9 gets there at S = 10; beyond, this form is out of its range.

    "half-life" keeps the number of samples after which a gradient counts half in Adam's averages (Marek et al. 2025,
    "Small batch size training for language models", for β2; Busbridge et al. 2023, "How to scale your EMA"). To first
    order in κ · (1 − β0) it is the same as "sde", and it never leaves its range.

    AdamW takes lr · wd of the weights in an update that stands for κ of them, so that the weight decay is multiplied by
    √κ, too, for the decay per sample to stay. Adam's own decay is a part of the gradient, which is right as it is.

    As the betas change from step to step, so does the correction of Adam's bias (:func:`corrected_for_bias`).

    Args:
        form: what happens to the betas.
        scales_weight_decay: whether a decoupled weight decay is multiplied by √κ; if not, it falls per sample as 1/√κ.

    >>> rule, step = AdamRule(), Step(batch_size=512, minibatch_size=32, ref_batchsize=128)
    >>> rule.settings({"lr": 0.1, "betas": (0.75, 0.875), "eps": 1e-8}, step, rule.factor(step))
    {'lr': 0.2, 'betas': (0.0, 0.5), 'eps': 5e-09}
    >>> rule = AdamRule(form="half-life")
    >>> adamw = {"lr": 0.1, "betas": (0.5, 0.75), "eps": 1e-8, "weight_decay": 0.01, "decoupled_weight_decay": True}
    >>> rule.settings(adamw, step, rule.factor(step))
    {'lr': 0.2, 'betas': (0.0625, 0.31640625), 'eps': 5e-09, 'weight_decay': 0.02}
    """

    text_setting = ("form", str)

    def __init__(self, *, form: Form = "sde", scales_weight_decay: bool = True) -> None:
        check_one_of(get_args(Form), form=form)
        self.form = form
        self.scales_weight_decay = scales_weight_decay

    def check(self, optimizer: str, groups: Sequence[Mapping[str, Any]]) -> None:
        check_adam(optimizer, groups)
        if optimizer in _OTHER_BIAS:
            raise ValueError(f"`inner` must correct its bias as Adam and AdamW do, got {optimizer}")

    def factor(self, step: Step) -> float:
        return math.sqrt(step.scale)

    def worth(self, step: Step, factor: float) -> float:
        return factor**2

    def settings(self, group: Mapping[str, Any], step: Step, factor: float) -> dict[str, Any]:
        betas = tuple(self._beta(beta, factor**2) for beta in group["betas"])
        changed = super().settings(group, step, factor) | {"betas": betas, "eps": group["eps"] / factor}
        if self.scales_weight_decay and group.get("decoupled_weight_decay"):
            changed["weight_decay"] = group["weight_decay"] * factor
        return changed

    def _beta(self, beta: float, kappa: float) -> float:
        return max(0.0, 1 - kappa * (1 - beta)) if self.form == "sde" else beta**kappa


def check_adam(optimizer: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse an inner optimizer that has no betas and eps."""
    if not all("betas" in group and "eps" in group for group in groups):
        raise ValueError(f"`inner` must be Adam or of its kind, with betas and eps, got {optimizer}")


def corrected_for_bias(
    settings: Mapping[str, Any], *, num_updates: int, products: tuple[float, float], is_decoupled: bool
) -> dict[str, Any]:
    """The settings with which Adam makes the step that it would make if it knew how its betas have varied.

    Adam's averages start at 0, and after t updates their weights add up to 1 − Π β_i, over all updates. Adam divides by
    1 − β^t instead, with the β that it has now. Its step

        lr · (m / b1) / (√(v / b2) + ε)    with b = 1 − β^t in place of c = 1 − Π β_i

    becomes the right one with the learning rate lr · b1/c1 / r and the epsilon ε/r, where r = √(b2/c2). A weight decay
    that is decoupled, which takes lr · decay of the weights, is divided by what the learning rate is multiplied by.

    Args:
        settings: of a parameter group for one step, ``lr``, ``betas`` and ``eps`` among them.
        num_updates: t, the update that is about to be made included.
        products: Π β1_i and Π β2_i, likewise.
        is_decoupled: whether ``weight_decay`` is, as in AdamW.

    >>> settings = {"lr": 0.1, "betas": (0.5, 0.75), "eps": 1e-8}
    >>> corrected_for_bias(settings, num_updates=2, products=(0.25, 0.5625), is_decoupled=False)
    {'lr': 0.1, 'betas': (0.5, 0.75), 'eps': 1e-08}
    >>> corrected_for_bias(settings, num_updates=2, products=(0.4, 0.5625), is_decoupled=False)
    {'lr': 0.125, 'betas': (0.5, 0.75), 'eps': 1e-08}
    """
    first, second = (
        (1 - beta**num_updates) / (1 - product) for beta, product in zip(settings["betas"], products, strict=True)
    )
    root = math.sqrt(second)
    scale = first / root
    corrected = {**settings, "lr": settings["lr"] * scale, "eps": settings["eps"] / root}
    if is_decoupled and "weight_decay" in settings:
        corrected["weight_decay"] = settings["weight_decay"] / scale
    return corrected
