"""Which rule an optimizer follows: one, or one made of the rules of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from variable_batch_size.rules.each import RuleOfEach
from variable_batch_size.rules.rule import Rule
from variable_batch_size.training.wrapper import name_of, optimizers_of


def rule_for(rule: Rule | Sequence[Rule], inner: Optimizer) -> Rule:
    """The rule of an optimizer, or one made of the rules of several; what does not fit is refused."""
    optimizers = optimizers_of(inner)
    rules: list[Any] = list(rule) if isinstance(rule, list | tuple) else [rule] * len(optimizers)
    for one in rules:
        if not isinstance(one, Rule):
            raise ValueError(f"`rule` must be a Rule, got {one!r}")
    for one, optimizer in zip(rules, optimizers, strict=False):
        one.check(name_of(optimizer), optimizer.param_groups)
    if isinstance(rule, Rule):
        return rule
    return RuleOfEach(rules, num_groups=[len(optimizer.param_groups) for optimizer in optimizers])
