"""Exact mode trains like plain mode: the same losses up to rounding, for gradients of any size."""

import functools

import pytest
import torch
from torch import nn

import variable_batch_size as vbs

MINIBATCH = 8
SIZES = [MINIBATCH * n for n in (1, 4, 2, 16, 3, 1, 8, 2)] * 4


class Uneven(nn.Module):
    """Layers with gradients that differ by 2^30, one that is initially 0, and one that is first used late."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.zero = nn.Linear(8, 8, bias=False)
        self.late = nn.Parameter(torch.zeros(8))
        self.head = nn.Linear(8, 3)
        self.num_calls = 0
        nn.init.zeros_(self.zero.weight)
        with torch.no_grad():
            self.second.weight.mul_(2.0**15)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x)) * 2.0**-15))
        x = x + self.zero(x) * 2.0**-15
        return self.head(x + self.late * 2.0**-20 if self.num_calls > 60 else x)


@functools.cache
def train(inner, *, exact, explosion=None, **options):
    """The losses, and the weights at the start and the end."""
    torch.manual_seed(0)
    model = Uneven()
    x, y = torch.randn(200, 6), torch.randint(0, 3, (200,))
    before = [p.detach().clone() for p in model.parameters()]
    sampler = vbs.CustomSampler(dataset_size=200, trace=SIZES, minibatch_size=MINIBATCH)
    optimizer = vbs.RootRuleOptimizer(inner(model.parameters()), sampler, ref_batchsize=16, exact=exact, **options)
    losses = []
    for epoch in range(sampler.schedule.num_epochs):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for indices in sampler:
            model.num_calls += 1
            loss = nn.functional.cross_entropy(model(x[indices]), y[indices])
            (loss * (explosion if explosion and optimizer.steps_done == 10 else 1.0)).backward()
            optimizer.step()
            losses.append(loss.item())
    return torch.tensor(losses), before, list(model.parameters())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=3e-3)


@pytest.mark.parametrize("inner", [sgd, adam])
def test_losses_equal_those_of_plain_mode(inner):
    (exact, _, _), (plain, _, _) = (train(inner, exact=is_exact) for is_exact in (True, False))
    torch.testing.assert_close(exact, plain, rtol=2e-3, atol=1e-4)
    assert exact[-20:].mean() < exact[:20].mean()


def test_adam_updates_tiny_gradients_as_in_plain_mode():
    (_, before, exact), (_, _, plain) = (train(adam, exact=is_exact) for is_exact in (True, False))
    for first, one, other in zip(before, exact, plain, strict=True):
        assert not torch.equal(first, one)
        torch.testing.assert_close((one - first).norm(), (other - first).norm(), rtol=0.02, atol=0)


@pytest.mark.parametrize("explosion", [2.0**10, 2.0**40, 2.0**60])
def test_training_continues_after_a_gradient_explosion(explosion):
    found = [train(sgd, exact=is_exact, explosion=explosion, clip_grad_norm=1.0) for is_exact in (True, False)]
    torch.testing.assert_close(found[0][0], found[1][0], rtol=2e-3, atol=1e-4)
