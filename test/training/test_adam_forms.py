"""The forms of the rule for Adam, with the optimizers of torch: each step is the one that Adam should have made."""

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
    """Give each minibatch of the trace its gradients, and yield after each update."""
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
@pytest.mark.parametrize("seed", [0, 1])
def test_every_step_of_a_constant_gradient_is_the_learning_rate(kind, form, options, seed):
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
def test_a_run_is_that_of_adam_written_out_with_the_settings_of_each_step(kind, form):
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
def test_everything_is_put_back_when_a_step_fails(form):
    class Failing(torch.optim.AdamW):
        def step(self, closure=None):
            group = self.param_groups[0]
            seen.append((group["betas"], group["weight_decay"]))
            raise ArithmeticError("no step")

    seen = []
    p = nn.Parameter(torch.zeros(1))
    optimizer = make([p], Failing, form, [64], betas=(0.5, 0.75), weight_decay=0.25)
    before = dict(optimizer.param_groups[0])
    with pytest.raises(ArithmeticError):
        next(updates(optimizer, torch.ones_like))
    betas = (0.0, 0.0) if form == "sde" else (0.5**4, 0.75**4)
    assert seen == [(betas, 0.5)]
    assert optimizer.param_groups[0] == before


def test_an_adamw_from_elsewhere_is_known_by_its_name():
    class OtherAdamW(torch.optim.Adam):
        def step(self, closure=None):
            (group,) = self.param_groups
            seen.append(group["weight_decay"])

    seen = []
    p = nn.Parameter(torch.zeros(1))
    optimizer = make([p], OtherAdamW, "sde", [64], weight_decay=0.25)
    optimizer.param_groups[0].pop("decoupled_weight_decay", None)
    next(updates(optimizer, torch.ones_like))
    assert seen == [0.5]
    assert "decoupled_weight_decay" not in optimizer.param_groups[0]


def test_progress_counts_the_samples_in_units_of_the_reference():
    optimizer = make([nn.Parameter(torch.zeros(1))], torch.optim.Adam, "half-life", trace(3))
    for _ in updates(optimizer, torch.ones_like):
        assert optimizer.progress == pytest.approx(optimizer.samples_done / REFERENCE)
