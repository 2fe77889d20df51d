"""Several optimizers for one model, wrapped as one."""

import copy
import pickle

import pytest
import torch
from torch import nn

import variable_batch_size as vbs

TRACE = [8, 32, 16, 8, 64, 24]
MINIBATCH = 8
SAME = vbs.rules.AdaScaleRule()


def data():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(256, 6, generator=generator, dtype=torch.float64), torch.randint(3, (256,), generator=generator)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def parts_of(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return matrices, [p for p in model.parameters() if p.dim() != 2]


def muon_and_adamw(model):
    matrices, rest = parts_of(model)
    return [torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1), torch.optim.AdamW(rest, lr=0.02, weight_decay=0.1)]


def sgd_and_adam(model):
    matrices, rest = parts_of(model)
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.Adam(rest, lr=0.02)]


def make(model, optimizers, rule, **options):
    sampler = vbs.CustomSampler(dataset_size=256, trace=TRACE, minibatch_size=MINIBATCH, shuffle=False)
    return vbs.CustomOptimizer(optimizers, sampler, rule=rule, ref_batchsize=16, **options)


def train(model, optimizer, num_steps=None):
    inputs, targets = data()
    for indices in optimizer.sampler:
        if optimizer.steps_done == num_steps:
            break
        nn.functional.cross_entropy(model(inputs[indices]), targets[indices]).backward()
        optimizer.step()


def train_plainly(model, optimizers, settings):
    """Each step as one batch, with the settings that ``settings(optimizer, batch size / 16)`` gives its groups."""
    inputs, targets = data()
    start = 0
    for size in TRACE:
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs[start : start + size]), targets[start : start + size]).backward()
        start += size
        for optimizer in optimizers:
            (group,) = optimizer.param_groups
            before = dict(group)
            group.update(settings(group, size / 16))
            optimizer.step()
            group.update(before)


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_each_follows_its_own_rule_as_if_it_were_alone_with_the_gradient_of_the_step():
    ours, plain = network(), network()
    train(ours, make(ours, sgd_and_adam(ours), [vbs.rules.LinearRule(), vbs.rules.RootRule()]))
    train_plainly(
        plain,
        sgd_and_adam(plain),
        lambda group, scale: {"lr": group["lr"] * (scale if "momentum" in group else scale**0.5)},
    )
    torch.testing.assert_close(weights_of(ours), weights_of(plain), rtol=0, atol=1e-12)


def test_the_learning_rate_to_come_is_that_of_the_groups_own_rule():
    ours = network()
    first, second = sgd_and_adam(ours)
    optimizer = make(ours, [first, second], [vbs.rules.LinearRule(), vbs.rules.RootRule()])
    scale = TRACE[0] / 16
    assert optimizer.current_lr(0) == pytest.approx(first.param_groups[0]["lr"] * scale)
    assert optimizer.current_lr(1) == pytest.approx(second.param_groups[0]["lr"] * scale**0.5)


def test_one_rule_serves_all():
    ours, plain = network(), network()
    train(ours, make(ours, sgd_and_adam(ours), vbs.rules.RootRule()))
    train_plainly(plain, sgd_and_adam(plain), lambda group, scale: {"lr": group["lr"] * scale**0.5})
    torch.testing.assert_close(weights_of(ours), weights_of(plain), rtol=0, atol=1e-12)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
def test_muon_for_matrices_and_adamw_for_the_rest():
    ours, plain = network(), network()
    train(ours, make(ours, muon_and_adamw(ours), [vbs.rules.MuonRule(), vbs.rules.RootRule()]))

    def settings(group, scale):
        decay = group["weight_decay"] * (1 if "betas" in group else scale**0.5)
        return {"lr": group["lr"] * scale**0.5, "weight_decay": decay}

    train_plainly(plain, muon_and_adamw(plain), settings)
    torch.testing.assert_close(weights_of(ours), weights_of(plain), rtol=0, atol=1e-12)


def test_betas_that_vary_reach_the_one_that_has_them():
    ours = network()
    matrices, rest = parts_of(ours)
    seen = []

    class Adam(torch.optim.Adam):
        def step(self, closure=None):
            seen.extend(group["betas"] for group in self.param_groups)
            return super().step(closure)

    optimizer = make(
        ours, [torch.optim.SGD(matrices, lr=0.1), Adam(rest, lr=0.02)], [vbs.rules.LinearRule(), vbs.rules.AdamRule()]
    )
    train(ours, optimizer)
    assert len(set(seen)) > 1
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.02]
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.999)


def test_clipping_is_by_the_norm_of_all():
    model = network()
    optimizer = make(model, sgd_and_adam(model), vbs.rules.ConstantRule(), clip_grad_norm=1e-3)
    norms = []
    update = optimizer.inner.step

    def step():
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
        update()

    optimizer.inner.step = step
    train(model, optimizer)
    assert norms == [pytest.approx(1e-3, rel=1e-2)] * len(TRACE)


