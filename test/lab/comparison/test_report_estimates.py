"""Spreads and differences over seeds, compared with numbers computed by hand."""

import numpy as np
import pytest

from variable_batch_size.lab.comparison.verdict import Estimate, difference, spread


def test_spread_is_mean_and_standard_deviation_of_a_sample():
    assert spread([97.0, 98.0, 99.0]) == Estimate(98.0, 1.0)
    assert spread([97.0]) == Estimate(97.0, None)
    assert spread([]) is None


def test_difference_is_significant_if_its_interval_excludes_0():
    assert difference([0.68, 0.74, 0.73]).is_clear
    assert not difference([-0.28, -3.92, -0.84]).is_clear  # t is 1.5
    assert difference([3.0]) == Estimate(3.0, None)
    assert not difference([3.0]).is_clear
    assert difference([]) is None


@pytest.mark.parametrize(("num_seeds", "quantile"), [(2, 12.70620), (3, 4.30265), (10, 2.26216), (31, 2.04227)])
def test_interval_is_from_students_t_distribution_for_any_number_of_seeds(num_seeds, quantile):
    differences = [(-1.0) ** seed for seed in range(num_seeds)]
    expected = quantile * np.std(differences, ddof=1) / num_seeds**0.5
    assert difference(differences).error == pytest.approx(expected, rel=1e-5)


def test_equal_rules_are_seldom_distinguished():
    draws = np.random.RandomState(0).standard_normal((2000, 3)).tolist()
    assert np.mean([difference(differences).is_clear for differences in draws]) == pytest.approx(0.05, abs=0.015)
