"""The summary at the top of the page: costs, decisions and mishaps, from results made by hand."""

import dataclasses

import numpy as np
import pytest
from outcomes import NO_CURVES, SETTINGS, arm, ended, write_records, write_results

from variable_batch_size.lab.command.main import main
from variable_batch_size.lab.comparison.experiment import Run
from variable_batch_size.lab.comparison.summary import Dip, deepest_dip, summary

REFERENCE = arm("constant", 98.2, 98.4, 98.5, trace="reference", updates=500)
COST = "linear makes 105 updates instead of the 500 of a constant batch size of 16"


def summarized(arms, reference=REFERENCE, settings=SETTINGS, **curves):
    return summary(settings, arms, reference, {one.rule: curves.get(one.rule, NO_CURVES) for one in arms})


def test_a_clear_winner_is_named_with_what_it_saves_and_costs():
    arms = [arm("constant", 94.0, 94.1, 94.2), arm("linear", 96.0, 96.2, 96.4, updates=105)]
    # from the baseline −2.2, −2.2, −2.1
    assert summarized(arms) == f"{COST}, at 2.17 ± 0.14 points less accuracy. linear is clearly ahead of constant."
    arms.append(arm("root", 95.0, 95.1, 95.2))
    assert summarized(arms).endswith("linear is clearly ahead of all other rules.")


def test_an_undecided_comparison_asks_for_more_seeds():
    arms = [arm("linear", 98.3, 98.6, updates=105), arm("root", 98.5, 97.0)]  # differences 0.2, −1.6
    assert summarized(arms) == (
        f"{COST}, with no clear difference in accuracy (0.15 ± 0.64 points higher). "
        "More seeds are needed to tell linear from root (± 11.44 points with 2)."
    )
    arms.append(arm("adascale", 98.2, 98.6))
    expected = "More seeds are needed to tell linear from adascale and root (up to ± 11.44 points with 2)."
    assert summarized(arms).endswith(expected)


def test_one_seed_decides_nothing():
    arms = [arm("linear", 97.0, updates=105), arm("root", 96.0)]
    assert summarized(arms) == (
        f"{COST}, with 1.20 points less accuracy in a single seed. "
        "More seeds are needed to tell linear from root (a single one cannot tell a difference from chance)."
    )


def test_a_rule_that_diverged_ranks_last_and_is_named():
    arms = [arm("linear", 99.9, "diverged", "diverged"), arm("root", 96.0, 96.2, 96.4, updates=105)]
    assert summarized(arms) == (
        f"{COST.replace('linear', 'root')}, at 2.17 ± 0.14 points less accuracy. "
        "root is clearly ahead of linear. linear: 2 of 3 diverged."
    )
    assert (
        summarized([arm("linear", "diverged", "failed")])
        == "No rule has a result. linear: 1 of 2 diverged, 1 of 2 failed."
    )


def test_without_a_baseline_the_metric_itself_is_given():
    arms = [arm("linear", 96.0, 96.2, 96.4, updates=105)]
    expected = "linear makes 105 updates, with accuracy 96.20 ± 0.20 %; there is no baseline to compare with."
    assert summarized(arms, None) == summarized(arms, arm("constant", "failed", trace="reference")) == expected


def test_failed_runs_with_other_seeds_decide_nothing():
    arms = [arm("linear", 90.0, 91.0, 99.0), arm("root", 92.0, 93.0, "failed")]
    assert "to tell linear from root (the runs that failed had other seeds)." in summarized(arms, None)


def test_equal_numbers_of_updates_and_metrics_without_per_cent():
    settings = dataclasses.replace(SETTINGS, metric_name="loss", unit="", is_higher_better=False)
    reference = arm("constant", 0.50, 0.51, 0.52, trace="reference")
    assert summarized([arm("linear", 0.40, 0.41, 0.42)], reference, settings) == (
        "linear makes 2 updates, as many as a constant batch size of 16, at 0.1000 ± 0.0000 less loss."
    )


