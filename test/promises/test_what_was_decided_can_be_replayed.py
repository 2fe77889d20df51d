"""Decisions of policies form a trace that replays to the same weights: to the last bit on the same cores."""

import policy_runs
import pytest
import torch

import variable_batch_size as vbs

POLICIES = list(policy_runs.POLICIES)
ON_THREE_CORES = ["autoscale", "per core", "norm test"]  # they depend on the number of cores; others in a long test
MEASURING = ["autoscale", "norm test", "on plateau"]  # they decide by noise, by norms and by the loss


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    return tmp_path_factory.mktemp("stopped")


def each_policy(cores, names):
    """These policies on each number of cores."""
    return pytest.mark.parametrize(
        ("name", "cores"),
        [
            pytest.param(name, number, marks=pytest.mark.long if number == 3 and name not in ON_THREE_CORES else ())
            for name in names
            for number in cores
        ],
    )


@pytest.fixture(scope="module")
def found_on(on_cores, stopped, request):
    """Policies on 1, 2 and 3 cores; and a run that is stopped on 2 cores, resumed on 3 and completed on 1."""
    found = {}
    for cores, stop_after in ((2, 13), (3, 31)):
        names = POLICIES if cores == 2 or "long" in request.config.option.markexpr else ON_THREE_CORES
        found[cores] = on_cores(cores, policy_runs.run_all, "gloo", names, stopped, stop_after)
    found[1] = [policy_runs.run_all("gloo", POLICIES)]
    return found


def largest_difference(some, others):
    return max((some[name] - others[name]).abs().max().item() for name in some)


@each_policy([1, 2, 3], POLICIES)
def test_all_cores_make_the_same_decisions_and_replay_bit_for_bit(found_on, cores, name):
    results = [result[name] for result in found_on[cores]]
    for result in results:
        assert result["rows"] == results[0]["rows"]
        assert all(torch.equal(result["weights"][key], results[0]["weights"][key]) for key in result["weights"])
        assert all(torch.equal(result["weights"][key], result["replayed"][key]) for key in result["weights"])
    assert name == "per core" or len(set(results[0]["rows"])) > 1


@each_policy([2, 3], ["autoscale", "norm test", "function"])
def test_decisions_replay_to_the_same_weights_on_one_core(found_on, cores, name):
    result = found_on[cores][0][name]
    assert largest_difference(policy_runs.train(result["rows"])[0], result["weights"]) < 1e-9


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_decisions_replay_bit_for_bit_on_one_core_in_exact_mode(found_on, cores):
    weights, rows = found_on[cores][0]["exact"]
    assert len(set(rows)) > 1
    replayed = policy_runs.train(rows, exact=True)[0]
    assert all(torch.equal(replayed[name], weights[name]) for name in weights)


def test_run_resumes_on_other_cores_and_its_executed_trace_gives_the_same_weights(found_on, stopped):
    weights, rows = policy_runs.train(policy_runs.POLICIES["autoscale"](), directory=stopped, **policy_runs.STOPPED)
    trace = vbs.Trace.read(stopped / "executed.csv")
    assert list(trace) == rows
    assert rows[0] % (2 * policy_runs.MINIBATCH) == 0
    assert rows[13 + 10] % (3 * policy_runs.MINIBATCH) == 0  # all three have the same depth
    assert largest_difference(policy_runs.train(stopped / "executed.csv", **policy_runs.STOPPED)[0], weights) < 1e-9


@pytest.mark.xla
@pytest.mark.parametrize(
    ("cores", "names"), [(2, MEASURING), *(pytest.param(cores, POLICIES, marks=pytest.mark.long) for cores in (2, 4))]
)
def test_policies_make_the_same_decisions_on_virtual_xla_cores_and_replay_to_the_same_weights(on_xla, cores, names):
    results = on_xla(cores, policy_runs.run_all, "xla", names)
    for name in names:
        assert name == "per core" or len(set(results[0][name]["rows"])) > 1
        for result in results:
            assert result[name]["rows"] == results[0][name]["rows"]
            assert largest_difference(result[name]["weights"], result[name]["replayed"]) < 1e-5
        alone = policy_runs.train(results[0][name]["rows"])[0]
        assert largest_difference(results[0][name]["weights"], alone) < 1e-5
