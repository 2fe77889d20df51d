import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from variable_batch_size.schedules import token_plan
from variable_batch_size.schedules.token_plan import TokenPlan, padded_length

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=150)
KEYS = st.none() | st.tuples(st.integers(-3, 3), st.integers(0, 3))


def lognormal(number, *, sigma, median=200, longest=8192):
    lengths = np.random.default_rng(0).lognormal(np.log(median), sigma, number)
    return lengths.astype(np.int64).clip(1, longest)


def all_samples(plan, key=(0, 0)):
    return plan.samples(range(plan.num_minibatches), key)


@given(LENGTHS, st.integers(1, 8), st.integers(2, 9), st.booleans(), st.integers(0, 100), KEYS)
@settings(max_examples=60)
def test_every_sample_is_in_one_minibatch_of_few_shapes_within_the_budget(lengths, multiple, shapes, packed, room, key):
    tokens = (max(lengths) + room + multiple) // multiple * multiple
    plan = TokenPlan(lengths, tokens=tokens, multiple_of=multiple, max_shapes=shapes, packed=packed)
    minibatches = all_samples(plan, key)
    assert sorted(itertools.chain.from_iterable(minibatches)) == list(range(len(lengths)))
    assert len(plan.shapes) <= shapes
    assert sum(shape.num_minibatches for shape in plan.shapes) == plan.num_minibatches
    assert all(shape.rows * shape.length <= tokens and shape.length % multiple == 0 for shape in plan.shapes)
    for samples in minibatches:
        own = [lengths[sample] for sample in samples]
        if packed:
            assert sum(own) <= tokens
        else:
            assert (len(samples), plan.padded_length(own)) in {shape[:2] for shape in plan.shapes}
    held = sum(shape.rows * shape.length * shape.num_minibatches for shape in plan.shapes)
    assert plan.padding == pytest.approx(1 - sum(lengths) / held)


@given(LENGTHS, st.booleans(), KEYS, st.data())
@settings(max_examples=30)
def test_a_minibatch_does_not_depend_on_which_others_are_computed(lengths, packed, key, data):
    plan = TokenPlan(lengths, tokens=60, packed=packed)
    numbers = data.draw(st.lists(st.integers(0, plan.num_minibatches - 1), min_size=1))
    everything = all_samples(plan, key)
    assert plan.samples(numbers, key) == [everything[number] for number in numbers]


@given(LENGTHS, st.integers(1, 30), st.booleans())
@settings(max_examples=30)
def test_dropped_samples_are_in_no_minibatch_and_truncated_ones_count_as_the_budget(lengths, tokens, packed):
    short = [sample for sample, length in enumerate(lengths) if length <= tokens]
    truncated = TokenPlan(lengths, tokens=tokens, packed=packed, too_long="truncate")
    assert truncated.num_tokens == sum(min(length, tokens) for length in lengths)
    assert sorted(itertools.chain.from_iterable(all_samples(truncated))) == list(range(len(lengths)))
    assert all(len(own) == 1 for own in all_samples(truncated) if max(lengths[sample] for sample in own) >= tokens)
    if short:
        plan = TokenPlan(lengths, tokens=tokens, packed=packed, too_long="drop")
        assert (plan.num_samples, plan.num_dropped) == (len(short), len(lengths) - len(short))
        assert sorted(itertools.chain.from_iterable(all_samples(plan))) == short


