"""The forms of the rule for Adam with torch's optimizers: each step equals that of Adam written out."""

import copy
import pickle
import random

import pytest
import torch
from torch import nn

import variable_batch_size as vbs

FORMS = pytest.mark.parametrize("form", ["sde", "half-life"])
MINIBATCH = 4
REFERENCE = 16


def trace(seed):
    """Scales from 1/4 to 32, at which betas of 0.9 and 0.95 are 0 in the form "sde"."""
    draw = random.Random(seed)
    return [MINIBATCH * draw.choice([1, 2, 3, 4, 5, 16, 40, 128]) for _ in range(25)]


def make(groups, kind, form, sizes, **options):
    sampler = vbs.CustomSampler(dataset_size=512, trace=sizes, minibatch_size=MINIBATCH, on_end="cycle")
    inner = kind(groups, lr=1e-3, **options)
    return vbs.AdamRuleOptimizer(inner, sampler, ref_batchsize=REFERENCE, form=form)


def updates(optimizer, gradient_of):
    """Set the gradients of each minibatch of the trace, and yield after each update."""
    sampler = optimizer.sampler
    for epoch in range(50):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for _ in sampler:
            for p in optimizer.parameters():
                p.grad = gradient_of(p)
            if optimizer.step():
                yield
            if optimizer.steps_done == 25:
                return


