from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from variable_batch_size.rules import (
    AdamRule,
    ConstantRule,
    LEGWRule,
    LinearMomentumRule,
    LinearRule,
    RootRule,
    Rule,
    Step,
    ema_decay,
)
from variable_batch_size.rules.transition import Transition

STEPS = st.builds(
    lambda num_minibatches, minibatch_size, ref_batchsize: Step(
        batch_size=num_minibatches * minibatch_size, minibatch_size=minibatch_size, ref_batchsize=ref_batchsize
    ),
    *[st.integers(1, 10_000)] * 3,
)
LEARNING_RATES = st.floats(1e-6, 10)


def settings_of(rule, group, step):
    return rule.settings(group, step, rule.factor(step))


@settings(deadline=None)
@given(step=STEPS, lr=LEARNING_RATES, weight_decay=st.floats(0, 1))
def test_with_summed_gradients_the_update_is_that_of_the_linear_rule(step, lr, weight_decay):
    group = {"lr": lr, "weight_decay": weight_decay}
    summed = settings_of(LinearMomentumRule(), group, step)
    mean_gradient, weight = 0.75, 2.0
    update = summed["lr"] * (step.num_minibatches * mean_gradient + summed["weight_decay"] * weight)
    expected = settings_of(LinearRule(), group, step)["lr"] * (mean_gradient + weight_decay * weight)
    assert update == pytest.approx(expected)


@pytest.mark.parametrize("rule", [LinearRule(), RootRule(), ConstantRule()])
@settings(deadline=None)
@given(step=STEPS, lr=LEARNING_RATES)
def test_at_the_reference_batch_size_nothing_changes(rule, step, lr):
    at_reference = Step(step.batch_size, step.minibatch_size, ref_batchsize=step.batch_size)
    assert settings_of(rule, {"lr": lr}, at_reference) == {"lr": lr}


@settings(deadline=None)
@given(step=STEPS, lr=LEARNING_RATES)
def test_the_root_rule_twice_is_the_linear_rule(step, lr):
    once = settings_of(RootRule(), {"lr": lr}, step)
    assert settings_of(RootRule(), once, step)["lr"] == pytest.approx(settings_of(LinearRule(), {"lr": lr}, step)["lr"])


def test_scale_and_number_of_minibatches_of_a_step():
    step = Step(batch_size=96, minibatch_size=32, ref_batchsize=128)
    assert (step.scale, step.num_minibatches) == (0.75, 3)
    with pytest.raises(FrozenInstanceError, match="batch_size"):
        step.batch_size = 64


@pytest.mark.parametrize(
    ("rule", "batch_size", "expected"),
    [
        (LinearRule(), 128, {"lr": 0.5}),
        (LinearRule(), 512, {"lr": 2.0}),
        (LinearRule(), 32, {"lr": 0.125}),
        (LinearRule(), 96, {"lr": 0.375}),
        (RootRule(), 128, {"lr": 0.5}),
        (RootRule(), 512, {"lr": 1.0}),
        (RootRule(), 32, {"lr": 0.25}),
        (ConstantRule(), 128, {"lr": 0.5}),
        (ConstantRule(), 512, {"lr": 0.5}),
        (LinearMomentumRule(), 128, {"lr": 0.125, "weight_decay": 0.25}),
        (LinearMomentumRule(), 512, {"lr": 0.125, "weight_decay": 1.0}),
        (LinearMomentumRule(), 32, {"lr": 0.125, "weight_decay": 0.0625}),
    ],
)
def test_settings_by_hand(rule, batch_size, expected):
    group = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.0625}
    step = Step(batch_size=batch_size, minibatch_size=32, ref_batchsize=128)
    assert settings_of(rule, group, step) == expected
    assert group == {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.0625}


def test_the_linear_momentum_rule_does_not_need_weight_decay():
    step = Step(batch_size=512, minibatch_size=32, ref_batchsize=128)
    assert settings_of(LinearMomentumRule(), {"lr": 0.5}, step) == {"lr": 0.125}


@pytest.mark.parametrize("name", ["AdamW", "Adadelta", "Adafactor", "Adagrad", "Muon", "RMSprop", "Rprop"])
def test_linear_momentum_rule_rejects_optimizers_that_normalize_gradients(name):
    """Their update of a sum equals that of a mean, but the rule applies the learning rate of one minibatch."""
    settings = {"lr": 0.5, **({"betas": (0.9, 0.999), "eps": 1e-8} if name == "AdamW" else {})}
    message = f"^`inner` must be an SGD-style optimizer, got {name}: .* Use LinearRule, RootRule or AdamRule$"
    with pytest.raises(ValueError, match=message):
        LinearMomentumRule().check(name, [settings])
    LinearMomentumRule().check("SGD", [{"lr": 0.5, "momentum": 0.9}])


