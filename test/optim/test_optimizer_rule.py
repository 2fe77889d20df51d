"""Rules and policies as recipes: every optimizer and every sampler has its own copy of what it was given."""

import copy
import threading

import pytest
import torch
from torch import nn

import variable_batch_size as vbs


class Toy:
    """A small run, in which nothing but the rule or policy comes from outside."""

    def __init__(self, rule, *, trace=32, seed=0, kinds=1):
        generator = torch.Generator().manual_seed(seed)
        self.data = torch.randn(256, 6, generator=generator, dtype=torch.float64)
        self.target = torch.randint(0, 3, (256,), generator=generator)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 2)
        inner = [torch.optim.SGD(self.model[i].parameters(), lr=0.05) for i in (0, 2)]
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.05) if kinds == 1 else inner
        self.sampler = vbs.CustomSampler(dataset_size=256, trace=trace, minibatch_size=8)
        self.optimizer = vbs.CustomOptimizer(self.inner, self.sampler, rule=rule, ref_batchsize=8, model=self.model)

    def train(self, epochs=2, each=lambda: None):
        for epoch in self.optimizer.epochs(epochs):
            for indices in self.sampler:
                nn.functional.cross_entropy(self.model(self.data[indices]), self.target[indices]).backward()
                if self.optimizer.step():
                    each()
            del epoch
        return self

    @property
    def numbers(self):
        optimizer = self.optimizer
        return optimizer.gain(64), optimizer.progress, [p.tolist() for p in self.model.parameters()]


@pytest.mark.parametrize("kind", [vbs.rules.AdaScaleRule, vbs.rules.SurgeRule])
def test_one_rule_for_a_sweep_measures_every_run_by_itself(kind):
    rule = kind()
    for seed in (0, 1, 2):
        assert Toy(rule, seed=seed).train().numbers == Toy(kind(), seed=seed).train().numbers
    assert rule.noise() is None


def test_one_rule_for_two_optimizers_at_once_measures_each_by_itself():
    rule = vbs.rules.AdaScaleRule()
    first, second = Toy(rule, seed=0), Toy(rule, seed=1)
    for epoch in range(2):
        for toy in (first, second):
            toy.optimizer.set_epoch(epoch)
        for mine, other in zip(first.sampler, second.sampler, strict=True):
            for toy, indices in ((first, mine), (second, other)):
                nn.functional.cross_entropy(toy.model(toy.data[indices]), toy.target[indices]).backward()
                toy.optimizer.step()
    for seed, toy in enumerate((first, second)):
        assert toy.numbers == Toy(vbs.rules.AdaScaleRule(), seed=seed).train().numbers


def test_the_same_rule_for_each_of_several_optimizers_measures_each_by_itself():
    rule = vbs.rules.AdaScaleRule()
    same = Toy([rule, rule], kinds=2).train()
    other = Toy([vbs.rules.AdaScaleRule(), vbs.rules.AdaScaleRule()], kinds=2).train()
    assert same.numbers == other.numbers
    of_layers = [one.noise() for one in same.optimizer.rule.rules]
    assert of_layers[0] != of_layers[1]
    assert of_layers == [one.noise() for one in other.optimizer.rule.rules]


def test_state_that_a_rule_was_given_before_is_kept():
    trained = Toy(vbs.rules.AdaScaleRule()).train()
    rule = vbs.rules.AdaScaleRule()
    rule.load_state_dict(trained.optimizer.rule.state_dict())
    toy = Toy(rule)
    assert toy.optimizer.noise == trained.optimizer.noise is not None
    toy.train(epochs=1)
    assert rule.noise() == trained.optimizer.noise != toy.optimizer.noise


def test_a_copied_optimizer_measures_by_itself():
    toy = Toy(vbs.rules.AdaScaleRule()).train(epochs=1)
    before, copied = toy.optimizer.noise, copy.deepcopy(toy)
    copied.train(epochs=2)
    assert toy.optimizer.noise == before != copied.optimizer.noise


class NormRule(vbs.Rule):
    """A rule that reads the model it is used with, and counts."""

    def __init__(self, model=None):
        self.model, self.seen = model, []

    def factor(self, step):
        self.seen.append(float(sum(p.detach().square().sum() for p in self.model.parameters())))
        return 1.0


def test_the_copy_of_a_rule_refers_to_the_model_and_parameters_of_its_optimizer():
    toy = Toy(vbs.rules.ConstantRule())
    rule = NormRule(toy.model)
    sampler = vbs.CustomSampler(dataset_size=256, trace=32, minibatch_size=8)
    for model in (toy.model, None):
        toy.optimizer = vbs.CustomOptimizer(toy.inner, sampler, rule=rule, ref_batchsize=8, model=model)
        toy.sampler = sampler
        toy.train(epochs=1)
        assert len(set(toy.optimizer.rule.seen)) >= 8
    assert toy.optimizer.rule.model[0].weight is toy.model[0].weight
    assert rule.seen == []


