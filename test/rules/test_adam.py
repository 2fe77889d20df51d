"""AdamRule and Adam's bias correction against numbers computed by hand."""

import pytest

from variable_batch_size.rules import AdamRule, Step
from variable_batch_size.rules.adam import check_adam, corrected_for_bias

# after two updates 1 − β^t is 0.75 and 0.4375: 1.25 and 4 times 1 − Π β, 0.6 and 0.109375
SETTINGS = {"lr": 0.5, "betas": (0.5, 0.75), "eps": 1.0}
PAST = {"num_updates": 2, "products": (0.4, 0.890625)}


def test_learning_rate_and_epsilon_correct_for_varying_betas():
    found = corrected_for_bias(SETTINGS, **PAST, is_decoupled=False)
    assert found == {"lr": pytest.approx(0.5 * 1.25 / 2), "betas": (0.5, 0.75), "eps": pytest.approx(0.5)}


def test_decoupled_decay_cancels_the_correction_of_the_learning_rate():
    found = corrected_for_bias({**SETTINGS, "weight_decay": 0.25}, **PAST, is_decoupled=True)
    assert found["weight_decay"] == pytest.approx(0.25 / (1.25 / 2))


def test_l2_penalty_is_not_corrected():
    found = corrected_for_bias({**SETTINGS, "weight_decay": 0.25}, **PAST, is_decoupled=False)
    assert found["weight_decay"] == 0.25


def test_no_weight_decay_is_added():
    assert "weight_decay" not in corrected_for_bias(SETTINGS, **PAST, is_decoupled=True)


def test_betas_that_have_not_varied_need_no_correction():
    settings = {**SETTINGS, "weight_decay": 0.25}
    assert corrected_for_bias(settings, num_updates=2, products=(0.25, 0.5625), is_decoupled=True) == settings


@pytest.mark.parametrize("groups", [[{"lr": 1, "betas": (0, 0)}], [{"lr": 1, "eps": 1}], [SETTINGS, {"lr": 1}]])
def test_every_group_must_have_betas_and_eps(groups):
    with pytest.raises(ValueError, match=r"^`inner` must be an Adam-style optimizer with betas and eps, got Lion"):
        check_adam("Lion", groups)


def test_adam_rule_checks_the_groups():
    with pytest.raises(
        ValueError, match=r"^`inner` must be an Adam-style optimizer with betas and eps, got SGD: use AdaScale"
    ):
        AdamRule().check("SGD", [{"lr": 1}])
    assert AdamRule().check("AdamW", [SETTINGS]) is None


# --------------------------------------------------------------------------------------------------------------- forms

FOUR_TIMES = Step(batch_size=512, minibatch_size=32, ref_batchsize=128)
A_QUARTER = Step(batch_size=32, minibatch_size=32, ref_batchsize=128)
ADAMW = {"lr": 0.5, "betas": (0.5, 0.75), "eps": 1.0, "weight_decay": 0.25, "decoupled_weight_decay": True}


def settings_of(rule, group, step):
    return rule.settings(group, step, rule.factor(step))


def test_the_half_life_form_takes_betas_to_the_power_of_the_scale():
    rule = AdamRule(form="half-life", scales_weight_decay=False)
    assert settings_of(rule, ADAMW, FOUR_TIMES) == {"lr": 1.0, "betas": (0.0625, 0.31640625), "eps": 0.5}
    root = pytest.approx(0.5**0.25), pytest.approx(0.75**0.25)
    assert settings_of(rule, ADAMW, A_QUARTER) == {"lr": 0.25, "betas": root, "eps": 2.0}
    # κ is the square of a bounded factor
    assert rule.settings(ADAMW, FOUR_TIMES, 1.0) == {"lr": 0.5, "betas": (0.5, 0.75), "eps": 1.0}


def test_at_scale_16_only_the_half_life_form_keeps_betas_positive():
    group = {"lr": 1.0, "betas": (0.9, 0.95), "eps": 1.0}
    step = Step(batch_size=16, minibatch_size=1, ref_batchsize=1)
    assert settings_of(AdamRule(form="half-life"), group, step)["betas"] == pytest.approx((0.1853, 0.4401), abs=1e-4)
    assert settings_of(AdamRule(form="sde"), group, step)["betas"] == pytest.approx((0.0, 0.2))


def test_both_forms_are_the_same_to_first_order():
    group = {"lr": 1.0, "betas": (1 - 1e-6, 1 - 1e-7), "eps": 1.0}
    found = [settings_of(AdamRule(form=form), group, FOUR_TIMES)["betas"] for form in ("sde", "half-life")]
    assert [1 - beta for beta in found[0]] == pytest.approx([1 - beta for beta in found[1]], rel=1e-5)


@pytest.mark.parametrize("form", ["sde", "half-life"])
def test_a_decoupled_decay_grows_with_the_learning_rate(form):
    assert settings_of(AdamRule(form=form), ADAMW, FOUR_TIMES)["weight_decay"] == 0.5
    assert settings_of(AdamRule(form=form), ADAMW, A_QUARTER)["weight_decay"] == 0.125
    assert AdamRule(form=form).settings(ADAMW, FOUR_TIMES, 1.5)["weight_decay"] == 0.375
    assert "weight_decay" not in settings_of(AdamRule(form=form, scales_weight_decay=False), ADAMW, FOUR_TIMES)


@pytest.mark.parametrize("option", [{"decoupled_weight_decay": False}, {}], ids=["false", "absent"])
def test_weight_decay_that_is_not_decoupled_is_unchanged(option):
    group = {"lr": 0.5, "betas": (0.5, 0.75), "eps": 1.0, "weight_decay": 0.25, **option}
    assert settings_of(AdamRule(), group, FOUR_TIMES).keys() == {"lr", "betas", "eps"}


@pytest.mark.parametrize("form", ["sde", "half-life"])
def test_adam_is_unchanged_at_the_reference_batch_size(form):
    same = settings_of(AdamRule(form=form), ADAMW, Step(batch_size=128, minibatch_size=32, ref_batchsize=128))
    assert {**ADAMW, **same} == ADAMW


def test_a_step_of_adam_is_worth_its_scale():
    nine_times = Step(batch_size=9 * 128, minibatch_size=32, ref_batchsize=128)
    assert AdamRule().worth(nine_times, AdamRule().factor(nine_times)) == 9.0


def test_unknown_form_is_rejected():
    with pytest.raises(
        ValueError, match=r"^`form` must be one of 'sde', 'half-life', got 'halflife' \(did you mean 'half-life'\?\)$"
    ):
        AdamRule(form="halflife")


@pytest.mark.parametrize("optimizer", ["NAdam", "RAdam", "Adamax", "SparseAdam"])
def test_adam_rule_rejects_optimizers_with_another_bias_correction(optimizer):
    message = f"^`inner` must use the bias correction of Adam and AdamW, got {optimizer}$"
    with pytest.raises(ValueError, match=message):
        AdamRule().check(optimizer, [SETTINGS])
