"""Noise in the norm of a step: the formulas against numbers by hand and against their definitions."""

import math

import numpy as np
import pytest

from variable_batch_size.optim.own_norms import deviation_factor, noise_in_norm

RNG = np.random.default_rng(0)


def estimate(gradients, minibatch_size, *, population=None):
    """By the formulas, of minibatches of samples with one row each, in the ℓ1 norm."""
    means = gradients.reshape(-1, minibatch_size, gradients.shape[-1]).mean(1)
    number = len(means)
    deviation = means.std(0, ddof=1).sum() / deviation_factor(number) * math.sqrt(minibatch_size)
    pairs = np.sign(means) @ means.T
    progress = (pairs.sum() - np.trace(pairs)) / (number * (number - 1))
    sizes = {"minibatch_size": minibatch_size, "population": population}
    return noise_in_norm(deviation, np.abs(means).sum(1).mean(), progress, **sizes)


def averaged(draw, number=400):
    found = [draw() for _ in range(number)]
    return [np.mean([getattr(one, name) for one in found]) for name in ("variance", "square_norm")]


def test_numbers_by_hand():
    # minibatches (3, 1) and (1, −1) of 2 samples: σ = √2·√2/c₄ each, L = 3, h = ((1 − 1) + (3 + (−1)·1))/2
    noise = estimate(np.array([[3.0, 1.0], [3.0, 1.0], [1.0, -1.0], [1.0, -1.0]]), 2)
    assert noise.variance == pytest.approx((2 * 2 / math.sqrt(2 / math.pi)) ** 2)
    assert noise.square_norm == pytest.approx(3 * (0 + 2) / 2)


@pytest.mark.parametrize("number", [2, 3, 8, 100])
def test_deviation_factor_is_that_of_normal_values(number):
    found = RNG.standard_normal((200_000 // number, number)).std(1, ddof=1)
    assert found.mean() == pytest.approx(deviation_factor(number), abs=4 * found.std() / math.sqrt(len(found)))


@pytest.mark.parametrize(("minibatch_size", "number"), [(1, 2), (4, 2), (4, 8), (32, 4)])
def test_signal_in_proportion_to_normal_ratios_is_found_below_and_above_the_noise_scale(minibatch_size, number):
    sigma = np.exp(RNG.standard_normal(4000))
    mu = sigma * RNG.standard_normal(4000) * 0.3  # φ = (π/2)/0.09 = 17
    rows = (minibatch_size * number, 4000)
    variance, square_norm = averaged(lambda: estimate(mu + sigma * RNG.standard_normal(rows), minibatch_size), 40)
    assert variance == pytest.approx(sigma.sum() ** 2, rel=0.02)
    assert square_norm == pytest.approx(np.abs(mu).sum() ** 2, rel=0.1)


def test_signal_without_noise_is_exact():
    mu = RNG.standard_normal(50)
    noise = estimate(np.tile(mu, (6, 1)), 2)
    assert noise.variance == pytest.approx(0, abs=1e-20)
    assert noise.square_norm == pytest.approx(np.abs(mu).sum() ** 2)


def test_noise_of_any_distribution_is_no_signal():
    """Sparse and skewed, as of the embeddings of rare words, for which ‖ḡ‖₁ is as large as a signal would be."""

    def draw():
        sparse = (RNG.random((12, 300)) < 0.02) * RNG.exponential(size=(12, 300))
        return estimate(sparse * np.where(RNG.random((12, 300)) < 0.5, -1, 1), 3).square_norm

    found = [draw() for _ in range(2000)]
    assert abs(np.mean(found)) < 3 * np.std(found) / math.sqrt(len(found))


def test_samples_without_replacement_have_the_signal_of_all():
    """Each epoch shows all 24 samples, so no signal is left but the mean over them."""
    samples = RNG.standard_normal((24, 500)) + 0.5 * RNG.standard_normal(500)
    steps = []
    for population in (None, 24):

        def draw(population=population):
            return estimate(samples[RNG.permutation(24)[:16]], 4, population=population)

        steps.append(averaged(draw)[1])
    means = [samples[RNG.permutation(24)[:4]].mean(0) for _ in range(4000)]
    truth = np.mean([np.sign(mean) @ samples.mean(0) for mean in means]) * np.mean(
        [np.abs(mean).sum() for mean in means]
    )
    assert steps[1] == pytest.approx(truth, rel=0.01)
    assert steps[0] < 0.9 * truth