def test_only_the_linear_momentum_rule_sums_gradients():
    rules = (LinearRule, RootRule, ConstantRule, LinearMomentumRule)
    assert [rule.sums_gradients for rule in rules] == [False, False, False, True]


def test_a_step_has_no_weights_by_default():
    step = Step(batch_size=8, minibatch_size=4, ref_batchsize=4)
    assert step.weight is step.num_weighted is None


def test_number_of_minibatches_is_an_integer_and_steps_done_defaults_to_zero():
    step = Step(batch_size=96, minibatch_size=32, ref_batchsize=128)
    assert (step.num_minibatches, type(step.num_minibatches)) == (3, int)
    assert (step.scale, step.steps_done) == (0.75, 0)


def test_factor_is_abstract():
    with pytest.raises(TypeError, match="abstract class Rule"):
        Rule()

    class Unfinished(Rule):
        pass

    with pytest.raises(TypeError, match=r"abstract class Unfinished .*factor"):
        Unfinished()


def test_custom_rule_needs_only_a_factor():
    class CappedRule(Rule):
        def __init__(self, cap):
            self.cap = cap

        def factor(self, step):
            return min(step.scale, self.cap)

    step = Step(batch_size=512, minibatch_size=32, ref_batchsize=128)
    assert settings_of(CappedRule(3.0), {"lr": 0.5, "eps": 1e-8}, step) == {"lr": 1.5}
    assert settings_of(CappedRule(8.0), {"lr": 0.5, "eps": 1e-8}, step) == {"lr": 2.0}
    assert (CappedRule.sums_gradients, CappedRule.preconditions, CappedRule.needs) == (False, False, ())


def test_custom_rule_may_change_other_settings():
    class MomentumRule(Rule):
        def factor(self, step):
            return step.scale

        def settings(self, group, step, factor):
            return super().settings(group, step, factor) | {"momentum": group["momentum"] ** factor}

    step = Step(batch_size=256, minibatch_size=32, ref_batchsize=128)
    assert settings_of(MomentumRule(), {"lr": 0.5, "momentum": 0.75}, step) == {"lr": 1.0, "momentum": 0.5625}


def test_custom_rule_receives_the_actual_factor_of_the_step():
    class LinearAgain(Rule):
        def factor(self, step):
            return step.scale

    step = Step(batch_size=512, minibatch_size=32, ref_batchsize=128)
    assert LinearAgain().settings({"lr": 0.5}, step, 3.0) == {"lr": 1.5}
    assert LinearAgain().group_factor(step, group=1) == 4.0
    assert LinearAgain().measures_noise is False
    assert LinearAgain().state_dict() == {}


# ---------------------------------------------------------------------------------------------------- Adam and warm-up


def test_adam_settings_by_hand():
    group = {"lr": 0.5, "betas": (0.875, 0.9375), "eps": 1.0, "weight_decay": 0.25}
    four_times = Step(batch_size=512, minibatch_size=32, ref_batchsize=128)
    assert settings_of(AdamRule(), group, four_times) == {"lr": 1.0, "betas": (0.5, 0.75), "eps": 0.5}
    a_quarter = Step(batch_size=32, minibatch_size=32, ref_batchsize=128)
    assert settings_of(AdamRule(), group, a_quarter) == {"lr": 0.25, "betas": (0.96875, 0.984375), "eps": 2.0}
    # κ is the square of a bounded factor
    assert AdamRule().settings(group, four_times, 1.0) == {"lr": 0.5, "betas": (0.875, 0.9375), "eps": 1.0}


def test_betas_are_not_negative():
    group = {"lr": 0.5, "betas": (0.875, 0.9375), "eps": 1.0}
    step = Step(batch_size=2048, minibatch_size=32, ref_batchsize=128)
    assert settings_of(AdamRule(), group, step) == {"lr": 2.0, "betas": (0.0, 0.0), "eps": 0.25}


