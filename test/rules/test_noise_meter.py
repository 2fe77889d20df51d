"""NoiseMeter: the noise of a run; weighted minibatches against single tokens."""

import math

import numpy as np
import pytest

from variable_batch_size.rules.noise import Noise, NoiseAverage, NoiseMeter
from variable_batch_size.rules.rule import Norms, Step


def step_of(weights, *, minibatch_size=1):
    """A step of minibatches with these weights."""
    return Step(
        batch_size=minibatch_size * len(weights),
        minibatch_size=minibatch_size,
        ref_batchsize=2,
        weight=float(sum(weights)),
        num_weighted=sum(weight > 0 for weight in weights),
    )


def norms_of(sums, weights):
    """L and T of the sums of gradients over the tokens of each minibatch."""
    total = sum(weights)
    each = sum((s**2).sum() / weight for s, weight in zip(sums, weights, strict=True) if weight)
    return Norms(each / total, ((np.sum(sums, axis=0) / total) ** 2).sum())


def test_two_minibatches_of_one_and_three_tokens_by_hand():
    # tokens 4 | 1, 2, 3: mean 2.5, s = 4 and 6, L = (16/1 + 36/3)/4 = 7, T = 6.25, V = 0.75 · 4/1, G² = 6.25 − 3/4
    meter = NoiseMeter()
    meter.observe(step_of([1, 3]), [norms_of(np.array([[4.0], [6.0]]), [1, 3])])
    assert meter.noise() == Noise(variance=3.0, square_norm=5.5)