@given(st.lists(st.integers(0, 4), min_size=10, max_size=10), st.integers(1, 3), st.sampled_from([None, 16, 24]))
@settings(max_examples=30)
def test_buckets_are_those_with_the_fewest_padded_and_unused_tokens(counts, multiple, tokens):
    counts = np.array([0, *counts, 1, *[0] * multiple])
    found = token_plan._best_edges(counts, 4, multiple_of=multiple, tokens=tokens)
    possible = sorted({-(-length // multiple) * multiple for length in np.flatnonzero(counts)})
    before = counts.cumsum()
    prices = np.array([0] + [length * 4 + (tokens // (tokens // length) if tokens else 0) for length in range(1, 13)])
    assert len(found) == min(4, len(possible))
    for number, edges in enumerate(found):
        choices = itertools.combinations(possible[:-1], number)
        ends = [[*own, possible[-1]] for own in choices]
        costs = [np.diff(before[own], prepend=0) @ prices[own] for own in ends]
        assert np.diff(before[edges], prepend=0) @ prices[edges] == min(costs)


def test_samples_of_each_length_are_equally_often_in_each_minibatch():
    plan = TokenPlan([5] * 16, tokens=20)
    assert plan.num_minibatches == 4
    counts = np.zeros((16, 4))
    for epoch in range(400):
        for number, samples in enumerate(all_samples(plan, (3, epoch))):
            counts[samples, number] += 1
    # chi square with 45 degrees of freedom: 99.9 % below 80
    assert ((counts - 100) ** 2 / 100).sum() < 80


def test_seeds_and_epochs_give_other_orders_of_the_same_shapes():
    plan = TokenPlan(lognormal(500, sigma=0.5), tokens=8192)
    orders = [all_samples(plan, key) for key in ((0, 0), (0, 1), (1, 0))]
    assert all(one != other for one, other in itertools.combinations(orders, 2))
    assert len({tuple(sorted(map(len, order))) for order in orders}) == 1


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("too_long", ["drop", "truncate"])
def test_nothing_depends_on_how_many_lengths_are_read_at_once(monkeypatch, packed, too_long):
    lengths = lognormal(5003, sigma=1.0)
    options = {"tokens": 2000, "packed": packed, "too_long": too_long}
    plan = TokenPlan(lengths, **options)
    monkeypatch.setattr(token_plan, "_AT_ONCE", 700)
    parts = TokenPlan(lengths, **options)
    assert parts.description == plan.description
    assert all_samples(parts) == all_samples(plan)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "uint64"])
def test_lengths_may_be_of_any_integer_type_or_in_a_file(tmp_path, dtype):
    lengths = lognormal(300, sigma=0.5, median=60, longest=120)
    expected = TokenPlan(lengths, tokens=100_000, packed=True)
    np.save(tmp_path / "lengths.npy", lengths.astype(dtype))
    for own in (np.load(tmp_path / "lengths.npy", mmap_mode="r"), torch.from_numpy(lengths), lengths.tolist()):
        plan = TokenPlan(own, tokens=100_000, packed=True)
        assert plan.description == expected.description
        assert all_samples(plan) == all_samples(expected)
    assert all_samples(TokenPlan(lengths.astype(dtype), tokens=120, multiple_of=120)) == all_samples(
        TokenPlan(lengths, tokens=120, multiple_of=120)
    )


@pytest.mark.parametrize("sigma", [0.6, 1.0])
def test_little_is_padding_where_minibatches_of_32_samples_waste_more_than_half(sigma):
    lengths = lognormal(20_000, sigma=sigma)
    rows = np.random.default_rng(1).permutation(lengths).reshape(-1, 32)
    assert 1 - rows.sum() / (32 * rows.max(1).sum()) > 0.5
    assert TokenPlan(lengths, tokens=8192).padding < 0.1
    assert TokenPlan(lengths, tokens=8192, packed=True).padding < 0.05


def test_long_documents_are_packed_with_short_ones():
    plan = TokenPlan([70, 30, 60, 40, 50, 25, 25], tokens=100, packed=True)
    assert (plan.num_minibatches, plan.padding) == (3, 0.0)
    assert [sorted(own) for own in all_samples(plan, None)] == [[0, 1], [2, 3], [4, 5, 6]]


def test_the_shape_of_a_minibatch_is_the_shortest_that_it_fits_into():
    shapes = TokenPlan([5, 2, 8, 2, 3, 7, 2, 2], tokens=16, max_shapes=3).shapes
    assert padded_length(shapes, [2, 2, 2, 2, 3]) == 3
    assert padded_length(shapes, [1]) == 8
    with pytest.raises(ValueError, match="2 samples of up to 9 tokens has none of the shapes 5 x 3, 1 x 8, 2 x 8"):
        padded_length(shapes, [2, 9])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [3, 0, 5]}, r"`lengths\[1\]` must be at least 1, got 0"),
        ({"lengths": [3, 17, 5]}, r"`lengths\[1\]` must be at most 16 \(`tokens`\), .* 'drop' or 'truncate', got 17"),
        ({"lengths": [17], "too_long": "drop"}, "`lengths` must have a sample of at most 16 tokens, got none"),
        ({"lengths": [2.5]}, "`lengths` must be a sequence or array of integers, .* got list of shape .* float64"),
        ({"lengths": []}, "`lengths` must be a sequence or array of integers"),
        ({"lengths": [[1]]}, r"`lengths` must be .* got list of shape \(1, 1\)"),
        ({"lengths": (n for n in (1, 2))}, "`lengths` must be .* got generator"),
        ({"lengths": [3], "tokens": 0}, "`tokens` must be a positive integer, got 0"),
        ({"lengths": [3], "max_shapes": 1}, "`max_shapes` must be at least 2, .* got 1"),
        ({"lengths": [3], "multiple_of": 5}, r"`tokens` must be a multiple of 5 \(`multiple_of`\), got 16"),
        ({"lengths": [3], "too_long": "cut"}, "`too_long` must be one of 'raise', 'drop', 'truncate', got 'cut'"),
    ],
)
def test_wrong_arguments_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        TokenPlan(**{"tokens": 16, **arguments})


def test_lengths_that_change_raise():
    lengths = np.array([5, 2, 8, 2, 3, 7, 2, 2])
    plan = TokenPlan(lengths, tokens=16)
    lengths[1] = 8
    with pytest.raises(RuntimeError, match="`lengths` have changed since they were first read"):
        all_samples(plan)
