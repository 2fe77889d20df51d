"""MuonRule against numbers computed by hand."""

import pytest

from variable_batch_size.rules import MuonRule, Step

GROUP = {"lr": 0.5, "weight_decay": 0.25, "momentum": 0.95}


@pytest.mark.parametrize(
    ("batch_size", "expected"),
    [
        (128, {"lr": 0.5, "weight_decay": 0.25}),
        (512, {"lr": 1.0, "weight_decay": 0.5}),
        (32, {"lr": 0.25, "weight_decay": 0.125}),
    ],
)
def test_learning_rate_and_decay_scale_with_the_root(batch_size, expected):
    rule, step = MuonRule(), Step(batch_size, minibatch_size=32, ref_batchsize=128)
    assert rule.settings(GROUP, step, rule.factor(step)) == expected
    assert rule.worth(step, rule.factor(step)) == batch_size / 128


def test_weight_decay_is_unchanged_if_requested_or_absent():
    step = Step(512, minibatch_size=32, ref_batchsize=128)
    assert MuonRule(scales_weight_decay=False).settings(GROUP, step, 2.0) == {"lr": 1.0}
    assert MuonRule().settings({"lr": 0.5}, step, 2.0) == {"lr": 1.0}


def test_other_optimizers_are_rejected():
    with pytest.raises(
        ValueError, match=r"^`inner` must be Muon, got SGD: use AdamRule for Adam, and LinearRule for SGD$"
    ):
        MuonRule().check("SGD", [GROUP])
    groups = [GROUP, {"lr": 0.5, "betas": (0.9, 0.95)}]
    message = "^`inner` must have no parameter groups with betas, got MuonWithAuxAdam: use AdamRule for Adam's groups$"
    with pytest.raises(ValueError, match=message):
        MuonRule().check("MuonWithAuxAdam", groups)
    assert MuonRule().check("SingleDeviceMuon", [GROUP]) is None