def test_estimate_equals_that_of_weighted_norms():
    generator = np.random.default_rng(0)
    weights = [5, 1, 17, 2]
    sums = generator.normal(size=(4, 3)) * np.array(weights)[:, None]
    meter = NoiseMeter()
    meter.observe(step_of(weights), [norms_of(sums, weights)])
    shares = [weight / sum(weights) for weight in weights]
    squares = [((s / weight) ** 2).sum() for s, weight in zip(sums, weights, strict=True)]
    # the two equations of E L and E T, for any weights w_i and sizes b_i, solved for V and G²
    square_of_mean = norms_of(sums, weights).square_of_mean
    of_one = sum(w / b for w, b in zip(shares, weights, strict=True))
    of_mean = sum(w * w / b for w, b in zip(shares, weights, strict=True))
    variance = (np.dot(shares, squares) - square_of_mean) / (of_one - of_mean)
    expected = {"variance": variance, "square_norm": square_of_mean - variance * of_mean}
    assert vars(meter.noise()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("weights", [[1, 1, 1, 1], [2, 16], [0, 3, 1, 40, 0, 7], [64, 1, 1]])
def test_estimate_per_token_is_unbiased_for_any_distribution_of_tokens(weights):
    generator = np.random.default_rng(1)
    mean, deviations = np.array([0.3, -0.2, 0.1]), np.array([1.0, 0.5, 2.0])
    # the sum of w independent tokens
    sums = np.array(weights)[:, None] * mean
    sums = sums + np.sqrt(weights)[:, None] * deviations * generator.normal(size=(5000, len(weights), 3))
    step, found = step_of(weights), []
    for of_minibatches in sums:
        meter = NoiseMeter()
        meter.observe(step, [norms_of(of_minibatches, weights)])
        found.append((meter.noise().variance, meter.noise().square_norm))
    error = np.std(found, axis=0) / np.sqrt(len(found))
    expected = np.array([(deviations**2).sum(), (mean**2).sum()])
    assert np.all(np.abs(np.mean(found, axis=0) - expected) < 4 * error)


@pytest.mark.parametrize("weights", [[5], [0, 5, 0]])
def test_one_minibatch_with_weight_gives_no_estimate(weights):
    meter = NoiseMeter()
    meter.observe(step_of(weights), [Norms(3.0, 1.0)])
    assert meter.noise() is None


def test_gain_converts_samples_with_their_mean_weight():
    meter = NoiseMeter()
    meter.observe(step_of([1, 3]), [Norms(7.0, 6.25)])
    meter.observe(step_of([26], minibatch_size=2), [None])  # 7.5 tokens a sample now
    assert meter.gain(8, 2) == pytest.approx(Noise(3.0, 5.5).gain(60, 15))
    restored = NoiseMeter()
    restored.load_state_dict(meter.state_dict())
    assert restored.gain(8, 2) == meter.gain(8, 2)
    assert restored.noise() == meter.noise()


def test_equal_weights_only_change_the_unit_of_the_noise():
    plain, weighted = NoiseMeter(), NoiseMeter()
    norms = Norms(2.0, 0.75)
    plain.observe(Step(batch_size=4, minibatch_size=1, ref_batchsize=2), [norms])
    weighted.observe(step_of([8, 8, 8, 8]), [norms])
    assert weighted.noise() == Noise(plain.noise().variance * 8, plain.noise().square_norm)
    assert weighted.gain(16, 2) == pytest.approx(plain.gain(16, 2), rel=1e-12)
    assert weighted.scale_in_samples() == pytest.approx(plain.scale_in_samples(), rel=1e-12)
    assert plain.scale_in_samples() == plain.noise().scale


PLAIN = Step(batch_size=64, minibatch_size=16, ref_batchsize=32)


def test_before_the_first_estimate_scale_is_none_and_gain_is_its_lower_bound():
    meter = NoiseMeter()
    assert meter.scale_in_samples() is None
    assert [meter.gain(size, 32) for size in (8, 32, 64)] == [0.25, 1, 1]
    report = meter.report(PLAIN)
    assert report["gain"] == 1
    assert math.isnan(report["noise_scale"])


def test_total_noise_is_the_sum_over_groups():
    meter = NoiseMeter()
    meter.observe(PLAIN, [Norms(2.0, 1.0), Norms(8.0, 1.5), None, Norms(3.0, 2.0)])
    of_groups = [meter.noise(group) for group in range(4)]
    expected = [
        Noise.from_norms(*pair, batch_size=64, num_minibatches=4) for pair in ((2.0, 1.0), (8.0, 1.5), (3.0, 2.0))
    ]
    assert of_groups == [*expected[:2], None, expected[2]]
    assert meter.noise() == expected[0] + expected[1] + expected[2]
    assert meter.gain(64, 32, group=1) == expected[1].gain(64, 32)
    report = meter.report(PLAIN)
    assert (report["gain"], report["noise_scale"]) == (meter.gain(64, 32), meter.noise().scale)


@pytest.mark.parametrize("starts_with_mean", [False, True])
def test_starts_with_mean_also_holds_after_resuming(starts_with_mean):
    meter, average = NoiseMeter(starts_with_mean=starts_with_mean), NoiseAverage(starts_with_mean=starts_with_mean)
    for mean_of_squares in (2.0, 8.0, 3.0, 5.0):
        meter.observe(PLAIN, [Norms(mean_of_squares, 1.0)])
        average.add(Noise.from_norms(mean_of_squares, 1.0, batch_size=64, num_minibatches=4), PLAIN.scale)
        assert meter.noise() == average.noise
        resumed = NoiseMeter(starts_with_mean=starts_with_mean)
        resumed.load_state_dict(meter.state_dict())
        meter = resumed


def test_first_steps_are_debiased_by_default():
    meter, average = NoiseMeter(), NoiseAverage()
    for mean_of_squares in (2.0, 8.0):
        meter.observe(PLAIN, [Norms(mean_of_squares, 1.0)])
        average.add(Noise.from_norms(mean_of_squares, 1.0, batch_size=64, num_minibatches=4), PLAIN.scale)
    assert meter.noise() == average.noise


def test_state_without_weights_loads():
    meter = NoiseMeter()
    meter.observe(step_of([1, 3]), [Norms(7.0, 6.25)])
    meter.load_state_dict({**meter.state_dict(), "weight": 0.0, "samples": 0})
    assert meter.gain(8, 2) == Noise(3.0, 5.5).gain(8, 2)
    meter.observe(step_of([2, 2]), [None])
    assert meter.gain(8, 2) == Noise(3.0, 5.5).gain(16, 4)
