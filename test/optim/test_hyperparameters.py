"""The hyperparameters of parameter groups in a step and after it, and corrections from Adam's history."""

import math

import pytest
import torch
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.cores.communicator import Communicator, SingleProcess
from variable_batch_size.optim.hyperparameters import (
    BetaHistory,
    Preconditioner,
    StepHyperparameters,
    divisors_of,
    is_decoupled,
)
from variable_batch_size.optim.proxy import MultiOptimizer

STEP = vbs.rules.Step(batch_size=4, minibatch_size=1, ref_batchsize=1)


def parameters(number, gradient=1.0):
    made = [nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(number)]
    for p in made:
        p.grad = torch.full_like(p, gradient)
    return made


def test_groups_have_the_settings_of_the_step_only_during_the_step():
    first, second = parameters(2)
    inner = torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 0.5}], lr=0.25)
    groups = inner.param_groups
    before = [dict(group) for group in groups]
    with StepHyperparameters(inner, SingleProcess()).applied(vbs.rules.LinearRule(), STEP, [2.0, 3.0]) as lrs:
        assert lrs == [0.5, 1.5]
        assert [group["lr"] for group in groups] == [0.5, 1.5]
        assert inner.param_groups is groups
    assert inner.param_groups is groups
    assert [dict(group) for group in groups] == before


def test_rule_without_a_learning_rate_uses_that_of_the_group():
    class MomentumRule(vbs.Rule):
        def factor(self, step):
            return 1.0

        def settings(self, group, step, factor):
            return {"momentum": 0.5}

    inner = torch.optim.SGD(parameters(1), lr=0.25)
    with StepHyperparameters(inner, SingleProcess()).applied(MomentumRule(), STEP, [1.0]) as lrs:
        assert lrs == [0.25]
        assert inner.param_groups[0]["momentum"] == 0.5
    assert inner.param_groups[0]["momentum"] == 0


def test_every_group_needs_a_factor():
    inner = torch.optim.SGD(parameters(1), lr=0.25)
    with (
        pytest.raises(ValueError, match="argument 2 is"),
        StepHyperparameters(inner, SingleProcess()).applied(vbs.rules.LinearRule(), STEP, []),
    ):
        pass


class Marking(Communicator):
    """A communicator whose traced scalars have another value, so that they can be recognized."""

    rank, num_replicas = 0, 1

    def sum(self, tensors):
        pass

    def broadcast(self, tensors):
        pass

    def traced_scalar(self, number):
        return number + 1000

    def traced_beta(self, number):
        return number + 2000


def test_numbers_are_passed_as_traced_scalars():
    inner = torch.optim.AdamW(parameters(1), lr=0.25, betas=(0.75, 0.875), eps=0.5, weight_decay=0.0)
    with StepHyperparameters(inner, Marking()).applied(vbs.rules.AdamRule(), STEP, [2.0]) as lrs:
        (group,) = inner.param_groups
        assert lrs == [0.5]
        assert group["lr"] == pytest.approx(1000.5)
        assert group["betas"] == (pytest.approx(2000.0), pytest.approx(2000.5))
        assert group["eps"] == pytest.approx(1000.25)
    assert (group["lr"], group["betas"], group["eps"]) == (0.25, (0.75, 0.875), 0.5)


def test_parameters_with_different_beta_histories_are_separate_groups_in_a_step():
    old, new = parameters(2)
    inner = torch.optim.Adam([old, new], lr=0.25, betas=(0.75, 0.875), eps=0.5, amsgrad=True)
    settings = StepHyperparameters(inner, Marking())
    new.grad = None
    with settings.applied(vbs.rules.AdamRule(), vbs.rules.Step(1, 1, 1), [1.0]):
        assert len(inner.param_groups) == 1
        inner.state[old]["step"] = torch.tensor(1.0)  # as after an update
    new.grad = torch.ones_like(new)
    with settings.applied(vbs.rules.AdamRule(), STEP, [2.0]) as lrs:
        assert lrs == [0.5]
        assert [group["params"] for group in inner.param_groups] == [[old], [new]]
        assert all(group["amsgrad"] for group in inner.param_groups)
        # for the old parameter, Adam's weights sum to 1 − 0.75 · 0 and 1 − 0.875 · 0.5; Adam assumes 1 − 0.5²
        root = math.sqrt((1 - 0.5**2) / (1 - 0.875 * 0.5))
        assert [group["lr"] - 1000 for group in inner.param_groups] == pytest.approx([0.5 / root, 0.5])
        assert [group["eps"] - 1000 for group in inner.param_groups] == pytest.approx([0.25 / root, 0.25])
        assert [group["betas"] for group in inner.param_groups] == [(2000.0, 2000.5)] * 2
    (group,) = inner.param_groups
    assert (group["params"], group["lr"], group["betas"]) == ([old, new], 0.25, (0.75, 0.875))


