"""Promise: with weights, a step has the mean over all its tokens, for any distribution over minibatches and cores."""

import pytest
import torch
import weighted_scenarios as scenarios
from weighted_scenarios import ALL_RUNS, LENGTHS, LOG_STEPS, MINIBATCH, RUNS, TRACE, WEIGHTS

import variable_batch_size as vbs

CORES = [
    ("alone", 1),
    *(("gloo", cores) for cores in (2, 4)),
    pytest.param("gloo", 3, marks=pytest.mark.long),
    *(pytest.param("xla", cores, marks=pytest.mark.xla) for cores in (1, 2)),
    pytest.param("xla", 4, marks=[pytest.mark.xla, pytest.mark.long]),
]
on_all_cores = pytest.mark.parametrize(("backend", "cores"), CORES)
PLAIN = {
    **{name: {"rule": name} for name in ("linear", "root", "linear_momentum")},
    **{name: {"rule": "linear"} for name in ("scaled", "careful", "careless", "measured", "kept", "exact")},
    "clipped": {"rule": "linear", "clip": 0.2},
}
BY_MEANS = ("adam", "adam:half-life")
NOISE = {
    **{name: RUNS[name][:2] for name in ("adascale", "adamscale", "surge")},
    **dict.fromkeys(("scaled adascale", "kept adascale", "exact adascale"), RUNS["adascale"][:2]),
}


@pytest.fixture(scope="module")
def results_on(run_on):
    found = {}

    def run(backend, cores):
        if (backend, cores) not in found:
            found[backend, cores] = (
                [scenarios.run_all("cpu", 1)]
                if backend == "alone"
                else run_on(backend, cores, scenarios.run_all, backend, cores)
            )
        return found[backend, cores]

    return run


def runs_of(results_on, backend, cores, names):
    """The result of each run with these names, and its dtype, on every core."""
    for rank, results in enumerate(results_on(backend, cores)):
        for key, result in results.items():
            if key[0] in names:
                yield *key, rank, result


def tolerance(name, dtype):
    """Exact sums are rounded to units for float32."""
    return 1e-6 if dtype == torch.float32 else 1e-9 if name.startswith("exact") else 1e-12


def difference(state, other):
    return max((state[name] - other[name]).abs().max().item() for name in state)


def test_scenario_covers_idle_cores_long_short_and_zero_weight_samples():
    steps = scenarios.steps_of_samples()
    counts = [[scenarios.num_targets(samples) for samples in minibatches] for minibatches in steps]
    assert any(len(minibatches) < 4 for minibatches in steps)
    assert max(max(step) for step in counts) > 10 * min(count for step in counts for count in step if count)
    assert [step for step, own in enumerate(counts) if not any(own)] == [6]
    assert any(0 in own and any(own) for own in counts)
    assert sum(sum(count > 0 for count in own) == 1 for own in counts) > 0
    assert all(key in {*PLAIN, *BY_MEANS, *NOISE, "measured at rest", "adascale at rest"} for key in ALL_RUNS)


@on_all_cores
def test_weights_are_those_of_the_mean_over_all_tokens(results_on, backend, cores):
    for name, dtype, _, result in runs_of(results_on, backend, cores, PLAIN):
        expected, _ = scenarios.train_plainly(**PLAIN[name])
        assert difference(result["state"], expected) < tolerance(name, dtype), (name, dtype)


@on_all_cores
def test_weights_of_adam_rules_equal_those_of_length_corrected_losses(results_on, backend, cores):
    for name, dtype, _, result in runs_of(results_on, backend, cores, BY_MEANS):
        expected = scenarios.train_by_means(*RUNS[name][:2])
        assert difference(result["state"], expected) < tolerance(name, dtype), (name, dtype)


