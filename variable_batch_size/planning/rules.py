"""The rules of a plan by their names; those that measure noise as if a run had measured it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from variable_batch_size.rules.registry import RULES as rules_by_name
from variable_batch_size.rules.registry import make_rule
from variable_batch_size.rules.rule import Rule

NAMES = tuple(rules_by_name)

RULES: Mapping[str, Rule] = {name: make_rule(name) for name in ("linear", "root", "constant")}
"""The rules that a plan shows if none are asked for."""


def planned_rules(names: Sequence[str], *, noise_scale: float | None = None) -> dict[str, Rule]:
    """Rules by name, as :func:`make_rule` takes it; AdaScale is among them where there is a noise scale.

    Args:
        names: of the rules.
        noise_scale: V/G², in samples, which the run is taken to measure in every step.

    >>> list(planned_rules(["root", "legw:5000", "surge"], noise_scale=1000))
    ['root', 'legw:5000', 'surge@1000']
    >>> list(planned_rules(["root"], noise_scale=1000))
    ['root', 'adascale@1000']
    """
    if noise_scale is not None and not 0 < noise_scale < math.inf:
        raise ValueError(f"`noise_scale` must be a positive number, got {noise_scale!r}")
    made = {name: make_rule(name) for name in names}
    if noise_scale is not None and not any(rule.measures_noise for rule in made.values()):
        made["adascale"] = make_rule("adascale")
    return dict(_planned(name, rule, noise_scale) for name, rule in made.items())


def _planned(name: str, rule: Rule, noise_scale: float | None) -> tuple[str, Rule]:
    if not rule.measures_noise:
        return name, rule
    if noise_scale is None:
        raise ValueError(f"the rule {name} follows the noise that a run measures: a plan of it needs --noise-scale")
    measured = {"variance": noise_scale, "square_norm": 1.0, "weight": 1.0, "count": 1}
    rule.load_state_dict({"averages": [measured]})
    return f"{name}@{noise_scale:g}", rule
