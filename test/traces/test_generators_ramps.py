import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs

MINIBATCHES = st.integers(1, 64)


@given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 300), MINIBATCHES)
def test_linear_ramp_is_off_by_at_most_half_a_minibatch(start, end, steps, size):
    trace = vbs.traces.linear_ramp(start * size, end * size, num_steps=steps, minibatch_size=size)
    line = np.linspace(start * size, end * size, steps) if steps > 1 else np.array([start * size])
    assert len(trace) == steps
    assert trace[0] == start * size
    assert steps == 1 or trace[-1] == end * size
    assert not (trace.sizes % size).any()
    assert np.abs(trace.sizes - line).max() <= size / 2 + 1e-6


@given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 20), MINIBATCHES)
def test_doubling_ramp_doubles_or_halves_until_its_end(start, end, every, size):
    trace = vbs.traces.doubling_ramp(start * size, end * size, every=every, minibatch_size=size)
    sizes = trace.sizes[::every]
    assert list(trace) == np.repeat(sizes, every).tolist()
    assert (sizes[0], sizes[-1]) == (start * size, end * size)
    for number, found in enumerate(sizes[:-1]):
        exact = start * size * 2.0 ** (number if end > start else -number)
        assert abs(found - exact) <= size / 2
        assert exact < end * size if end > start else exact > end * size


def test_doubling_ramp_may_hold_its_end_or_be_truncated():
    assert list(vbs.traces.doubling_ramp(8, 32, every=2, minibatch_size=8, num_steps=9)) == [
        8,
        8,
        16,
        16,
        32,
        32,
        32,
        32,
        32,
    ]
    assert list(vbs.traces.doubling_ramp(8, 32, every=2, minibatch_size=8, num_steps=3)) == [8, 8, 16]


def runs_of(trace):
    """The batch sizes and the number of steps of each."""
    return [(size, len(list(steps))) for size, steps in itertools.groupby(trace)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # 3 increments over 960 samples, one every 320. A step that begins after 0, 16, … 304 samples has 16; after
        # 320, 352, … 608 it has 32; after 640, 688, … 928 it has 48; 976 is after the ramp
        ((16, 16, 960, 64), [(16, 20), (32, 10), (48, 7), (64, 1)]),
        # one every 2000 samples: 2000 / 32 = 62.5 steps, then from 2016 on 31 of 64 to 4000, which begins 96
        ((32, 32, 6000, 128), [(32, 63), (64, 31), (96, 21), (128, 1)]),
        # one every 50 samples: 0, 5, … 45 have 5; 50 and 95 have 45; 140 is after the ramp
        ((5, 40, 100, 85), [(5, 10), (45, 2), (85, 1)]),
        # 464 samples are done right where the ramp ends, and in floats 464 / (464 / 7) is 6.999999999999999
        ((2, 2, 464, 16), [(2, 34), (4, 17), (6, 11), (8, 8), (10, 7), (12, 6), (14, 5), (16, 1)]),
    ],
)
def test_rampup_equals_megatrons_calculator(arguments, expected):
    start, increment, ramp_samples, final = arguments
    assert runs_of(vbs.traces.rampup(start, increment, ramp_samples, final=final)) == expected


def test_rampup_continues_to_num_samples_in_full_steps():
    # 20 · 16 + 10 · 32 + 7 · 48 = 976 samples, then (10,000 − 976) / 64 = 141 steps
    ramp = [(16, 20), (32, 10), (48, 7)]
    assert runs_of(vbs.traces.rampup(16, 16, 960, final=64, until=10_000)) == [*ramp, (64, 141)]
    assert runs_of(vbs.traces.rampup(16, 16, 960, final=64, until=9_999)) == [*ramp, (64, 140)]
    assert runs_of(vbs.traces.rampup(16, 16, 960, final=64, until=976)) == ramp
    assert runs_of(vbs.traces.rampup(16, 16, 960, final=64, until=975)) == [(16, 20), (32, 10), (48, 6)]
    assert runs_of(vbs.traces.rampup(16, 16, 960, final=64, until=16)) == [(16, 1)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vbs.traces.constant_trace(0, num_steps=1), "`batch_size` must be a positive integer, got 0"),
        (
            lambda: vbs.traces.constant_trace(32, num_steps=10**9),
            "a trace may have at most 20000000 steps, got 1000000000",
        ),
        (
            lambda: vbs.traces.linear_ramp(32, 100, num_steps=5, minibatch_size=32),
            r"`end` must be a multiple of 32 \(the minibatch size\), got 100",
        ),
        (
            lambda: vbs.traces.doubling_ramp(32, 64, every=0, minibatch_size=32),
            "`every` must be a positive integer, got 0",
        ),
        (lambda: vbs.traces.rampup(16, 0, 960, final=64), "`increment` must be a positive integer, got 0"),
        (lambda: vbs.traces.rampup(16, 16, 0, final=64), "`length` must be a positive integer, got 0"),
        (
            lambda: vbs.traces.rampup(16, 16, 960, final=72),
            "`final` must be 16 plus one or more increments of 16, got 72",
        ),
        (
            lambda: vbs.traces.rampup(16, 16, 960, final=16),
            "`final` must be 16 plus one or more increments of 16, got 16",
        ),
        (
            lambda: vbs.traces.rampup(16, 16, 960, final=64, until=15),
            "`until` must be at least one step of 16 samples, got 15",
        ),
        (
            lambda: vbs.traces.rampup(1, 1, 10**12, final=2),
            "a trace may have at most 20000000 steps, got 500000000000",
        ),
    ],
)
def test_invalid_arguments_are_rejected(call, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        call()


def test_rampup_in_tokens_is_the_one_in_samples():
    in_samples = vbs.traces.rampup(16, 16, 960, final=64, until=10_000)
    assert in_samples == vbs.traces.rampup(
        16, 16, 960 * 1024, final=64, until=10_000 * 1024 + 1023, unit="tokens", tokens_per_sample=1024
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit": "tokens"}, "`tokens_per_sample` must be a positive integer, got None"),
        ({"tokens_per_sample": 8}, "`tokens_per_sample` must be None unless `unit` is 'tokens', got 8"),
        ({"unit": "steps"}, "`unit` must be one of 'samples', 'tokens', got 'steps'"),
        ({"unit": "tokens", "tokens_per_sample": 961}, "`length` must be at least one sample of 961 tokens, got 960"),
    ],
)
def test_rampup_refuses_units_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        vbs.traces.rampup(16, 16, 960, final=64, **options)