def test_values_written_to_groups_by_the_optimizer_are_kept():
    old, new, other_old, other_new = parameters(4)
    inner = torch.optim.Adam([{"params": [old, new]}, {"params": [other_old, other_new], "lr": 0.5}], lr=0.25)
    settings = StepHyperparameters(inner, SingleProcess())
    for gradient in (None, torch.ones_like(new), torch.ones_like(new)):
        new.grad = other_new.grad = gradient
        whole, split = [[old, new], [other_old, other_new]], [[old], [new], [other_old], [other_new]]
        with settings.applied(vbs.rules.AdamRule(), STEP, [2.0, 2.0]):
            assert [group["params"] for group in inner.param_groups] == (whole if gradient is None else split)
            for group in inner.param_groups:
                group["count"] = group.get("count", 0) + 1
                group["lr"] *= 0.5
            inner.step()
    assert [group["params"] for group in inner.param_groups] == whole
    assert [group["count"] for group in inner.param_groups] == [3, 3]
    assert [group["lr"] for group in inner.param_groups] == pytest.approx([0.25 / 8, 0.5 / 8], rel=1e-14)


# --------------------------------------------------------------------------------------------------------------- biases


def variants(bias, group, betas, **settings):
    return bias.variants(group, {"lr": 0.25, "betas": betas, "eps": 0.5, **settings})


def update(bias, inner, betas):
    """Make an update of all groups, and store what it adds to the histories."""
    bias.pending = []
    found = [variants(bias, group, betas) for group in inner.param_groups]
    inner.step()
    bias.commit()
    return found


def histories(inner):
    keys = ("num_updates_of_products", "beta1_product", "beta2_product")
    return [tuple(inner.state[p].get(key) for key in keys) for group in inner.param_groups for p in group["params"]]


def test_the_products_of_betas_are_those_of_all_updates_of_a_parameter():
    first, second = parameters(2)
    inner = torch.optim.Adam([first, second], lr=0.25)
    bias = BetaHistory(inner)
    update(bias, inner, (0.5, 0.75))
    second.grad = None
    update(bias, inner, (0.25, 0.5))
    assert histories(inner) == [(2, 0.125, 0.375), (1, 0.5, 0.75)]


def test_updates_outside_of_the_rule_count_with_the_betas_of_the_group():
    (p,) = parameters(1)
    inner = torch.optim.Adam([p], lr=0.25, betas=(0.5, 0.75))
    inner.step()
    inner.step()
    bias = BetaHistory(inner)
    update(bias, inner, (0.25, 0.5))
    assert histories(inner) == [(3, 0.0625, 0.28125)]
    inner.step()
    update(BetaHistory(inner), inner, (0.25, 0.5))
    assert histories(inner) == [(5, 0.0625 * 0.5 * 0.25, 0.28125 * 0.75 * 0.5)]


def test_a_group_without_any_gradient_keeps_its_settings():
    (p,) = parameters(1)
    p.grad = None
    inner = torch.optim.Adam([p], lr=0.25)
    bias = BetaHistory(inner)
    settings = {"lr": 0.25, "betas": (0.5, 0.75), "eps": 0.5}
    assert bias.variants(inner.param_groups[0], settings) == [([p], settings)]
    assert bias.pending == []


def test_an_update_that_fails_is_not_in_the_history():
    (p,) = parameters(1)
    inner = torch.optim.Adam([p], lr=0.25)
    settings = StepHyperparameters(inner, SingleProcess())
    for _ in range(2):
        with settings.applied(vbs.rules.AdamRule(), STEP, [2.0]):
            inner.step()
        before = histories(inner)
        with (
            pytest.raises(ArithmeticError, match="no step"),
            settings.applied(vbs.rules.AdamRule(), STEP, [2.0]),
        ):
            raise ArithmeticError("no step")
        assert histories(inner) == before


def test_decoupled_decay_is_detected_from_the_group():
    (p,) = parameters(1)
    inner = torch.optim.Adam([p], lr=0.25, weight_decay=0.125, decoupled_weight_decay=True)
    bias = BetaHistory(inner)
    update(bias, inner, (0.75, 0.75))
    ((_, settings),) = variants(bias, inner.param_groups[0], (0.5, 0.75))
    assert settings["weight_decay"] == pytest.approx(0.125 * (1 - 0.75 * 0.5) / (1 - 0.5**2))


