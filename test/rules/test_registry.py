"""The rules by name."""

import re

import pytest

import variable_batch_size as vbs
from variable_batch_size.rules.registry import RULES


def test_a_rule_is_made_by_its_name_with_its_settings():
    assert isinstance(vbs.make_rule("root"), vbs.RootRule)
    assert vbs.make_rule("adascale", starts_with_mean=True).starts_with_mean
    assert vbs.make_rule("legw", warmup_samples=128).warmup_samples == 128


def test_an_unknown_rule_is_refused_with_the_names_of_those_there_are():
    names = "'linear', 'root', 'constant', 'linear_momentum', 'adascale', 'adam', 'adamscale', 'legw'"
    message = f"`rule` must be one of {names}, got 'Linear'"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        vbs.make_rule("Linear")


def test_a_rule_says_what_it_needs():
    assert {name: rule.needs for name, rule in RULES.items() if rule.needs} == {"legw": ("warmup_samples",)}
