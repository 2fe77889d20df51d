import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from variable_batch_size.lab.planning.reports import sparkline

VALUES = st.lists(st.integers(1, 10**9), min_size=1, max_size=60).map(np.array)


@settings(max_examples=40)
@given(VALUES, st.integers(1, 100), st.booleans())
def test_length_of_a_sparkline(values, width, is_ascii):
    line = sparkline(values, width=width, is_ascii=is_ascii)
    assert len(line) == min(width, len(values))
    assert line.isascii() == is_ascii


@settings(max_examples=40)
@given(VALUES, st.integers(1, 60))
def test_equal_weights_change_nothing(values, width):
    assert sparkline(values, width=width, weights=np.full(len(values), 7)) == sparkline(values, width=width)


def test_heights_range_from_zero_to_the_largest_value():
    assert sparkline(np.array([1, 125, 126, 500, 501, 1000]), width=6) == "▁▁▂▄▅█"
    assert sparkline(np.array([1, 125, 126, 500, 501, 1000]), width=6, is_ascii=True) == "__.=+#"


def test_character_shows_the_mean_over_its_width():
    assert sparkline(np.array([2, 8, 8, 8, 4, 4]), width=3) == "▅█▄"


def test_width_of_a_number_is_its_weight():
    assert sparkline(np.array([4, 8, 8]), width=3, weights=np.array([16, 4, 4])) == "▄▄█"
