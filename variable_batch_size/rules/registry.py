"""The rules by name: for plans, comparisons, scripts and tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from variable_batch_size.checks import check_one_of
from variable_batch_size.rules.adam import AdamRule
from variable_batch_size.rules.adascale import AdamScaleRule, AdaScaleRule
from variable_batch_size.rules.rule import Rule
from variable_batch_size.rules.scaling import ConstantRule, LEGWRule, LinearMomentumRule, LinearRule, RootRule

RULES: Mapping[str, type[Rule]] = {
    "linear": LinearRule,
    "root": RootRule,
    "constant": ConstantRule,
    "linear_momentum": LinearMomentumRule,
    "adascale": AdaScaleRule,
    "adam": AdamRule,
    "adamscale": AdamScaleRule,
    "legw": LEGWRule,
}


def make_rule(name: str, **settings: Any) -> Rule:
    """A new rule by its name, with the settings that it takes.

    >>> make_rule("legw", warmup_samples=1280).warmup_samples
    1280
    """
    check_one_of(RULES, rule=name)
    return RULES[name](**settings)
