"""Gradients are accumulated as they are when step() is called, compared with numbers computed by hand."""

import copy
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from small_runs import sgd, train
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.optim.gradients.accumulator import Layout
from variable_batch_size.optim.gradients.gradient_buckets import GradientBuckets


def make(trace=(2,), *, rule=None, inner=None, **options):
    """A weight of 0 with the mean of its inputs as gradient, in minibatches of one sample; lr 1 at batch size 2."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    sampler = vbs.CustomSampler(dataset_size=64, trace=list(trace), minibatch_size=1, shuffle=False)
    inner = (inner or (lambda parameters: torch.optim.SGD(parameters, lr=1.0)))(model.parameters())
    options = {"rule": rule or vbs.rules.ConstantRule(), "ref_batchsize": 2, "model": model, **options}
    return model, sampler, vbs.CustomOptimizer(inner, sampler, **options)


def loss_of(model, x):
    return model(torch.tensor([[float(x)]], dtype=model.weight.dtype)).sum()


def test_a_replaced_gradient_counts_once():
    model, _, optimizer = make()
    for x in (1, 3):
        loss_of(model, x).backward()
        model.weight.grad = model.weight.grad.clamp(-10, 10)
        optimizer.step()
    assert model.weight.item() == -2  # the mean of 1 and 3


def test_no_gradient_counts_as_none():
    model, _, optimizer = make()
    loss_of(model, 8).backward()
    model.weight.grad = None
    optimizer.step()
    train(model, optimizer, [6], loss_of)
    assert model.weight.item() == -3


def test_parameter_without_a_gradient_in_a_step_is_not_updated():
    inner = lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.5, weight_decay=0.1)  # noqa: E731
    model, _, optimizer = make([1, 1, 1], inner=inner)
    train(model, optimizer, [4], loss_of)
    before = model.weight.item()
    loss_of(model, 4).backward()
    model.weight.grad = None
    assert optimizer.step()
    assert model.weight.item() == before  # neither momentum nor decay


def test_an_assigned_gradient_is_used():
    model, _, optimizer = make()
    for x in (1.0, 3.0):
        model.weight.grad = torch.full((1, 1), x, dtype=torch.float64)
        optimizer.step()
    assert model.weight.item() == -2


def test_gradient_referenced_by_the_user_is_not_modified():
    model, _, optimizer = make([1, 2], clip_grad_norm=None)
    buffer = torch.ones(1, 1, dtype=torch.float64)
    for value in (1.0, 2.0, 4.0):
        buffer.fill_(value)
        model.weight.grad = buffer
        optimizer.step()
        assert buffer.item() == value
    assert model.weight.item() == -(1 + (2 + 4) / 2)


def test_clipping_does_not_modify_a_gradient_referenced_by_the_user():
    model, _, optimizer = make([1, 1, 2], clip_grad_norm=1.5)
    for value in (1.0, 4.0, 2.0, 5.0):
        buffer = model.weight.grad = torch.full((1, 1), value, dtype=torch.float64)
        optimizer.step()
        assert buffer.item() == value
    assert model.weight.item() == pytest.approx(-(1 + 1.5 + 1.5), abs=1e-5)


def test_create_graph_is_like_any_other_backward_pass():
    model, _, optimizer = make()
    for x in (1, 3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss_of(model, x).backward(create_graph=True)
        optimizer.step()
    assert model.weight.item() == -2


def test_a_backward_pass_without_step_does_not_leak_into_the_next_epoch():
    model, sampler, optimizer = make()
    loss_of(model, 100).backward()
    sampler.set_epoch(0)
    optimizer.set_epoch(0)
    train(model, optimizer, (1, 3), loss_of)
    assert model.weight.item() == -2


@pytest.mark.parametrize("rule", [vbs.rules.ConstantRule, vbs.rules.AdaScaleRule])
def test_step_leaves_no_gradient(rule):
    model, _, optimizer = make([2, 1], rule=rule())
    for x in (1, 3, 5):
        train(model, optimizer, [x], loss_of)
        assert model.weight.grad is None


def test_a_module_may_be_converted_at_any_time():
    model, _, optimizer = make([2, 2])
    train(model, optimizer, [1], loss_of)
    model.float()
    train(model, optimizer, [3], loss_of)
    assert model.weight.item() == -2
    model.double()
    train(model, optimizer, (1, 3), loss_of)
    assert model.weight.item() == -4


def test_clipping_bound_of_a_sum_applies_to_the_mean():
    model, _, optimizer = make([2, 2], rule=vbs.rules.LinearMomentumRule(), clip_grad_norm=1.0)
    train(model, optimizer, (4, 8, 0.5, 0.5), loss_of)
    # the first mean of 6 is clipped to 1, the second of 0.5 is not; lr0 · S = 1
    assert model.weight.item() == pytest.approx(-1.5, rel=1e-6)


class Watching(vbs.Rule):
    """Sums gradients and observes their norms."""

    sums_gradients = True
    measures_noise = True

    def __init__(self):
        self.seen = []

    def factor(self, step):
        return 1.0

    def observe(self, step, norms):
        self.seen.append(norms[0])


def test_rule_that_sums_observes_the_norms_of_the_mean():
    rule = Watching()
    model, _, optimizer = make(rule=rule)
    train(model, optimizer, (1, 3), loss_of)
    assert optimizer.rule.seen == [vbs.rules.Norms(mean_of_squares=5.0, square_of_mean=4.0)]


def test_both_norms_of_a_single_minibatch_are_the_same():
    rule = Watching()
    model, _, optimizer = make([1], rule=rule)
    train(model, optimizer, [3], loss_of)
    assert optimizer.rule.seen == [vbs.rules.Norms(mean_of_squares=9.0, square_of_mean=9.0)]


def test_progress_counts_the_factor_after_max_factor():
    model, _, optimizer = make([4, 4], rule=vbs.rules.LinearRule(), max_factor=1.5)
    train(model, optimizer, [1] * 8, loss_of)
    assert optimizer.progress == 3.0
    assert optimizer.factor() == 1.5


def test_progress_counts_the_factor_after_smooth_steps():
    model, _, optimizer = make([2, 8, 8], rule=vbs.rules.LinearRule(), smooth_steps=3)
    train(model, optimizer, [1] * 18, loss_of)
    assert optimizer.progress == 1 + 2 + 3


# ----------------------------------------------------------------------------------------------------------------- Adam


def test_adam_under_changing_scale_makes_full_steps_of_a_constant_gradient():
    """With the correct bias correction, Adam's step is lr for any history of the betas."""
    sizes = [2, 2, 8, 8, 2, 32, 2, 2, 4, 64, 2, 2]
    model = nn.Linear(1, 1, bias=False).double()
    sampler = vbs.CustomSampler(dataset_size=256, trace=sizes, minibatch_size=2, shuffle=False)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-30, weight_decay=0.0)
    optimizer = vbs.AdamRuleOptimizer(inner, sampler, ref_batchsize=2)
    for _ in sampler:
        before = model.weight.item()
        loss_of(model, 7).backward()
        if optimizer.step():
            assert before - model.weight.item() == pytest.approx(optimizer.current_lr(), rel=1e-9)


