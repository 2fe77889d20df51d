"""PerOptimizerRule: one rule for each of several inner optimizers."""

from collections.abc import Mapping, Sequence
from typing import Any, final

from variable_batch_size.rules.adascale import NoiseRule
from variable_batch_size.rules.noise import NoiseMeter
from variable_batch_size.rules.rule import Rule, Step


@final
class PerOptimizerRule(Rule):
    """Applies to every parameter group the rule of its optimizer; the first rule measures progress.

    In a step in which no parameter of the first optimizer has a gradient, that is the worth of the batch size by the
    averages of earlier steps.
    """

    def __init__(self, rules: Sequence[Rule], *, num_groups: Sequence[int]) -> None:
        if len(rules) != len(num_groups):
            raise ValueError(f"`rule` must be one rule, or one per optimizer ({len(num_groups)}), got {len(rules)}")
        traits = {"sums_gradients": "sum gradients", "preconditions": "measure preconditioned gradients"}
        for trait, words in traits.items():
            if len({getattr(rule, trait) for rule in rules}) > 1:
                names = " and ".join(type(rule).__name__ for rule in rules)
                raise ValueError(f"either all rules in `rule` must {words} or none, got {names}")
        self.rules, self._num_groups = list(rules), list(num_groups)
        self.sums_gradients, self.preconditions = rules[0].sums_gradients, rules[0].preconditions
        self.min_updates = max(rule.min_updates for rule in rules)
        self.measures_noise = any(rule.measures_noise for rule in rules)

    @property
    def meter(self) -> NoiseMeter | None:
        """The meter of the first rule that has one; it measures the parameters of that rule's optimizer."""
        return next((rule.meter for rule in self.rules if isinstance(rule, NoiseRule)), None)

    def rule_for_group(self, group: int) -> tuple[Rule, int]:
        for rule, count in zip(self.rules, self._num_groups, strict=True):
            if group < count:
                return rule, group
            group -= count
        return self.rules[-1], group + self._num_groups[-1]  # added later

    def factor(self, step: Step) -> float:
        return self.rules[0].factor(step)

    def group_factor(self, step: Step, group: int) -> float:
        rule, own = self.rule_for_group(group)
        return rule.group_factor(step, own)

    def worth(self, step: Step, factor: float) -> float:
        return self.rules[0].worth(step, factor)

    def observe(self, step: Step, norms: Sequence[Any]) -> None:
        of_rules: dict[Rule, list[Any]] = {rule: [] for rule in self.rules}
        for group, pair in enumerate(norms):
            of_rules[self.rule_for_group(group)[0]].append(pair)
        for rule, own in of_rules.items():
            rule.observe(step, own)

    def report(self, step: Step) -> dict[str, float]:
        return {name: value for rule in reversed(self.rules) for name, value in rule.report(step).items()}

    def state_dict(self) -> dict[str, Any]:
        return {"rules": [rule.state_dict() for rule in self.rules]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for rule, saved in zip(self.rules, state["rules"], strict=True):
            rule.load_state_dict(saved)
