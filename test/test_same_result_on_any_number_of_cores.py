"""Promise: the weights after a trace depend on the trace, the seed and the epochs, not on the cores or the backend."""

import pytest
import scenarios
import torch

import variable_batch_size as vbs

CORES = [
    ("alone", 1),
    *(("gloo", cores) for cores in (1, 2, 3, 4)),
    *(pytest.param("xla", cores, marks=pytest.mark.xla) for cores in (1, 2, 4, 8)),
]
on_all_cores = pytest.mark.parametrize(("backend", "cores"), CORES)

PLAIN = {
    "sgd": {"inner": scenarios.sgd},
    "adamw": {"inner": scenarios.adamw},
    "clipped": {"inner": scenarios.sgd, "clip": 0.5},
    "momentum rule": {"inner": scenarios.sgd, "sums_gradients": True},
}


@pytest.fixture(scope="module")
def plain():
    return {name: scenarios.train_plainly(scenarios.models()[name], **how) for name, how in PLAIN.items()}


def largest_difference(state, other):
    names = [name for name in state if "running" not in name and "tracked" not in name]
    return max((state[name] - other[name]).abs().max().item() for name in names)


def test_the_scenario_has_many_sizes_uneven_shares_and_idle_cores():
    schedule = vbs.Schedule(vbs.Trace.of(scenarios.SIZES), dataset_size=1200, minibatch_size=32, num_replicas=8)
    shares = [[len(schedule.minibatches(step, rank)) for rank in range(8)] for step in range(len(scenarios.SIZES))]
    assert len(set(scenarios.SIZES)) >= 15
    assert len(scenarios.SIZES) == 60
    assert sum(len(set(share)) > 1 for share in shares) > 30
    assert sum(0 in share for share in shares) > 20
    assert schedule.num_epochs == scenarios.NUM_EPOCHS
    assert shares[0] == [2, 1, 1, 1, 1, 1, 1, 1]


@on_all_cores
@pytest.mark.parametrize("name", PLAIN)
def test_weights_are_those_of_plain_pytorch(results_on, plain, backend, cores, name):
    for result in results_on(backend, cores):
        assert largest_difference(result[name]["state"], plain[name]) < 1e-5


@on_all_cores
def test_training_has_changed_every_parameter_but_the_unused(results_on, backend, cores):
    first = scenarios.models()["sgd"].state_dict()
    for result in results_on(backend, cores):
        for name, value in result["sgd"]["state"].items():
            assert torch.equal(value, first[name]) == name.startswith("unused"), name


@on_all_cores
def test_every_core_updates_in_every_step_and_nowhere_else(results_on, backend, cores):
    schedule = vbs.Schedule(vbs.Trace.of(scenarios.SIZES), dataset_size=1200, minibatch_size=32, num_replicas=cores)
    for rank, result in enumerate(results_on(backend, cores)):
        expected = []
        for step, size in enumerate(scenarios.SIZES):
            share = len(schedule.minibatches(step, rank))
            expected += [(False, size, False)] * (share - 1) + [(True, size, share == 0)]
        assert [entry[:3] for entry in result["sgd"]["log"]] == expected


@on_all_cores
def test_an_idle_core_leaves_no_mark(results_on, backend, cores):
    for rank, result in enumerate(results_on(backend, cores)):
        before, after = result["idle"]["before"], result["idle"]["after"]
        for name in before:
            assert torch.equal(before[name], after[name]) == (rank > 0), f"{name} on core {rank}"
        for name, value in result["idle"]["state"].items():
            assert value.isfinite().all(), f"{name} on core {rank}"


@on_all_cores
def test_a_stopped_run_goes_on_alone_as_if_never_stopped(results_on, plain, backend, cores):
    saved = results_on(backend, cores)[0]["stopped"]
    result = scenarios.go_on(scenarios.models()["resumed"], saved, "cpu")
    assert largest_difference(result["state"], plain["sgd"]) < 1e-5
    assert result["steps_done"] == len(scenarios.SIZES)
    assert result["samples_done"] == sum(scenarios.SIZES)


def test_a_run_stopped_on_four_cores_goes_on_on_three(results_on, plain):
    saved = results_on("gloo", 4)[0]["stopped"]
    args = (scenarios.models()["resumed"], saved, "gloo")
    for result in vbs.launch(scenarios.go_on, args, cores=3, backend="gloo"):
        assert largest_difference(result["state"], plain["sgd"]) < 1e-5


@pytest.mark.xla
@pytest.mark.parametrize("cores", [1, 8])
@pytest.mark.parametrize("name", ["sgd", "adamw", "clipped", "momentum rule"])
def test_the_number_of_xla_graphs_does_not_grow_with_the_trace(results_on, cores, name):
    result = results_on("xla", cores)[0][name]
    assert result["graphs"] <= 5
    log = result["log"]
    seen_after_two_updates = next(i for i in range(len(log)) if sum(entry[0] for entry in log[:i]) == 2)
    first_accumulation = next(i for i, entry in enumerate(log) if not entry[0])
    settled = max(seen_after_two_updates, first_accumulation + 2)
    assert settled < 12
    assert log[-1][3] == log[settled][3]