@pytest.mark.parametrize("scales_weight_decay", [True, False])
def test_adamw_decays_by_its_own_learning_rate_under_changing_scale(scales_weight_decay):
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    sampler = vbs.CustomSampler(dataset_size=64, trace=[1, 4, 1], minibatch_size=1, shuffle=False)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-30, weight_decay=0.1)
    optimizer = vbs.AdamRuleOptimizer(inner, sampler, ref_batchsize=1, scales_weight_decay=scales_weight_decay)
    for _ in range(6):
        before = model.weight.item()
        loss_of(model, 7).backward()
        if optimizer.step():
            lr = optimizer.current_lr()
            decay = 0.1 * optimizer.factor() if scales_weight_decay else 0.1
            assert model.weight.item() == pytest.approx(before * (1 - lr * decay) - lr, rel=1e-9)


def test_parameter_that_starts_later_has_its_own_bias_correction():
    model = nn.Linear(1, 1).double()
    sampler = vbs.CustomSampler(dataset_size=64, trace=[1, 4, 1, 8, 1], minibatch_size=1, shuffle=False)
    inner = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-30)
    optimizer = vbs.AdamRuleOptimizer(inner, sampler, ref_batchsize=1)
    groups = optimizer.param_groups
    for number in range(15):
        before = model.weight.item(), model.bias.item()
        loss_of(model, 7).backward()
        if number < 5:
            model.bias.grad = None
        if optimizer.step():
            lr = optimizer.current_lr()
            assert before[0] - model.weight.item() == pytest.approx(lr, rel=1e-9)
            assert before[1] - model.bias.item() == pytest.approx(lr if number >= 5 else 0, rel=1e-9)
            assert optimizer.param_groups is groups
            assert len(groups) == 1
            assert len(groups[0]["params"]) == 2


