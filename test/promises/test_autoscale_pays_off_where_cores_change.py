"""Where cores change all the time, Autoscale is no slower than the best fixed batch."""

import policy_runs
import pytest
from policy_runs import ACCUMULATING, MINIBATCH, NOISE_SCALE, REF_BATCHSIZE, UPDATING

from variable_batch_size.policies.autoscale import gain


def seconds_for_progress(steps):
    """Of steps on so many cores with this batch size, by the true times and noise."""
    depths = [(cores, -(-size // (MINIBATCH * cores))) for cores, size in steps]
    seconds = sum((depth - 1) * ACCUMULATING + UPDATING[cores] for cores, depth in depths)
    return seconds / sum(gain(size, ref_batchsize=REF_BATCHSIZE, noise_scale=NOISE_SCALE) for _, size in steps)


@pytest.mark.parametrize("num_steps", [400, pytest.param(2000, marks=pytest.mark.long)])
def test_on_one_and_two_cores_in_turn(on_cores, tmp_path, num_steps):
    steps, other = on_cores(2, policy_runs.train_where_cores_change, tmp_path, num_steps, 50)
    assert len(steps) == num_steps
    assert other == [step for step in steps if step[0] == 2]
    best = min(seconds_for_progress([(1, size), (2, size)]) for size in range(REF_BATCHSIZE, 1025, MINIBATCH))
    assert seconds_for_progress(steps) < 1.05 * best
    assert max(size for _, size in steps) <= 160  # 112 is best on two cores
