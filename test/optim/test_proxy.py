"""Several optimizers for one model, wrapped as one."""

import copy
import math
import pickle

import pytest
import torch
from small_runs import classified, network, sgd, weights_of
from torch import nn

import variable_batch_size as vbs

TRACE = [8, 32, 16, 8, 64, 24]
MINIBATCH = 8
DATA = classified(256, 6, num_classes=3, seed=3)


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
    inputs, targets = DATA.tensors
    for indices in optimizer.sampler:
        if optimizer.steps_done == num_steps:
            break
        nn.functional.cross_entropy(model(inputs[indices]), targets[indices]).backward()
        optimizer.step()


def train_plainly(model, optimizers, settings):
    """Each step as one batch, with ``settings(optimizer, batch size / 16)`` applied to the groups."""
    inputs, targets = DATA.tensors
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


def test_each_optimizer_follows_its_own_rule():
    ours, plain = network(6, 8, 3), network(6, 8, 3)
    train(ours, make(ours, sgd_and_adam(ours), [vbs.rules.LinearRule(), vbs.rules.RootRule()]))
    train_plainly(
        plain,
        sgd_and_adam(plain),
        lambda group, scale: {"lr": group["lr"] * (scale if "momentum" in group else scale**0.5)},
    )
    torch.testing.assert_close(weights_of(ours), weights_of(plain), rtol=0, atol=1e-12)


def test_next_learning_rate_is_that_of_the_groups_own_rule():
    ours = network(6, 8, 3)
    first, second = sgd_and_adam(ours)
    optimizer = make(ours, [first, second], [vbs.rules.LinearRule(), vbs.rules.RootRule()])
    scale = TRACE[0] / 16
    assert optimizer.current_lr(0) == pytest.approx(first.param_groups[0]["lr"] * scale)
    assert optimizer.current_lr(1) == pytest.approx(second.param_groups[0]["lr"] * scale**0.5)


def test_one_rule_for_all_optimizers():
    ours, plain = network(6, 8, 3), network(6, 8, 3)
    train(ours, make(ours, sgd_and_adam(ours), vbs.rules.RootRule()))
    train_plainly(plain, sgd_and_adam(plain), lambda group, scale: {"lr": group["lr"] * scale**0.5})
    torch.testing.assert_close(weights_of(ours), weights_of(plain), rtol=0, atol=1e-12)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
def test_muon_for_matrices_and_adamw_for_the_rest():
    ours, plain = network(6, 8, 3), network(6, 8, 3)
    train(ours, make(ours, muon_and_adamw(ours), [vbs.rules.MuonRule(), vbs.rules.RootRule()]))

    def settings(group, scale):
        decay = group["weight_decay"] * (1 if "betas" in group else scale**0.5)
        return {"lr": group["lr"] * scale**0.5, "weight_decay": decay}

    train_plainly(plain, muon_and_adamw(plain), settings)
    torch.testing.assert_close(weights_of(ours), weights_of(plain), rtol=0, atol=1e-12)


def test_varying_betas_reach_the_optimizer_that_has_them():
    ours = network(6, 8, 3)
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


def test_clipping_uses_the_norm_of_all_gradients():
    model = network(6, 8, 3)
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
def test_saved_run_resumes_bit_for_bit(rules):
    whole = network(6, 8, 3)
    train(whole, make(whole, sgd_and_adam(whole), [rule() for rule in rules]))
    first = network(6, 8, 3)
    before = make(first, sgd_and_adam(first), [rule() for rule in rules])
    train(first, before, num_steps=3)
    state, weights = copy.deepcopy(before.state_dict()), copy.deepcopy(first.state_dict())
    second = network(6, 8, 3)
    second.load_state_dict(weights)
    after = make(second, sgd_and_adam(second), [rule() for rule in rules])
    after.load_state_dict(state)
    after.sampler.set_epoch(after.epoch, after.epoch_step)
    train(second, after)
    assert torch.equal(weights_of(whole), weights_of(second))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copy_continues_independently(copied):
    model = network(6, 8, 3)
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


def test_noise_is_that_of_the_measuring_rule_or_of_all_parameters_on_request():
    model = network(6, 8, 3)
    optimizer = make(model, sgd_and_adam(model), [vbs.rules.RootRule(), vbs.rules.AdaScaleRule()])
    train(model, optimizer)
    assert optimizer.noise == optimizer.rule.rules[1].noise()
    assert optimizer.report()["noise_scale"] == optimizer.noise_scale
    alone = network(6, 8, 3)
    groups = [{"params": part} for part in parts_of(alone)]
    one = make(alone, torch.optim.SGD(groups, lr=0.0), vbs.rules.AdaScaleRule())
    train(alone, one, num_steps=2)
    again = network(6, 8, 3)
    at_rest = [torch.optim.SGD(part, lr=0.0) for part in parts_of(again)]
    both = make(again, at_rest, vbs.rules.LinearRule(), measure_noise=True)
    train(again, both, num_steps=2)
    assert both.noise == one.noise