def test_beta_history_is_restored():
    def start():
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.ones_(model.weight)
        sampler = vbs.CustomSampler(dataset_size=64, trace=[1, 4, 1, 8, 1], minibatch_size=1, shuffle=False)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return model, sampler, vbs.AdamRuleOptimizer(inner, sampler, ref_batchsize=1)

    model, _, optimizer = start()
    train(model, optimizer, range(5), loss_of)
    other, sampler, resumed = start()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    sampler.set_epoch(resumed.epoch, resumed.epoch_step)
    for x in range(5, 15):
        for m, o in ((model, optimizer), (other, resumed)):
            train(m, o, [x], loss_of)
    assert model.weight.item() == other.weight.item()


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax])
def test_adam_rule_rejects_unknown_bias_corrections(kind):
    with pytest.raises(
        ValueError, match=f"`inner` must use the bias correction of Adam and AdamW, got {kind.__name__}"
    ):
        make(rule=vbs.rules.AdamRule(), inner=lambda parameters: kind(parameters))


def test_adam_rules_work_with_custom_optimizer():
    runs = []
    for is_by_name in (True, False):
        model = nn.Linear(1, 1).double()
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        sampler = vbs.CustomSampler(dataset_size=64, trace=[4, 2, 4], minibatch_size=1, shuffle=False)
        inner = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizer = (
            vbs.AdamScaleOptimizer(inner, sampler, ref_batchsize=1, min_updates=1)
            if is_by_name
            else vbs.CustomOptimizer(inner, sampler, rule=vbs.rules.AdamScaleRule(min_updates=1), ref_batchsize=1)
        )
        train(model, optimizer, range(10), loss_of)
        runs.append((model.weight.item(), optimizer.gain(), optimizer.progress, optimizer.noise_scale))
    assert runs[0] == runs[1]


