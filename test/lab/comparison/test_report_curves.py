"""Curves over seeds, compared with numbers computed by hand."""

import math

import pytest
from outcomes import ended, write_records, write_results

from variable_batch_size.lab.comparison.experiment import Run
from variable_batch_size.lab.comparison.report import curves
from variable_batch_size.lab.comparison.verdict import arms_of


def records(*, losses, metrics, progress):
    """Records of two steps, and of a test after each."""
    first = {"step": 1, "samples": 16, "progress": progress[0]}
    second = {"step": 2, "samples": 48, "progress": progress[1]}
    return [
        {**first, "loss": losses[0], "lr": 0.1, "batch_size": 16},
        {**first, "metric": metrics[0], "test_loss": 1.0},
        {**second, "loss": losses[1], "lr": 0.2, "batch_size": 32},
        {**second, "metric": metrics[1], "test_loss": 1.0},
    ]


@pytest.fixture
def found(tmp_path):
    """The curves of two seeds, and of a third one that diverged before its first record."""
    runs = [Run("ramp", "linear", seed) for seed in range(3)]
    results = write_results(tmp_path, {runs[0]: ended(95.0), runs[1]: ended(97.0), runs[2]: ended("diverged")})
    write_records(results, runs[0], records(losses=(1.0, None), metrics=(90.0, 95.0), progress=(1.0, 2.0)))
    write_records(results, runs[1], records(losses=(4.0, None), metrics=(92.0, 97.0), progress=(1.0, 3.0)))
    write_records(results, runs[2], [])
    (arm,) = arms_of(results)[1]["ramp"]
    return curves(results, arm)


def test_curve_is_the_mean_over_seeds_with_a_band_of_one_standard_deviation(found):
    tests = found["tests"]
    assert tests["samples"].tolist() == [16, 48]
    assert tests["progress"].tolist() == [1.0, 2.5]
    assert tests["metric"]["mean"].tolist() == [91.0, 96.0]
    assert tests["metric"]["low"] == pytest.approx([91 - 2**0.5, 96 - 2**0.5])
    assert tests["metric"]["high"] == pytest.approx([91 + 2**0.5, 96 + 2**0.5])


def test_band_is_a_factor_on_a_logarithmic_axis(found):
    loss, factor = found["training"]["loss"], 4 ** (0.5**0.5)  # the deviation of log 1 and log 4 is log 4 / √2
    assert (loss["low"][0], loss["mean"][0], loss["high"][0]) == pytest.approx((2.5 / factor, 2.5, 2.5 * factor))


def test_curve_has_no_band_for_equal_seeds_and_a_gap_for_missing_values(found):
    training = found["training"]
    assert training["lr"]["mean"].tolist() == [0.1, 0.2]
    assert "low" not in training["lr"]
    assert math.isnan(training["loss"]["mean"][1])


def test_record_that_is_not_json_is_named_in_the_error(tmp_path):
    run = Run("ramp", "linear", 0)
    results = write_results(tmp_path, {run: ended(95.0)})
    (results.run_directory(run) / "steps.jsonl").write_text('{"step": 1}\n{"step": \n')
    (arm,) = arms_of(results)[1]["ramp"]
    with pytest.raises(ValueError, match=r"steps\.jsonl:2: expected a JSON record, got '{\"step\": '"):
        curves(results, arm)