@pytest.mark.parametrize(
    "rules", [[vbs.rules.LinearRule, vbs.rules.AdamRule], [vbs.rules.AdaScaleRule, vbs.rules.SurgeRule]]
)
def test_a_run_that_is_saved_goes_on_bit_for_bit(rules):
    whole = network()
    train(whole, make(whole, sgd_and_adam(whole), [rule() for rule in rules]))
    first = network()
    before = make(first, sgd_and_adam(first), [rule() for rule in rules])
    train(first, before, num_steps=3)
    state, weights = copy.deepcopy(before.state_dict()), copy.deepcopy(first.state_dict())
    second = network()
    second.load_state_dict(weights)
    after = make(second, sgd_and_adam(second), [rule() for rule in rules])
    after.load_state_dict(state)
    after.sampler.set_epoch(after.epoch, after.epoch_step)
    train(second, after)
    assert torch.equal(weights_of(whole), weights_of(second))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_goes_on_by_itself(copied):
    model = network()
    optimizer = make(model, sgd_and_adam(model), [vbs.rules.LinearRule(), vbs.rules.AdamRule()])
    train(model, optimizer, num_steps=2)
    other = copied(optimizer)
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.02]
    (parameter,) = other.inner.optimizers[1].param_groups[0]["params"][:1]
    before, ours = parameter.detach().clone(), weights_of(model).clone()
    parameter.grad = torch.ones_like(parameter)
    other.inner.step()
    assert not torch.equal(parameter, before)
    assert torch.equal(weights_of(model), ours)


def test_the_noise_is_that_of_the_rule_that_measures_it_or_of_all_parameters_if_asked_for():
    model = network()
    optimizer = make(model, sgd_and_adam(model), [vbs.rules.RootRule(), vbs.rules.AdaScaleRule()])
    train(model, optimizer)
    assert optimizer.noise == optimizer.rule.rules[1].noise()
    assert optimizer.report()["noise_scale"] == optimizer.noise_scale
    alone = network()
    groups = [{"params": part} for part in parts_of(alone)]
    one = make(alone, torch.optim.SGD(groups, lr=0.0), vbs.rules.AdaScaleRule())
    train(alone, one, num_steps=2)
    again = network()
    at_rest = [torch.optim.SGD(part, lr=0.0) for part in parts_of(again)]
    both = make(again, at_rest, vbs.rules.LinearRule(), measure_noise=True)
    train(again, both, num_steps=2)
    assert both.noise == one.noise


def test_schedulers_see_the_groups_of_all():
    model = network()
    optimizer = make(model, sgd_and_adam(model), vbs.rules.ConstantRule())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5, lambda step: 0.25])
    assert scheduler.get_last_lr() == [0.05, 0.005]
    assert [optimizer.current_lr(group) for group in range(2)] == [0.05, 0.005]


def test_a_group_that_is_added_belongs_to_the_last_one():
    model = network()
    optimizer = make(model, sgd_and_adam(model), [vbs.rules.LinearRule(), vbs.rules.RootRule()])
    late = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer.add_param_group({"params": [late]})
    assert optimizer.inner.owner(optimizer.param_groups[2]) is optimizer.inner.optimizers[1]
    late.grad = torch.ones_like(late)
    optimizer.step()  # a batch of 8: scale 1/2
    assert optimizer.factor(2) == pytest.approx(0.5**0.5)
    assert late.tolist() == [pytest.approx(-0.02 * 0.5**0.5)] * 2


def test_a_group_that_one_of_them_was_given_is_not_left_out_without_a_word():
    model = network()
    optimizers = sgd_and_adam(model)
    optimizer = make(model, optimizers, vbs.rules.ConstantRule())
    optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.float64))]})
    with pytest.raises(RuntimeError, match=r"^SGD had 1 parameter groups and has 2: add a group to the optimizer of"):
        for _ in range(2):
            optimizer.step()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("is_one", [False, True])
def test_a_group_that_is_refused_leaves_all_as_it_was(is_one):
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1) if is_one else sgd_and_adam(model)
    optimizer = make(model, inner, vbs.rules.ConstantRule())
    groups, late = list(optimizer.param_groups), nn.Parameter(torch.zeros(2, dtype=torch.float64))
    late.grad = torch.ones_like(late)
    for wrong in [[late, late]] if is_one else [[late, late], [model[0].weight]]:
        with pytest.raises(ValueError, match=r"^some parameters appear in more than one parameter group"):
            optimizer.add_param_group({"params": wrong})
        assert optimizer.param_groups == groups
    assert late.grad is not None
    optimizer.add_param_group({"params": [late]})  # which it does not have yet
    assert len(optimizer.param_groups) == len(groups) + 1


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([vbs.rules.LinearRule()], r"^`rule` must be one rule, or one per optimizer \(2\), got 1$"),
        ([vbs.rules.LinearRule(), vbs.rules.MuonRule()], "Muon"),
        (
            [vbs.rules.LinearMomentumRule(), vbs.rules.LinearRule()],
            r"^either all rules in `rule` must sum gradients or none, got",
        ),
        ([SAME, SAME], r"^`rule` must contain a separate rule for each optimizer, got the same AdaScaleRule twice$"),
        ([vbs.rules.LinearRule(), "root"], r"^`rule` must be a Rule, got 'root'$"),
    ],
)
def test_rules_that_do_not_fit_are_refused(rules, message):
    model = network()
    with pytest.raises(ValueError, match=message):
        make(model, sgd_and_adam(model), rules)


def test_a_parameter_of_two_optimizers_is_refused():
    model = network()
    twice = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters())]
    with pytest.raises(ValueError, match=r"^`inner` must be optimizers with parameters of their own"):
        make(model, twice, vbs.rules.ConstantRule())


@pytest.mark.parametrize(("inner", "kinds"), [([], "none"), (["sgd"], "str")])
def test_what_is_no_optimizer_is_refused(inner, kinds):
    with pytest.raises(ValueError, match=rf"^`inner` must be one or several optimizers of torch, got {kinds}$"):
        make(network(), inner, vbs.rules.ConstantRule())