def test_freezing_a_parameter_keeps_the_preconditioner_of_the_others():
    def gains(freezes):
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double()
        sampler = vbs.CustomSampler(dataset_size=64, trace=[4] * 6, minibatch_size=1, shuffle=False)
        inner = torch.optim.Adam([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.01)
        optimizer = vbs.AdamScaleOptimizer(inner, sampler, ref_batchsize=1, min_updates=1)
        for number in range(16):
            if number == 12 and freezes:
                model.bias.requires_grad_(False)
            model(torch.randn(1, 3, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
        return optimizer.gain(group=0)

    # the bias, in a separate group, does not affect the gain of the weight
    assert gains(True) == pytest.approx(gains(False), rel=1e-12)


# ---------------------------------------------------------------------------------------------------------- other kinds


def test_complex_parameters_train_with_adascale():
    model = nn.ParameterList([torch.ones(2, 2, dtype=torch.complex128)])
    sampler = vbs.CustomSampler(dataset_size=64, trace=[2, 2], minibatch_size=1, shuffle=False)
    optimizer = vbs.AdaScaleOptimizer(sgd(model), sampler, ref_batchsize=1)
    minibatches = torch.tensor([[[1j, 0]], [[0, 1]], [[1, 1]], [[2, 0]]], dtype=torch.complex128)
    train(model, optimizer, minibatches, lambda model, x: (x @ model[0]).abs().square().sum())
    assert optimizer.gain() > 1


def loss_of_embedding(model, numbers):
    return model(torch.tensor(numbers)).square().sum()


def test_sparse_gradients_are_accumulated_and_measured():
    def trained(is_sparse):
        torch.manual_seed(0)
        model = nn.Embedding(5, 3, sparse=is_sparse).double()
        sampler = vbs.CustomSampler(dataset_size=64, trace=[3, 1], minibatch_size=1, shuffle=False)
        optimizer = vbs.AdaScaleOptimizer(sgd(model), sampler, ref_batchsize=1)
        train(model, optimizer, [(1, 0), (2, 0), (1, 0), (4, 0)], loss_of_embedding)
        return model.weight.detach(), optimizer.gain()

    (sparse, gain), (dense, expected) = trained(True), trained(False)
    torch.testing.assert_close(sparse, dense)
    assert gain == pytest.approx(expected)


@pytest.mark.parametrize("kind", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.Adam])
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.1}, {"skip_nonfinite": True}])
def test_sparse_gradients_work_with_any_optimizer_also_in_a_step_of_one_minibatch(kind, options):
    def trained(is_sparse):
        torch.manual_seed(0)
        model = nn.Embedding(5, 3, sparse=is_sparse).double()
        sampler = vbs.CustomSampler(dataset_size=64, trace=[1, 3, 1], minibatch_size=1, shuffle=False)
        optimizer = vbs.ConstantOptimizer(kind(model.parameters()), sampler, ref_batchsize=1, **options)
        train(model, optimizer, [(1, 0), (2, 0), (1, 0), (4, 0), (3, 0)], loss_of_embedding)
        return model.weight.detach()

    torch.testing.assert_close(trained(True), trained(False))


def test_epoch_may_be_a_numpy_integer():
    _, sampler, optimizer = make([2, 2])
    sampler.set_epoch(np.int64(0), np.int64(1))
    optimizer.set_epoch(np.int64(0), np.int64(1))
    own = optimizer.state_dict()["variable_batch_size"]
    assert type(own["epoch"]) is type(own["epoch_step"]) is int


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
def test_the_optimizer_can_be_copied_and_pickled(gradient_as_bucket_view):
    model, _, optimizer = make([2, 2], rule=vbs.rules.AdaScaleRule(), gradient_as_bucket_view=gradient_as_bucket_view)
    train(model, optimizer, (1, 3, 5), loss_of)
    pairs = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    loss_of(model, 7).backward()
    assert optimizer.step()
    for other_model, other in pairs:
        loss_of(other_model, 7).backward()
        assert other.step()
        assert other_model.weight.item() == model.weight.item()
        assert other.progress == optimizer.progress


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
@pytest.mark.parametrize("measure_noise", [False, True])
def test_copy_within_a_step_has_the_accumulated_weight(gradient_as_bucket_view, measure_noise):
    model, _, optimizer = make([2], gradient_as_bucket_view=gradient_as_bucket_view, measure_noise=measure_noise)
    loss_of(model, 1).backward()
    optimizer.step(weight=3)
    pairs = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    for one, its_optimizer in [(model, optimizer), *pairs]:
        loss_of(one, 9).backward()
        its_optimizer.step(weight=1)
        assert one.weight.item() == -(1 + 9) / (3 + 1)
        assert its_optimizer.weight_done == 4


# -------------------------------------------------------------------------------------------------------------- kept


def test_bucket_views_stay_in_place():
    model, _, optimizer = make([2, 1, 2], gradient_as_bucket_view=True)
    place = model.weight.grad.data_ptr()
    for x in (1, 3, 5, 1, 1):
        train(model, optimizer, [x], loss_of)
        assert model.weight.grad.data_ptr() == place
    assert model.weight.item() == -(2 + 5 + 1)


def test_replacing_a_bucket_view_raises():
    model, _, optimizer = make(gradient_as_bucket_view=True)
    loss_of(model, 1).backward()
    model.weight.grad = model.weight.grad.clamp(-1, 1)
    with pytest.raises(RuntimeError, match=r"parameter 0 \(shape \(1, 1\)\) was replaced between backward"):
        optimizer.step()


