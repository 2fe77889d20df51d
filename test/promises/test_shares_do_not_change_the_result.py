"""Promise: which core runs a minibatch changes nothing but the time: not the weights, the noise or the samples."""

import pytest
import shared_steps
import torch

import variable_batch_size as vbs

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
SHARED = ["as free", "as free, read ahead", "by speed"]
EXACT = ["as free, exact", "by speed, exact"]


@pytest.fixture(scope="module")
def alone():
    return {exact: shared_steps.run(exact=exact) for exact in (False, True)}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("shares")


@pytest.fixture(scope="module")
def found(on_cores, root):
    return on_cores(3, shared_steps.run_all, root)


def numbers_in_steps():
    sizes = [shared_steps.SIZES[step % len(shared_steps.SIZES)] for step in range(shared_steps.NUM_STEPS)]
    return [size // 8 for size in sizes]


@pytest.mark.parametrize("name", SHARED)
def test_weights_and_noise_are_those_of_one_process(alone, found, name):
    for result in found:
        for key, value in result[name]["weights"].items():
            torch.testing.assert_close(value, alone[False]["weights"][key], rtol=0, atol=1e-6)
        assert result[name]["noise"] == pytest.approx(alone[False]["noise"], rel=1e-4)


@pytest.mark.parametrize("name", EXACT)
def test_in_exact_mode_weights_have_the_bits_of_one_process(alone, found, name):
    for result in found:
        assert all(torch.equal(value, alone[True]["weights"][key]) for key, value in result[name]["weights"].items())


def test_a_stopped_run_resumes_with_the_same_bits(alone, found):
    for result in found:
        weights = result["resumed"]["weights"]
        assert all(torch.equal(value, alone[True]["weights"][key]) for key, value in weights.items())
        assert len(result["resumed"]["shares"]) == shared_steps.NUM_STEPS - 6  # the last save was after step 6


@pytest.mark.parametrize("name", [*SHARED, *EXACT])
def test_the_shares_of_all_cores_make_up_each_step(found, name):
    shares = zip(*(result[name]["shares"] for result in found), strict=True)
    assert [sum(share) for share in shares] == numbers_in_steps()


def test_a_log_has_the_shares_and_seconds_of_the_cores(found):
    records = found[0]["as free"]["records"]
    totals = [sum(record["minibatches_of_cores"][core] for record in records) for core in range(3)]
    # the first minibatch of a pass, in which a loader starts, is not timed
    shares = [sum(result["as free"]["shares"]) for result in found]
    assert all(share - 2 <= total <= share for total, share in zip(totals, shares, strict=True))
    assert records[-1]["seconds_of_cores"][1] > 0.003  # it sleeps this long


def test_the_core_that_ran_each_minibatch_is_recorded_next_to_the_executed_trace(found, root):
    rows = (root / "stopped" / "assigned.csv").read_text().splitlines()
    assert rows[1] == "step,cores"
    cores = [list(map(int, row.split(",")[1].split())) for row in rows[2:]]
    assert [len(row) for row in cores] == numbers_in_steps()
    before, after = ([result[name]["shares"] for result in found] for name in ("stopped", "resumed"))
    for rank in range(3):
        assert [row.count(rank) for row in cores] == [*before[rank][:6], *after[rank]]
    executed = (root / "stopped" / "executed.csv").read_text().splitlines()
    assert len(executed) == len(rows)


def test_what_needs_even_shares_is_refused(on_cores):
    for errors in on_cores(2, shared_steps.refusals):
        assert len(errors) == 3
        assert all(error.startswith('`assign` must be "round robin" with ') for error in errors)


def test_cores_that_do_not_share_a_counter_are_detected(on_cores):
    for error in on_cores(2, shared_steps.read_twice_as_often_on_one_core):
        assert "minibatches of a step that has 16" in error


def test_one_core_needs_no_store():
    sampler = vbs.CustomSampler(dataset_size=64, trace=[16], minibatch_size=8, assign="as free", shuffle=False)
    assert list(sampler) == [[*range(8)], [*range(8, 16)]]


def test_an_unknown_way_to_assign_is_refused():
    with pytest.raises(ValueError, match="`assign` must be one of"):
        vbs.CustomSampler(dataset_size=64, trace=[16], minibatch_size=8, assign="fastest")


def test_a_loader_that_takes_too_much_ahead_is_refused(on_cores):
    for error in on_cores(2, shared_steps.read_far_ahead):
        assert error.startswith('`num_workers` * `prefetch_factor` must be at most 8 with assign="as free"')
