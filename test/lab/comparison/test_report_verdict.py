"""Rankings and the text of the verdict, compared with numbers computed by hand."""

import dataclasses
import re

from hypothesis import given
from hypothesis import strategies as st
from outcomes import NO_CURVES, SETTINGS, arm

from variable_batch_size.lab.comparison.summary import summary
from variable_batch_size.lab.comparison.verdict import ranking, ranking_in_words, verdict

REFERENCE = arm("constant", 98.2, 98.4, 98.5, trace="reference")


def test_verdict_names_the_best_rule_the_gaps_and_failed_runs():
    arms = [
        arm("constant", 96.0, 96.1, 96.2),  # differences −2.0, −2.1, −2.2
        arm("linear", 98.0, 98.2, 98.4),  # from the baseline −0.2, −0.2, −0.1
        arm("root", "diverged", "diverged", "failed"),
    ]
    assert verdict(SETTINGS, arms, REFERENCE) == (
        "best is linear with 98.20 ± 0.20 %; constant 2.10 ± 0.25 points lower. Against a constant batch of 16 "
        "(98.37 ± 0.15 %), linear is 0.17 ± 0.14 points lower. root: 2 of 3 diverged, 1 of 3 failed."
    )
    assert ranking_in_words(SETTINGS, arms) == (
        "linear > constant; without a result: root (2 of 3 diverged, 1 of 3 failed)"
    )


def test_no_rule_is_best_if_the_first_two_cannot_be_distinguished():
    arms = [
        arm("adascale", 98.1, 97.9, 98.3),  # differences 0.1, −0.3, −0.1
        arm("constant", 96.0, 96.1, 96.2),
        arm("linear", 98.0, 98.2, 98.4),
        arm("root", 98.3, 98.0, 98.0),  # differences 0.3, −0.2, −0.4
    ]
    assert verdict(SETTINGS, arms, REFERENCE) == (
        "undecided, as linear with 98.20 ± 0.20 % is not clearly ahead of adascale (0.10 ± 0.50 points lower) and root "
        "(0.10 ± 0.90 points lower); constant 2.10 ± 0.25 points lower. Against a constant batch of 16 "
        "(98.37 ± 0.15 %), linear is 0.17 ± 0.14 points lower."
    )
    assert ranking_in_words(SETTINGS, arms) == "linear, adascale, root > constant"


def test_no_rule_is_best_if_it_cannot_be_distinguished_from_a_noisier_one():
    arms = [
        arm("linear", 98.0, 98.1, 98.2),
        arm("root", 97.0, 97.1, 97.2),
        arm("constant", 98.5, 90.0, 95.0),  # differences 0.5, −8.1, −3.2
    ]
    assert verdict(SETTINGS, arms, None) == (
        "undecided, as linear with 98.10 ± 0.10 % is not clearly ahead of constant (3.60 ± 10.72 points lower); "
        "root 1.00 ± 0.00 points lower."
    )
    assert ranking_in_words(SETTINGS, arms) == "linear, root, constant"


def test_no_rule_is_best_only_because_a_run_of_another_failed():
    arms = [arm("linear", 90.0, 91.0, 99.0), arm("root", 92.0, 93.0, "failed")]
    assert verdict(SETTINGS, arms, None) == (
        "undecided, as linear with 93.33 ± 4.93 % is not clearly ahead of root (2.00 ± 0.00 points higher). "
        "root: 1 of 3 failed."
    )
    assert ranking_in_words(SETTINGS, arms) == "linear, root (1 of 3 failed)"


def test_rule_with_few_successful_seeds_is_not_the_best():
    arms = [arm("linear", 98.9, "diverged", "diverged"), arm("root", 98.0, 98.1, 98.2)]
    assert verdict(SETTINGS, arms, None) == (
        "best is root with 98.10 ± 0.10 %; linear 0.90 points higher where it did not diverge. "
        "linear: 2 of 3 diverged. A single seed cannot tell a difference from chance."
    )
    assert ranking_in_words(SETTINGS, arms) == "root > linear (2 of 3 diverged)"


def test_the_ranking_ends_with_the_rules_without_a_result():
    arms = [arm("a", 90.0, 90.0), arm("b", "diverged", 99.0), arm("c", 95.0, "failed"), arm("d", "failed")]
    assert ranking_in_words(SETTINGS, arms) == (
        "c (1 of 2 failed), a > b (1 of 2 diverged); without a result: d (1 of 1 failed)"
    )


def test_rules_without_a_common_seed_are_not_distinguished():
    arms = [arm("linear", 98.0, "failed"), arm("root", "failed", 97.0)]
    baseline = arm("constant", "failed", 98.0, trace="reference")
    assert verdict(SETTINGS, arms, baseline) == (
        "undecided, as linear with 98.00 % is not clearly ahead of root (without a seed in common). "
        "linear: 1 of 2 failed. root: 1 of 2 failed. A single seed cannot tell a difference from chance."
    )


def test_small_metrics_keep_their_digits_and_lower_can_be_better():
    settings = dataclasses.replace(SETTINGS, unit="", is_higher_better=False)
    arms = [arm("linear", 0.0032, 0.0033), arm("root", 0.0042, 0.0043)]
    assert verdict(settings, arms, None) == "best is linear with 0.003250 ± 0.000071; root 0.001000 ± 0.000000 higher."
    assert ranking_in_words(settings, arms) == "linear > root"


def test_verdict_for_a_single_seed_and_for_no_successful_seed():
    assert verdict(SETTINGS, [arm("linear", 98.0), arm("root", 97.0)], None) == (
        "undecided, as linear with 98.00 % is not clearly ahead of root (1.00 points lower). "
        "A single seed cannot tell a difference from chance."
    )
    assert ranking_in_words(SETTINGS, [arm("linear", 98.0), arm("root", 97.0)]) == "linear, root"
    assert verdict(SETTINGS, [arm("linear", "failed")], None) == "linear: 1 of 1 failed."


finals = st.one_of(st.sampled_from(["diverged", "failed"]), st.integers(90, 99).map(float))


@given(st.lists(st.lists(finals, min_size=3, max_size=3), min_size=2, max_size=4), st.booleans())
def test_verdict_summary_and_ranking_agree_on_the_best_rule(seeds, is_higher_better):
    settings = dataclasses.replace(SETTINGS, is_higher_better=is_higher_better)
    arms = [arm(f"rule{number}", *finals) for number, finals in enumerate(seeds)]
    ranked = ranking(arms, is_higher_better=is_higher_better)
    if len(ranked) > 1:
        best, _, _ = ranking_in_words(settings, arms).partition("; without")[0].partition(" > ")
        is_alone = [one.rule for one in ranked if re.search(rf"{one.rule}\b", best)] == [ranked[0].rule]
        text = summary(settings, arms, None, dict.fromkeys((one.rule for one in arms), NO_CURVES))
        assert verdict(settings, arms, None).startswith(f"best is {ranked[0].rule} ") == is_alone
        assert (f"{ranked[0].rule} is clearly ahead of" in text) == is_alone
        assert (f"More seeds are needed to tell {ranked[0].rule} from " in text) != is_alone