def test_missing_bucket_view_raises_unless_its_parameter_is_frozen():
    model, _, optimizer = make([1, 1], gradient_as_bucket_view=True)
    other = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer.add_param_group({"params": [other]})
    model.weight.requires_grad_(False)
    model.weight.grad = None
    other.sum().backward()
    optimizer.step()
    assert (model.weight.item(), other.item()) == (0, -1)
    other.grad = None
    with pytest.raises(RuntimeError, match=r"parameter 0 \(shape \(1,\)\) was replaced between backward"):
        optimizer.step()


def test_replaced_bucket_view_of_a_frozen_parameter_raises():
    model, _, optimizer = make([1, 1], gradient_as_bucket_view=True)
    model.weight.requires_grad_(False)
    model.weight.grad = torch.ones(1, 1, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"parameter 0 \(shape \(1, 1\)\) was replaced between backward"):
        optimizer.step()


def test_accumulated_bucket_view_cannot_be_dropped():
    model, _, optimizer = make([3], gradient_as_bucket_view=True)
    train(model, optimizer, [1], loss_of)
    loss_of(model, 1).backward()
    message = (
        r"^With `gradient_as_bucket_view`, zero_grad\(\) cannot drop the gradient of a backward pass without step\(\): "
        r"it was added to those of earlier minibatches\.$"
    )
    with pytest.raises(RuntimeError, match=message):
        optimizer.zero_grad()


def test_bucket_views_support_weights_including_fractions_and_zero():
    def trained(**options):
        model, _, optimizer = make([3, 2, 4], rule=vbs.rules.AdaScaleRule(), **options)
        minibatches = [(1, 0.5), (3, 0.0), (5, 0.25), (1, 0.75), (2, 0.5), (0.5, 4), (7, 0.125), (1, 0), (2, 0.5)]
        for x, weight in minibatches:
            loss_of(model, x * weight).backward()
            optimizer.step(weight=weight)
        return model.weight.item(), optimizer.gain(), optimizer.progress, optimizer.weight_done

    assert trained(gradient_as_bucket_view=True) == pytest.approx(trained(), rel=1e-12)
    assert trained()[3] == 6.625


def test_bucket_views_give_the_same_gains():
    def trained(**options):
        model, _, optimizer = make([3, 1, 4], rule=vbs.rules.AdaScaleRule(), **options)
        train(model, optimizer, (1, 3, 5, 1, 2, 0.5, 7, 1), loss_of)
        return model.weight.item(), optimizer.gain(), optimizer.progress

    assert trained(gradient_as_bucket_view=True) == pytest.approx(trained(), rel=1e-12)
    assert not math.isnan(trained()[1])


def test_bucket_view_of_a_frozen_parameter_is_removed():
    inner = lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.5, weight_decay=0.1)  # noqa: E731
    model, _, optimizer = make([1, 1, 1], gradient_as_bucket_view=True, inner=inner)
    other = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer.add_param_group({"params": [other]})
    train(model, optimizer, [1], loss_of)
    before = model.weight.item()
    model.weight.requires_grad_(False)
    for _ in range(2):
        other.sum().backward()
        optimizer.step()
    assert model.weight.item() == before  # neither momentum nor decay
    assert other.item() == pytest.approx(-(1 + 1.4))  # with momentum and decay


def test_freezing_a_bucket_view_within_a_step_raises():
    model, _, optimizer = make([2], gradient_as_bucket_view=True)
    train(model, optimizer, [1], loss_of)
    model.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="parameters must not be frozen, added, converted or moved within a step"):
        optimizer.step()


@pytest.mark.parametrize("rule", [vbs.rules.ConstantRule, vbs.rules.AdaScaleRule])
def test_bucket_views_follow_a_module_converted_between_steps(rule):
    model, _, optimizer = make([2, 2], gradient_as_bucket_view=True, rule=rule())
    model.float().double()
    train(model, optimizer, (1, 3, 1, 3), loss_of)
    assert model.weight.item() == -4


