"""Promise: a stream gives each step the same samples once, on any number of cores, after any number of stops."""

from itertools import accumulate, chain, pairwise

import pytest
import streamed_run
from streamed_run import CASES, NUM_SHORT, SIZES, STOP_AFTER

LEGS = [(1, 3), (2, 1), (3, 2)]  # numbers of cores at the start and at the end of a run
all_legs = pytest.mark.parametrize("cores", LEGS, ids=str)
all_cases = pytest.mark.parametrize("name", CASES)

SAMPLES = [list(range(*ends)) for ends in pairwise((0, *accumulate(SIZES)))]  # of each step


@pytest.fixture(scope="module")
def legs(on_new_cores, tmp_path_factory):
    """The results of both legs on all cores, by the numbers of cores."""
    found = {}

    def run(cores):
        if cores not in found:
            directory = tmp_path_factory.mktemp("streams")
            found[cores] = [
                on_new_cores(number, function, directory, imports=("datasets", "torchdata.stateful_dataloader"))
                for function, number in zip((streamed_run.begin_all, streamed_run.end_all), cores, strict=True)
            ]
        return found[cores]

    return run


@pytest.fixture(scope="module")
def indexed():
    return streamed_run.train_indexed()


def taken(results, name):
    """The samples of each step on all cores."""
    steps = results[0][name]["taken"]
    return {step: sorted(chain(*(result[name]["taken"][step] for result in results))) for step in steps}


def largest_difference(weights, others):
    return max((weights[name] - others[name]).abs().max().item() for name in others)


def test_runs_cover_idle_cores_uneven_shares_and_a_first_step_with_one_minibatch():
    assert SIZES[0] == SIZES[5] == 4
    assert {size // 4 % 3 for size in SIZES} == {0, 1, 2}
    assert 3 * 4 < NUM_SHORT - sum(SIZES[:12]) < SIZES[12]


@all_cases
@all_legs
def test_every_step_has_its_samples_once(legs, cores, name):
    first, second = (taken(results, name) for results in legs(cores))
    assert list(first) == list(range(STOP_AFTER))
    assert list(second) == list(range(STOP_AFTER, len(SIZES)))
    assert [*first.values(), *second.values()] == SAMPLES


@all_cases
@all_legs
def test_weights_equal_those_of_indexed_samples(legs, indexed, cores, name):
    for results, steps_done in zip(legs(cores), (STOP_AFTER, len(SIZES)), strict=True):
        for result in results:
            assert result[name]["steps_done"] == steps_done
            assert largest_difference(result[name]["weights"], indexed[steps_done]) < 1e-6


@pytest.mark.parametrize("num_workers", [0, 3])
@all_legs
def test_stream_that_ends_within_a_step_ends_the_run_before_that_step_on_all_cores(legs, indexed, cores, num_workers):
    results = legs(cores)[0]
    for result in results:
        assert result[num_workers]["steps_done"] == 12
        assert largest_difference(result[num_workers]["weights"], indexed[12]) < 1e-6
    assert list(taken(results, num_workers).values()) == SAMPLES[:12]