@on_all_cores
def test_rules_that_measure_follow_the_formulas_per_token(results_on, backend, cores):
    for name, dtype, _, result in runs_of(results_on, backend, cores, NOISE):
        expected, factors = scenarios.noise_plainly(*NOISE[name])
        found = [
            factor for factor, has_updated in zip(result["factors"], result["updates"], strict=True) if has_updated
        ]
        assert found == pytest.approx(factors, rel=10 * tolerance(name, dtype)), (name, dtype)
        assert difference(result["state"], expected) < tolerance(name, dtype), (name, dtype)


@on_all_cores
def test_step_with_known_zero_weight_is_skipped_on_all_cores(results_on, backend, cores):
    for name, dtype, rank, result in runs_of(results_on, backend, cores, ALL_RUNS):
        expected = [step != 6 for step in range(len(TRACE))]
        assert result["updates"] == expected, (name, dtype, rank)


@on_all_cores
def test_padding_minibatches_have_no_weight(results_on, backend, cores):
    for name, dtype, rank, result in runs_of(results_on, backend, cores, ALL_RUNS):
        assert result["weight_done"] == sum(LENGTHS[: sum(TRACE)]) - sum(TRACE), (name, dtype, rank)


@on_all_cores
def test_log_shows_the_mean_loss_per_token_and_the_tokens_seen(results_on, backend, cores):
    ends = [sum(TRACE[:step]) for step in range(LOG_STEPS, len(TRACE) + 1, LOG_STEPS)]
    for name, dtype, rank, result in runs_of(
        results_on, backend, cores, ("linear", "careless", "kept", "exact", "measured")
    ):
        records = result["records"]
        if rank:
            assert records == []
            continue
        _, losses = scenarios.train_plainly("linear")
        assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-5), (name, dtype)
        assert [record["weight"] for record in records] == [sum(LENGTHS[:end]) - end for end in ends]
        assert [record["samples"] for record in records] == ends
        assert all(("noise_scale" in record) == (name == "measured") for record in records)


@on_all_cores
def test_measuring_noise_under_any_rule_equals_adascale_and_changes_no_weights(results_on, backend, cores):
    for results in results_on(backend, cores):
        for dtype in {key[1] for key in results if key[0] == "measured"}:
            measured, adascale = results["measured at rest", dtype], results["adascale at rest", dtype]
            # on XLA, AdaScale averages on the device, in float32
            tolerance = {"rel": 1e-5, "abs": 1e-5} if backend == "xla" else {"rel": 0, "abs": 0}
            assert measured["noise"] == pytest.approx(adascale["noise"], **tolerance)
            assert measured["noise"]["variance"] > 0
            assert [record.get("noise_scale") for record in measured["records"]] == pytest.approx(
                [record["noise_scale"] for record in adascale["records"]],
                nan_ok=True,
                rel=1e-3 if backend == "xla" else 1e-6,
            )
            assert difference(results["measured", dtype]["state"], results["linear", dtype]["state"]) == 0


@pytest.mark.parametrize(("backend", "cores"), CORES[:2])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_weight_may_be_any_type_of_number(results_on, backend, cores, kind):
    for results in results_on(backend, cores):
        expected = results["adascale", torch.float64]
        assert difference(results[kind]["state"], expected["state"]) == 0
        assert results[kind]["factors"] == expected["factors"]
        assert results[kind]["weight_done"] == expected["weight_done"]


def test_equal_weights_give_a_different_result():
    state, _ = scenarios.train_plainly("linear")
    model = scenarios.reader()
    sampler = vbs.CustomSampler(dataset_size=len(LENGTHS), trace=TRACE, minibatch_size=MINIBATCH, shuffle=False)
    optimizer = vbs.LinearRuleOptimizer(scenarios.sgd(model), sampler, ref_batchsize=scenarios.REF_BATCHSIZE)
    for samples in sampler:
        loss = scenarios.loss_of(model, scenarios.padded(samples), "sum")
        (loss / max(1, scenarios.num_targets(samples))).backward()
        optimizer.step()
    assert difference(dict(model.state_dict()), state) > 1e-3