@pytest.mark.parametrize("conversions", [(nn.Module.bfloat16, nn.Module.half), (nn.Module.float, nn.Module.double)])
def test_measured_bucket_views_follow_a_converted_and_copied_module(conversions):
    model, _, optimizer = make([2, 2], gradient_as_bucket_view=True, rule=vbs.rules.AdaScaleRule())
    for convert in conversions:
        model, optimizer = copy.deepcopy((convert(model), optimizer))
        nn.init.zeros_(model.weight)
        for x in (257 / 256, 1):  # not representable in bfloat16
            train(model, optimizer, [x], loss_of)
    assert model.weight.item() == pytest.approx(-513 / 512, rel=1e-3)


def test_converting_a_module_with_bucket_views_within_a_step_raises():
    model, _, optimizer = make([2], gradient_as_bucket_view=True)
    train(model, optimizer, [1], loss_of)
    model.float().double()
    loss_of(model, 3).backward()
    with pytest.raises(RuntimeError, match="parameters must not be frozen, added, converted or moved within a step"):
        optimizer.step()


# ----------------------------------------------------------------------------------------- around backward() and step()


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"gradient_as_bucket_view": True, "rule": vbs.rules.AdaScaleRule()}],
)
def test_zero_grad_drops_the_gradient_of_another_loss(options):
    model, _, optimizer = make([2, 2], **options)
    loss_of(model, 100).backward()  # as in a GAN, where the loss of the generator passes through this model
    optimizer.zero_grad()
    for x in (1, 3):
        train(model, optimizer, [x], loss_of)
        optimizer.zero_grad()
    loss_of(model, 100).backward()
    optimizer.zero_grad()
    train(model, optimizer, [5] * 2, loss_of)
    assert model.weight.item() == -7


@pytest.mark.parametrize("change", [nn.Module.requires_grad_, nn.Module.float])
@pytest.mark.parametrize("rule", [vbs.rules.ConstantRule, vbs.rules.AdaScaleRule])
def test_zero_grad_drops_a_gradient_without_a_bucket_view(change, rule):
    model, _, optimizer = make([2, 2], gradient_as_bucket_view=True, rule=rule())
    model.weight.requires_grad_(change is not nn.Module.requires_grad_)
    for _ in range(2):
        optimizer.step()
    change(model)  # unfreezes or converts it
    loss_of(model, 100).backward()
    optimizer.zero_grad()
    for x in (1, 3):
        train(model, optimizer, [x], loss_of)
        optimizer.zero_grad()
    assert model.weight.item() == -2


def test_zero_grad_within_a_step_drops_the_gradient_or_raises():
    for is_kept in (False, True):
        model, _, optimizer = make([2], gradient_as_bucket_view=is_kept)
        train(model, optimizer, [1], loss_of)
        loss_of(model, 100).backward()
        if is_kept:
            with pytest.raises(RuntimeError, match="cannot drop the gradient of a backward pass without step"):
                optimizer.zero_grad()
            continue
        optimizer.zero_grad()
        train(model, optimizer, [3], loss_of)
        assert model.weight.item() == -2


class FailsOnce(torch.optim.SGD):
    """Fails once, as when out of memory."""

    has_failed = False

    def step(self, closure=None):
        if not self.has_failed:
            self.has_failed = True
            raise RuntimeError("out of memory")
        return super().step(closure)


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
def test_gradient_of_a_failed_update_is_not_counted_again(gradient_as_bucket_view):
    model, _, optimizer = make(
        [2, 2], inner=lambda p: FailsOnce(p, lr=1.0), gradient_as_bucket_view=gradient_as_bucket_view
    )
    for number, x in enumerate((1, 3, 5, 7)):
        loss_of(model, x).backward()
        if number == 1:
            with pytest.raises(RuntimeError, match="out of memory"):
                optimizer.step()
        else:
            optimizer.step()
    assert model.weight.item() == -6


class Differences(torch.optim.SGD):
    """Adds the change of the gradient since the previous step, and references that gradient without a copy."""

    is_aliased = False

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p -= p.grad - self.state[p].get("before", 0)
            self.state[p]["before"] = p.grad.detach() if self.is_aliased else p.grad


