"""Arms: pairs of the same seed, the ranking of rules, and significant differences."""

import pytest
from outcomes import arm, ended, write_results

from variable_batch_size.lab.comparison.experiment import Run
from variable_batch_size.lab.comparison.verdict import arms_of, is_ahead, ranking


def test_difference_is_computed_between_pairs_of_the_same_seed():
    gap = arm("a", 98.49, 98.54, 98.38).above(arm("b", 97.81, 97.80, 97.65))
    assert gap.mean == pytest.approx((0.68 + 0.74 + 0.73) / 3)
    assert gap.error == pytest.approx(0.07986, abs=1e-5)  # the deviation, 0.03215, times 4.3027 / √3
    assert arm("a", 90.0, 92.0, "failed").above(arm("b", "failed", 91.0, 99.0)).mean == 1.0
    assert arm("a", 90.0, "failed").above(arm("b", "failed", 91.0)) is None


def test_best_arm_is_first_and_diverged_or_missing_ones_are_not():
    arms = [arm("a", 90.0, 90.0), arm("b", "diverged", 99.0), arm("c", 95.0, "failed"), arm("d", "failed")]
    assert [arm.rule for arm in ranking(arms, is_higher_better=True)] == ["c", "a", "b"]
    assert [arm.rule for arm in ranking(arms, is_higher_better=False)] == ["a", "c", "b"]
    more = [arm("few", "diverged", 99.0), arm("many", *["diverged"] * 2, *[90.0] * 8)]
    assert [arm.rule for arm in ranking(more, is_higher_better=True)] == ["many", "few"]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([98.0, 98.1, 98.2], [97.0, 97.2, 97.1], True),
        ([98.0, 98.1, 98.2], [98.1, 98.0, 98.1], False),  # chance
        ([98.0], [97.0], False),  # a single seed
        ([98.0, "failed"], ["failed", 97.0], False),  # no seed in common
        ([98.0, 98.1], ["diverged", 99.0], True),
        ([90.0, 91.0, 99.0], [92.0, 93.0, "failed"], False),  # worse on all common seeds
        ([98.0, 98.1], [98.1, 98.0, "diverged", 98.0], False),  # from a seed that only one rule has
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_rule_ranks_above_clearly_worse_or_more_often_diverged_rules(first, second, expected, sign):
    arms = [arm("a", *_times(sign, first)), arm("b", *_times(sign, second))]
    assert is_ahead(*arms, is_higher_better=sign > 0) is expected


def _times(sign, finals):
    return [final if isinstance(final, str) else sign * final for final in finals]


def test_arms_are_listed_by_trace_without_arms_that_have_no_completed_run(tmp_path):
    runs = [
        Run("reference", "constant", 0),
        *(Run("ramp", rule, seed) for rule in ("root", "linear") for seed in (0, 1)),
    ]
    results = write_results(tmp_path, {run: ended(98.0) for run in runs})
    (results.run_directory(Run("ramp", "linear", 1)) / "run.json").unlink()
    (results.run_directory(Run("reference", "constant", 0)) / "run.json").unlink()
    reference, on_traces = arms_of(results)
    assert reference is None
    assert [(arm.rule, len(arm.outcomes)) for arm in on_traces["ramp"]] == [("linear", 1), ("root", 2)]
