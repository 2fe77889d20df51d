"""Units of exact sums: powers of two that follow the gradients, and limbs whose sum does not depend on the order."""

import itertools
import math
import operator
import random
from functools import reduce

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from variable_batch_size.optim.gradients.fixed_point import (
    HEADROOM,
    MAX_RUNGS,
    NUM_PARTS,
    FixedPointScale,
    join_parts,
    split_into_parts,
)

P, Q = torch.zeros(1), torch.zeros(1)


def units(largest=1.0):
    made = FixedPointScale()
    made.update([P], [largest])
    return made


def test_first_exponent_bucket_covers_twelve_powers_of_two_above_the_previous_gradient():
    assert units(0.75).limit(P) == 0 + 12  # 0.75 < 2^0
    assert units(8.0).limit(P) == 4 + 12
    assert units(2.0**-70).limit(P) == -69 + 12


@pytest.mark.parametrize(
    ("growth", "rung"),
    [
        *((2**12, 0), (2**13 - 1, 0), (2**13, 1), (2**25 - 1, 1), (2**25, 2), (2.0**100, 8)),
        *((1, 0), (2.0**-11, 0), (2.0**-12, -1), (2.0**-23, -1), (2.0**-24, -2), (2.0**-100, -8)),
    ],
)
def test_grown_or_shrunk_gradient_is_in_another_exponent_bucket(growth, rung):
    assert units(1.0).rung(P, growth) == rung


@pytest.mark.parametrize("largest", [0.0, math.inf, math.nan])
def test_zero_or_non_finite_gradient_is_in_the_first_bucket_and_does_not_change_the_scale(largest):
    made = units(8.0)
    made.update([P], [largest])
    assert made.limit(P) == 4 + 12
    assert made.rung(P, largest) == 0


def test_exponent_buckets_are_relative_to_the_parameters_own_gradient():
    made = units(8.0)
    made.update([Q], [2.0**-60])
    assert made.limit(P) == 4 + 12
    assert made.limit(Q) == -59 + 12
    assert [made.rung(p, 1.0) for p in (P, Q)] == [0, 4]
    assert [made.rung(Q, largest) for largest in (0.0, math.inf)] == [0, 0]
    assert made.rounding_constant(Q, 0, 1) == 1.5 * 2.0 ** (52 - 59 + 12 - 51)


@pytest.mark.parametrize(("num_minibatches", "bits"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (2**13, 13)])
def test_unit_is_as_small_as_the_number_of_terms_allows(num_minibatches, bits):
    assert math.ulp(units(0.75).rounding_constant(P, 0, num_minibatches)) == 2.0 ** (12 + bits - 51)
    assert math.ulp(units(0.75).rounding_constant(P, -2, num_minibatches)) == 2.0 ** (12 - 24 + bits - 51)


def test_unit_is_lowered_by_two_exponent_buckets():
    made = units(8.0)
    made.update([Q], [2.0**30])
    made.decrease(P)
    assert made.limit(P) == 4 + 12 - 24
    assert made.limit(Q) == 31 + 12


def test_parameter_without_a_previous_gradient_has_the_largest_unit():
    made = units(8.0)
    assert made.limit(Q) == made.limit(P)
    assert FixedPointScale().limit(Q) == 0 + 12


@given(before=st.integers(-148, 128), now=st.integers(-148, 128), num_minibatches=st.integers(1, 2**13))
def test_every_float32_gradient_is_in_range_of_its_bucket_and_keeps_its_bits(before, now, num_minibatches):
    made = units(math.ldexp(0.5, before))
    rung = made.rung(P, math.ldexp(0.5, now))
    rounder = made.rounding_constant(P, rung, num_minibatches)
    unit = math.ulp(rounder)
    assert abs(rung) <= MAX_RUNGS
    assert math.ldexp(1.0, now) * num_minibatches <= 2**51 * unit  # and so is the sum
    assert math.ldexp(0.5, now) >= unit * 2 ** (26 - (num_minibatches - 1).bit_length())


@given(st.floats(-(2.0**13), 2.0**13, width=32), st.integers(1, 5000))
def test_adding_and_subtracting_rounds_to_the_nearest_unit(number, num_minibatches):
    rounder = units(0.75).rounding_constant(P, 0, num_minibatches)
    unit = math.ulp(rounder)
    rounded = (number + rounder) - rounder
    assert rounded / unit == int(rounded / unit)
    assert abs(rounded - number) <= unit / 2


def test_units_are_saved_in_the_order_of_the_parameters():
    made = units(8.0)
    made.has_asked = True
    other = FixedPointScale()
    other.load_state_dict(made.state_dict([Q, P]), [Q, P])
    assert other.has_asked
    assert other.state_dict([Q, P]) == {"exponents": [None, 4], "has_asked": True}
    other.load_state_dict(made.state_dict([P]), [Q])
    assert other.limit(Q) == 4 + HEADROOM


@given(st.lists(st.floats(0, 2.0**126, width=32), min_size=1, max_size=40), st.randoms(use_true_random=False))
@example([1.0, 2.0**100, 2.0**-120, 2.0**-149, 3.0], random.Random(0))
def test_limbs_have_the_same_sum_in_any_order_and_grouping(numbers, rng):
    exact = math.fsum(numbers)
    sums = set()
    for _ in range(4):
        shuffled = rng.sample(numbers, len(numbers))
        cut = rng.randint(0, len(numbers))
        cores = [sum_of_parts(part) for part in (shuffled[:cut], shuffled[cut:])]
        sums.add(join_parts(cores[0] + cores[1]).item())
    (found,) = sums
    assert found == pytest.approx(exact, rel=1e-15, abs=len(numbers) * 2.0**-153)


@pytest.mark.parametrize("number", [*(2.0**e for e in (88, 48, 8, -32, -72, -112, -149)), 3.4e38, 1.1754942e-38, 0.1])
def test_each_limb_is_a_multiple_of_its_unit_and_later_limbs_are_smaller(number):
    exact = torch.tensor([number]).double().item()
    parts = split_into_parts(torch.tensor([number]))
    units_of_parts = [2.0 ** (88 - 40 * place) for place in range(7)]
    assert len(parts) == len(units_of_parts)
    for place, unit in enumerate(units_of_parts):
        assert parts[place].item() % unit == 0
        assert abs(exact - parts[: place + 1].sum().item()) <= unit / 2
    assert join_parts(parts).item() == exact


def sum_of_parts(numbers):
    total = torch.zeros(NUM_PARTS, 1, dtype=torch.float64)
    for number in numbers:
        total = total + split_into_parts(torch.tensor([number]))
    return total


def test_plain_sums_of_these_numbers_depend_on_the_order():
    orders = list(itertools.permutations([1.0, 2.0**53, 2.0**-60, 1.0]))
    assert len({reduce(operator.add, order) for order in orders}) > 1
    exact = [sum_of_parts(order) for order in orders]
    assert all(torch.equal(parts, exact[0]) for parts in exact)


@pytest.mark.parametrize("number", [math.inf, math.nan, 2.0**128])
def test_non_finite_values_are_preserved(number):
    parts = split_into_parts(torch.tensor([number, 3.0], dtype=torch.float64))
    first, second = join_parts(parts).tolist()
    assert not math.isfinite(first)
    assert second == 3.0