@pytest.mark.parametrize("is_aliased", [False, True])
def test_inner_optimizer_may_reference_a_gradient(is_aliased):
    model, _, optimizer = make([2, 2, 2], inner=lambda p: Differences(p, lr=1.0))
    optimizer.inner.is_aliased = is_aliased
    train(model, optimizer, (1, 3, 5, 7, 10, 12), loss_of)
    assert model.weight.item() == -11


def test_memory_is_reused_if_no_gradient_is_referenced():
    model, _, optimizer = make([2, 2, 2], rule=vbs.rules.AdaScaleRule())
    places = set()
    optimizer.inner.register_step_pre_hook(lambda *_: places.add(model.weight.grad.data_ptr()))
    blockers = []  # so that released memory is not reused
    for x in (1, 3, 5, 7, 10, 12):
        train(model, optimizer, [x], loss_of)
        blockers.append(torch.zeros(64))
    assert len(places) == 1


def test_a_copy_of_an_optimizer_with_a_scheduler_steps_by_itself():
    model, _, optimizer = make([1, 1])
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    other, copied = copy.deepcopy((model, optimizer))
    train(other, copied, [3], loss_of)
    assert (model.weight.item(), other.weight.item()) == (0, -3)


def test_parameter_that_is_in_a_group_twice_raises():
    model = nn.Linear(1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inner = torch.optim.SGD([model.weight, model.weight], lr=1.0)
    sampler = vbs.CustomSampler(dataset_size=8, trace=[2], minibatch_size=1)
    with pytest.raises(ValueError, match="`inner` must have each parameter once"):
        vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=1)


def test_adamscale_rejects_an_optimizer_without_second_moments():
    rule = vbs.rules.AdamScaleRule()
    with pytest.raises(ValueError, match=r"^`inner` must keep second moments in its state .* got Adamax$"):
        make([1], rule=rule, inner=lambda p: torch.optim.Adamax(p))
    rule.checks_inner = False
    model, _, optimizer = make([1], rule=rule, inner=lambda p: torch.optim.Adamax(p))
    loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match=r"`inner` must keep the second moment of each gradient .* Adamax has only"):
        optimizer.step()


def test_conjugated_gradients_are_measured():
    model = nn.ParameterList([torch.ones(2, dtype=torch.complex128)])
    sampler = vbs.CustomSampler(dataset_size=64, trace=[2], minibatch_size=1, shuffle=False)
    optimizer = vbs.AdaScaleOptimizer(sgd(model, lr=1.0), sampler, ref_batchsize=2)
    for x in (1 + 2j, 3 + 0j):
        model[0].grad = torch.full((2,), x, dtype=torch.complex128).conj()
        optimizer.step()
    assert model[0].tolist() == [-1 + 1j] * 2


