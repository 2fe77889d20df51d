"""Promise: in exact mode the weights are bitwise equal on any number of cores, also when a run resumes elsewhere."""

import dataclasses
import math
import random

import exact_runs
import pytest
import torch
from exact_runs import SCENARIOS, drawn

ALL = [*SCENARIOS, *(drawn(seed) for seed in range(100, 102))]
NAMES = [scenario.name for scenario in ALL]
# numbers of cores for each run, and for a copy of it that moves from one number to the next
WAYS = [(2, 1, 3), pytest.param((2, 3, 1, 4), marks=pytest.mark.long)]
# in the first way, each run is complete on one of these only, in turn; the copy is on all numbers of cores
IN_TURN = [2, 3]

# newer Python versions warn about forking a process with threads
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture(scope="module")
def alone():
    return {scenario.name: exact_runs.run(scenario) for scenario in ALL}


@pytest.fixture(scope="module", params=WAYS, ids=str)
def found(on_cores, tmp_path_factory, request):
    """The results of each core for each run, by the number of cores."""
    root, rng, results = tmp_path_factory.mktemp("exact"), random.Random(0), {}
    for cores in request.param:
        stops = [None if cores == request.param[-1] else rng.randint(0, 5) for _ in ALL]
        wholes = [request.param != WAYS[0] or cores == IN_TURN[number % 2] for number in range(len(ALL))]
        results[cores] = on_cores(cores, exact_runs.run_all, ALL, root, stops, wholes)
    return results


@pytest.mark.parametrize("name", NAMES)
def test_after_every_step_the_weights_are_those_of_one_process(alone, found, name):
    whole = {cores: results for cores, results in found.items() if "digests" in results[0][name]}
    assert whole
    for cores, results in whole.items():
        assert len(results) == cores
        for result in results:
            assert result[name]["digests"] == alone[name]["digests"], f"on {cores} cores"
            assert result[name]["steps_skipped"] == alone[name]["steps_skipped"]


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_same_in_a_run_that_moves_between_numbers_of_cores(alone, found, name):
    last = max(alone[name]["digests"])
    done = {}
    for results in found.values():
        for result in results:
            part = result[name]["part"]
            assert part.items() <= alone[name]["digests"].items()
            done |= part
    assert last in done
    assert done == alone[name]["digests"]


def test_scenarios_cover_the_intended_cases(alone, found):
    skipped = {name for name, result in alone.items() if result["steps_skipped"]}
    not_finite = {scenario.name for scenario in ALL if not math.isfinite(scenario.burst)}
    assert {"overflow"} <= skipped <= not_finite
    assert len({scenario.rule for scenario in ALL}) >= 6
    assert {scenario.net for scenario in ALL} == {"mlp", "conv", "tokens"}
    for result in alone.values():
        assert len(set(result["digests"].values())) == len(result["digests"]) > 5
        assert all(value.isfinite().all() for value in result["model"].values())
    # the legs of a moved run are incomplete runs
    first = next(iter(found.values()))
    assert 0 < sum(len(first[0][name]["part"]) for name in NAMES) < 6 * len(ALL)


def plainly(scenario):
    """The same run, and the same random numbers, in plain mode."""
    options = {**scenario.options, "seed_minibatches": True}
    return exact_runs.run(dataclasses.replace(scenario, options=options), exact=False)


def test_digests_detect_the_rounding_of_plain_sums(alone):
    assert plainly(SCENARIOS[0])["digests"] != alone[SCENARIOS[0].name]["digests"]


@pytest.mark.parametrize("scenario", [s for s in ALL if s.burst == 1.0], ids=lambda scenario: scenario.name)
def test_the_losses_are_those_of_plain_mode_within_rounding(alone, scenario):
    plain, exact = plainly(scenario), alone[scenario.name]
    torch.testing.assert_close(torch.tensor(exact["losses"]), torch.tensor(plain["losses"]), rtol=1e-3, atol=1e-4)
