import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from variable_batch_size.traces import Recording, convert_recording, step_seconds

RECORDINGS = st.lists(st.tuples(st.floats(0.01, 500), st.integers(0, 40)), min_size=1, max_size=15).map(
    lambda rows: Recording.from_counts(
        np.concatenate(([0.0], np.cumsum([duration for duration, _ in rows]))), [count for _, count in rows]
    )
)
OPTIONS = {"samples_per_device": 64, "minibatch_size": 32, "seconds_per_step": 10, "when_empty": "skip"}


def is_convertible(recording, when_empty, seconds_per_step):
    has_device = (recording.counts > 0).any() and (when_empty == "skip" or recording.counts[0] > 0)
    used = recording.seconds - (recording.seconds_empty if when_empty == "skip" else 0)
    return has_device and used >= seconds_per_step


@settings(deadline=None, max_examples=200)
@given(
    recording=RECORDINGS,
    samples_per_device=st.integers(32, 200),
    seconds_per_step=st.floats(0.5, 100),
    when_empty=st.sampled_from(["skip", "hold"]),
    rounding=st.sampled_from(["down", "nearest", "up"]),
)
def test_samples_per_second_equal_the_recording_up_to_rounding(
    recording, samples_per_device, seconds_per_step, when_empty, rounding
):
    if not is_convertible(recording, when_empty, seconds_per_step):
        return
    conversion = convert_recording(
        recording,
        samples_per_device=samples_per_device,
        minibatch_size=32,
        seconds_per_step=seconds_per_step,
        when_empty=when_empty,
        rounding=rounding,
    )
    counts = recording.counts.copy()
    if when_empty == "hold":
        for row in range(1, len(counts)):
            counts[row] = counts[row] or counts[row - 1]
    # what the devices run in all the time, less the end that makes no step
    recorded = counts @ recording.durations * samples_per_device / seconds_per_step
    at_end = conversion.seconds_left * counts.max() * samples_per_device / seconds_per_step
    steps = len(conversion.trace)
    assert recorded - at_end - 1e-6 * recorded <= conversion.samples_before_rounding <= recorded * (1 + 1e-6)
    assert 0 <= conversion.seconds_left < seconds_per_step * (1 + 1e-6)
    # and rounding is off by a minibatch at most, in its direction
    off = conversion.samples - conversion.samples_before_rounding
    least, most = {"down": (-32, 0), "nearest": (-16, 16), "up": (0, 32)}[rounding]
    assert least * steps - 1e-3 * steps <= off <= most * steps + 1e-3 * steps
    assert not (conversion.trace.sizes % 32).any()
    if when_empty == "skip":
        slack = abs(off) / recording.seconds + at_end / recording.seconds
        slack += conversion.rate * conversion.seconds_left / recording.seconds
        assert conversion.rate == pytest.approx(conversion.recorded_rate, abs=slack * (1 + 1e-6) + 1e-6, rel=1e-6)


@pytest.mark.parametrize("seconds_per_step", [0.1, 0.3, 1 / 3, 7.7])
@pytest.mark.parametrize("rounding", ["down", "nearest", "up"])
def test_full_minibatches_are_unchanged_by_any_rounding(seconds_per_step, rounding):
    times = np.cumsum([0, *[1000 * seconds_per_step] * 5])
    recording = Recording.from_counts(times, [3, 1, 7, 2, 9])
    options = {**OPTIONS, "seconds_per_step": seconds_per_step}
    conversion = convert_recording(recording, rounding=rounding, **options)
    assert conversion.trace.sizes.tolist() == np.repeat(64 * np.array([3, 1, 7, 2, 9]), 1000).tolist()
    assert conversion.num_steps_rounded == 0
    assert conversion.seconds_left == pytest.approx(0, abs=1e-6)


def test_batch_size_is_the_time_weighted_mean_of_devices():
    recording = Recording.from_counts([0, 5, 10, 17.5, 20], [2, 4, 1, 5])
    # 2 and 4 for half of the step each; 1 for three quarters and 5 for one: 3 and 2 devices of 64
    conversion = convert_recording(recording, rounding="down", **OPTIONS)
    assert list(conversion.trace) == [192, 128]
    assert conversion.rate == conversion.recorded_rate == 16


def test_rounding_directions():
    recording = Recording.from_counts([0, 10, 20, 30], [1, 3, 5])
    options = {**OPTIONS, "samples_per_device": 48}  # 1.5, 4.5 and 7.5 minibatches
    traces = {r: list(convert_recording(recording, rounding=r, **options).trace) for r in ("down", "nearest", "up")}
    assert traces == {"down": [32, 128, 224], "nearest": [64, 160, 256], "up": [64, 160, 256]}
    options = {**OPTIONS, "samples_per_device": 40}  # 1.25, 3.75 and 6.25 minibatches
    traces = {r: list(convert_recording(recording, rounding=r, **options).trace) for r in ("down", "nearest", "up")}
    assert traces == {"down": [32, 96, 192], "nearest": [32, 128, 192], "up": [64, 128, 224]}


