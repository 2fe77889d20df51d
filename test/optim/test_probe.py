"""Inner optimizers are tried when they are wrapped: updates must have the form that the rule assumes."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import variable_batch_size as vbs
from variable_batch_size.optim import probe


def wrap(kind, rule, *, shape=(3, 2), **settings):
    """The inner optimizer, wrapped."""
    inner = kind([nn.Parameter(torch.ones(shape))], **{"lr": 0.01, **settings})
    sampler = vbs.CustomSampler(dataset_size=64, trace=[8, 16], minibatch_size=8)
    return vbs.CustomOptimizer(inner, sampler, rule=rule, ref_batchsize=8)


class Lars(torch.optim.SGD):
    """Divides each gradient by its norm, and multiplies it by that of the parameter."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad * 0.001 * p.detach().norm() / p.grad.norm()
        super().step()


class MomentumOfUpdates(torch.optim.Optimizer):
    """SGD whose momentum is in units of updates: a learning rate counts for the gradient of its own step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.mul_(0.9).add_(p.grad, alpha=group["lr"])
                p.sub_(buffer)


class Uncorrected(torch.optim.Optimizer):
    """Adam without any correction of its bias, as some have it."""

    corrects = False

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (beta1, beta2), eps = group["betas"], group["eps"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].lerp_(p.grad**2, 1 - beta2)
                first, second = state["exp_avg"], state["exp_avg_sq"]
                if self.corrects:
                    first, second = first / (1 - beta1 ** state["step"]), second / (1 - beta2 ** state["step"])
                p.sub_(group["lr"] * first / (second.sqrt() + eps))


class Corrected(Uncorrected):
    corrects = True


class LambLike(Corrected):
    """Makes every update of Adam as large as the parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            before = [p.clone() for p in group["params"]]
            super().step()
            for p, old in zip(group["params"], before, strict=True):
                p.copy_(old + (p - old) / (p - old).norm() * group["lr"] * old.norm())


LINEAR = [vbs.rules.LinearRule, vbs.rules.RootRule, vbs.rules.AdaScaleRule]


@pytest.mark.parametrize("rule", LINEAR)
@pytest.mark.parametrize("kind", [torch.optim.ASGD, torch.optim.Rprop])
def test_optimizers_whose_updates_do_not_follow_the_learning_rate_are_refused(kind, rule):
    message = (
        rf"^`inner` must make updates in proportion to the learning rate of their step, .* {kind.__name__} are not"
    )
    with pytest.raises(ValueError, match=message):
        wrap(kind, rule())
    wrap(kind, vbs.rules.ConstantRule())


KINDS = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {"capturable": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adagrad, {"lr_decay": 0.1}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (MomentumOfUpdates, {}),
    (Lars, {}),
]


@pytest.mark.parametrize("lr", [0.01, 0.0, torch.tensor(0.01)], ids=["lr", "lr of 0", "lr in a tensor"])
@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_optimizers_whose_updates_follow_the_learning_rate_are_accepted(kind, settings, lr):
    for rule in LINEAR:
        wrap(kind, rule(), lr=lr, **settings)


@pytest.mark.parametrize(("kind", "settings"), [*KINDS[:3], (MomentumOfUpdates, {})])
def test_summed_gradients_are_for_optimizers_whose_updates_grow_with_them(kind, settings):
    wrap(kind, vbs.rules.LinearMomentumRule(), **settings)


def test_summed_gradients_are_refused_where_the_optimizer_divides_by_their_norm():
    with pytest.raises(ValueError, match=r"^`inner` must be an SGD-style optimizer, got SGD: the rule sums gradients"):
        wrap(Lars, vbs.rules.LinearMomentumRule())


@pytest.mark.parametrize("kind", [Uncorrected, LambLike])
def test_adam_rule_refuses_what_does_not_correct_as_adam_does(kind):
    message = rf"^`inner` must use the bias correction of Adam and AdamW, got {kind.__name__}, .*use RootRule, or set"
    with pytest.raises(ValueError, match=message):
        wrap(kind, vbs.rules.AdamRule())
    wrap(kind, vbs.rules.RootRule())


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.9), (0.99, 0.9)])
@pytest.mark.parametrize("eps", [1e-8, 0.1])
@pytest.mark.parametrize("kind", [Corrected, torch.optim.Adam, torch.optim.AdamW])
def test_adam_rule_accepts_what_corrects_as_adam_does(kind, betas, eps):
    wrap(kind, vbs.rules.AdamRule(), betas=betas, eps=eps)


def test_adamscale_refuses_an_optimizer_without_second_moments():
    class Signs(Corrected):
        def step(self, closure=None):
            super().step()
            for state in self.state.values():
                state["squares"] = state.pop("exp_avg_sq")

    with pytest.raises(ValueError, match=r"^`inner` must keep second moments in its state as `exp_avg_sq`"):
        wrap(Signs, vbs.rules.AdamScaleRule())


