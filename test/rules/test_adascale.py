"""AdaScaleRule and AdamScaleRule: norms in, factors out."""

import math

import pytest

from variable_batch_size.rules import AdamScaleRule, AdaScaleRule, Noise, Norms, Step

TWO = Step(batch_size=2, minibatch_size=1, ref_batchsize=1)
SINGLE = Step(batch_size=1, minibatch_size=1, ref_batchsize=1)


def test_noise_is_computed_per_group():
    rule = AdaScaleRule()
    rule.observe(TWO, [Norms(4.0, 3.0), Norms(3.0, 1.5)])
    # V = (L − T) · B/(n − 1), G² = T − V/B
    assert (rule.noise(0), rule.noise(1)) == (Noise(2.0, 2.0), Noise(3.0, 0.0))
    assert rule.noise() == Noise(5.0, 2.0)
    assert [rule.group_factor(TWO, group) for group in (0, 1)] == pytest.approx([4 / 3, 2.0])
    assert rule.factor(TWO) == pytest.approx(7 / 4.5)
    assert rule.gain(4, 2, group=0) == pytest.approx((1 + 2) / (0.5 + 2))


def test_groups_without_an_estimate_are_excluded_from_the_total():
    rule = AdaScaleRule()
    rule.observe(TWO, [None, Norms(4.0, 3.0), Norms(3.0, 1.5)])
    assert rule.noise(0) is None
    assert rule.noise() == Noise(5.0, 2.0)
    assert rule.group_factor(TWO, 0) == 1.0


def test_a_single_minibatch_gives_no_estimate():
    rule = AdaScaleRule()
    rule.observe(SINGLE, [Norms(4.0, 4.0)])
    assert rule.noise() is rule.noise(0) is None
    rule.observe(TWO, [Norms(4.0, 3.0)])
    rule.observe(SINGLE, [Norms(9.0, 9.0)])
    assert rule.noise() == Noise(2.0, 2.0)


@pytest.mark.parametrize(("batch_size", "gain"), [(64, 0.5), (128, 1.0), (256, 1.0)])
def test_gain_without_an_estimate_is_its_lower_bound(batch_size, gain):
    assert AdaScaleRule().gain(batch_size, 128) == gain
    assert AdamScaleRule().factor(Step(batch_size, 32, 128)) == math.sqrt(gain)


def test_report_has_the_gain_and_the_noise_scale():
    rule = AdaScaleRule()
    unknown = rule.report(TWO)
    assert unknown["gain"] == 1.0
    assert math.isnan(unknown["noise_scale"])
    rule.observe(TWO, [Norms(5.0, 3.0)])  # V = 4, G² = 1
    found = {name: value for name, value in rule.report(TWO).items() if not math.isnan(value)}
    # G²/(G² + V/b) with minibatches of one sample
    expected = {"scale": 2.0, "gain": 5 / 3, "efficiency": 5 / 6, "noise_scale": 4.0, "cosine": 1 / 5}
    assert found == pytest.approx(expected)  # one step has no interval


DEBIASED = (0.09 * 1 + 0.1 * 4) / 0.19


@pytest.mark.parametrize(
    ("options", "mean"), [({}, DEBIASED), ({"starts_with_mean": False}, DEBIASED), ({"starts_with_mean": True}, 2.5)]
)
def test_averages_resume_from_their_state(options, mean):
    rule, other = (AdaScaleRule(smoothing="paper", **options) for _ in range(2))
    step = Step(batch_size=100, minibatch_size=50, ref_batchsize=1)  # decay 9/10
    rule.observe(step, [Norms(1.0, 1.0), None])
    other.load_state_dict(rule.state_dict())
    assert other.noise(1) is None
    for each in (rule, other):
        each.observe(step, [Norms(4.0, 4.0), Norms(2.0, 2.0)])
    assert rule.noise(0) == other.noise(0) == Noise(0.0, pytest.approx(mean))
    assert rule.noise(1) == other.noise(1) == Noise(0.0, pytest.approx(2.0))


def test_adamscale_is_worth_the_square_of_its_factor():
    assert AdamScaleRule().scaled(4.0, TWO) == 2.0
    assert AdamScaleRule().worth(TWO, 3.0) == 9.0
    assert AdaScaleRule().scaled(4.0, TWO) == 4.0
    assert AdaScaleRule().worth(TWO, 3.0) == 3.0


def test_measurements_the_rules_request():
    found = [(rule.measures_noise, rule.preconditions, rule.sums_gradients) for rule in (AdaScaleRule, AdamScaleRule)]
    assert found == [(True, False, False), (True, True, False)]
