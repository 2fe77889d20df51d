"""On TorchTPU's device, weights are those of the CPU, and a new batch size compiles no program.

Programs are kept for the next tests. A batch size that compiles one fails the first test that has it.
"""

import pytest
import scenarios
import torch
import torch_tpu_on_cpu
import torch_tpu_runs as runs
from torch_tpu_runs import RUNS, SCHEDULES, SIZES, WARM_UP, WEIGHTED

import variable_batch_size as vbs
from variable_batch_size.optim import flow

POLICIES = {
    "norm test": lambda: vbs.policies.NormTest(eta=0.3, max_batch_size=136, every=4, lead=3),
    "function": lambda: vbs.policies.FunctionPolicy(sawtooth, every=2, lead=3),
}


def sawtooth(situation):
    return runs.MINIBATCH * (1 + situation.steps_done * 5 % 17)


@pytest.fixture
def late(monkeypatch):
    """Gains that the host reads one step late are so from the fourth estimate on, which is in the warm-up."""
    monkeypatch.setattr(flow, "_NUM_AT_ONCE", 3)


@pytest.fixture(scope="module")
def on_cpu():
    """The same runs on the CPU, each once, where the host reads gains as late as on a device."""
    found = {}

    def run(*args, **options):
        key = repr((args, sorted(options.items())))
        if key not in found:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(flow, "_HOSTS", ())
                found[key] = runs.train("cpu", *args, **options)
        return found[key]

    return run


def check(result, expected, *, tolerance=1e-5):
    assert runs.largest_difference(result["state"], expected["state"]) < tolerance
    assert result["factors"] == pytest.approx(expected["factors"], rel=1e-4)
    assert result["lrs"] == pytest.approx(expected["lrs"], rel=1e-4)
    assert sum(result["programs"][WARM_UP:]) == 0, result["programs"]


def test_the_runs_have_all_rules_and_many_new_batch_sizes_after_the_first_steps():
    assert {rule.partition(":")[0] for rule, *_ in RUNS.values()} | {"muon"} == set(vbs.rules.RULES)
    assert len(set(SIZES[WARM_UP:]) - set(SIZES[:WARM_UP])) >= 11
    assert len(set(SIZES)) >= 16


def test_a_new_shape_is_a_new_program():
    """The counter that the other tests read works."""
    before = torch_tpu_on_cpu.num_programs()
    (torch.ones(3, 41, device="tpu") * 2).cpu()
    assert torch_tpu_on_cpu.num_programs() > before


@pytest.mark.parametrize("name", RUNS)
def test_weights_are_those_of_the_cpu_and_no_batch_size_compiles_a_program(on_cpu, eager_mode, late, name):
    check(runs.train("tpu", *RUNS[name]), on_cpu(*RUNS[name]))


@pytest.mark.parametrize("name", runs.FUSED)
def test_fused_optimizers_read_nothing_and_compile_nothing_over_48_batch_sizes(eager_mode, name):
    how = {"trace": runs.MANY_SIZES, "follow": SCHEDULES["cosine, samples"], "asks": False}
    result = runs.train("tpu", *runs.FUSED[name], **how)
    assert len(set(runs.MANY_SIZES)) == 48
    assert sum(result["programs"][WARM_UP:]) == 0, result["programs"]
    assert sum(result["reads"][1:]) == 0, result["reads"]
    expected = runs.train("cpu", *runs.FUSED[name], **how)
    assert runs.largest_difference(result["state"], expected["state"]) < 1e-5


def test_a_schedule_by_progress_reads_one_number_a_step(eager_mode):
    result = runs.train("tpu", *runs.FUSED["adascale"], follow=runs.SCHEDULES["cosine, progress"], asks=False)
    assert set(result["reads"][2:]) == {1}


@pytest.mark.parametrize("weight", [runs.number, runs.tensor])
@pytest.mark.parametrize("name", WEIGHTED)
def test_with_weights(on_cpu, eager_mode, late, name, weight):
    check(runs.train("tpu", *WEIGHTED[name], weight=weight), on_cpu(*WEIGHTED[name], weight=weight))


@pytest.mark.parametrize("name", SCHEDULES)
def test_with_a_schedule(on_cpu, eager_mode, late, name):
    run = RUNS["adascale"]
    check(runs.train("tpu", *run, follow=SCHEDULES[name]), on_cpu(*run, follow=SCHEDULES[name]))


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_compiles_nothing_after_steps_of_one_a_few_and_many_minibatches(on_cpu, eager_mode, late, name):
    run = RUNS["adascale"]
    runs.train("tpu", *run)  # has them, while these policies keep to one size for long
    result = runs.train("tpu", *run, trace=POLICIES[name]())
    assert len(set(result["sizes"][WARM_UP:])) > 1
    check(result, on_cpu(*run, trace=result["sizes"]))


@pytest.fixture(scope="module")
def results():
    torch.manual_seed(7)
    return scenarios.run_all(scenarios.models(), "tpu", ["sgd", "adascale", "adamw"])


def test_scenarios_are_those_of_plain_pytorch(results):
    for name, inner in {"sgd": scenarios.sgd, "adamw": scenarios.adamw}.items():
        expected = scenarios.train_plainly(scenarios.models()[name], inner)
        found = results[name]["state"]
        assert max((found[key] - expected[key]).abs().max() for key in expected if "running" not in key) < 1e-5
    expected, gains = scenarios.adascale_plainly(scenarios.models()["adascale"])
    factors = [entry["factors"] for entry in results["adascale"]["log"] if entry["has_updated"]]
    torch.testing.assert_close(torch.tensor(factors), torch.tensor(gains), rtol=1e-4, atol=1e-5)


def test_update_with_nan_is_skipped(results):
    assert results["nan"]["updates"] == [True, True, True, False, True, True]
    state, _ = scenarios.one_step_left_out(scenarios.models()["nan"])
    assert runs.largest_difference(results["nan"]["state"], state) < 1e-5


def test_stopped_run_resumes_on_the_cpu_and_back(results):
    expected, _ = scenarios.adascale_plainly(scenarios.models()["adascale"])
    names = [name for name in expected if "running" not in name and "tracked" not in name]
    saved_on_cpu = scenarios.stop_in_the_middle(scenarios.models()["resumed"], "cpu")
    for saved, device in ((results["stopped"], "cpu"), (saved_on_cpu, "tpu"), (results["stopped"], "tpu")):
        result = scenarios.go_on(scenarios.models()["resumed"], saved, device)
        assert max((result["state"][name] - expected[name]).abs().max() for name in names) < 1e-5


def test_exact_mode_is_refused():
    with pytest.raises(ValueError, match="`exact` must be False on TorchTPU"):
        runs.train("tpu", "linear", runs.sgd, {"exact": True})