@pytest.mark.parametrize(("betas", "eps"), [((0.9, 0.9, 0.9), 1e-8), ((0.9, 0.9), (1e-8, 1e-3))])
@pytest.mark.parametrize("rule", [vbs.rules.AdamRule, vbs.rules.AdamScaleRule])
def test_betas_and_eps_other_than_adams_are_refused(betas, eps, rule):
    with pytest.raises(
        ValueError, match=r"^`inner` must be an Adam-style optimizer .* got Corrected with betas .* eps"
    ):
        wrap(Corrected, rule(), betas=betas, eps=eps)


def test_what_is_known_to_fit_is_not_tried():
    class Known(vbs.rules.RootRule.__base__):
        checks_inner = False

        def factor(self, step):
            return step.scale

    wrap(torch.optim.Rprop, Known())
    rule = vbs.rules.AdamRule()
    rule.checks_inner = False
    wrap(Uncorrected, rule)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


class NeedsMore(torch.optim.SGD):
    def __init__(self, params, lr, number):
        super().__init__(params, lr)
        self.number = number


@pytest.mark.parametrize(("kind", "settings"), [(NeedsClosure, {}), (NeedsMore, {"number": 1})])
def test_what_cannot_be_tried_is_accepted(kind, settings):
    wrap(kind, vbs.rules.LinearRule(), **settings)


def test_trying_changes_no_optimizer_or_random_numbers_and_calls_no_hooks():
    class Noisy(torch.optim.Optimizer):
        def __init__(self, params, lr=0.1, seen=()):
            super().__init__(params, {"lr": lr, "seen": list(seen)})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                group["seen"].append(torch.rand(1).item())
                for p in group["params"]:
                    p.sub_(group["lr"] * (p.grad + group["seen"][-1]))

    p = nn.Parameter(torch.ones(3))
    inner = Noisy([p])
    calls = []
    inner.register_step_post_hook(lambda *arguments: calls.append(arguments))
    handle = register_optimizer_step_pre_hook(lambda *arguments: calls.append(arguments))
    torch.optim.lr_scheduler.StepLR(inner, 1)
    torch.manual_seed(3)
    before, groups = torch.get_rng_state(), [dict(group) for group in inner.param_groups]
    try:
        assert probe.follows_lr(inner, inner.param_groups[0]) is None  # it is random
    finally:
        handle.remove()
    assert torch.equal(torch.get_rng_state(), before)
    assert inner.param_groups[0]["seen"] == []
    assert [dict(group) for group in inner.param_groups] == groups
    assert (p.tolist(), p.grad, dict(inner.state), calls) == ([1, 1, 1], None, {}, [])


def test_groups_that_differ_in_more_than_the_learning_rate_are_tried():
    class Mixed(torch.optim.SGD):
        """Ignores the learning rate in some groups."""

        def __init__(self, params, lr=0.1, fixed=False):
            super().__init__(params, lr)
            self.defaults["fixed"] = fixed
            for group in self.param_groups:
                group.setdefault("fixed", fixed)

        def step(self, closure=None):
            found = [group["lr"] for group in self.param_groups]
            for group in self.param_groups:
                group["lr"] = 0.1 if group["fixed"] else group["lr"]
            super().step()
            for group, lr in zip(self.param_groups, found, strict=True):
                group["lr"] = lr

    sampler = vbs.CustomSampler(dataset_size=64, trace=8, minibatch_size=8)
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    for is_fixed in (False, True):
        inner = Mixed([{"params": [first]}, {"params": [second], "lr": 0.2, "fixed": is_fixed}])
        if is_fixed:
            with pytest.raises(ValueError, match="in proportion to the learning rate"):
                vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=8)
        else:
            vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=8)


def test_many_groups_of_one_kind_are_tried_once():
    made = []

    class Counted(torch.optim.AdamW):
        def __init__(self, params, lr=0.1, betas=(0.9, 0.99), eps=1e-8):
            super().__init__(params, lr, betas, eps)
            made.append(self)

    for number in (1, 30):
        inner = Counted([{"params": [nn.Parameter(torch.ones(2))], "lr": 0.1 / (1 + i)} for i in range(number)])
        made.clear()
        probe.check_inner(vbs.rules.AdamRule(), inner)
        assert len(made) == 9


class BetasRule(vbs.Rule):
    """Changes betas, and does not ask for a correction."""

    def factor(self, step):
        return 1.0

    def settings(self, group, step, factor):
        return {"betas": (0.5, 0.5) if step.batch_size == 8 else (0.5, 0.75)}


@pytest.mark.parametrize(
    ("kind", "is_kept"), [(torch.optim.Adam, False), (Uncorrected, True), (torch.optim.NAdam, True)]
)
def test_only_the_bias_correction_of_adam_is_adapted_to_betas_of_a_rule(kind, is_kept):
    seen, parameters = [], []

    class Watched(kind):
        def step(self, closure=None):
            (group,) = self.param_groups
            if [id(p) for p in group["params"]] == [id(p) for p in parameters]:
                seen.append((group["lr"], group["betas"]))
            super().step()

    optimizer = wrap(Watched, BetasRule(), betas=(0.9, 0.99))
    parameters += optimizer.parameters()
    (p,) = parameters
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert [betas for _, betas in seen] == [(0.5, 0.5), (0.5, 0.75)]
    assert ({found for found, _ in seen} == {0.01}) is is_kept
