"""Noise of samples drawn without replacement: G² against that of all samples, by all draws and over epochs."""

from itertools import permutations

import numpy as np
import pytest
import torch
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.rules.noise import Noise, NoiseMeter
from variable_batch_size.rules.rule import Norms, Step


def norms(gradients, sizes, weights=None):
    """L and T of a step whose minibatches have these numbers of samples, or weights of samples."""
    weights = np.ones(len(gradients)) if weights is None else weights
    ends = np.cumsum(sizes)
    parts = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    of_minibatches = np.array([weights[list(part)].sum() for part in parts])
    means = [
        weights[list(part)] @ gradients[list(part)] / total for part, total in zip(parts, of_minibatches, strict=True)
    ]
    shares = of_minibatches / of_minibatches.sum()
    step = shares @ np.array(means)
    return float(shares @ [mean @ mean for mean in means]), float(step @ step)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 3), (2, 2, 2), (1, 2, 3)])
def test_mean_over_all_draws_is_exact(sizes):
    gradients = np.random.default_rng(0).standard_normal((6, 3)) + 0.4
    size = sum(sizes)
    found = [norms(gradients[list(draw)], sizes) for draw in permutations(range(6), size)]
    estimates = [Noise.from_norms(*pair, batch_size=size, num_minibatches=len(sizes), population=6) for pair in found]
    mean = gradients.mean(0)
    assert np.mean([one.variance for one in estimates]) == pytest.approx(((gradients - mean) ** 2).sum() / 5)
    assert np.mean([one.square_norm for one in estimates]) == pytest.approx(mean @ mean)


def test_the_whole_data_set_has_its_own_norm_as_square_norm():
    gradients = np.random.default_rng(1).standard_normal((6, 3))
    mean_of_squares, square_of_mean = norms(gradients, (3, 3))
    noise = Noise.from_norms(mean_of_squares, square_of_mean, batch_size=6, num_minibatches=2, population=6)
    assert noise.square_norm == pytest.approx(square_of_mean)


def test_tokens_are_drawn_without_replacement_as_well():
    rng = np.random.default_rng(2)
    num_samples, tokens = 64, 5
    of_tokens = rng.standard_normal((num_samples * tokens, 2)) + 0.1
    # a sample that draws its tokens from all leaves them independent
    square = of_tokens.mean(0) @ of_tokens.mean(0)
    found = []
    for _ in range(1000):
        gradients = of_tokens[rng.permutation(num_samples * tokens)[: 32 * tokens]]
        meter = NoiseMeter()
        step = Step(32, 4, 32, weight=32.0 * tokens, num_weighted=8, population=num_samples)
        meter.observe(step, [Norms(*norms(gradients, [4 * tokens] * 8))])
        found.append(meter.noise().square_norm)
    assert np.mean(found) == pytest.approx(square, abs=3 * np.std(found) / len(found) ** 0.5)


class Frozen(nn.Module):
    """Each sample has a gradient of its own, which is always the same."""

    def __init__(self, gradients):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(gradients.shape[1]))
        self.gradients = gradients

    def forward(self, indices):
        return (self.gradients[indices] @ self.weight).mean()


def noise_over_epochs():
    torch.manual_seed(0)
    gradients = torch.randn(128, 64)
    gradients += 1 / 8 - gradients.mean(0)  # V/G² = N/2
    model = Frozen(gradients)
    sampler = vbs.CustomSampler(dataset_size=128, trace=32, minibatch_size=8)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = vbs.Optimizer(inner, sampler, rule="constant", ref_batchsize=32, measure_noise=True)
    for _ in optimizer.epochs(100):
        for indices in sampler:
            model(torch.tensor(indices)).backward()
            optimizer.step()
    variance = ((gradients - gradients.mean(0)) ** 2).sum().item() / 127
    return optimizer, variance / gradients.mean(0).square().sum().item()


def test_noise_scale_of_a_run_is_that_of_the_data_set():
    optimizer, truth = noise_over_epochs()
    assert truth == pytest.approx(64, rel=0.15)
    assert optimizer.noise_scale == pytest.approx(truth, rel=0.05)
    noise = optimizer.noise
    without = noise.variance / (noise.square_norm - noise.variance / 128)
    assert without > 1.8 * truth  # what it was


def test_samples_in_a_fixed_order_are_not_corrected():
    sampler = vbs.CustomSampler(dataset_size=64, trace=32, minibatch_size=8, shuffle=False)
    assert sampler.population is None
    assert vbs.CustomSampler(dataset_size=64, trace=32, minibatch_size=8).population == 64
    stream = vbs.Stream(iter([]), trace=32, minibatch_size=8)
    assert stream.population is None
