"""SurgeRule: norms in, factors out."""

import math

import pytest

from variable_batch_size.rules import Norms, Step, SurgeRule


def at_noise_scale(noise_scale):
    """A rule that has measured V = noise_scale and G² = 1, in two minibatches of one sample."""
    rule = SurgeRule()
    # V = (L − T) · 2 and G² = T − V/2
    rule.observe(Step(2, 1, ref_batchsize=1), [Norms(1 + noise_scale, 1 + noise_scale / 2)])
    return rule


@pytest.mark.parametrize("batch_size", [1, 32, 100, 128, 2048])
@pytest.mark.parametrize("noise_scale", [3.0, 100.0, 5000.0])
def test_factor_is_the_formula_of_the_paper_relative_to_the_reference(noise_scale, batch_size):
    def paper(size):
        return 1 / (math.sqrt(noise_scale / size) + math.sqrt(size / noise_scale))

    rule, step = at_noise_scale(noise_scale), Step(batch_size, minibatch_size=1, ref_batchsize=100)
    assert rule.noise().scale == pytest.approx(noise_scale)
    assert rule.factor(step) == pytest.approx(paper(batch_size) / paper(100))
    assert rule.group_factor(step, 0) == rule.factor(step)


def test_factors_by_hand():
    # √S · (Bn + B0)/(Bn + B), at Bn = 300 and B0 = 100
    found = [at_noise_scale(300.0).factor(Step(size, 1, ref_batchsize=100)) for size in (25, 100, 400, 900)]
    assert found == pytest.approx([0.5 * 400 / 325, 1.0, 2 * 400 / 700, 3 * 400 / 1200])


def test_the_largest_factor_is_at_the_noise_scale():
    rule = at_noise_scale(1000.0)
    assert max(range(1, 5000), key=lambda size: rule.factor(Step(size, 1, ref_batchsize=100))) == 1000


def test_factor_bounds_at_all_noise_and_no_noise():
    step = Step(1600, minibatch_size=1, ref_batchsize=100)
    assert at_noise_scale(1e15).factor(step) == pytest.approx(4.0)
    assert at_noise_scale(0.0).factor(step) == pytest.approx(0.25)


@pytest.mark.parametrize(("batch_size", "factor"), [(400, 0.5), (100, 1.0), (25, 0.5)])
def test_factor_without_an_estimate_is_its_lower_bound(batch_size, factor):
    assert SurgeRule().factor(Step(batch_size, 25, ref_batchsize=100)) == factor


def test_a_step_is_worth_its_gain():
    rule, step = at_noise_scale(300.0), Step(400, minibatch_size=1, ref_batchsize=100)
    assert rule.worth(step, rule.factor(step)) == pytest.approx(rule.gain(400, 100)) == pytest.approx(4 * 400 / 700)


def test_surge_measures_plain_gradients():
    assert (SurgeRule.measures_noise, SurgeRule.preconditions, SurgeRule.sums_gradients) == (True, False, False)
