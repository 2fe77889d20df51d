import hashlib
import tracemalloc
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import sparse, stats

from variable_batch_size.schedules.permutation import Permutation, _bases

KEYS = st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**63 - 1))

LEAST_P = 1e-4
"""The keys are fixed, so the tests are deterministic; with true shuffles, 99 % of runs would pass all of them."""


# ---------------------------------------------------------------------------------------------------------- one to one


@settings(deadline=None, max_examples=50)
@given(size=st.integers(1, 5000), key=KEYS)
@example(size=4999, key=(0, 0))  # a prime
@example(size=71**2, key=(0, 0))
@example(size=71 * 73, key=(0, 0))
@example(size=2**16 - 1, key=(3, 1))
@example(size=2**16, key=(3, 1))
@example(size=2**16 + 1, key=(3, 1))
@example(size=1_000_003, key=(3, 1))
def test_every_element_occurs_once(size, key):
    elements = Permutation(size, key)(np.arange(size))
    assert elements.dtype == np.int64
    assert np.array_equal(np.bincount(elements, minlength=size), np.ones(size))


def test_every_element_occurs_once_at_every_small_size():
    for size in range(1, 600):
        assert sorted(Permutation(size, key=(1, 2))(np.arange(size)).tolist()) == list(range(size))


@settings(deadline=None, max_examples=50)
@given(size=st.integers(1, 2000), key=KEYS, data=st.data())
def test_order_does_not_depend_on_the_blocks_requested(size, key, data):
    whole = Permutation(size, key)(np.arange(size))
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=8)))
    shuffle = Permutation(size, key)
    blocks = [shuffle(np.arange(start, stop)) for start, stop in zip([0, *cuts], [*cuts, size], strict=True)]
    assert np.array_equal(np.concatenate(blocks), whole)
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=6, max_size=6))).reshape(2, 3)
    assert np.array_equal(shuffle(positions), whole[positions])


def test_positions_are_not_modified():
    positions = np.arange(1000)
    Permutation(1000, key=(0, 0))(positions)
    assert np.array_equal(positions, np.arange(1000))


@settings(deadline=None, max_examples=50)
@given(key=KEYS, other=KEYS)
@example(key=(0, 1), other=(1, 0))
@example(key=(0, 1), other=(2**32, 0))
@example(key=(5, 7), other=(5 + 7 * 2**32, 0))
@example(key=(0, 0), other=(-1, 0))
@example(key=(0, 0), other=(0, 2**32))
def test_another_key_gives_another_order(key, other):
    positions = np.arange(1000)
    is_same = np.array_equal(Permutation(1000, key)(positions), Permutation(1000, other)(positions))
    assert is_same == (key == other)


def test_order_is_stable_between_versions():
    assert Permutation(10, key=(0, 0))(np.arange(10)).tolist() == [5, 6, 7, 9, 2, 3, 8, 0, 1, 4]
    assert Permutation(10**12, key=(42, 7))(np.arange(4)).tolist() == [
        226730358963,
        214837300837,
        695037605688,
        418655386195,
    ]


# ------------------------------------------------------------------------------------------------ as if drawn by chance


@pytest.mark.parametrize(("size", "num_seeds"), [(2, 8), (3, 10), (4, 15)])  # each order about 10 times or more
def test_all_orders_of_few_elements_occur_equally_often(size, num_seeds):
    counts = dict.fromkeys(permutations(range(size)), 0)
    for key in product(range(num_seeds), repeat=2):
        counts[tuple(Permutation(size, key)(np.arange(size)).tolist())] += 1
    assert min(counts.values()) > 0
    assert stats.chisquare(list(counts.values())).pvalue > LEAST_P


def sizes_and_keys():
    """Each size with consecutive seeds or epochs, with both in the long form."""
    for (number, size), kind in product(enumerate((100, 256, 300, 17 * 19, 1000, 4096)), ("seeds", "epochs")):
        is_long = kind != ("seeds", "epochs")[number % 2]
        yield pytest.param((size, kind), id=f"{kind}-{size}", marks=pytest.mark.long if is_long else ())


