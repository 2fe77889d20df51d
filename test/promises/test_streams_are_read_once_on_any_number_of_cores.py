"""Promise: a stream gives each step the same samples once, on any number of cores, after any number of stops."""

from itertools import accumulate, chain, pairwise

import pytest
import streamed_run
from streamed_run import CASES, NUM_SHORT, SIZES, STOP_AFTER

SHORT = [0, 3]  # loader workers of the stream that ends early
# by the numbers of cores at the start and at the end of a run, the cases; all others are in the long form
LEGS = {
    (1, 3): ["no workers", "three workers", "stateful loader of a Hugging Face stream", 0],
    (2, 1): ["one worker", "Hugging Face stream", "stateful loader", 3],
    (3, 2): ["stream with a state", "stateful loader with three workers", 0],
}


def on_all_legs(names):
    """Parametrize a test with these cases on all legs."""
    return pytest.mark.parametrize(
        ("cores", "name"),
        [
            pytest.param(cores, name, marks=() if name in LEGS[cores] else pytest.mark.long)
            for cores in LEGS
            for name in names
        ],
        ids=str,
    )


SAMPLES = [list(range(*ends)) for ends in pairwise((0, *accumulate(SIZES)))]  # of each step


@pytest.fixture(scope="module")
def legs(on_new_cores, tmp_path_factory):
    """The results of both legs on all cores, with a case; those that are run together share their processes."""
    found = {}

    def run(cores, name):
        key = cores, name in LEGS[cores]
        if key not in found:
            names = [one for one in [*CASES, *SHORT] if (one in LEGS[cores]) == key[1]]
            directory = tmp_path_factory.mktemp("streams")
            found[key] = [
                on_new_cores(number, function, directory, names, imports=("datasets", "torchdata.stateful_dataloader"))
                for function, number in zip((streamed_run.begin_all, streamed_run.end_all), cores, strict=True)
            ]
        return found[key]

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


@on_all_legs(CASES)
def test_every_step_has_its_samples_once(legs, cores, name):
    first, second = (taken(results, name) for results in legs(cores, name))
    assert list(first) == list(range(STOP_AFTER))
    assert list(second) == list(range(STOP_AFTER, len(SIZES)))
    assert [*first.values(), *second.values()] == SAMPLES


@on_all_legs(CASES)
def test_weights_equal_those_of_indexed_samples(legs, indexed, cores, name):
    for results, steps_done in zip(legs(cores, name), (STOP_AFTER, len(SIZES)), strict=True):
        for result in results:
            assert result[name]["steps_done"] == steps_done
            assert largest_difference(result[name]["weights"], indexed[steps_done]) < 1e-6


@on_all_legs(SHORT)
def test_stream_that_ends_within_a_step_ends_the_run_before_that_step_on_all_cores(legs, indexed, cores, name):
    results = legs(cores, name)[0]
    for result in results:
        assert result[name]["steps_done"] == 12
        assert largest_difference(result[name]["weights"], indexed[12]) < 1e-6
    assert list(taken(results, name).values()) == SAMPLES[:12]