def test_schedulers_have_the_groups_of_all_optimizers():
    model = network(6, 8, 3)
    optimizer = make(model, sgd_and_adam(model), vbs.rules.ConstantRule())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5, lambda step: 0.25])
    assert scheduler.get_last_lr() == [0.05, 0.005]
    assert [optimizer.current_lr(group) for group in range(2)] == [0.05, 0.005]


def test_added_group_belongs_to_the_last_optimizer():
    model = network(6, 8, 3)
    optimizer = make(model, sgd_and_adam(model), [vbs.rules.LinearRule(), vbs.rules.RootRule()])
    late = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer.add_param_group({"params": [late]})
    assert optimizer.inner.owner(optimizer.param_groups[2]) is optimizer.inner.optimizers[1]
    late.grad = torch.ones_like(late)
    optimizer.step()  # a batch of 8: scale 1/2
    assert optimizer.factor(2) == pytest.approx(0.5**0.5)
    assert late.tolist() == [pytest.approx(-0.02 * 0.5**0.5)] * 2


def test_group_added_directly_to_one_optimizer_raises():
    model = network(6, 8, 3)
    optimizers = sgd_and_adam(model)
    optimizer = make(model, optimizers, vbs.rules.ConstantRule())
    optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.float64))]})
    with pytest.raises(RuntimeError, match=r"^SGD had 1 parameter groups and has 2: add a group to the optimizer of"):
        for _ in range(2):
            optimizer.step()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("is_one", [False, True])
def test_rejected_group_has_no_effect(is_one):
    model = network(6, 8, 3)
    inner = sgd(model) if is_one else sgd_and_adam(model)
    optimizer = make(model, inner, vbs.rules.ConstantRule())
    groups, late = list(optimizer.param_groups), nn.Parameter(torch.zeros(2, dtype=torch.float64))
    late.grad = torch.ones_like(late)
    for wrong in [[late, late]] if is_one else [[late, late], [model[0].weight]]:
        with pytest.raises(ValueError, match=r"^some parameters appear in more than one parameter group"):
            optimizer.add_param_group({"params": wrong})
        assert optimizer.param_groups == groups
    assert late.grad is not None
    optimizer.add_param_group({"params": [late]})  # before the first update
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
        ([vbs.rules.LinearRule(), 3], r"^`rule` must be a Rule or a name such as 'linear', got 3$"),
    ],
)
def test_incompatible_rules_raise(rules, message):
    model = network(6, 8, 3)
    with pytest.raises(ValueError, match=message):
        make(model, sgd_and_adam(model), rules)


def test_parameter_of_two_optimizers_raises():
    model = network(6, 8, 3)
    twice = [sgd(model), torch.optim.Adam(model.parameters())]
    with pytest.raises(ValueError, match=r"^`inner` must be optimizers with parameters of their own"):
        make(model, twice, vbs.rules.ConstantRule())


@pytest.mark.parametrize(("inner", "kinds"), [([], "none"), (["sgd"], "str")])
def test_object_that_is_not_an_optimizer_raises(inner, kinds):
    with pytest.raises(ValueError, match=rf"^`inner` must be one or several optimizers of torch, got {kinds}$"):
        make(network(6, 8, 3), inner, vbs.rules.ConstantRule())


