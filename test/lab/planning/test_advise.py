"""advise: choices from profiles and noise made by hand."""

import pytest

import variable_batch_size as vbs
from variable_batch_size.lab.planning.advise import NoiseBand, advice_report, advise, core_numbers
from variable_batch_size.lab.planning.profile import Measured


def profile(updating=1.0, accumulating=1.0):
    """One second for a minibatch of 32 on one core; `updating` is that of 2 cores with an all-reduce."""
    rows = (Measured(1, 1, 32, 1.0, 1.0), Measured(1, 2, 32, accumulating, updating))
    return vbs.planning.Profile(rows, extrapolates=True)


def band(low=96.0, mean=96.0, high=96.0):
    return NoiseBand(*map(vbs.planning.NoiseCurve.constant, (low, mean, high)))


def advice(profile, noise, cores=(1, 2), **options):
    options = {"minibatch_size": 32, "ref_batchsize": 32, "num_samples": 3200, "max_batch_size": 127, **options}
    return advise(profile, noise, cores=cores, **options)


# 100 steps at 32. With φ = 96, gain(64) = (96/32 + 1) / (96/64 + 1) = 1.6: 63 updates. On 1 core, 32 takes 100 s, and
# 64 takes 63 · 2 s. On 2 cores, 32 takes 100 updates, and 64 takes 63.


def test_the_best_batch_size_of_each_number_of_cores_by_hand():
    found = advice(profile(updating=1.2), band())
    assert found.sizes == (32, 64)
    sizes = [(name, run.moments[0].cores, run.seconds, run.device_seconds) for name, run in found.best]
    assert sizes == [
        ("32", 1, pytest.approx(100), pytest.approx(100)),
        ("64", 2, pytest.approx(75.6), pytest.approx(151.2)),
    ]


@pytest.mark.parametrize(("updating", "taken"), [(1.2, ("32", 1)), (1.0, ("64", 2))])
def test_the_smallest_product_of_time_and_cost_is_taken(updating, taken):
    # 100 · 100 against 75.6 · 151.2 = 11,431 and 63 · 126 = 7,938
    name, run = advice(profile(updating), band()).taken
    assert (name, run.moments[0].cores) == taken


def test_the_paragraph_has_the_noise_the_times_and_the_choices():
    found, noise = profile(updating=1.2), band(90.0, 96.0, 100.0)
    assert advice_report(advice(found, noise, price=36.0), found, noise) == (
        "The noise scale is 96 samples (95 % interval 90 to 100) after 0 of 100 steps at the reference batch size, "
        "where it is assumed to stay. Times on 1 and 2 cores were measured, for training steps alone. "
        "Fastest: batch size 64 on 2 cores, 1 min 16 s, cost 1.51. Cheapest: batch size 32 on 1 core, 1 min 40 s, cost "
        "1.00. Take batch size 32 on 1 core, 1 min 40 s, cost 1.00: of these choices it has the smallest product of "
        "time and cost. Over the interval of the noise scale it takes 1 min 40 s, and the choice is the same."
    )


def test_a_choice_that_depends_on_the_noise_is_not_hidden():
    # at φ = 32 the gain of 64 is 2 / 1.5, so 75 updates, and 75 · 150 > 100 · 100; at 1e9 it is just below 2, so 51
    found, noise = profile(), band(32.0, 96.0, 1e9)
    text = advice_report(advice(found, noise), found, noise)
    assert "Take batch size 64 on 2 cores, 1 min 3 s, 2 min 6 s of device time: of these choices" in text
    changes = "it takes 51 s to 1 min 15 s, and the choice would be batch size 32 on 1 core at the lower end."
    assert f"Over the interval of the noise scale {changes}" in text
    assert text.endswith("It has the largest batch size that was considered (--max-batch-size).")


def test_guesses_are_named_as_such_next_to_the_best_measured_choice():
    found, noise = profile(), band(1e9, 1e9, 1e9)
    text = advice_report(advice(found, noise, cores=(1, 2, 8), max_batch_size=256, price=1.0), found, noise)
    assert (
        "Times on 8 cores are a guess, extrapolated on the assumption that further cores are as fast, and the" in text
    )
    assert "the all-reduce is no slower than on 2 cores. " in text
    assert "Take batch size 256 on 8 cores, " in text
    assert (
        "Its times are a guess: measure them before you rent. The best choice with measured times is batch size" in text
    )


def test_a_guess_from_one_core_has_no_all_reduce():
    found = vbs.planning.Profile((Measured(1, 1, 32, 1.0, 1.0),), extrapolates=True)
    text = advice_report(advice(found, band()), found, band())
    assert "Times on 1 core were measured, for training steps alone. Times on 2 cores are a guess" in text
    assert "further cores are as fast, and the all-reduce takes no time." in text


def test_times_of_a_busy_machine_are_doubtful():
    found = profile(accumulating=2.5, updating=2.5)
    text = advice_report(advice(found, band()), found, band(), doubts=["the load was 5"])
    slower = "accumulating a minibatch of 32 takes 2.5 s on 2 cores, 2.5 times the 1 s on 1 core"
    assert f"The times are doubtful: the load was 5. The times are doubtful: {slower}" in text


def test_noise_that_covers_the_training_needs_no_assumption():
    curves = [vbs.planning.NoiseCurve([10.0, 100.0], [scale, 10 * scale]) for scale in (8.0, 9.0, 10.0)]
    text = advice_report(advice(profile(), NoiseBand(*curves)), profile(), NoiseBand(*curves))
    first, last = "9 samples (95 % interval 8 to 10) after 10", "90 samples (95 % interval 80 to 100) after 100"
    assert text.startswith(f"The noise scale is {first} of 100 steps at the reference batch size, and {last}. Times on")


def test_impossible_bounds_raise():
    rule = "`max_batch_size` must be at least 32, the reference batch size in whole minibatches, got 31"
    with pytest.raises(ValueError, match=rule):
        advice(profile(), band(), max_batch_size=31)
    with pytest.raises(ValueError, match="`most` must be a positive integer, got 0"):
        core_numbers(0)
