"""measure_noise: noise scales of several seeds, with intervals."""

import math

import pytest

from variable_batch_size.lab.comparison.measure import measure_noise, noise_band


def test_interval_is_that_of_the_logarithms():
    # logarithms 0, 1 and 2: mean 1, deviation 1, t(2) = 4.3027
    seeds = [[(10.0, math.exp(k))] for k in range(3)]
    low, mean, high = noise_band(seeds)
    error = 4.3027 / math.sqrt(3)
    assert list(mean.progress) == [10.0]
    found = [curve.noise_scales[0] for curve in (low, mean, high)]
    assert found == pytest.approx([math.exp(1 - error), math.e, math.exp(1 + error)], rel=1e-4)


def test_points_without_a_noise_scale_of_every_seed_are_left_out():
    seeds = [[(1.0, math.nan), (2.0, 10.0), (4.0, 5.0)], [(1.5, 5.0), (3.0, math.inf), (5.0, 5.0)]]
    low, mean, high = noise_band(seeds)
    assert (list(mean.progress), mean.noise_scales) == ([4.5], (pytest.approx(5.0),))
    assert low.noise_scales == high.noise_scales == mean.noise_scales
    with pytest.raises(ValueError, match="the noise scale of 2 seeds is not finite at any step: measure more steps"):
        noise_band([run[:2] for run in seeds])


def test_noise_of_digits_is_measured_at_ten_points():
    low, mean, high = measure_noise("digits", rule="adascale", steps=40, seeds=2)
    assert len(mean.progress) == 10
    assert list(mean.progress) == sorted(mean.progress)
    assert 40 <= mean.progress[-1] <= 80  # of 40 steps with two minibatches of the reference each
    for below, between, above in zip(low.noise_scales, mean.noise_scales, high.noise_scales, strict=True):
        assert 0 < below < between < above


def test_rules_that_need_no_noise_are_measured_as_well():
    assert measure_noise("digits", rule="linear", steps=10, seeds=2).mean.noise_scales[-1] > 0


def test_one_seed_has_no_interval():
    with pytest.raises(ValueError, match="`seeds` must be at least 2, because a single seed gives no interval, got 1"):
        measure_noise("digits", rule="adascale", steps=10, seeds=1)
