"""LRScaler: the factors of each group, and progress."""

import pytest

from variable_batch_size.rules import Rule, Step
from variable_batch_size.rules.transition import LRScaler


class OfGroups(Rule):
    """Common factor S, and S times 1, 10, 100 for the groups; progress is a tenth for any reference."""

    def factor(self, step):
        return step.scale

    def group_factor(self, step, group):
        return step.scale * 10**group

    def worth(self, step, factor):
        return factor / 10 * step.ref_batchsize


def step(scale):
    return Step(batch_size=scale, minibatch_size=1, ref_batchsize=1)


def test_each_group_has_its_factor_and_progress_is_common():
    factors = LRScaler(OfGroups(), smooth_steps=0, max_factor=None)
    assert factors.move(step(2), 2) == [2, 20]
    assert factors.move(step(4), 3) == [4, 40, 400]
    assert factors.progress == pytest.approx(0.2 + 0.4)


def test_groups_are_bounded_and_smoothed_independently():
    factors = LRScaler(OfGroups(), smooth_steps=2, max_factor=25.0)
    assert factors.move(step(2), 2) == [2, 20]
    assert [factors.preview(step(4), group) for group in (0, 1)] == [3, 22.5]
    assert factors.move(step(4), 2) == [3, 22.5]
    assert [factors.preview(step(4), group) for group in (0, 1)] == [4, 25]
    assert factors.move(step(4), 2) == [4, 25]
    assert factors.progress == pytest.approx(0.2 + 0.3 + 0.4)


def test_later_group_starts_with_its_target_factor():
    factors = LRScaler(OfGroups(), smooth_steps=2, max_factor=None)
    factors.move(step(2), 1)
    assert factors.preview(step(4), 1) == 40
    assert factors.move(step(4), 2) == [3, 40]


def test_unfinished_jumps_and_progress_are_restored():
    factors, other = (LRScaler(OfGroups(), smooth_steps=3, max_factor=None) for _ in range(2))
    factors.move(step(1), 2)
    factors.move(step(4), 2)
    state = factors.state_dict()
    assert state["progress"] == pytest.approx(0.3)
    other.load_state_dict(state)
    assert other.progress == factors.progress
    assert other.move(step(4), 2) == factors.move(step(4), 2) == [3, 30]
    assert other.progress == factors.progress == pytest.approx(0.1 + 0.2 + 0.3)


def test_common_transition_is_restored_separately():
    factors = LRScaler(OfGroups(), smooth_steps=3, max_factor=None)
    rule_for_group, of_all = ({"factor": factor, "batch_size": 4, "steps_left": 2} for factor in (2.0, 1.0))
    factors.load_state_dict({"progress": 5.0, "transitions": [rule_for_group], "transition_of_all": of_all})
    assert factors.move(step(4), 1) == [3]
    assert factors.progress == pytest.approx(5.0 + 0.25)
