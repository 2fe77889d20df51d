"""The rules by name."""

import re

import pytest

import variable_batch_size as vbs
from variable_batch_size.rules.registry import RULES


def test_a_rule_is_made_by_its_name_with_its_settings():
    assert isinstance(vbs.make_rule("root"), vbs.rules.RootRule)
    assert vbs.make_rule("adascale", starts_with_mean=True).starts_with_mean
    assert vbs.make_rule("legw", warmup_samples=128).warmup_samples == 128


def test_an_unknown_rule_is_refused_with_the_names_of_those_there_are():
    names = "'linear', 'root', 'constant', 'linear_momentum', 'adascale', 'adam', 'adamscale', 'muon', 'surge', 'legw'"
    message = f"`rule` must be one of {names}, got 'Linear'"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        vbs.make_rule("Linear")


def test_a_rule_says_what_it_needs():
    assert {name: rule.needs for name, rule in RULES.items() if rule.needs} == {"legw": ("warmup_samples",)}


def test_one_setting_may_follow_the_name_as_a_text():
    assert vbs.make_rule("legw:128").warmup_samples == 128
    assert vbs.make_rule("adam:half-life", scales_weight_decay=False).form == "half-life"
    assert vbs.make_rule("adam").form == "sde"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("legw", "`rule` legw needs warmup_samples, as in legw:5000, got 'legw'"),
        ("legw:", "`rule` must have an integer after its colon, the warmup_samples, got 'legw:'"),
        ("legw:5K", "`rule` must have an integer after its colon, the warmup_samples, got 'legw:5K'"),
        ("legw:0", "`warmup_samples` must be positive, got 0"),
        ("adam:ode", "`form` must be one of 'sde', 'half-life', got 'ode'"),
        ("linear:2", "`rule` must have no colon where the rule takes no setting as a text, got 'linear:2'"),
    ],
)
def test_a_text_that_is_no_setting_of_the_rule_is_refused(name, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        vbs.make_rule(name)
