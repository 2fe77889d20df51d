import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import variable_batch_size as vbs

MINIBATCHES = st.integers(1, 64)
SMITH = {"factor": 5, "at_epochs": [60, 120, 160], "num_epochs": 200, "dataset_size": 50_000}


@pytest.mark.parametrize(
    ("start", "cap", "updates", "sizes"),
    [
        (128, None, 28_875, [128, 640, 3_200, 16_000]),
        (640, 5_120, 6_406, [640, 3_200, 5_120]),
        (3_200, 5_120, 2_305, [3_200, 5_120]),
    ],
)
def test_number_of_updates_of_smith_et_al(start, cap, updates, sizes):
    trace = vbs.traces.growth_for_decay(start, cap=cap, minibatch_size=128, **SMITH)
    assert len(trace) == updates
    assert np.unique(trace.sizes).tolist() == sizes
    assert abs(int(trace.sizes.sum()) - 10_000_000) <= max(sizes) / 2


def test_number_of_updates_of_smith_et_al_without_a_change():
    trace = vbs.traces.growth_for_decay(128, minibatch_size=128, **{**SMITH, "at_epochs": []})
    assert trace == vbs.traces.constant_trace(128, num_steps=78_125)


def test_the_linear_rule_on_top_of_the_decay_gives_the_learning_rate_of_smith_et_al():
    trace = vbs.traces.growth_for_decay(640, cap=5_120, minibatch_size=128, **SMITH)
    rule = vbs.rules.LinearRule()
    decays = {640: 1, 3_200: 5, 5_120: 25}  # the cap is reached at the second change
    lrs = [rule.factor(vbs.rules.Step(size, 128, 640)) / decay for size, decay in decays.items()]
    assert np.unique(trace.sizes).tolist() == list(decays)
    assert lrs == [1, 1, 8 / 25]


@pytest.mark.parametrize("start", [32, 128, 256, 1024])
@pytest.mark.parametrize("minibatch_size", [1, 8, 32])
@pytest.mark.parametrize("num_samples", [600_000, 10_000_000])
def test_seesaw_takes_two_over_pi_of_the_updates_and_all_samples(start, minibatch_size, num_samples):
    trace = vbs.traces.seesaw(start, num_samples=num_samples, minibatch_size=minibatch_size)
    assert len(trace) / (num_samples / start) == pytest.approx(2 / math.pi, rel=0.005)
    assert trace.sizes.sum() == num_samples // minibatch_size * minibatch_size


def test_seesaw_follows_the_cosine():
    trace = vbs.traces.seesaw(256, num_samples=10_000_000, minibatch_size=8)
    middle = np.cumsum(trace.sizes) - trace.sizes / 2
    wanted = 256 / np.cos(math.pi / 2 * middle / 10_000_000)
    assert np.abs(trace.sizes - wanted)[:-20].max() < 8.5  # near the end it grows within a step


def test_seesaw_with_a_factor_changes_when_the_cosine_has_fallen_by_it():
    trace = vbs.traces.seesaw(256, num_samples=9_000_000, minibatch_size=32, factor=2, cap=1024)
    stages = vbs.traces.Stages.of(trace, unit="samples")
    assert stages.sizes == (256, 512, 1024)
    for start, share in zip(stages.starts, (0, math.acos(1 / 2), math.acos(1 / 4)), strict=True):
        assert abs(start - 9_000_000 * 2 / math.pi * share) <= 512


@settings(deadline=None)
@given(
    MINIBATCHES, st.integers(1, 20), st.integers(1, 10), st.integers(1, 10**6), st.sampled_from([None, 1.1, 2.0, 3.0])
)
def test_seesaw_respects_its_cap_and_is_off_by_at_most_a_step(size, start, growth, more, factor):
    start, cap = start * size, start * growth * size
    num_samples = start + more
    trace = vbs.traces.seesaw(start, num_samples=num_samples, minibatch_size=size, factor=factor, cap=cap)
    assert trace.sizes.max() <= cap
    assert not (trace.sizes % size).any()
    assert abs(num_samples - int(trace.sizes.sum())) <= cap + size


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: vbs.traces.growth_for_decay(128, minibatch_size=128, **{**SMITH, "at_epochs": [60, 60]}),
            "`at_epochs` must be ascending between 0 and 200, got 60 after 60",
        ),
        (
            lambda: vbs.traces.growth_for_decay(128, minibatch_size=128, **{**SMITH, "at_epochs": [200]}),
            "`at_epochs` must be ascending between 0 and 200, got 200 after 200",
        ),
        (
            lambda: vbs.traces.growth_for_decay(128, minibatch_size=128, **{**SMITH, "factor": 1}),
            "`factor` must be greater than 1, got 1",
        ),
        (
            lambda: vbs.traces.seesaw(128, num_samples=10**6, minibatch_size=128, cap=100),
            r"`cap` must be a multiple of 128 \(the minibatch size\), got 100",
        ),
        (
            lambda: vbs.traces.seesaw(256, num_samples=10**6, minibatch_size=128, cap=128),
            "`cap` must be at least the first batch size of 256, got 128",
        ),
        (
            lambda: vbs.traces.seesaw(128, num_samples=10**6, minibatch_size=128, factor=1 + 1e-9),
            r"`factor` must be at least 1\.001 \(None: the limit of small factors\), got 1\.000000001",
        ),
        (
            lambda: vbs.traces.seesaw(256, num_samples=200, minibatch_size=128),
            "`num_samples` must be at least one step of 256 samples, got 200",
        ),
    ],
)
def test_invalid_arguments_are_rejected(call, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        call()