def test_group_without_decay_gets_none():
    (p,) = parameters(1)
    inner = torch.optim.AdamW([p], lr=0.25)
    group = {name: value for name, value in inner.param_groups[0].items() if name != "weight_decay"}
    ((_, settings),) = variants(BetaHistory(inner), group, (0.5, 0.75))
    assert settings.keys() == {"lr", "betas", "eps"}


@pytest.mark.parametrize(
    ("kind", "counts"), [(torch.optim.Adam, False), (torch.optim.AdamW, True)], ids=["Adam", "AdamW"]
)
@pytest.mark.parametrize("is_said", [True, False], ids=["set in the group", "detected by the class"])
def test_only_a_decoupled_decay_is_corrected(kind, counts, is_said):
    (p,) = parameters(1)
    inner = kind([p], lr=0.25, weight_decay=0.125)
    group = dict(inner.param_groups[0])
    if not is_said:
        group.pop("decoupled_weight_decay")
    bias = BetaHistory(inner)
    update(bias, inner, (0.75, 0.75))
    ((_, settings),) = variants(bias, group, (0.5, 0.75))
    # Adam assumes 1 − 0.5²; correct is 1 − 0.75 · 0.5
    scale = (1 - 0.5**2) / (1 - 0.75 * 0.5)
    assert settings["lr"] == pytest.approx(0.25 * scale)
    assert settings["weight_decay"] == pytest.approx(0.125 / scale if counts else 0.125)


@pytest.mark.parametrize(
    ("kind", "decay"), [(torch.optim.Adam, 0.125), (torch.optim.AdamW, 0.25)], ids=["Adam", "AdamW"]
)
def test_decoupled_decay_is_detected_from_the_optimizer(kind, decay):
    (p,) = parameters(1)
    inner = kind([p], lr=0.25, weight_decay=0.125)
    inner.param_groups[0].pop("decoupled_weight_decay", None)
    with StepHyperparameters(inner, SingleProcess()).applied(vbs.rules.AdamRule(), STEP, [2.0]):
        found = inner.param_groups[0]["weight_decay"] * inner.param_groups[0]["lr"]
    # lr · √4, and a constant decoupled decay per sample; Adam's first update needs no correction
    assert found == pytest.approx(0.25 * 2 * decay)


def test_decoupled_decay_is_detected_per_optimizer():
    p, q = parameters(2)
    inner = MultiOptimizer([torch.optim.SGD([p], lr=0.25), torch.optim.AdamW([q])])
    inner.param_groups[1].pop("decoupled_weight_decay", None)
    assert [is_decoupled(inner, group) for group in inner.param_groups] == [False, True]


def test_decay_set_by_the_rule_overrides_that_of_the_group():
    (p,) = parameters(1)
    inner = torch.optim.AdamW([p], lr=0.25, weight_decay=0.125)
    ((_, settings),) = variants(BetaHistory(inner), inner.param_groups[0], (0.5, 0.75), weight_decay=0.5)
    assert settings["weight_decay"] == pytest.approx(0.5)


# ------------------------------------------------------------------------------------------------------- preconditioner


def test_divisors_are_the_roots_of_adams_second_moments():
    used, unused = parameters(2, gradient=3.0)
    unused.grad = None
    inner = torch.optim.Adam([unused, used], lr=0.25, betas=(0.5, 0.75), eps=0.125)
    preconditioner = Preconditioner(inner)
    assert preconditioner.divisors == {}
    inner.step()
    preconditioner.refresh()
    assert {p: divisor.item() for p, divisor in preconditioner.divisors.items()} == {used: pytest.approx(3.125)}
    place = preconditioner.divisors[used]
    used.grad = torch.full_like(used, 4.0)
    inner.step()
    preconditioner.refresh()
    # v = 3/4 · 9/4 + 16/4, over 1 − (3/4)²
    assert place.item() == pytest.approx(math.sqrt((0.75 * 2.25 + 4) / (1 - 0.5625)) + 0.125)


