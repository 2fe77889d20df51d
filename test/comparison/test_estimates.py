"""Spreads and differences over seeds, against numbers worked out by hand."""

import numpy as np
import pytest

from variable_batch_size.comparison.report.summary import Difference, Spread


def test_a_spread_is_the_mean_and_the_deviation_of_a_sample():
    assert Spread.of([97.0, 98.0, 99.0]) == Spread(98.0, 1.0)
    assert Spread.of([97.0]) == Spread(97.0, None)
    assert Spread.of([None]) is None


def test_a_difference_is_clear_where_its_interval_leaves_out_0():
    assert Difference.of([0.68, 0.74, 0.73]).is_clear
    assert not Difference.of([-0.28, -3.92, -0.84]).is_clear  # t is 1.5
    assert Difference.of([3.0]) == Difference(3.0, None)
    assert not Difference.of([3.0]).is_clear
    assert Difference.of([]) is None


@pytest.mark.parametrize(("num_seeds", "quantile"), [(2, 12.70620), (3, 4.30265), (10, 2.26216), (31, 2.04227)])
def test_the_interval_is_that_of_students_distribution_for_any_number_of_seeds(num_seeds, quantile):
    differences = [(-1.0) ** seed for seed in range(num_seeds)]
    expected = quantile * np.std(differences, ddof=1) / num_seeds**0.5
    assert Difference.of(differences).half_width == pytest.approx(expected, rel=1e-5)


def test_rules_are_seldom_told_apart_where_there_is_no_difference():
    draws = np.random.RandomState(0).standard_normal((2000, 3)).tolist()
    assert np.mean([Difference.of(differences).is_clear for differences in draws]) == pytest.approx(0.05, abs=0.015)