# ---------------------------------------------------------------------------------------------- what happens on the way


def curves_of(metrics, sizes=(16, 16, 16, 16, 16)):
    steps = 10 * np.arange(1, len(metrics) + 1)
    return {
        "training": {"step": steps, "batch_size": {"mean": np.array(sizes)}},
        "tests": {"step": steps, "metric": {"mean": np.array(metrics)}},
    }


def test_a_dip_is_reported_with_the_jump_before_it():
    arms = [arm("linear", 98.0, 98.1, updates=105), arm("root", 97.0, 97.5)]
    dipped = curves_of([30.0, 90.0, 63.0, 95.0, 98.0], sizes=(16, 64, 1024, 1024, 2048))
    text = summarized(arms, linear=dipped, root=curves_of([30.0, 90.0, 94.0, 93.5, 97.0]))
    assert text.endswith("On the way, accuracy fell to 63.00 % with linear at the jump to 1,024.")
    text = summarized(arms, linear=dipped, root=curves_of([30.0, 90.0, 94.0, 50.0, 97.0]))
    both = "to 50.00 % with root at update 40 and to 63.00 % with linear at the jump to 1,024"
    assert text.endswith(f"On the way, accuracy fell {both}.")


def test_a_dip_within_the_noise_of_the_seeds_is_not_reported():
    arms = [arm("linear", 90.0, 98.0)]  # a deviation of 5.7
    assert "On the way" not in summarized(arms, linear=curves_of([30.0, 90.0, 80.0, 95.0, 94.0]))


@pytest.mark.parametrize(
    ("metrics", "is_higher_better", "dip"),
    [
        ([1.0, 2.0, 3.0], True, None),
        ([3.0, 2.0, 1.0], False, None),
        ([2.0], True, None),
        ([1.0, 5.0, 2.0, 6.0, 4.0], True, Dip(3.0, 2.0, 30, 64)),
        ([5.0, 1.0, 4.0, 1.5, 0.5], False, Dip(3.0, 4.0, 30, 64)),
        ([1.0, 5.0, np.nan, 2.0, np.nan], True, Dip(3.0, 2.0, 40, 64)),
        ([np.nan, np.nan], True, None),
    ],
)
def test_the_deepest_dip_is_below_the_best_value_so_far(metrics, is_higher_better, dip):
    curves = curves_of(metrics, sizes=(16, 16, 64, 96, 96)[: len(metrics)])
    assert deepest_dip(curves, is_higher_better=is_higher_better) == dip


def test_the_summary_is_that_of_the_completed_runs_and_the_same_in_the_terminal(tmp_path, capsys):
    outcomes = {Run("ramp", "linear", 0): ended(98.0), Run("ramp", "linear", 1): ended("diverged")}
    results = write_results(tmp_path, outcomes)
    metrics = {0: [50.0, 90.0, 60.0, 98.0], 1: [99.0, 99.0, 10.0]}
    for seed, found in metrics.items():
        tests = [{"step": step, "samples": step, "progress": step, "metric": value} for step, value in enumerate(found)]
        steps = [{**test, "loss": 1.0, "lr": 0.1, "batch_size": 16 + 48 * (test["step"] > 1)} for test in tests]
        write_records(
            results,
            Run("ramp", "linear", seed),
            [*tests, *({k: v for k, v in one.items() if k != "metric"} for one in steps)],
        )
    assert main(["report", str(tmp_path)]) == 0
    text = (
        "linear makes 2 updates, with accuracy 98.00 %; there is no baseline to compare with. "
        "On the way, accuracy fell to 60.00 % with linear at the jump to 64. linear: 1 of 2 diverged."
    )
    assert capsys.readouterr().out.splitlines() == [f"ramp: {text}", str(results.page_file)]
    assert f"<p><b>ramp</b>: {text}</p>" in results.page_file.read_text(encoding="utf-8")