def test_each_group_has_its_own_beta_and_eps():
    first, second = parameters(2, gradient=3.0)
    groups = [{"params": [first], "eps": 0.5}, {"params": [second], "betas": (0.5, 0.5), "eps": 0.25}]
    inner = torch.optim.Adam(groups, lr=0.25, betas=(0.5, 0.75))
    preconditioner = Preconditioner(inner)
    for gradient in (3.0, 5.0):
        for p in (first, second):
            p.grad = torch.full_like(p, gradient)
        inner.step()
    preconditioner.refresh()
    assert preconditioner.divisors[first].item() == pytest.approx(
        math.sqrt((0.75 * 0.25 * 9 + 0.25 * 25) / (1 - 0.75**2)) + 0.5
    )
    assert preconditioner.divisors[second].item() == pytest.approx(
        math.sqrt((0.5 * 0.5 * 9 + 0.5 * 25) / (1 - 0.5**2)) + 0.25
    )


def test_amsgrad_uses_the_largest_second_moment():
    (p,) = parameters(1, gradient=4.0)
    inner = torch.optim.Adam([p], lr=0.25, betas=(0.5, 0.5), eps=0.0, amsgrad=True)
    inner.step()
    p.grad = torch.zeros_like(p)
    inner.step()
    preconditioner = Preconditioner(inner)
    preconditioner.refresh()
    assert preconditioner.divisors[p].item() == pytest.approx(math.sqrt(8 / (1 - 0.25)))


def test_step_count_may_be_a_number_on_the_host():
    (p,) = parameters(1, gradient=3.0)
    inner = torch.optim.Adam([p], lr=0.25, eps=0.125)
    inner.step()
    inner.state[p]["step"] = 1
    preconditioner = Preconditioner(inner)
    preconditioner.refresh()
    assert preconditioner.divisors[p].item() == pytest.approx(3.125)


def test_divisors_follow_a_parameter_into_another_dtype():
    (p,) = parameters(1, gradient=3.0)
    inner = torch.optim.Adam([p], lr=0.25, eps=0.125)
    inner.step()
    preconditioner = Preconditioner(inner)
    preconditioner.refresh()
    inner.state[p]["exp_avg_sq"] = inner.state[p]["exp_avg_sq"].float()
    preconditioner.refresh()
    assert preconditioner.divisors[p].dtype == torch.float32
    assert preconditioner.divisors[p].item() == pytest.approx(3.125)


def test_parameters_have_divisors_from_their_min_updates_th_update_on():
    early, late = parameters(2, gradient=3.0)
    late.grad = None
    inner = torch.optim.Adam([early, late], lr=0.25, eps=0.125)
    preconditioner = Preconditioner(inner, min_updates=3)
    known = []
    for number in range(5):
        if number == 2:
            late.grad = torch.full_like(late, 3.0)
        inner.step()
        preconditioner.refresh()
        known.append([p in preconditioner.divisors for p in (early, late)])
    assert known == [[False, False], [False, False], [True, False], [True, False], [True, True]]


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_elements_below_a_tenth_of_the_root_mean_square_are_left_out(kind):
    # √v̂ + ε of 8 elements: root mean square √((7 · 10² + x²) / 8) = 9.354 for a small x, so that the limit is 0.9354
    roots = torch.tensor([[10.0] * 7 + [x] for x in (0.9, 0.96, 0.125)], dtype=torch.float64)
    moments = list(((roots - 0.125) ** 2) * (1 - 0.5**2))
    scalar = torch.tensor(0.25 * (1 - 0.5), dtype=torch.float64)
    divisors = divisors_of([*moments, scalar], kind([2.0, 2.0, 2.0, 1.0]), 0.5, 0.125, 1)
    torch.testing.assert_close(torch.stack(divisors[:3])[:, :7], roots[:, :7])
    assert torch.stack(divisors[:3])[:, 7].tolist() == [math.inf, pytest.approx(0.96), math.inf]
    assert divisors[3].item() == pytest.approx(0.625)


def test_numbers_of_updates_on_a_device_leave_out_new_tensors():
    moments = [torch.full((2,), 9.0) * (1 - 0.75**n) for n in (2, 3)]
    new, old = divisors_of(moments, torch.tensor([2.0, 3.0]), 0.75, 0.0, 3)
    assert new.tolist() == [math.inf] * 2
    assert old.tolist() == pytest.approx([3.0] * 2)


def test_second_moments_without_a_number_of_updates_raise():
    (p,) = parameters(1)
    inner = torch.optim.Adam([p], lr=0.1)
    inner.step()
    del inner.state[p]["step"]
    with pytest.raises(
        RuntimeError, match=r"number of updates in `step`, as Adam does, but Adam has only \['exp_avg', "
    ):
        Preconditioner(inner).refresh()
