"""Promise: with minibatches filled to a token budget, a step is one padded batch of its samples, on any cores."""

import pytest
import token_programs
import torch
from token_programs import sharded, wrapped

CORES = [1, 2, 3, 4]
SEEDS = range(8)
SOME = {1: SEEDS, 2: SEEDS[::3], 3: SEEDS[1::3], 4: SEEDS[2::3]}  # of each number of cores; others in the long form
STOPPED_AFTER = 3  # steps, of four in the first epoch
EXACT = {"exact": True, "dropout_rate": 0.3}


def runs_on(cores):
    """Name, arguments and options of the runs on a number of cores."""
    yield from (((seed, "float64"), (seed,), {}) for seed in SOME[cores])
    yield (0, "float32"), (0,), {"dtype": torch.float32}
    yield "exact", (1,), EXACT
    yield "workers", (2,), {"workers": 2 if cores == 2 else 0}
    if cores > 1:
        first, second = (3, 1) if cores == 3 else (0, 3)
        yield (first, "wrapped"), (first,), {"way": wrapped}
        yield (second, "sharded"), (second,), {"way": sharded}


def more_runs_on(cores):
    """Those of the long form."""
    yield from (((seed, "float64"), (seed,), {}) for seed in SEEDS)
    yield from (((seed, "wrapped"), (seed,), {"way": wrapped}) for seed in (0, 3))
    yield from (((seed, "sharded"), (seed,), {"way": sharded}) for seed in (1, 3))


@pytest.fixture(scope="module")
def found(on_cores):
    results = {}

    def run(cores, those=runs_on):
        if (cores, those) not in results:
            names, *calls = zip(*those(cores), strict=True)
            runs = list(zip(*calls, strict=True))
            every = [token_programs.train_all(runs)] if cores == 1 else on_cores(cores, token_programs.train_all, runs)
            results[cores, those] = [dict(zip(names, own, strict=True)) for own in every]
        return results[cores, those]

    return run


def difference(weights, expected):
    return max((weights[name] - expected[name]).abs().max().item() for name in expected)


@pytest.mark.parametrize(
    ("cores", "runs"),
    [
        *((cores, runs_on) for cores in CORES),
        *(pytest.param(cores, more_runs_on, marks=pytest.mark.long) for cores in CORES[1:]),
    ],
)
def test_weights_are_those_of_one_padded_batch_in_each_step(found, cores, runs):
    for results in found(cores, runs):
        for name, result in results.items():
            if name == "exact":
                continue
            seed = 2 if name == "workers" else name[0]
            expected = token_programs.train_plainly(seed)
            assert result["tokens"] == expected["tokens"], name
            assert difference(result["weights"], expected["weights"]) < (1e-6 if name[1] == "float32" else 1e-12), name


def test_the_programs_have_what_may_go_wrong():
    programs = [token_programs.program_of(seed) for seed in SEEDS]
    assert {program["options"]["packed"] for program in programs} == {True, False}
    assert {program["adam"] for program in programs} == {True, False}
    assert len({program["rule"] for program in programs}) == 3
    numbers = {size // program["options"]["tokens"] for program in programs for size in program["trace"]}
    assert numbers == {1, 2, 3, 4, 5}
    shapes = [token_programs.budget_of(program, num_replicas=1, rank=0).shapes for program in programs]
    assert max(map(len, shapes)) > 4


@pytest.mark.parametrize("cores", CORES[1:])
def test_exact_runs_have_the_same_bits_on_any_number_of_cores(found, cores):
    expected = found(1)[0]["exact"]["weights"]
    for results in found(cores):
        assert all(torch.equal(value, expected[name]) for name, value in results["exact"]["weights"].items())


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_a_run_stopped_within_an_epoch_resumes_on_other_cores(found, on_cores, before, after):
    def run(cores, **options):
        runs = [((1,), {**EXACT, **options})]
        return token_programs.train_all(runs) if cores == 1 else on_cores(cores, token_programs.train_all, runs)[-1]

    (stopped,) = run(before, steps=STOPPED_AFTER)
    assert stopped["steps"] == STOPPED_AFTER < len(token_programs.steps_of(1, num_epochs=1))
    (resumed,) = run(after, state=stopped)
    expected = found(1)[0]["exact"]
    assert (resumed["steps"], resumed["tokens"]) == (expected["steps"], expected["tokens"])
    assert all(torch.equal(value, expected["weights"][name]) for name, value in resumed["weights"].items())
