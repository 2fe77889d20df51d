import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import variable_batch_size as vbs


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(0, 8), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_spot_market_is_within_its_bounds(at_least, more, arrive, leave, seed):
    options = {"arrive": arrive, "leave": leave, "samples_per_device": 32, "num_steps": 40, "seed": seed}
    trace = vbs.traces.spot_market(num_devices=at_least + more, at_least=at_least, **options)
    assert len(trace) == 40
    assert not (trace.sizes % 32).any()
    assert at_least * 32 <= trace.sizes.min()
    assert trace.sizes.max() <= trace[0] == (at_least + more) * 32
    assert trace == vbs.traces.spot_market(num_devices=at_least + more, at_least=at_least, **options)


def test_availability_in_a_spot_market_follows_the_rates():
    trace = vbs.traces.spot_market(
        num_devices=101, at_least=1, arrive=0.03, leave=0.01, samples_per_device=1, num_steps=20_000, seed=0
    )
    assert trace.sizes[1000:].mean() == pytest.approx(1 + 100 * 0.75, rel=0.02)


def test_a_spot_market_is_the_same_with_every_version_of_numpy():
    trace = vbs.traces.spot_market(
        num_devices=4, at_least=1, arrive=0.3, leave=0.2, samples_per_device=32, num_steps=12, seed=7
    )
    assert list(trace) == [128, 96, 96, 64, 64, 96, 96, 64, 96, 64, 64, 96]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: vbs.traces.spot_market(
                num_devices=2, at_least=3, arrive=0.5, leave=0.5, samples_per_device=1, num_steps=1, seed=0
            ),
            "`at_least` must be at most the 2 devices, got 3",
        ),
        (
            lambda: vbs.traces.spot_market(
                num_devices=2, at_least=1, arrive=1.5, leave=0.5, samples_per_device=1, num_steps=1, seed=0
            ),
            "`arrive` must be a probability from 0 to 1, got 1.5",
        ),
        (
            lambda: vbs.traces.spot_market(
                num_devices=2, at_least=1, arrive=0.5, leave=0.5, samples_per_device=1, num_steps=1, seed=2**32
            ),
            "`seed` must be an integer from 0 to 4294967295, got 4294967296",
        ),
    ],
)
def test_invalid_arguments_are_rejected(call, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        call()