def test_warm_up_takes_the_same_number_of_steps_at_every_batch_size():
    rule = LEGWRule(warmup_samples=512)
    for batch_size, root in ((128, 1.0), (512, 2.0), (32, 0.5)):
        factors = [rule.factor(Step(batch_size, 32, ref_batchsize=128, steps_done=steps)) for steps in range(6)]
        assert factors == [0.25 * root, 0.5 * root, 0.75 * root, root, root, root]


def test_warm_up_of_one_sample_ends_in_the_first_step():
    assert LEGWRule(warmup_samples=1).factor(Step(512, 32, ref_batchsize=128)) == 2.0


@pytest.mark.parametrize("warmup_samples", [0, -1, float("nan")])
def test_warmup_samples_must_be_positive(warmup_samples):
    with pytest.raises(ValueError, match=f"^`warmup_samples` must be positive, got {warmup_samples}$"):
        LEGWRule(warmup_samples=warmup_samples)


# ----------------------------------------------------------------------------------------------------------- transition

GOALS = st.lists(st.tuples(st.floats(0.01, 100), st.sampled_from([64, 128, 256])), min_size=1, max_size=20)


@settings(deadline=None)
@given(goals=GOALS, smooth_steps=st.integers(0, 1))
def test_without_smoothing_the_factor_is_the_goal(goals, smooth_steps):
    transition = Transition(smooth_steps=smooth_steps)
    assert [transition.move(goal, batch_size) for goal, batch_size in goals] == [goal for goal, _ in goals]


@settings(deadline=None)
@given(goals=GOALS, smooth_steps=st.integers(0, 5), max_factor=st.floats(0.01, 100), cut=st.integers(0, 20))
def test_transition_resumes_from_its_state(goals, smooth_steps, max_factor, cut):
    transition = Transition(smooth_steps=smooth_steps, max_factor=max_factor)
    whole = [transition.move(*goal) for goal in goals]
    first, second = (Transition(smooth_steps=smooth_steps, max_factor=max_factor) for _ in range(2))
    start = [first.move(*goal) for goal in goals[:cut]]
    second.load_state_dict(first.state_dict())
    assert start + [second.move(*goal) for goal in goals[cut:]] == whole
    assert max(whole) <= max_factor * (1 + 1e-9)


@settings(deadline=None)
@given(goals=GOALS, smooth_steps=st.integers(0, 5))
def test_preview_equals_move_and_changes_nothing(goals, smooth_steps):
    transition = Transition(smooth_steps=smooth_steps)
    for goal, batch_size in goals:
        expected = transition.preview(goal, batch_size)
        assert transition.preview(2 * goal, 512) > 0
        assert transition.move(goal, batch_size) == expected


def test_smoothing_of_jumps_by_hand():
    transition = Transition(smooth_steps=4)
    moves = [(1, 128), (1, 128), (5, 640), (5, 640), (3, 384), (3, 384), (3, 384), (3, 384), (3, 384)]
    # the second change comes at 3, halfway through the first
    assert [transition.move(*move) for move in moves] == [1, 1, 2, 3, 3, 3, 3, 3, 3]
    assert [transition.move(7, 896) for _ in range(6)] == [4, 5, 6, 7, 7, 7]


def test_state_of_a_transition():
    transition = Transition(smooth_steps=4)
    assert transition.state_dict() == {"factor": None, "batch_size": 0, "steps_left": 1}
    transition.move(1, 128)
    transition.move(5, 640)
    assert transition.state_dict() == {"factor": 2.0, "batch_size": 640, "steps_left": 3}


def test_factor_is_bounded():
    transition = Transition(max_factor=4.0)
    assert [transition.move(goal, 128) for goal in (1, 3.5, 8, 4, 2)] == [1, 3.5, 4, 4, 2]


@pytest.mark.parametrize("smooth_steps", [-1, 1.5, True, None])
def test_smooth_steps_must_be_a_non_negative_integer(smooth_steps):
    with pytest.raises(ValueError, match=f"^`smooth_steps` must be a non-negative integer, got {smooth_steps}$"):
        Transition(smooth_steps=smooth_steps)


@pytest.mark.parametrize("max_factor", [0, -1.0, float("nan")])
def test_max_factor_must_be_positive(max_factor):
    with pytest.raises(ValueError, match=f"^`max_factor` must be positive, got {max_factor}$"):
        Transition(max_factor=max_factor)


def test_ema_decay_per_sample_is_the_same_at_every_batch_size():
    assert ema_decay(0.5, 128, 128) == 0.5
    assert ema_decay(0.5, 384, 128) == 0.125
    assert ema_decay(0.25, 64, 128) == 0.5
