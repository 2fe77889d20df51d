"""An optimizer for each rule: CustomOptimizer under the rule's name."""

from typing import Any, ClassVar, final

from torch.utils.data import DataLoader
from typing_extensions import Unpack

from variable_batch_size.data.sampler import MinibatchSource
from variable_batch_size.optim.optimizer import CustomOptimizer, Options
from variable_batch_size.optim.proxy import Inner
from variable_batch_size.rules.adam import AdamRule, Form
from variable_batch_size.rules.adascale import AdamScaleRule, AdaScaleRule
from variable_batch_size.rules.rule import Rule
from variable_batch_size.rules.scaling import ConstantRule, LEGWRule, LinearMomentumRule, LinearRule, RootRule
from variable_batch_size.stability import experimental

Source = MinibatchSource | DataLoader[Any]

Optimizer = CustomOptimizer
"""The short name of :class:`CustomOptimizer`: ``vbs.Optimizer(inner, loader, rule="adascale", ref_batchsize=64)``."""


class _RuleOptimizer(CustomOptimizer):
    """CustomOptimizer with a rule that needs no settings."""

    rule_type: ClassVar[type[Rule]]

    def __init__(
        self, inner: Inner, sampler: Source, *, ref_batchsize: int | None = None, **options: Unpack[Options]
    ) -> None:
        super().__init__(inner, sampler, rule=self.rule_type(), ref_batchsize=ref_batchsize, **options)


@final
class LinearRuleOptimizer(_RuleOptimizer):
    """:class:`CustomOptimizer` with lr = lr0 · S, S = batch size / `ref_batchsize` (:class:`LinearRule`)."""

    rule_type = LinearRule


@final
class RootRuleOptimizer(_RuleOptimizer):
    """:class:`CustomOptimizer` with lr = lr0 · √S, S = batch size / `ref_batchsize` (:class:`RootRule`)."""

    rule_type = RootRule


@final
class LinearRuleMomentumOptimizer(_RuleOptimizer):
    """:class:`CustomOptimizer` with the linear rule in the form that suits momentum (:class:`LinearMomentumRule`)."""

    rule_type = LinearMomentumRule


@final
class ConstantOptimizer(_RuleOptimizer):
    """:class:`CustomOptimizer` with lr = lr0 for every batch size; `ref_batchsize` only counts for progress."""

    rule_type = ConstantRule

    def __init__(
        self, inner: Inner, sampler: Source, *, ref_batchsize: int | None = None, **options: Unpack[Options]
    ) -> None:
        ref_batchsize = 1 if ref_batchsize is None and "ref_batch_size" not in options else ref_batchsize
        super().__init__(inner, sampler, ref_batchsize=ref_batchsize, **options)


@experimental
@final
class LEGWRuleOptimizer(CustomOptimizer):
    """:class:`CustomOptimizer` with lr = lr0 · √S after a warm-up of S · `warmup_samples` (:class:`LEGWRule`)."""

    def __init__(
        self,
        inner: Inner,
        sampler: Source,
        *,
        ref_batchsize: int | None = None,
        warmup_samples: int,
        **options: Unpack[Options],
    ) -> None:
        rule = LEGWRule(warmup_samples=warmup_samples)
        super().__init__(inner, sampler, rule=rule, ref_batchsize=ref_batchsize, **options)


@final
class AdamRuleOptimizer(CustomOptimizer):
    """:class:`CustomOptimizer` with the square root rule for Adam, and the arguments of :class:`AdamRule`."""

    def __init__(
        self,
        inner: Inner,
        sampler: Source,
        *,
        ref_batchsize: int | None = None,
        form: Form = "sde",
        scales_weight_decay: bool = True,
        **options: Unpack[Options],
    ) -> None:
        rule = AdamRule(form=form, scales_weight_decay=scales_weight_decay)
        super().__init__(inner, sampler, rule=rule, ref_batchsize=ref_batchsize, **options)


@final
class AdaScaleOptimizer(CustomOptimizer):
    """:class:`CustomOptimizer` with lr = lr0 · gain, measured from the gradients, as :class:`AdaScaleRule` does."""

    def __init__(
        self,
        inner: Inner,
        sampler: Source,
        *,
        ref_batchsize: int | None = None,
        starts_with_mean: bool = False,
        **options: Unpack[Options],
    ) -> None:
        rule = AdaScaleRule(starts_with_mean=starts_with_mean)
        super().__init__(inner, sampler, rule=rule, ref_batchsize=ref_batchsize, **options)


@experimental
@final
class AdamScaleOptimizer(CustomOptimizer):
    """:class:`CustomOptimizer` with lr = lr0 · √gain for Adam and AdamW, and arguments of :class:`AdamScaleRule`."""

    def __init__(
        self,
        inner: Inner,
        sampler: Source,
        *,
        ref_batchsize: int | None = None,
        starts_with_mean: bool = False,
        min_updates: int = 10,
        **options: Unpack[Options],
    ) -> None:
        rule = AdamScaleRule(starts_with_mean=starts_with_mean, min_updates=min_updates)
        super().__init__(inner, sampler, rule=rule, ref_batchsize=ref_batchsize, **options)
