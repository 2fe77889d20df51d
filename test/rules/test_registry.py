"""The rules by name."""

import re

import pytest

import variable_batch_size as vbs
from variable_batch_size.rules.registry import RULES


def test_a_rule_is_made_by_its_name_with_its_settings():
    assert isinstance(vbs.rules.make_rule("root"), vbs.rules.RootRule)
    assert vbs.rules.make_rule("adascale", starts_with_mean=True).starts_with_mean
    assert vbs.rules.make_rule("legw", warmup_samples=128).warmup_samples == 128


def test_unknown_rule_error_lists_the_names():
    names = ", ".join(f"'{name}'" for name in RULES)
    message = f"`rule` must be one of {names}, got 'Linear' (did you mean 'linear'?)"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        vbs.rules.make_rule("Linear")
    with pytest.raises(ValueError, match=r"^`rule` must be one of .*, got '3'$"):
        vbs.rules.make_rule(3)


def test_required_settings_of_rules():
    assert {name: rule.needs for name, rule in RULES.items() if rule.needs} == {"legw": ("warmup_samples",)}


def test_one_setting_may_follow_the_name():
    assert vbs.rules.make_rule("legw:128").warmup_samples == 128
    assert vbs.rules.make_rule("adam:half-life", scales_weight_decay=False).form == "half-life"
    assert vbs.rules.make_rule("adam").form == "sde"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("legw", "`rule` legw needs warmup_samples, as in legw:5000, got 'legw'"),
        ("legw:", "`rule` legw must be followed by an integer warmup_samples, got 'legw:'"),
        ("legw:5K", "`rule` legw must be followed by an integer warmup_samples, got 'legw:5K'"),
        ("legw:0", "`warmup_samples` must be positive, got 0"),
        ("adam:ode", "`form` must be one of 'sde', 'half-life', got 'ode'"),
        ("linear:2", "`rule` linear takes no setting after a colon, got 'linear:2'"),
    ],
)
def test_invalid_setting_after_the_name_is_rejected(name, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        vbs.rules.make_rule(name)