def test_conversion_reports_the_effect_of_rounding():
    recording = Recording.from_counts([0, 10, 20, 33], [1, 2, 5])
    conversion = convert_recording(recording, rounding="down", **{**OPTIONS, "samples_per_device": 48})
    assert list(conversion.trace) == [32, 96, 224]
    assert conversion.num_steps_rounded == 2
    assert (conversion.samples, conversion.samples_before_rounding) == (352, 48 * 8)
    assert conversion.seconds_left == 3
    assert conversion.recorded_rate == pytest.approx(48 * (10 + 20 + 65) / 33 / 10)
    assert conversion.rate == pytest.approx(352 / 30)


# ----------------------------------------------------------------------------------------------------------- no device


def test_when_empty_options():
    recording = Recording.from_counts([0, 15, 35, 50, 55], [2, 0, 4, 0])
    options = {**OPTIONS, "rounding": "down"}
    # 30 s with devices: 2, then 2 and 4 for half of the step each, then 4
    skipped = convert_recording(recording, **options)
    assert list(skipped.trace) == [128, 192, 256]
    assert (skipped.seconds_recorded, skipped.seconds_empty, skipped.seconds_left) == (55, 25, 0)
    # 55 s, of which the first 35 with 2 and the rest with 4
    held = convert_recording(recording, **{**options, "when_empty": "hold"})
    assert list(held.trace) == [128, 128, 128, 192, 256]
    with pytest.raises(ValueError, match=r"^recording\[1\]: no devices available \(`when_empty` is 'error'\)$"):
        convert_recording(recording, **{**options, "when_empty": "error"})


def test_recording_without_gaps_is_the_same_with_each_when_empty():
    recording = Recording.from_counts([0, 20, 40], [2, 3])
    traces = [
        convert_recording(recording, **{**OPTIONS, "rounding": "up", "when_empty": when_empty}).trace
        for when_empty in ("skip", "hold", "error")
    ]
    assert traces[0] == traces[1] == traces[2]
    assert list(traces[0]) == [128, 128, 192, 192]


def test_gaps_that_cannot_be_held_or_skipped_are_rejected():
    options = {**OPTIONS, "rounding": "down"}
    with pytest.raises(ValueError, match=r"^recording\[0\]: no devices at the start, so there is no number to hold"):
        convert_recording(Recording.from_counts([0, 20, 40], [0, 3]), **{**options, "when_empty": "hold"})
    with pytest.raises(ValueError, match=r"^recording\[0\]: the recording has no devices at any time$"):
        convert_recording(Recording.from_counts([0, 20, 40], [0, 0]), **options)


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples_per_device": 0}, "`samples_per_device` must be a positive integer, got 0"),
        ({"minibatch_size": 0}, "`minibatch_size` must be a positive integer, got 0"),
        ({"seconds_per_step": 0}, "`seconds_per_step` must be a positive number, got 0"),
        ({"seconds_per_step": float("nan")}, "`seconds_per_step` must be a positive number, got nan"),
        ({"when_empty": "wait"}, "`when_empty` must be one of 'skip', 'hold', 'error', got 'wait'"),
        ({"rounding": "even"}, "`rounding` must be one of 'down', 'nearest', 'up', got 'even'"),
        (
            {"seconds_per_step": 41},
            r"recording\[1\]: 40 seconds with devices must make 1 to 20000000 steps of 41 seconds, got 0",
        ),
        (
            {"seconds_per_step": 1e-9},
            r"recording\[1\]: 40 seconds with devices must make 1 to 20000000 steps of 1e-09 seconds, got 4e\+10",
        ),
        (
            {"samples_per_device": 12},
            r"recording\[0\]: a step must have at least one minibatch of 32 and at most 2\*\*53 samples, "
            r"got 24 samples, rounded down \(`rounding`\)",
        ),
        (
            {"samples_per_device": 2**60},
            r"recording\[1\]: a step must have at least one minibatch of 32 and at most 2\*\*53 samples, "
            r"got 3\.45876e\+18 samples, rounded down \(`rounding`\)",
        ),
    ],
)
def test_invalid_arguments_are_rejected(change, message):
    recording = Recording.from_counts([0, 20, 40], [2, 3])
    with pytest.raises(ValueError, match=f"^{message}$"):
        convert_recording(recording, **{**OPTIONS, "rounding": "down", **change})


def test_step_seconds_include_minibatches_and_all_reduce():
    options = {"minibatch_size": 32, "seconds_per_minibatch": 0.5, "seconds_per_allreduce": 0.25}
    assert step_seconds(samples_per_device=64, **options) == 1.25
    assert step_seconds(samples_per_device=65, **options) == 1.75
    with pytest.raises(ValueError, match="`seconds_per_allreduce` must be a number of seconds, got -1"):
        step_seconds(samples_per_device=64, **{**options, "seconds_per_allreduce": -1})


@pytest.mark.parametrize("rounding", ["down", "nearest", "up"])
def test_a_month_of_constant_devices_gives_a_constant_batch_size(rounding):
    recording = Recording.from_counts([0, 2.6e6], [1000])
    options = {**OPTIONS, "samples_per_device": 256, "seconds_per_step": 0.7, "rounding": rounding}
    conversion = convert_recording(recording, **options)
    assert set(conversion.trace.sizes.tolist()) == {256_000}
    assert conversion.num_steps_rounded == 0
