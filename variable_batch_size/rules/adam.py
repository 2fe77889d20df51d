"""The square root rule for Adam, and Adam's bias correction for betas that vary between steps."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, final, get_args

from variable_batch_size.checks import check_one_of
from variable_batch_size.rules.rule import Rule, Step

Form = Literal["sde", "half-life"]

_OTHER_BIAS = ("NAdam", "RAdam", "Adamax", "SparseAdam")


@final
class AdamRule(Rule):
    """The square root rule for Adam, applied to lr, betas, eps and weight decay.

    With κ = S, or the square of the factor if the factor is smoothed or bounded:

        lr = lr0 · √κ,   ε = ε0/√κ,   weight decay = wd0 · √κ if it is decoupled
        1 − β = κ · (1 − β0)    with form "sde"
        β = β0^κ                with form "half-life"

    "sde" preserves the stochastic differential equation that Adam discretises (Malladi et al. 2022); β is clamped at 0,
    which it reaches at κ = 1/(1 − β0). "half-life" preserves the number of samples after which a gradient's weight in
    Adam's averages halves (Marek et al. 2025 for β2; Busbridge et al. 2023), and is valid for any κ. A scaled
    weight decay, if decoupled, preserves the decay per sample. Bias correction follows the varying betas.

    Args:
        form: how the betas scale; "half-life" is experimental: it may change or be removed in any version.
        scales_weight_decay: multiply a decoupled weight decay by √κ; otherwise the decay per sample falls as 1/√κ.

    >>> rule, step = AdamRule(), Step(batch_size=512, minibatch_size=32, ref_batchsize=128)
    >>> rule.settings({"lr": 0.1, "betas": (0.75, 0.875), "eps": 1e-8}, step, rule.factor(step))
    {'lr': 0.2, 'betas': (0.0, 0.5), 'eps': 5e-09}
    >>> rule = AdamRule(form="half-life")
    >>> adamw = {"lr": 0.1, "betas": (0.5, 0.75), "eps": 1e-8, "weight_decay": 0.01, "decoupled_weight_decay": True}
    >>> rule.settings(adamw, step, rule.factor(step))
    {'lr': 0.2, 'betas': (0.0625, 0.31640625), 'eps': 5e-09, 'weight_decay': 0.02}
    """

    text_setting = ("form", str)
    corrects_bias = True

    def __init__(self, *, form: Form = "sde", scales_weight_decay: bool = True) -> None:
        check_one_of(get_args(Form), form=form)
        self.form = form
        self.scales_weight_decay = scales_weight_decay

    def check(self, optimizer: str, groups: Sequence[Mapping[str, Any]]) -> None:
        check_adam(optimizer, groups)
        if optimizer in _OTHER_BIAS:
            raise ValueError(f"`inner` must use the bias correction of Adam and AdamW, got {optimizer}")

    def factor(self, step: Step) -> float:
        return math.sqrt(step.scale)

    def worth(self, step: Step, factor: float) -> float:
        return factor**2

    def settings(self, group: Mapping[str, Any], step: Step, factor: float) -> dict[str, Any]:
        kappa, is_sde = factor**2, self.form == "sde"
        betas = tuple(max(0.0, 1 - kappa * (1 - beta)) if is_sde else beta**kappa for beta in group["betas"])
        changed = super().settings(group, step, factor) | {"betas": betas, "eps": group["eps"] / factor}
        if self.scales_weight_decay and group.get("decoupled_weight_decay"):
            changed["weight_decay"] = group["weight_decay"] * factor
        return changed


def check_adam(optimizer: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Reject an inner optimizer without two betas and an eps."""
    for group in groups:
        betas, eps = group.get("betas"), group.get("eps")
        if not isinstance(betas, tuple | list) or len(betas) != 2 or eps is None or isinstance(eps, tuple | list):
            found = f" with betas {betas} and eps {eps}" if betas else ""
            rule = "`inner` must be an Adam-style optimizer with betas and eps"
            raise ValueError(f"{rule}, got {optimizer}{found}: use AdaScaleRule, LinearRule or RootRule for others")


def corrected_for_bias(
    settings: Mapping[str, Any], *, num_updates: int, products: Sequence[float], is_decoupled: bool
) -> dict[str, Any]:
    """Settings that give Adam the correct bias correction after its betas have varied.

    Adam's averages start at 0, and after t updates (`num_updates`, including the next one) their weights sum to
    1 − Π β_i (`products`). Adam divides by 1 − β^t instead, with the current β. Its step

        lr · (m / b1) / (√(v / b2) + ε)    with b = 1 − β^t in place of c = 1 − Π β_i

    becomes the correct one with the learning rate lr · b1/c1 / r and the epsilon ε/r, where r = √(b2/c2). A decoupled
    weight decay, which subtracts lr · decay of the weights, is divided by the correction of the learning rate.

    >>> settings = {"lr": 0.1, "betas": (0.5, 0.75), "eps": 1e-8}
    >>> corrected_for_bias(settings, num_updates=2, products=(0.25, 0.5625), is_decoupled=False)
    {'lr': 0.1, 'betas': (0.5, 0.75), 'eps': 1e-08}
    >>> corrected_for_bias(settings, num_updates=2, products=(0.4, 0.5625), is_decoupled=False)
    {'lr': 0.125, 'betas': (0.5, 0.75), 'eps': 1e-08}
    """
    pairs = zip(settings["betas"], products, strict=True)
    first, second = ((1 - beta**num_updates) / (1 - product) for beta, product in pairs)
    root, scale = math.sqrt(second), first / math.sqrt(second)
    corrected = {**settings, "lr": settings["lr"] * scale, "eps": settings["eps"] / root}
    if is_decoupled and "weight_decay" in settings:
        corrected["weight_decay"] = settings["weight_decay"] / scale
    return corrected
