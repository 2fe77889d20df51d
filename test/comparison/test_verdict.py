"""Means, deviations, rankings and the verdict, against numbers worked out by hand."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outcomes import SETTINGS, arm

from variable_batch_size.comparison.experiment import RULES, Outcome, Run, default_traces, runs_of
from variable_batch_size.comparison.report.arm import Arms, ranking
from variable_batch_size.comparison.report.curves import curves
from variable_batch_size.comparison.report.estimates import Difference, Spread
from variable_batch_size.comparison.report.verdict import ranking_in_words, verdict
from variable_batch_size.comparison.results import Results, trace_hash
from variable_batch_size.comparison.train import OPTIMIZERS
from variable_batch_size.traces.trace import Trace


def test_a_spread_is_the_mean_and_the_deviation_of_a_sample():
    assert Spread.of([97.0, 98.0, 99.0]) == Spread(98.0, 1.0)
    assert Spread.of([97.0]) == Spread(97.0, None)
    assert Spread.of([None]) is None


def test_a_difference_is_of_pairs_of_the_same_seed_with_an_interval_of_95_per_cent():
    # pairs: 0.68, 0.74, 0.73; deviation 0.03215; times 4.3027 / √3
    one, other = arm("a", 98.49, 98.54, 98.38), arm("b", 97.81, 97.80, 97.65)
    gap = one.above(other)
    assert gap.mean == pytest.approx(0.71667, abs=1e-5)
    assert gap.half_width == pytest.approx(0.07986, abs=1e-5)
    assert gap.is_clear
    assert not Difference.of([-0.28, -3.92, -0.84]).is_clear  # t is 1.5
    assert Difference.of([3.0]) == Difference(3.0, None)
    assert arm("a", 90.0, "failed").above(arm("b", "failed", 91.0)) is None  # no seed in common


@pytest.mark.parametrize(("num_seeds", "quantile"), [(2, 12.70620), (3, 4.30265), (10, 2.26216), (31, 2.04227)])
def test_the_interval_is_that_of_students_distribution_for_any_number_of_seeds(num_seeds, quantile):
    differences = [(-1.0) ** seed for seed in range(num_seeds)]
    expected = quantile * np.std(differences, ddof=1) / num_seeds**0.5
    assert Difference.of(differences).half_width == pytest.approx(expected, rel=1e-5)


def test_rules_are_seldom_told_apart_where_there_is_no_difference():
    draws = np.random.RandomState(0).standard_normal((2000, 3)).tolist()
    assert np.mean([Difference.of(differences).is_clear for differences in draws]) == pytest.approx(0.05, abs=0.015)


def test_the_best_is_first_and_what_diverged_or_has_no_number_is_not():
    members = [arm("a", 90.0, 90.0), arm("b", "diverged", 99.0), arm("c", 95.0, "failed"), arm("d", "failed")]
    assert [a.rule for a in ranking(members, is_higher_better=True)] == ["c", "a", "b"]
    assert [a.rule for a in ranking(members, is_higher_better=False)] == ["a", "c", "b"]
    assert ranking_in_words(SETTINGS, members) == (
        "c (1 of 2 failed) ≈ a > b (1 of 2 diverged); without a result: d (1 of 1 failed)"
    )


REFERENCE = arm("constant", 98.2, 98.4, 98.5, trace="reference")


def test_the_verdict_says_who_is_best_how_far_others_are_behind_and_what_did_not_end_well():
    arms = [
        arm("constant", 96.0, 96.1, 96.2),  # differences −2.0, −2.1, −2.2
        arm("linear", 98.0, 98.2, 98.4),  # from the yardstick −0.2, −0.2, −0.1
        arm("root", "diverged", "diverged", "failed"),
    ]
    assert verdict(SETTINGS, arms, REFERENCE) == (
        "best is linear with 98.20 ± 0.20 %; constant 2.10 ± 0.25 points lower. Against always a batch of 16 "
        "(98.37 ± 0.15 %), linear is 0.17 ± 0.14 points lower. root: 2 of 3 diverged, 1 of 3 failed."
    )
    assert ranking_in_words(SETTINGS, arms) == (
        "linear > constant; without a result: root (2 of 3 diverged, 1 of 3 failed)"
    )


def test_no_rule_is_best_where_the_first_is_not_told_apart_from_the_next():
    arms = [
        arm("adascale", 98.1, 97.9, 98.3),  # differences 0.1, −0.3, −0.1
        arm("constant", 96.0, 96.1, 96.2),
        arm("linear", 98.0, 98.2, 98.4),
        arm("root", 98.3, 98.0, 98.0),  # differences 0.3, −0.2, −0.4
    ]
    assert verdict(SETTINGS, arms, REFERENCE) == (
        "undecided, as linear with 98.20 ± 0.20 % is not clearly ahead of adascale (0.10 ± 0.50 points lower) and root "
        "(0.10 ± 0.90 points lower); constant 2.10 ± 0.25 points lower. Against always a batch of 16 "
        "(98.37 ± 0.15 %), linear is 0.17 ± 0.14 points lower."
    )
    assert ranking_in_words(SETTINGS, arms) == "linear ≈ adascale ≈ root > constant"


def test_no_rule_is_best_where_it_is_told_apart_from_the_next_and_not_from_one_that_varies_more():
    arms = [
        arm("linear", 98.0, 98.1, 98.2),
        arm("root", 97.0, 97.1, 97.2),
        arm("constant", 98.5, 90.0, 95.0),  # differences 0.5, −8.1, −3.2
    ]
    assert verdict(SETTINGS, arms, None) == (
        "undecided, as linear with 98.10 ± 0.10 % is not clearly ahead of constant (3.60 ± 10.72 points lower); "
        "root 1.00 ± 0.00 points lower."
    )
    assert ranking_in_words(SETTINGS, arms) == "linear ≈ root ≈ constant"


def test_no_rule_is_best_whose_mean_only_a_failure_of_the_other_makes_the_higher_one():
    arms = [arm("linear", 90.0, 91.0, 99.0), arm("root", 92.0, 93.0, "failed")]
    assert verdict(SETTINGS, arms, None) == (
        "undecided, as linear with 93.33 ± 4.93 % is not clearly ahead of root (2.00 ± 0.00 points higher). "
        "root: 1 of 3 failed."
    )
    assert ranking_in_words(SETTINGS, arms) == "linear ≈ root (1 of 3 failed)"


def test_a_rule_that_survived_few_seeds_is_not_the_best():
    arms = [arm("linear", 98.9, "diverged", "diverged"), arm("root", 98.0, 98.1, 98.2)]
    assert verdict(SETTINGS, arms, None) == (
        "best is root with 98.10 ± 0.10 %; linear 0.90 points higher where it did not diverge. "
        "linear: 2 of 3 diverged. A single seed cannot tell a difference from chance."
    )
    assert ranking_in_words(SETTINGS, arms) == "root > linear (2 of 3 diverged)"


def test_rules_without_a_seed_in_common_are_not_told_apart():
    arms = [arm("linear", 98.0, "failed"), arm("root", "failed", 97.0)]
    yardstick = arm("constant", "failed", 98.0, trace="reference")
    assert verdict(SETTINGS, arms, yardstick) == (
        "undecided, as linear with 98.00 % is not clearly ahead of root (without a seed in common). "
        "linear: 1 of 2 failed. root: 1 of 2 failed. A single seed cannot tell a difference from chance."
    )


def test_small_metrics_keep_their_digits_and_lower_may_be_better():
    settings = dataclasses.replace(SETTINGS, unit="", is_higher_better=False)
    arms = [arm("linear", 0.0032, 0.0033), arm("root", 0.0042, 0.0043)]
    assert verdict(settings, arms, None) == "best is linear with 0.003250 ± 0.000071; root 0.001000 ± 0.000000 higher."
    assert ranking_in_words(settings, arms) == "linear > root"


def test_a_single_seed_and_no_seed_that_ended_well():
    assert verdict(SETTINGS, [arm("linear", 98.0), arm("root", 97.0)], None) == (
        "undecided, as linear with 98.00 % is not clearly ahead of root (1.00 points lower). "
        "A single seed cannot tell a difference from chance."
    )
    assert ranking_in_words(SETTINGS, [arm("linear", 98.0), arm("root", 97.0)]) == "linear ≈ root"
    assert verdict(SETTINGS, [arm("linear", "failed")], None) == "linear: 1 of 1 failed."


finals = st.one_of(st.sampled_from(["diverged", "failed"]), st.integers(90, 99).map(float))


@given(st.lists(st.lists(finals, min_size=3, max_size=3), min_size=2, max_size=4), st.booleans())
def test_the_verdict_names_a_best_rule_exactly_where_the_ranking_sets_the_first_apart(seeds, is_higher_better):
    settings = dataclasses.replace(SETTINGS, is_higher_better=is_higher_better)
    arms = [arm(f"rule{number}", *finals) for number, finals in enumerate(seeds)]
    ranked = ranking(arms, is_higher_better=is_higher_better)
    if len(ranked) > 1:
        signs = [sign for sign in ranking_in_words(settings, arms) if sign in ">≈"]
        assert len(signs) == len(ranked) - 1
        assert verdict(settings, arms, None).startswith("best is ") == (signs[0] == ">")


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
    ramp = Trace.from_sequence([16, 32])
    results.write_experiment(SETTINGS, {}, {"ramp": ramp}, [Run("ramp", "linear", seed) for seed in range(3)])
    diverged = Run("ramp", "linear", 2)
    results.write(diverged, Outcome(status="diverged"))
    (results.run_directory(diverged) / "steps.jsonl").write_text("")  # ended before the first record
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
    (found,) = Arms.of(results).on_traces["ramp"]
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
