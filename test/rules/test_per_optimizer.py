"""PerOptimizerRule: a separate rule for each of several optimizers."""

import pytest

import variable_batch_size as vbs
from variable_batch_size.rules.noise import Noise
from variable_batch_size.rules.per_optimizer import PerOptimizerRule
from variable_batch_size.rules.rule import Norms, Step

STEP = Step(batch_size=64, minibatch_size=16, ref_batchsize=16)
QUIET, NOISY = Norms(mean_of_squares=1.25, square_of_mean=1.0), Norms(mean_of_squares=4.0, square_of_mean=1.0)


def test_groups_map_to_rules_in_order_and_added_groups_to_the_last():
    rules = [vbs.rules.ConstantRule(), vbs.rules.RootRule(), vbs.rules.LinearRule()]
    rule = PerOptimizerRule(rules, num_groups=[2, 3, 1])
    places = [(rules.index(of), own) for of, own in map(rule.rule_for_group, range(8))]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
    assert [rule.group_factor(STEP, group) for group in range(7)] == [1, 1, 2, 2, 2, 4, 4]


def test_first_rule_gives_factor_and_worth():
    rule = PerOptimizerRule(
        [vbs.rules.AdamRule(), vbs.rules.LinearRule(), vbs.rules.LinearRule()], num_groups=[1, 1, 1]
    )
    assert rule.factor(STEP) == vbs.rules.AdamRule().factor(STEP) == 2
    assert rule.worth(STEP, 2.0) == vbs.rules.AdamRule().worth(STEP, 2.0) == 4
    assert rule.meter is None
    rule = PerOptimizerRule([vbs.rules.SurgeRule(), vbs.rules.LinearRule()], num_groups=[1, 1])
    assert rule.worth(STEP, 3.0) == vbs.rules.SurgeRule().worth(STEP, 3.0) == 6


def test_each_rule_observes_only_its_own_groups():
    linear, adascale = vbs.rules.LinearRule(), vbs.rules.AdaScaleRule()
    rule = PerOptimizerRule([linear, adascale], num_groups=[1, 2])
    assert rule.measures_noise
    rule.observe(STEP, [None, QUIET, NOISY])
    assert rule.meter is adascale.meter
    expected = [Noise.from_norms(*norms, batch_size=64, num_minibatches=4).gain(64, 16) for norms in (QUIET, NOISY)]
    assert [rule.group_factor(STEP, group) for group in range(3)] == [4, *expected]
    assert expected[0] < expected[1]


def test_a_step_without_a_gradient_of_the_first_optimizer_is_worth_its_gain_by_the_averages_so_far():
    nothing = Norms(mean_of_squares=0.0, square_of_mean=0.0)  # of frozen parameters
    rule = PerOptimizerRule([vbs.rules.AdaScaleRule(), vbs.rules.AdaScaleRule()], num_groups=[2, 1])
    rule.observe(STEP, [nothing, nothing, NOISY])
    assert rule.factor(STEP) == 1  # min(1, S): the other optimizer's noise does not count
    rule.observe(STEP, [NOISY, nothing, QUIET])
    # V = (4 − 1) · 64/3 = 64 and G² = 1 − 64/64 = 0: a gain of S
    assert rule.factor(STEP) == 4
    rule.observe(STEP, [QUIET, QUIET, QUIET])
    # V = (1.25 − 1) · 64/3 = 16/3 and G² = 1 − 1/12; with θ = 1 − 4/1000, the averages of both groups are
    theta = 0.996
    variance = (theta * 64 + 16 / 3) / (1 + theta) + 16 / 3
    square_norm = 11 / 12 / (1 + theta) + 11 / 12
    for norms in ([nothing, nothing, NOISY], [None, None, None], [nothing, nothing, nothing]):
        rule.observe(STEP, norms)
        for batch_size in (16, 32, 64):
            step = Step(batch_size=batch_size, minibatch_size=16, ref_batchsize=16)
            gain = (variance / 16 + square_norm) / (variance / batch_size + square_norm)
            assert rule.worth(step, rule.factor(step)) == pytest.approx(gain, rel=1e-12)


@pytest.mark.parametrize(
    ("rule", "sums", "preconditions"),
    [
        (vbs.rules.LinearMomentumRule, True, False),
        (vbs.rules.AdamScaleRule, False, True),
        (vbs.rules.LinearRule, False, False),
    ],
)
def test_combined_rule_has_the_common_traits(rule, sums, preconditions):
    together = PerOptimizerRule([rule(), rule()], num_groups=[1, 1])
    assert together.sums_gradients is sums
    assert together.preconditions is preconditions


def test_rules_with_different_gradients_are_rejected():
    rules = [vbs.rules.LinearRule(), vbs.rules.AdamScaleRule(), vbs.rules.RootRule()]
    message = (
        "^either all rules in `rule` must measure preconditioned gradients or none, got LinearRule and AdamScaleRule"
    )
    with pytest.raises(ValueError, match=f"{message} and RootRule$"):
        PerOptimizerRule(rules, num_groups=[1, 1, 1])
