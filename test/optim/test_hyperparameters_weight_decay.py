"""Weight decay per sample under each rule, with torch's optimizers."""

import math

import pytest
import torch
from torch import nn

import variable_batch_size as vbs

REFERENCE = 4
NUM_UPDATES = 32
LR, DECAY = 1e-3, 1e-3
HAS_MUON = hasattr(torch.optim, "Muon")  # since torch 2.9


def run(weight, inner, rule, scale, gradient_of=torch.zeros_like, *, num_samples, minibatch_size=2):
    """Train a weight on `num_samples` samples at one batch size; yields after each update."""
    sampler = vbs.CustomSampler(num_samples, trace=int(scale * REFERENCE), minibatch_size=minibatch_size)
    optimizer = vbs.CustomOptimizer(inner, sampler, rule=rule, ref_batchsize=REFERENCE)
    for _ in sampler:
        weight.grad = gradient_of(weight)
        if optimizer.step():
            yield


def decay_per_sample(kind, rule, scale, **options):
    """The logarithmic decay of a weight per sample, over the second half of a run without a gradient."""
    weight = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    inner = kind([weight], lr=LR, weight_decay=DECAY, **options)
    size = int(scale * REFERENCE)  # in two minibatches, or one: without a gradient their number plays no part
    updates = run(weight, inner, rule, scale, num_samples=NUM_UPDATES * size, minibatch_size=max(2, size // 2))
    logarithms = [math.log(weight[0, 0].item()) for _ in updates]
    assert len(logarithms) == NUM_UPDATES
    half = NUM_UPDATES // 2
    return -(logarithms[-1] - logarithms[half - 1]) / (size * half)


SCALES = pytest.mark.parametrize("scale", [0.5, 2, 16])


@SCALES
@pytest.mark.parametrize(
    ("rule", "power"), [("linear", 0), ("linear_momentum", 0), ("root", -0.5), ("constant", -1)], ids=str
)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_decay_per_sample_of_sgd_is_constant_only_under_the_linear_rules(rule, power, scale, momentum):
    found = decay_per_sample(torch.optim.SGD, vbs.rules.make_rule(rule), scale, momentum=momentum)
    # momentum accumulates a coupled decay like the gradient
    at_reference = LR * DECAY / (1 - momentum) / REFERENCE
    assert found == pytest.approx(at_reference * scale**power, rel=1e-4)


@SCALES
@pytest.mark.parametrize("form", ["sde", "half-life"])
@pytest.mark.parametrize(("scales", "power"), [(True, 0), (False, -0.5)], ids=["scaled", "as it is"])
def test_decay_per_sample_of_adamw_is_constant_if_its_decay_is_scaled(form, scale, scales, power):
    rule = vbs.rules.AdamRule(form=form, scales_weight_decay=scales)
    found = decay_per_sample(torch.optim.AdamW, rule, scale)
    assert found == pytest.approx(LR * DECAY / REFERENCE * scale**power, rel=1e-4)


@pytest.mark.skipif(not HAS_MUON, reason="this torch has no Muon")
@SCALES
@pytest.mark.parametrize(("scales", "power"), [(True, 0), (False, -0.5)], ids=["scaled", "as it is"])
def test_decay_per_sample_of_muon_is_constant_if_its_decay_is_scaled(scale, scales, power):
    found = decay_per_sample(torch.optim.Muon, vbs.rules.MuonRule(scales_weight_decay=scales), scale)
    assert found == pytest.approx(LR * DECAY / REFERENCE * scale**power, rel=1e-4)


@pytest.mark.parametrize("form", ["sde", "half-life"])
@pytest.mark.parametrize("scale", [2, 8])
def test_decay_of_plain_adam_needs_no_scaling_with_a_noisy_gradient(form, scale):
    """Noise and decay are divided by the root of a second moment that falls as 1/κ: the decay grows as √κ."""

    def noise(weight):  # and its opposite, so that the mean of all weights has no noise
        drawn = torch.randn(len(weight) // 2, dtype=weight.dtype)
        return torch.cat([drawn, -drawn])

    def mean_after(scale):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.ones(4000, dtype=torch.float64))
        inner = torch.optim.Adam([weight], lr=1e-5, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-12)
        list(run(weight, inner, vbs.rules.AdamRule(form=form), scale, gradient_of=noise, num_samples=512))
        return 1 - weight.mean().item()

    assert mean_after(scale) == pytest.approx(mean_after(1), rel=0.05)


# ----------------------------------------------------------------------------------------------------------------- Muon


@pytest.mark.skipif(not HAS_MUON, reason="this torch has no Muon")
def test_muon_equals_plain_muon_with_the_settings_of_each_step():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 3, dtype=torch.float64))
    plain = nn.Parameter(weight.detach().clone())
    sizes = [4, 16, 2, 64, 4, 8]
    inner = torch.optim.Muon([weight], lr=0.02, weight_decay=0.1, momentum=0.9)
    other = torch.optim.Muon([plain], lr=0.02, weight_decay=0.1, momentum=0.9)
    sampler = vbs.CustomSampler(dataset_size=128, trace=sizes, minibatch_size=2)
    optimizer = vbs.CustomOptimizer(inner, sampler, rule=vbs.rules.MuonRule(), ref_batchsize=REFERENCE)
    gradient = torch.randn_like(weight)
    for _ in sampler:
        weight.grad = gradient.clone()
        if optimizer.step():
            root = math.sqrt(sizes[optimizer.steps_done - 1] / REFERENCE)
            other.param_groups[0].update(lr=0.02 * root, weight_decay=0.1 * root)
            plain.grad = gradient
            other.step()
            assert torch.equal(weight, plain)
            gradient = torch.randn_like(weight)
    assert optimizer.steps_done == len(sizes)
    assert optimizer.progress == pytest.approx(sum(sizes) / REFERENCE)
    assert (inner.param_groups[0]["lr"], inner.param_groups[0]["weight_decay"]) == (0.02, 0.1)


def test_muon_rule_rejects_sgd():
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"^`inner` must be Muon, got SGD: use AdamRule"):
        next(run(weight, torch.optim.SGD([weight], lr=0.1), vbs.rules.MuonRule(), 1, num_samples=64))


# ---------------------------------------------------------------------------------------------------------------- surge


def test_surge_rule_uses_the_learning_rate_of_the_measured_noise():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(1000))
    inner = torch.optim.AdamW([weight], lr=1e-3)
    sampler = vbs.CustomSampler(dataset_size=4096, trace=[8, 64, 16] * 40, minibatch_size=2)
    optimizer = vbs.CustomOptimizer(inner, sampler, rule=vbs.rules.SurgeRule(), ref_batchsize=4)
    worth = 0.0
    for _ in sampler:
        weight.grad = 0.3 + torch.randn_like(weight) / math.sqrt(2)  # of 2 samples, with V/G² = 1/0.3²
        if optimizer.step():
            size = optimizer.batch_size
            noise = optimizer.noise
            share = (noise.variance + 4 * noise.square_norm) / (noise.variance + size * noise.square_norm)
            assert optimizer.current_lr() == pytest.approx(1e-3 * math.sqrt(size / 4) * share)
            worth += optimizer.gain()
    assert optimizer.noise_scale == pytest.approx(1 / 0.09, rel=0.1)
    assert optimizer.progress == pytest.approx(worth)
    report = optimizer.report()
    assert (report["gain"], report["noise_scale"]) == (optimizer.gain(), optimizer.noise_scale)