def test_a_rule_that_cannot_be_copied_is_refused():
    rule = NormRule()
    rule.lock = threading.Lock()
    message = r"^every run has its own copy of NormRule, which cannot be copied .*: implement NormRule.__deepcopy__$"
    with pytest.raises(ValueError, match=message):
        Toy(rule)


def test_one_policy_for_two_samplers_decides_for_each_by_itself():
    policy = vbs.policies.OnPlateau(patience=2, max_batch_size=128, every=2, lead=1)
    sizes = []
    for _ in range(2):
        toy = Toy(vbs.rules.ConstantRule(), trace=policy)
        toy.train(each=lambda toy=toy: toy.sampler.policy.tell(1.0))
        sizes.append(list(toy.sampler.schedule.trace)[: toy.optimizer.steps_done])
    assert sizes[0] == sizes[1]
    assert sizes[0][0] == 8 < sizes[0][-1]
    assert policy.state_dict()["best"] is None
    first, second = (Toy(vbs.rules.ConstantRule(), trace=policy).sampler.policy for _ in range(2))
    first.tell(0.5)
    assert (first.state_dict()["best"], second.state_dict()["best"]) == (0.5, None)


def test_a_value_for_a_policy_that_a_sampler_has_copied_is_refused():
    policy = vbs.policies.OnPlateau()
    sampler = vbs.CustomSampler(dataset_size=64, trace=policy, minibatch_size=8)
    with pytest.raises(RuntimeError, match=r"^a sampler decides with its own copy .*sampler.policy.tell\(value\)$"):
        policy.tell(1.0)
    sampler.policy.tell(1.0)
    vbs.CustomSampler(dataset_size=64, trace=sampler.policy, minibatch_size=8).policy.tell(1.0)


def test_a_function_that_decides_is_not_copied():
    class Trainer:
        asked = 0

        def choose(self, situation):
            self.asked += 1
            return 16

    trainer = Trainer()
    for trace in (trainer.choose, vbs.policies.FunctionPolicy(trainer.choose)):
        Toy(vbs.rules.ConstantRule(), trace=trace)
    assert trainer.asked == 2
    assert vbs.CustomSampler(dataset_size=64, trace=16, minibatch_size=8).policy is None


class RootWithDecay(vbs.Rule):
    """Scales the weight decay, and leaves the learning rate to the library."""

    def factor(self, step):
        return step.scale**0.69

    def settings(self, group, step, factor):
        return {"weight_decay": group["weight_decay"] * factor}


def one_update(rule):
    p = nn.Parameter(torch.ones(1, dtype=torch.float64))
    inner = torch.optim.SGD([p], lr=0.001, weight_decay=0.5)
    sampler = vbs.CustomSampler(dataset_size=32, trace=32, minibatch_size=8)
    optimizer = vbs.CustomOptimizer(inner, sampler, rule=rule, ref_batchsize=8)
    for _ in range(4):
        p.grad = torch.ones_like(p)
        optimizer.step()
    return 1 - p.item(), optimizer.current_lr()


def test_a_rule_with_settings_of_its_own_keeps_its_factor():
    factor = 4**0.69
    moved, lr = one_update(RootWithDecay())
    assert lr == pytest.approx(0.001 * factor)
    assert moved == pytest.approx(0.001 * factor * (1 + 0.5 * factor))


class Returning(vbs.Rule):
    def __init__(self, factor=1.0, settings=None):
        self.returned, self.returned_settings = factor, settings

    def factor(self, step):
        return self.returned

    def settings(self, group, step, factor):
        return self.returned_settings or {}


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -0.5, "2", None, 1j])
def test_a_factor_that_is_negative_or_not_finite_is_refused(factor):
    with pytest.raises(ValueError, match=r"^the factor of Returning must be a finite number of at least 0, got .* 32$"):
        one_update(Returning(factor))
    assert one_update(Returning(torch.ones(()).numpy() * 3))[1] == pytest.approx(0.003)


@pytest.mark.parametrize("settings", [{"betas": (0.5, 0.5)}, [0.1]])
def test_settings_that_the_inner_optimizer_does_not_have_are_refused(settings):
    with pytest.raises(ValueError, match=r"^Returning.settings must return .* \(lr, momentum, .*\), got "):
        one_update(Returning(settings=settings))


def test_a_learning_rate_among_the_settings_counts():
    assert one_update(Returning(3.0, {"lr": 0.02})) == pytest.approx((0.02 * 1.5, 0.02))