def test_norms_are_reduced_in_float32_or_higher_for_any_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        memory = GradientBuckets(list(nn.Linear(1, 1).parameters()), num_numbers=2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert memory.numbers.dtype == torch.float32


def with_a_frozen_group(**options):
    """A group that is frozen when it is added, and unfrozen a step later."""
    model, _, optimizer = make([2, 2, 2], rule=vbs.rules.AdaScaleRule(), **options)
    late = nn.Parameter(torch.zeros(1, dtype=torch.float64), requires_grad=False)
    rank, cores = optimizer.sampler.rank, optimizer.sampler.num_replicas
    for step in range(3):
        if step == 1:
            optimizer.add_param_group({"params": [late]})
            assert optimizer.current_lr(1) == optimizer.current_lr(0)
        late.requires_grad_(step == 2)
        for x in range(rank, 2, cores):
            (model(torch.tensor([[1.0 + x]], dtype=torch.float64)) + late * x).sum().backward()
            optimizer.step()
    return model.weight.item(), late.item(), optimizer.gain()


def with_a_group_added_within_a_step(parameters):
    """The weight and gains of a step of four minibatches; a group is added after half of them, on one core or two."""
    model, _, optimizer = make([4, 4], rule=vbs.rules.AdaScaleRule())
    rank, cores = optimizer.sampler.rank, optimizer.sampler.num_replicas
    for _ in range(2):
        for number, x in enumerate(range(rank, 4, cores)):
            if number == 2 // cores and len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": parameters()})
            train(model, optimizer, [1.0 + x], loss_of)
    return model.weight.item(), optimizer.gain(), optimizer.gain(group=0)


def no_parameters():
    return []


def an_unused_parameter():
    return [nn.Parameter(torch.zeros(2, dtype=torch.float64))]


@pytest.mark.parametrize("parameters", [no_parameters, an_unused_parameter])
def test_a_group_may_be_added_within_a_step(on_cores, parameters):
    # mean of 1, 2, 3, 4; L = 7.5, T = 6.25, B/B0 = 2: V = (L − T)·4/3, G² = T − V/4
    variance, square = 5 / 3, 6.25 - 5 / 12
    gain = (variance / 2 + square) / (variance / 4 + square)
    expected = (-2 * 2.5 * gain, gain, gain)
    assert with_a_group_added_within_a_step(parameters) == pytest.approx(expected)
    for found in on_cores(2, with_a_group_added_within_a_step, parameters):
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_the_gain_is_the_same_however_many_norms_are_summed_at_once(monkeypatch, most):
    monkeypatch.setattr("variable_batch_size.optim.gradients.buckets._MOST_NORMS", most)
    model, _, optimizer = make([2, 5], rule=vbs.rules.AdaScaleRule(), smoothing=0.0)
    train(model, optimizer, (1, 3), loss_of)
    assert optimizer.noise == vbs.rules.Noise.from_norms(5.0, 4.0, batch_size=2, num_minibatches=2)
    train(model, optimizer, (1, 2, 3, 4, 5), loss_of)
    assert optimizer.noise == vbs.rules.Noise.from_norms(11.0, 9.0, batch_size=5, num_minibatches=5)


def with_a_minibatch_that_core_0_leaves_out():
    """Two epochs of two steps of four minibatches; returns the error message."""
    model = nn.Linear(1, 1, bias=False).double()
    sampler = vbs.CustomSampler(dataset_size=8, trace=[4] * 4, minibatch_size=1)
    optimizer = vbs.ConstantOptimizer(sgd(model, lr=1.0), sampler, ref_batchsize=4)
    for _ in optimizer.epochs(2):
        for number, _ in enumerate(sampler):
            if sampler.rank == 0 and optimizer.epoch == 0 and number == 3:  # the last one, as in a pass left early
                continue
            loss_of(model, 1).backward()
            try:
                optimizer.step()
            except RuntimeError as error:
                return str(error)
    raise AssertionError("there was no error")


def test_core_that_skips_a_call_of_step_does_not_mix_two_epochs(on_cores):
    for message, epoch in zip(on_cores(2, with_a_minibatch_that_core_0_leaves_out), (1, 0), strict=True):
        assert message == (
            f"Ranks are in different epochs; this one is in epoch {epoch}. Call step() after every minibatch on every "
            "rank; to leave a minibatch out, call step() without backward()."
        )


def test_a_group_may_be_frozen_when_it_is_added(on_cores):
    expected = with_a_frozen_group()
    assert expected[1] == -0.5
    assert with_a_frozen_group(gradient_as_bucket_view=True) == pytest.approx(expected)
    for found in on_cores(2, with_a_frozen_group):
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("has_samples", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_numbers_on_a_device_are_interpreted_as_those_on_the_host(n, has_samples, is_weighted):
    """Also of a single minibatch, which is not measured by itself."""
    num_measured = 2 + has_samples
    layout = Layout((True,) * num_measured, has_samples, has_samples, is_weighted, 1)
    squares = [0.0 if n == 1 and not has_samples else 5.0 + place for place in range(num_measured)]
    values = [*squares, 7.0, float(n), *(2.0 + place for place in range(num_measured))]
    expected = layout.interpret(values, n)
    numbers = torch.tensor([*values, n], dtype=torch.float64).unbind()
    found = layout.interpret(numbers[:-1], numbers[-1], is_finite=True)
    assert [tuple(map(float, pair)) for pair in found.norms] == [tuple(pair) for pair in expected.norms]
    assert (found.of_samples is None) == (expected.of_samples is None)
    assert found.of_samples is None or tuple(map(float, found.of_samples)) == tuple(expected.of_samples)
