"""Promise: shares by speed, larger minibatches, edited traces, token budgets and norm layers are alike on XLA cores."""

import math

import pytest
import token_programs
import torch
import ways_to_train

from variable_batch_size.optim import norm_layers

pytestmark = [pytest.mark.xla, pytest.mark.parametrize("cores", [1, 2])]
SAME_NOISE = ["by speed", "norm layers", "watched"]
OF_TOKENS = [f"tokens {seed}" for seed in ways_to_train.TOKEN_SEEDS]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    def write():
        path = tmp_path_factory.mktemp("watched") / "trace.csv"
        ways_to_train.write(path, [16] * 24)
        return path

    return write


@pytest.fixture(scope="module")
def results(on_xla, trace):
    found = {}

    def run(cores):
        if cores not in found:
            found[cores] = on_xla(cores, ways_to_train.run_all, ways_to_train.models(), "xla", trace())
        return found[cores]

    return run


@pytest.fixture(scope="module")
def alone(trace):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm_layers, "EVERY", 1)  # as on XLA
        return ways_to_train.run_all(ways_to_train.models(), "cpu", trace())


@pytest.mark.parametrize("name", [*SAME_NOISE, "larger minibatches", *OF_TOKENS])
def test_weights_are_those_of_one_process(results, alone, cores, name):
    for result in results(cores):
        for key, value in result[name]["state"].items():
            torch.testing.assert_close(value, alone[name]["state"][key], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", SAME_NOISE)
def test_noise_is_that_of_one_process(results, alone, cores, name):
    for result in results(cores):
        assert result[name]["noise"] == pytest.approx(alone[name]["noise"], rel=1e-4)


@pytest.mark.parametrize("name", [*SAME_NOISE, "larger minibatches"])
def test_records_have_the_losses_and_sizes_of_one_process_and_the_cores(results, alone, cores, name):
    records, expected = results(cores)[0][name]["records"], alone[name]["records"]
    assert [record["batch_size"] for record in records] == [record["batch_size"] for record in expected]
    assert [record["loss"] for record in records] == pytest.approx([record["loss"] for record in expected], rel=1e-4)
    assert {record["cores"] for record in records} == {cores}


@pytest.mark.parametrize("name", SAME_NOISE)
def test_later_steps_do_not_compile(results, cores, name):
    log = min((result[name]["graphs"] for result in results(cores)), key=lambda graphs: graphs[-1])
    assert log[-1] == log[len(log) // 2]


def test_a_core_that_is_slower_gets_fewer_minibatches(results, cores):
    shares = [result["by speed"]["shares"] for result in results(cores)]
    numbers = [size // ways_to_train.MINIBATCH for size in ways_to_train.SIZES] * 2
    assert [sum(share) for share in zip(*shares, strict=True)] == numbers[: len(shares[0])]
    later = slice(10, len(shares[0]))  # once the speeds are known
    round_robin = sum(math.ceil(number / cores) for number in numbers[later])
    assert sum(shares[0][later]) > round_robin - (cores == 1)


def test_minibatches_are_larger_where_a_step_has_many(results, cores):
    for result in results(cores):
        assert set(result["larger minibatches"]["sizes"]) == {8, 16, 32} - ({16} if cores == 1 else set())


def test_a_step_that_was_edited_has_the_new_size(results, cores):
    for result in results(cores):
        assert sum(result["watched"]["sizes"]) * cores == sum(ways_to_train.EDITED)


@pytest.mark.parametrize("seed", ways_to_train.TOKEN_SEEDS)
def test_tokens_are_counted_and_each_shape_is_compiled_once(results, cores, seed):
    found = [result[f"tokens {seed}"] for result in results(cores)]
    assert {result["tokens"] for result in found} == {token_programs.train_plainly(seed)["tokens"]}
    (before, first), (after, last) = found[0]["epochs"]
    for result in found[1:]:
        (others_before, _), (others_after, _) = result["epochs"]
        before, after = before | others_before, after | others_after
    assert last - first <= len(after - before)
