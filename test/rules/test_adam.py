"""Adam's correction of its bias, by hand-made numbers."""

import pytest

from variable_batch_size.rules.adam import AdamRule, check_adam, corrected_for_bias

# 1 − β^t is 0.75 and 0.4375 after two updates; against 1 − Π β of 0.6 and 0.109375 that is 1.25 and 4 times as much
SETTINGS = {"lr": 0.5, "betas": (0.5, 0.75), "eps": 1.0}
PAST = {"num_updates": 2, "products": (0.4, 0.890625)}


def test_the_learning_rate_and_epsilon_make_up_for_betas_that_have_varied():
    found = corrected_for_bias(SETTINGS, **PAST, is_decoupled=False)
    assert found == {"lr": pytest.approx(0.5 * 1.25 / 2), "betas": (0.5, 0.75), "eps": pytest.approx(0.5)}


def test_a_decoupled_decay_makes_up_for_the_learning_rate():
    found = corrected_for_bias({**SETTINGS, "weight_decay": 0.25}, **PAST, is_decoupled=True)
    assert found["weight_decay"] == pytest.approx(0.25 / (1.25 / 2))


def test_a_decay_that_is_part_of_the_gradient_stays_as_it_is():
    found = corrected_for_bias({**SETTINGS, "weight_decay": 0.25}, **PAST, is_decoupled=False)
    assert found["weight_decay"] == 0.25


def test_where_there_is_no_decay_none_is_made_up():
    assert "weight_decay" not in corrected_for_bias(SETTINGS, **PAST, is_decoupled=True)


def test_betas_that_have_not_varied_need_no_correction():
    settings = {**SETTINGS, "weight_decay": 0.25}
    assert corrected_for_bias(settings, num_updates=2, products=(0.25, 0.5625), is_decoupled=True) == settings


@pytest.mark.parametrize("groups", [[{"lr": 1, "betas": (0, 0)}], [{"lr": 1, "eps": 1}], [SETTINGS, {"lr": 1}]])
def test_every_group_must_have_betas_and_eps(groups):
    with pytest.raises(ValueError, match=r"^`inner` must be Adam or of its kind, with betas and eps, got Lion$"):
        check_adam("Lion", groups)


def test_the_adam_rule_looks_at_the_groups_too():
    with pytest.raises(ValueError, match=r"^`inner` must be Adam or of its kind, with betas and eps, got SGD$"):
        AdamRule().check("SGD", [{"lr": 1}])
    assert AdamRule().check("AdamW", [SETTINGS]) is None


@pytest.mark.parametrize("optimizer", ["NAdam", "RAdam", "Adamax", "SparseAdam"])
def test_the_adam_rule_refuses_relatives_of_adam_with_another_correction(optimizer):
    message = f"^`inner` must correct its bias as Adam and AdamW do, got {optimizer}$"
    with pytest.raises(ValueError, match=message):
        AdamRule().check(optimizer, [SETTINGS])
