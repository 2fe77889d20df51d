import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs

MINIBATCHES = st.integers(1, 64)


@given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 300), MINIBATCHES)
def test_a_linear_ramp_goes_from_end_to_end_and_is_never_off_by_more_than_half_a_minibatch(start, end, steps, size):
    trace = vbs.linear_ramp(start * size, end * size, num_steps=steps, minibatch_size=size)
    line = np.linspace(start * size, end * size, steps) if steps > 1 else np.array([start * size])
    assert len(trace) == steps
    assert trace[0] == start * size
    assert steps == 1 or trace[-1] == end * size
    assert not (trace.sizes % size).any()
    assert np.abs(trace.sizes - line).max() <= size / 2 + 1e-6


@given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 20), MINIBATCHES)
def test_a_doubling_ramp_doubles_or_halves_until_it_is_there(start, end, every, size):
    trace = vbs.doubling_ramp(start * size, end * size, every=every, minibatch_size=size)
    sizes = trace.sizes[::every]
    assert list(trace) == np.repeat(sizes, every).tolist()
    assert (sizes[0], sizes[-1]) == (start * size, end * size)
    for number, found in enumerate(sizes[:-1]):
        exact = start * size * 2.0 ** (number if end > start else -number)
        assert abs(found - exact) <= size / 2
        assert exact < end * size if end > start else exact > end * size


def test_a_doubling_ramp_may_hold_its_end_or_be_cut():
    assert list(vbs.doubling_ramp(8, 32, every=2, minibatch_size=8, num_steps=9)) == [8, 8, 16, 16, 32, 32, 32, 32, 32]
    assert list(vbs.doubling_ramp(8, 32, every=2, minibatch_size=8, num_steps=3)) == [8, 8, 16]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vbs.constant_trace(0, num_steps=1), "`batch_size` must be a positive integer, got 0"),
        (lambda: vbs.constant_trace(32, num_steps=10**9), "a trace may have 20000000 steps at most, got 1000000000"),
        (
            lambda: vbs.linear_ramp(32, 100, num_steps=5, minibatch_size=32),
            r"`end` must be a multiple of 32 \(the minibatch size\), got 100",
        ),
        (
            lambda: vbs.doubling_ramp(32, 64, every=0, minibatch_size=32),
            "`every` must be a positive integer, got 0",
        ),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        call()