@pytest.fixture(scope="module", params=[*sizes_and_keys()])
def shuffles(request):
    """The orders of consecutive keys, one per row."""
    size, kind = request.param
    keys = [(number, 3) if kind == "seeds" else (3, number) for number in range(min(2000, 4_000_000 // size))]
    return np.stack([Permutation(size, key)(np.arange(size)) for key in keys])


def bins_of(elements, size, num_bins):
    """The bin of each element, and how many elements are in each bin."""
    return elements * num_bins // size, np.bincount(np.arange(size) * num_bins // size)


def p_of_coincidences(counts):
    """p-value of counts of fixed points in shuffles, which have a Poisson distribution with mean 1."""
    expected = stats.poisson.pmf(np.arange(5), 1)
    expected = np.append(expected, 1 - expected.sum()) * len(counts)
    return stats.chisquare(np.bincount(np.minimum(counts, 5), minlength=6), expected).pvalue


def two_sided(p):
    return 2 * min(p, 1 - p)


def test_every_element_is_equally_likely_at_every_position(shuffles):
    num_shuffles, size = shuffles.shape
    bins, weights = bins_of(shuffles, size, 20)
    counts = np.bincount((bins + 20 * np.arange(size)).ravel(), minlength=20 * size).reshape(size, 20)
    expected = num_shuffles * weights / size
    # every position is taken once in every shuffle, which ties the rows of the table together
    statistic = (size - 1) / size * ((counts - expected) ** 2 / expected).sum()
    assert two_sided(stats.chi2.cdf(statistic, (size - 1) * 19)) > LEAST_P


@pytest.mark.parametrize("distance", [1, 2, 16, 17, 18, 25, 50, 99])  # some of them the second base
def test_pairs_of_positions_get_all_pairs_of_elements_equally_often(shuffles, distance):
    num_shuffles, size = shuffles.shape
    bins, weights = bins_of(shuffles, size, 5)
    counts = np.bincount(bins[:, 0] * 5 + bins[:, distance], minlength=25)
    expected = (np.outer(weights, weights) - np.diag(weights)) / (size * (size - 1)) * num_shuffles
    assert stats.chisquare(counts, expected.ravel()).pvalue > LEAST_P


def test_neighbours_are_all_distances_apart_equally_often(shuffles):
    size = shuffles.shape[1]
    distances = (shuffles[:, 1::2] - shuffles[:, :-1:2]) % size
    assert stats.chisquare(np.bincount(distances.ravel(), minlength=size)[1:]).pvalue > LEAST_P


def test_as_many_elements_stay_in_place_as_by_chance(shuffles):
    assert p_of_coincidences((shuffles == np.arange(shuffles.shape[1])).sum(axis=1)) > LEAST_P


def test_as_many_neighbours_ascend_as_by_chance(shuffles):
    num_shuffles, size = shuffles.shape
    ascents = (np.diff(shuffles, axis=1) > 0).sum(axis=1)
    mean, variance = (size - 1) / 2, (size + 1) / 12
    assert two_sided(stats.norm.cdf((ascents.mean() - mean) / np.sqrt(variance / num_shuffles))) > LEAST_P
    assert two_sided(stats.chi2.cdf(((ascents - mean) ** 2).sum() / variance, num_shuffles)) > LEAST_P


def test_orders_of_neighbouring_keys_are_independent(shuffles):
    assert p_of_coincidences((shuffles[1:] == shuffles[:-1]).sum(axis=1)) > LEAST_P
    refuse_correlation(shuffles[1:], shuffles[:-1])


def test_elements_are_uncorrelated_with_positions(shuffles):
    positions = np.arange(shuffles.shape[1])
    refuse_correlation(shuffles, positions)
    refuse_correlation(shuffles % 16, positions % 16)


def refuse_correlation(these, those):
    """Check that correlations of rows of n numbers with shuffles are as large as by chance."""
    a, b = (x - x.mean(axis=-1, keepdims=True) for x in (these, those))
    found = (a * b).sum(axis=1) / np.sqrt((a**2).sum(axis=-1) * (b**2).sum(axis=-1)) * np.sqrt(a.shape[1] - 1)
    assert two_sided(stats.norm.cdf(found.sum() / np.sqrt(len(found)))) > LEAST_P
    assert two_sided(stats.chi2.cdf((found**2).sum(), len(found))) > LEAST_P


def test_half_of_the_shuffles_are_odd_and_their_cycles_as_many_as_by_chance(shuffles):
    num_shuffles, size = shuffles.shape
    arrows = (shuffles + size * np.arange(num_shuffles)[:, None]).ravel()
    graph = sparse.csr_array((np.ones_like(arrows), arrows, np.arange(arrows.size + 1)), shape=(arrows.size,) * 2)
    _, cycles = sparse.csgraph.connected_components(graph)
    num_cycles = np.array([len(set(row)) for row in cycles.reshape(num_shuffles, size).tolist()])
    assert stats.binomtest(int(((size - num_cycles) % 2).sum()), num_shuffles).pvalue > LEAST_P
    one_in = 1 / np.arange(1, size + 1)  # cycles end after each element with these chances, independently
    mean, variance = one_in.sum(), (one_in * (1 - one_in)).sum()
    assert two_sided(stats.norm.cdf((num_cycles.mean() - mean) / np.sqrt(variance / num_shuffles))) > LEAST_P


# --------------------------------------------------------------------------------------------------------- large sizes


@pytest.mark.parametrize("size", [10**9, 2**40 - 1, 2**40, 2**40 + 1, 10**12])
def test_a_large_shuffle_is_spread_evenly_and_takes_no_memory(size):
    tracemalloc.start()
    try:
        shuffle = Permutation(size, key=(1, 2))
        blocks = [shuffle(np.arange(start, start + 5000)) for start in (0, size // 2, size - 5000)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    elements = np.concatenate(blocks)
    assert peak < 2_000_000
    assert elements.min() >= 0
    assert elements.max() < size
    assert len(set(elements.tolist())) == 15_000
    assert stats.kstest(elements / size, "uniform").pvalue > LEAST_P
    assert two_sided(stats.norm.cdf(np.corrcoef(elements[1:], elements[:-1])[0, 1] * np.sqrt(15_000))) > LEAST_P


@pytest.mark.parametrize("size", [2**32 - 1, 2**32, 2**32 + 1, 10**10, 10**18 + 9, 2**62, 2**63 - 1])
def test_large_numbers_do_not_overflow(size):
    positions = [0, 1, size // 3, size // 2, size - 2, size - 1, *(size * np.random.default_rng(0).random(50)).tolist()]
    positions = [min(int(position), size - 1) for position in positions]
    elements = Permutation(size, (1, 2))(np.array(positions))
    assert elements.tolist() == [element_at(position, size, "1 2") for position in positions]


def element_at(position, size, key):
    """Reference implementation in Python integers."""
    digest = hashlib.blake2b(key.encode()).digest()
    keys = [int.from_bytes(digest[start : start + 8], "little") for start in range(0, 8 * 6, 8)]
    digit, other = divmod(position, _bases(size)[1])
    base, other_base = _bases(size)
    for key_of_round in keys:
        mixed = (other ^ key_of_round) * 0x9E3779B97F4A7C15 % 2**64
        mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 % 2**64
        moved = (digit + (mixed // 2**32 * base) // 2**32) % base
        digit, other, base, other_base = other, moved, other_base, base
    element = digit * other_base + other
    return element if element < size else element_at(element, size, key)


@pytest.mark.parametrize("size", [4999, 10_007, 50_021, 60_000, 70_001, 1_000_003, 1_280_000, 10**10 + 19, 2**40 + 1])
def test_few_elements_need_cycle_walking(size):
    blocks = []

    class Counting(Permutation):
        def _pass(self, x):
            blocks.append(len(x))
            return super()._pass(x)

    Counting(size, key=(0, 0))(np.arange(4096))
    assert sum(blocks) <= 4096 + 4