class Hypergradient(torch.optim.SGD):
    """Adapts its own learning rate: by 10 % in every step. Weights decay with the latest one."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["params"][0].data.mul_(1 - group["lr"])
        super().step(closure)
        for group in self.param_groups:
            group["lr"] = group["lr"] * 0.9


def learning_rates(rule, *, kind=torch.optim.SGD, scheduled=None, is_several=False):
    """The learning rates in each step of 16, 64, 16 and 32 samples, the base ones after it, and the last weight."""
    model = nn.Linear(1, 1).double()
    nn.init.ones_(model.weight)
    used, base = [], []
    inner = [kind([p], lr=0.1) for p in model.parameters()][: 2 if is_several else 1]
    if scheduled is not None:
        scheduler = scheduled(inner[0])
        inner[0].register_step_post_hook(lambda *_: scheduler.step())
    sampler = vbs.CustomSampler(dataset_size=128, trace=[16, 64, 16, 32], minibatch_size=16)
    optimizer = vbs.CustomOptimizer(inner if is_several else inner[0], sampler, rule=rule, ref_batchsize=16)
    for _ in sampler:
        (0 * model(torch.ones(1, 1, dtype=torch.float64))).sum().backward()
        if optimizer.step():
            used.append(optimizer.current_lr())
            base.append(inner[0].param_groups[0]["lr"])
    return used, base, model.weight.item()


@pytest.mark.parametrize("is_several", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        {"kind": Hypergradient},
        {"scheduled": lambda inner: torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)},  # from the latest one
        {"scheduled": lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 0.9**step)},  # from the first
    ],
)
def test_learning_rate_that_changes_within_the_inner_step_is_kept(change, is_several):
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # from now on torch calls the hooks in its step(), too
    expected = [0.1 * 0.9**step for step in range(5)]
    for rule, scales in ((vbs.rules.ConstantRule(), [1, 1, 1, 1]), (vbs.rules.LinearRule(), [1, 4, 1, 2])):
        used, base, weight = learning_rates(rule, is_several=is_several, **change)
        scaled = [lr * scale for lr, scale in zip(expected, scales, strict=False)]
        assert used == pytest.approx(scaled, rel=1e-15)
        assert base == pytest.approx(expected[1:], rel=1e-15)
        assert weight == pytest.approx(math.prod(1 - lr for lr in scaled) if "kind" in change else 1.0)


def test_hooks_of_a_step_find_the_settings_restored_and_none_of_ours():
    model = network(6, 8, 3)
    inner = sgd(model)
    seen = []
    inner.register_step_post_hook(lambda *_: seen.append(inner.param_groups[0]["lr"]))
    optimizer = make(model, inner, vbs.rules.LinearRule())
    inner.register_step_post_hook(lambda *_: seen.append(inner.param_groups[0]["lr"]))
    train(model, optimizer)
    assert seen == [0.1] * 2 * len(TRACE)
    assert len(inner._optimizer_step_post_hooks) == 2


@pytest.mark.parametrize("number", [0, 1])
def test_state_loaded_into_one_optimizer_is_that_of_the_next_step(number):
    ours, plain = network(6, 8, 3), network(6, 8, 3)
    optimizers, expected = sgd_and_adam(ours), sgd_and_adam(plain)
    optimizer = make(ours, optimizers, vbs.rules.ConstantRule())
    inputs, targets = DATA.tensors
    schedulers = []
    for indices in optimizer.sampler:
        for model in (ours, plain):
            nn.functional.cross_entropy(model(inputs[indices]), targets[indices]).backward()
        if not optimizer.step():
            continue
        for p in plain.parameters():
            p.grad /= optimizer.batch_size // MINIBATCH
        for one in expected:
            one.step()
        plain.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        if not schedulers:
            for one in (optimizers[number], expected[number]):
                one.load_state_dict(copy.deepcopy(one.state_dict()))
                schedulers.append(torch.optim.lr_scheduler.ExponentialLR(one, 0.5))
    assert optimizer.get_lr()[number] < 0.01
    assert optimizer.param_groups[number] is optimizers[number].param_groups[0]
    assert optimizer.state[parts_of(ours)[number][0]] is optimizers[number].state[parts_of(ours)[number][0]]
    torch.testing.assert_close(weights_of(ours), weights_of(plain), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kinds", [(torch.optim.SGD, torch.optim.AdamW), (torch.optim.AdamW, torch.optim.SGD)])
def test_one_cycle_cycles_momentum_only_where_all_optimizers_have_it(kinds):
    model = network(6, 8, 3)
    inner = [kind(part, lr=0.1) for kind, part in zip(kinds, parts_of(model), strict=True)]
    optimizer = make(model, inner, vbs.rules.ConstantRule())
    keys = [set(group) for group in optimizer.param_groups]
    cycle = torch.optim.lr_scheduler.OneCycleLR
    with pytest.raises(ValueError, match="must support momentum or beta1 with `cycle_momentum` option enabled"):
        cycle(optimizer, max_lr=0.4, total_steps=10)
    scheduler = cycle(optimizer, max_lr=0.4, total_steps=10, cycle_momentum=False)
    train(model, optimizer, num_steps=2)
    scheduler.step()
    assert [set(group) - found for group, found in zip(optimizer.param_groups, keys, strict=True)] == [
        {"initial_lr", "max_lr", "min_lr"}
    ] * 2
    alike = network(6, 8, 3)
    both = [torch.optim.SGD(part, lr=0.1, momentum=0.9) for part in parts_of(alike)]
    cycle(make(alike, both, vbs.rules.ConstantRule()), max_lr=0.4, total_steps=10)
    assert [one.param_groups[0]["momentum"] for one in both] == [0.95, 0.95]


@pytest.mark.parametrize("is_several", [False, True])
def test_group_without_a_learning_rate_raises(is_several):
    model = network(6, 8, 3)
    inner = sgd_and_adam(model)[1]
    inner.param_groups[0]["lr"] = None
    with pytest.raises(ValueError, match=r"^`inner` must have a learning rate in each parameter group, .* got None: "):
        make(model, [inner] if is_several else inner, vbs.rules.ConstantRule())


def test_optimizer_without_parameters_raises():
    with pytest.raises(ValueError, match=r"^`inner` must have parameters, got only empty groups$"):
        make(network(6, 8, 3), torch.optim.SGD([{"params": []}], lr=0.1), vbs.rules.ConstantRule())


@pytest.mark.parametrize("rule", [vbs.rules.LinearRule, vbs.rules.AdaScaleRule, vbs.rules.RootRule])
def test_empty_group_has_no_effect(rule):
    found = []
    for empty in ([], [{"params": []}]):
        model = network(6, 8, 3)
        optimizer = make(model, torch.optim.SGD([*empty, {"params": model.parameters()}], lr=0.1), rule())
        train(model, optimizer)
        found.append((weights_of(model), optimizer.factor(len(empty))))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
