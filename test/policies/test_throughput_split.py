"""split: no sample is lost on any number of cores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs


@given(st.integers(1, 2000), st.integers(1, 300), st.integers(1, 40))
def test_every_sample_is_assigned_and_no_minibatch_is_too_large(batch_size, max_minibatch, cores):
    found = vbs.policies.split(batch_size, max_minibatch=max_minibatch, cores=cores)
    assert found.minibatch_size <= max_minibatch
    assert found.minibatch_size * found.num_minibatches == batch_size
    assert sum(found.shares) == found.num_minibatches
    assert len(found.shares) == cores
    assert max(found.shares) - min(found.shares) <= 1


@pytest.mark.parametrize(
    ("cores", "minibatch_size", "shares"),
    [
        (1, 64, (4,)),
        (2, 64, (2, 2)),
        (3, 64, (2, 1, 1)),
        (4, 64, (1, 1, 1, 1)),
        (5, 64, (1, 1, 1, 1, 0)),
        (8, 32, (1,) * 8),
    ],
)
def test_splits_of_256_samples_with_at_most_64_per_core(cores, minibatch_size, shares):
    assert vbs.policies.split(256, max_minibatch=64, cores=cores) == (minibatch_size, 256 // minibatch_size, shares)


def test_invalid_arguments_are_rejected():
    with pytest.raises(ValueError, match="`max_minibatch` must be a positive integer, got 0"):
        vbs.policies.split(256, max_minibatch=0, cores=3)
