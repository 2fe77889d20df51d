"""PerOptimizerRule: the groups of several optimizers, each with the rule of its own."""

import pytest

import variable_batch_size as vbs
from variable_batch_size.rules.noise import Noise
from variable_batch_size.rules.per_optimizer import PerOptimizerRule
from variable_batch_size.rules.rule import Norms, Step

STEP = Step(batch_size=64, minibatch_size=16, ref_batchsize=16)
QUIET, NOISY = Norms(mean_of_squares=1.25, square_of_mean=1.0), Norms(mean_of_squares=4.0, square_of_mean=1.0)


def test_groups_go_to_the_rules_in_their_order_and_added_ones_to_the_last():
    rules = [vbs.rules.ConstantRule(), vbs.rules.RootRule(), vbs.rules.LinearRule()]
    rule = PerOptimizerRule(rules, num_groups=[2, 3, 1])
    places = [(rules.index(of), own) for of, own in map(rule.rule_for_group, range(8))]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
    assert [rule.group_factor(STEP, group) for group in range(7)] == [1, 1, 2, 2, 2, 4, 4]


def test_the_first_rule_speaks_for_all():
    rule = PerOptimizerRule(
        [vbs.rules.AdamRule(), vbs.rules.LinearRule(), vbs.rules.LinearRule()], num_groups=[1, 1, 1]
    )
    assert rule.factor(STEP) == vbs.rules.AdamRule().factor(STEP) == 2
    assert rule.worth(STEP, 2.0) == vbs.rules.AdamRule().worth(STEP, 2.0) == 4
    assert rule.meter is None
    rule = PerOptimizerRule([vbs.rules.SurgeRule(), vbs.rules.LinearRule()], num_groups=[1, 1])
    assert rule.worth(STEP, 3.0) == vbs.rules.SurgeRule().worth(STEP, 3.0) == 6


def test_a_rule_sees_the_noise_of_its_own_groups_and_scales_each_by_it():
    linear, adascale = vbs.rules.LinearRule(), vbs.rules.AdaScaleRule()
    rule = PerOptimizerRule([linear, adascale], num_groups=[1, 2])
    assert rule.measures_noise
    rule.observe(STEP, [None, QUIET, NOISY])
    assert rule.meter is adascale.meter
    expected = [Noise.from_norms(*norms, batch_size=64, num_minibatches=4).gain(64, 16) for norms in (QUIET, NOISY)]
    assert [rule.group_factor(STEP, group) for group in range(3)] == [4, *expected]
    assert expected[0] < expected[1]


@pytest.mark.parametrize(
    ("rule", "sums", "preconditions"),
    [
        (vbs.rules.LinearMomentumRule, True, False),
        (vbs.rules.AdamScaleRule, False, True),
        (vbs.rules.LinearRule, False, False),
    ],
)
def test_what_all_rules_have_in_common_they_have_together(rule, sums, preconditions):
    together = PerOptimizerRule([rule(), rule()], num_groups=[1, 1])
    assert together.sums_gradients is sums
    assert together.preconditions is preconditions


def test_rules_that_need_other_gradients_are_refused_together():
    rules = [vbs.rules.LinearRule(), vbs.rules.AdamScaleRule(), vbs.rules.RootRule()]
    message = (
        "^`rule` must be rules of which all or none measure divided gradients, got LinearRule and AdamScaleRule and"
    )
    with pytest.raises(ValueError, match=f"{message} RootRule$"):
        PerOptimizerRule(rules, num_groups=[1, 1, 1])


def test_one_rule_twice_is_refused():
    rule = vbs.rules.RootRule()
    with pytest.raises(
        ValueError, match=r"^`rule` must be a rule of its own for each optimizer, got one RootRule twice$"
    ):
        PerOptimizerRule([vbs.rules.LinearRule(), rule, rule], num_groups=[1, 1, 1])
