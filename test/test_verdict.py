"""Means, deviations, rankings and the verdict, against numbers worked out by hand."""

import hashlib
import json

import pytest

from variable_batch_size.comparison.curves import curves
from variable_batch_size.comparison.experiment import (
    RULES,
    Outcome,
    Results,
    Run,
    Settings,
    default_traces,
    runs_of,
    trace_hash,
)
from variable_batch_size.comparison.results import Group, Spread, groups, ranking
from variable_batch_size.comparison.train import OPTIMIZERS
from variable_batch_size.comparison.verdict import one_deviation, verdict
from variable_batch_size.trace import Trace

SETTINGS = Settings(
    workload="digits",
    metric_name="accuracy",
    unit=" %",
    is_higher_better=True,
    device="cpu",
    cores=1,
    threads=1,
    minibatch_size=16,
    ref_batchsize=16,
    lr=None,
    num_samples=1000,
    until="samples",
    on_end="stop",
    num_tests=20,
    log_steps=None,
)


def group(rule, *finals, trace="ramp"):
    """A group whose seeds ended so: with a metric, or with a status."""
    outcomes = [
        Outcome(status=final, reason="so it is")
        if isinstance(final, str)
        else Outcome(status="done", final_metric=final)
        for final in finals
    ]
    return Group(trace, rule, tuple((Run(trace, rule, seed), outcome) for seed, outcome in enumerate(outcomes)))


def test_a_spread_is_the_mean_and_the_deviation_of_a_sample():
    assert Spread.of([97.0, 98.0, 99.0]) == Spread(98.0, 1.0)
    assert Spread.of([97.0]) == Spread(97.0, None)
    assert Spread.of([None]) is None


def test_the_best_is_first_and_what_has_no_number_last():
    members = [group("a", 90.0), group("b", "diverged"), group("c", 95.0)]
    assert [g.rule for g in ranking(members, is_higher_better=True)] == ["c", "a", "b"]
    assert [g.rule for g in ranking(members, is_higher_better=False)] == ["a", "c", "b"]


def test_the_verdict_says_who_is_level_how_far_others_are_behind_and_what_did_not_end_well():
    members = [
        group("linear", 98.0, 98.2, 98.4),  # 98.2 ± 0.2
        group("adascale", 97.8, 98.1, 98.4),  # 98.1 ± 0.3
        group("constant", 96.0, 96.1, 96.2),  # 96.1 ± 0.1
        group("root", "diverged", "diverged", "failed"),
    ]
    reference = group("constant", 98.2, 98.4, 98.6, trace="reference")  # 98.4 ± 0.2
    assert one_deviation([*members, reference]) == pytest.approx(0.2)
    assert verdict(SETTINGS, members, reference) == (
        "linear and adascale within one deviation, at best 98.20 ± 0.20 %; constant 2.10 points lower "
        "(96.10 ± 0.10 %). Against always a batch of 16 (98.40 ± 0.20 %), linear is within one deviation. "
        "root: 2 of 3 diverged, 1 of 3 failed."
    )


def test_a_rule_whose_seeds_differ_wildly_is_not_level_for_that():
    members = [group("linear", 10.0, 98.0, 98.0), group("root", 97.9, 98.0, 98.1), group("constant", 97.9, 98.0, 98.1)]
    text = verdict(SETTINGS, members, None)
    assert text.startswith("root and constant within one deviation, at best 98.00 ± 0.10 %; linear 29.33 points lower")


def test_a_single_seed_and_no_seed_that_ended_well():
    assert verdict(SETTINGS, [group("linear", 98.0), group("root", 97.0)], None) == (
        "best is linear with 98.00 %; root 1.00 points lower (97.00 %). "
        "A single seed cannot tell a difference from chance."
    )
    assert verdict(SETTINGS, [group("linear", "failed")], None) == "linear: 1 of 1 failed."


def test_runs_are_every_combination_after_the_yardstick():
    assert runs_of(["a", "b"], ["root"], 2) == [
        Run("reference", "constant", 0),
        Run("reference", "constant", 1),
        Run("a", "root", 0),
        Run("a", "root", 1),
        Run("b", "root", 0),
        Run("b", "root", 1),
    ]


def test_every_rule_has_an_optimizer():
    assert tuple(OPTIMIZERS) == RULES


def test_default_traces_hold_the_samples_and_fit_the_data():
    traces = default_traces(16, 14_400, 1440)
    assert {name: (int(t.sizes.min()), int(t.sizes.max())) for name, t in traces.items()} == {
        "ramp": (16, 256),
        "spot": (80, 256),
    }
    assert all(14_400 <= t.sizes.sum() < 14_400 + 5 * 256 for t in traces.values())
    assert all(t.sizes.max() == 96 for t in default_traces(32, 5000, 100).values())


def test_the_hash_of_a_trace_is_that_of_its_numbers():
    text = bytes([8, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0])
    assert trace_hash(Trace.from_sequence([8, 16])) == hashlib.sha256(text).hexdigest()


def test_curves_are_means_over_seeds_with_a_band_of_one_deviation(tmp_path):
    results = Results(tmp_path)
    for seed, metrics in enumerate([(90.0, 95.0), (92.0, 97.0)]):
        run = Run("ramp", "linear", seed)
        results.write(run, Outcome(status="done", final_metric=metrics[-1]))
        lines = [
            {"step": 1, "samples": 16, "progress": 1.0, "loss": [1.0, 4.0][seed], "lr": 0.1, "batch_size": 16},
            {"step": 1, "samples": 16, "progress": 1.0, "metric": metrics[0], "test_loss": 1.0},
            {"step": 2, "samples": 48, "progress": 2.0 + seed, "loss": None, "lr": 0.2, "batch_size": 32},
            {"step": 2, "samples": 48, "progress": 2.0 + seed, "metric": metrics[1], "test_loss": 1.0},
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (results.run_directory(run) / "steps.jsonl").write_text(text)
    (found,) = groups(results)
    training, tests = curves(results, found).values()
    assert tests["samples"].tolist() == [16, 48]
    assert tests["progress"].tolist() == [1.0, 2.5]
    assert tests["metric"]["mean"].tolist() == [91.0, 96.0]
    assert tests["metric"]["high"] == pytest.approx([91 + 2**0.5, 96 + 2**0.5])
    assert training["lr"]["mean"].tolist() == [0.1, 0.2]
    assert "low" not in training["lr"]  # seeds do not differ
    # by a factor, that of the logarithms' deviation: log 4 / √2 for the losses 1 and 4
    assert training["loss"]["low"][0] == pytest.approx(2.5 / 4 ** (0.5**0.5))
    assert training["loss"]["high"][0] == pytest.approx(2.5 * 4 ** (0.5**0.5))
    assert training["loss"]["mean"][1] != training["loss"]["mean"][1]  # null is not a number