@FORMS
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW], ids=["Adam", "AdamW"])
@pytest.mark.parametrize(
    "options",
    [{"foreach": False}, {"foreach": True}, {"fused": True}, {"amsgrad": True}, {"amsgrad": True, "foreach": True}],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_every_step_of_a_constant_gradient_has_the_size_of_the_learning_rate(kind, form, options, seed):
    first, second, third = (nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(3))
    groups = [{"params": [first, second]}, {"params": [third], "lr": 0.5, "betas": (0.5, 0.9999)}]
    sizes = trace(seed)
    optimizer = make(groups, kind, form, sizes, betas=(0.9, 0.95), eps=1e-30, weight_decay=0.0, **options)
    constant = {first: -3.0, second: 1e-3, third: 7.0}
    seen = set()
    before = {p: p.detach().clone() for p in constant}
    for _ in updates(optimizer, lambda p: torch.full_like(p, constant[p])):
        scale = optimizer.batch_size / REFERENCE
        seen.add(scale)
        for p, lr in ((first, 1e-3), (second, 1e-3), (third, 0.5)):
            step = (before[p] - p.detach()) / (lr * scale**0.5)
            assert step.tolist() == pytest.approx([1.0 if constant[p] > 0 else -1.0] * 3, rel=1e-9)
            before[p] = p.detach().clone()
    assert min(seen) < 1
    assert max(seen) >= 20  # where a beta of 0.95 is 0 in the form "sde"
    assert optimizer.steps_done == len(sizes)


@FORMS
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW], ids=["Adam", "AdamW"])
def test_run_equals_adam_written_out_with_the_settings_of_each_step(kind, form):
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(5, dtype=torch.float64))
    w = p.detach().clone()
    sizes = trace(2)
    optimizer = make([p], kind, form, sizes, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
    gradients, first, second, products = [], torch.zeros_like(w), torch.zeros_like(w), [1.0, 1.0]

    def gradient_of(p):
        gradients.append(torch.randn_like(p))
        return gradients[-1].clone()

    for _ in updates(optimizer, gradient_of):
        kappa = optimizer.batch_size / REFERENCE
        lr, eps = 1e-3 * kappa**0.5, 1e-3 / kappa**0.5
        if form == "sde":
            betas = [max(0.0, 1 - kappa * (1 - beta)) for beta in (0.9, 0.95)]
        else:
            betas = [beta**kappa for beta in (0.9, 0.95)]
        g = torch.stack(gradients).mean(0)
        gradients.clear()
        if kind is torch.optim.Adam:
            g = g + 0.1 * w
        else:
            w = w * (1 - lr * 0.1 * kappa**0.5)
        first = betas[0] * first + (1 - betas[0]) * g
        second = betas[1] * second + (1 - betas[1]) * g**2
        products = [product * beta for product, beta in zip(products, betas, strict=True)]
        w = w - lr * (first / (1 - products[0])) / ((second / (1 - products[1])).sqrt() + eps)
        assert p.tolist() == pytest.approx(w.tolist(), rel=1e-12)
    settings = optimizer.param_groups[0]
    assert (settings["lr"], settings["betas"], settings["eps"]) == (1e-3, (0.9, 0.95), 1e-3)
    assert settings["weight_decay"] == 0.1


@FORMS
def test_settings_are_restored_when_a_step_fails(form):
    class Failing(torch.optim.AdamW):
        def step(self, closure=None):
            group = self.param_groups[0]
            seen.append((group["betas"], group["weight_decay"]))
            raise ArithmeticError("no step")

    seen = []
    p = nn.Parameter(torch.zeros(1))
    optimizer = make([p], Failing, form, [64], betas=(0.5, 0.75), weight_decay=0.25)
    seen.clear()  # when it was wrapped
    before = dict(optimizer.param_groups[0])
    with pytest.raises(ArithmeticError):
        next(updates(optimizer, torch.ones_like))
    betas = (0.0, 0.0) if form == "sde" else (0.5**4, 0.75**4)
    assert seen == [(betas, 0.5)]
    assert optimizer.param_groups[0] == before


def test_adamw_of_another_library_is_detected_by_its_name():
    class OtherAdamW(torch.optim.Adam):
        def step(self, closure=None):
            (group,) = self.param_groups
            seen.append(group["weight_decay"])

    seen = []
    p = nn.Parameter(torch.zeros(1))
    optimizer = make([p], OtherAdamW, "sde", [64], weight_decay=0.25)
    seen.clear()  # when it was wrapped
    optimizer.param_groups[0].pop("decoupled_weight_decay", None)
    next(updates(optimizer, torch.ones_like))
    assert seen == [0.5]
    assert "decoupled_weight_decay" not in optimizer.param_groups[0]


def test_progress_counts_samples_in_units_of_the_reference():
    optimizer = make([nn.Parameter(torch.zeros(1))], torch.optim.Adam, "half-life", trace(3))
    for _ in updates(optimizer, torch.ones_like):
        assert optimizer.progress == pytest.approx(optimizer.samples_done / REFERENCE)


# ------------------------------------------------------------------------ Adam's state decides, whatever becomes of it


class Written:
    """Adam with betas that vary, written out for one parameter."""

    def __init__(self, w, betas):
        self.w, self.betas = w.clone(), betas
        self.reset()

    def reset(self):
        self.first, self.second, self.products = torch.zeros_like(self.w), torch.zeros_like(self.w), [1.0, 1.0]
        self.num_updates = 0

    def step(self, g, kappa, lr=1e-2, eps=1e-3, *, scales_betas=True):
        betas = [1 - kappa * (1 - beta) if scales_betas else beta for beta in self.betas]
        self.first = betas[0] * self.first + (1 - betas[0]) * g
        self.second = betas[1] * self.second + (1 - betas[1]) * g**2
        self.products = [product * beta for product, beta in zip(self.products, betas, strict=True)]
        self.num_updates += 1
        eps = eps / kappa**0.5 if scales_betas else eps
        missing = self.products if scales_betas else [beta**self.num_updates for beta in betas]  # as torch's Adam
        change = (self.first / (1 - missing[0])) / ((self.second / (1 - missing[1])).sqrt() + eps)
        self.w = self.w - lr * kappa**0.5 * change


class Run:
    """One parameter with the rule for Adam, compared with :class:`Written`."""

    def __init__(self, **options):
        torch.manual_seed(0)
        self.p = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.inner = torch.optim.Adam([self.p], lr=1e-2, betas=(0.9, 0.99), eps=1e-3, **options)
        self.written = Written(self.p.detach(), (0.9, 0.99))
        self.wrap(vbs.rules.AdamRule())

    def wrap(self, rule):
        self.rule = rule
        sampler = vbs.CustomSampler(dataset_size=4096, trace=[16, 64, 16, 128, 32] * 8, minibatch_size=16)
        self.optimizer = vbs.CustomOptimizer(self.inner, sampler, rule=rule, ref_batchsize=16)

    def steps(self, number):
        done = self.optimizer.steps_done + number
        gradients = []
        while self.optimizer.steps_done < done:
            gradients.append(torch.randn_like(self.p))
            self.p.grad = gradients[-1].clone()
            if self.optimizer.step():
                is_adam = isinstance(self.rule, vbs.rules.AdamRule)
                self.written.step(torch.stack(gradients).mean(0), len(gradients), scales_betas=is_adam)
                gradients.clear()
        assert self.p.tolist() == pytest.approx(self.written.w.tolist(), rel=1e-10)


def test_adam_begins_anew_when_its_state_is_cleared():
    run = Run()
    run.steps(7)
    run.inner.state.clear()
    run.written.reset()
    run.steps(7)


@pytest.mark.parametrize("is_ours", [True, False], ids=["of the optimizer", "of the inner optimizer"])
def test_a_state_from_before_brings_its_betas_back(is_ours):
    run = Run()
    run.steps(4)
    owner = run.optimizer if is_ours else run.inner
    weights, state, written = run.p.detach().clone(), copy.deepcopy(owner.state_dict()), copy.deepcopy(run.written)
    run.steps(5)
    with torch.no_grad():
        run.p.copy_(weights)
    owner.load_state_dict(state)
    run.written = written
    run.steps(5)


def test_updates_of_another_rule_in_between_count_with_the_betas_of_the_group():
    run = Run()
    run.steps(6)
    run.wrap(vbs.rules.RootRule())
    run.steps(5)
    run.wrap(vbs.rules.AdamRule())
    run.steps(6)


def test_the_same_adam_in_a_second_optimizer_keeps_its_betas():
    run = Run()
    run.steps(6)
    run.wrap(vbs.rules.AdamRule())
    run.steps(6)


def test_a_copied_or_pickled_adam_keeps_its_betas():
    for copied in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        run = Run()
        run.steps(6)
        run.p, run.inner = copied((run.p, run.inner))
        run.wrap(vbs.rules.AdamRule())
        run.steps(6)


def test_the_state_of_a_single_parameter_may_be_reset():
    run = Run()
    other = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    run.inner.add_param_group({"params": [other]})
    run.wrap(vbs.rules.AdamRule())
    run.steps(5)
    del run.inner.state[run.p]
    run.written.reset()
    run.steps(5)
