"""The noise of runs with SGD, Adam and AdamW, with and without weights, against that of all per-sample gradients."""

import itertools
import logging
import math
import statistics

import pytest
import torch
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.rules.noise import Noise, NoiseMeter
from variable_batch_size.rules.rule import Norms, Step

NUM_SAMPLES, MINIBATCH, NUM_MINIBATCHES = 4096, 8, 8
KINDS = {
    "sgd": (vbs.AdaScaleOptimizer, lambda groups: torch.optim.SGD(groups, lr=1e-3)),
    "adam": (vbs.AdamScaleOptimizer, lambda groups: torch.optim.Adam(groups, lr=1e-4)),
    "adamw": (vbs.AdamScaleOptimizer, lambda groups: torch.optim.AdamW(groups, lr=1e-4, weight_decay=0.1)),
}


class Problem:
    """Classification by a small network with ReLU; some units of its first layer see inputs that are mostly 0."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(NUM_SAMPLES, 10, generator=generator)
        self.x[:, 7:] *= torch.rand(NUM_SAMPLES, 3, generator=generator) < 0.02
        self.y = (self.x[:, :3].argmax(1) + torch.randint(0, 2, (NUM_SAMPLES,), generator=generator)) % 3
        self.model = nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 3))
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.4)

    @torch.no_grad()
    def noise_of_all_samples(self, divisors):
        """V and G² of the gradients of single samples, divided by the divisors; parameters without one do not count.

        The gradient of a sample is the outer product of a layer's input and the gradient of its output.
        """
        first, _, second = self.model
        hidden = first(self.x).relu()
        outer = second(hidden).softmax(1) - nn.functional.one_hot(self.y, 3)
        inner = outer @ second.weight * (hidden > 0)
        variance = square = 0.0
        for layer, inputs, gradients in ((first, self.x, inner), (second, hidden, outer)):
            moments = [(gradients**k).T @ inputs**k / NUM_SAMPLES for k in (1, 2)]
            for p, mean, of_squares in zip(
                layer.parameters(), (moments[0], gradients.mean(0)), (moments[1], (gradients**2).mean(0)), strict=True
            ):
                if divisors is None or p in divisors:
                    scale = 1.0 if divisors is None else divisors[p].double() ** -2
                    variance += ((of_squares - mean**2) * scale).sum().item()
                    square += (mean**2 * scale).sum().item()
        return Noise(variance, square)


def errors(kind, seed, is_weighted, num_steps):
    """For some steps, log of the measured over the true noise: V, and G² + V/B, averaged over the steps before."""
    problem = Problem(seed)
    optimizer_kind, inner = KINDS[kind]
    layers = [{"params": layer.parameters()} for layer in (problem.model[0], problem.model[2])]
    batch_size = MINIBATCH * NUM_MINIBATCHES
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=batch_size, minibatch_size=MINIBATCH, seed=seed)
    optimizer = optimizer_kind(inner(layers), sampler, ref_batchsize=batch_size)
    draw = torch.Generator().manual_seed(seed)
    truth, found = [], {}
    while optimizer.steps_done < num_steps:
        for indices in vbs_pass(optimizer):
            x, y = problem.x[indices], problem.y[indices]
            if not optimizer.is_accumulating:
                divisors = optimizer._preconditioner.divisors if optimizer._preconditioner else None
                now = problem.noise_of_all_samples(divisors) if divisors is None or divisors else None
            if is_weighted:  # some samples of each minibatch are left out
                kept = torch.rand(MINIBATCH, generator=draw) < 0.6
                loss = nn.functional.cross_entropy(problem.model(x), y, reduction="none")
                (loss * kept).sum().backward()
                optimizer.step(weight=int(kept.sum()))
                has_updated = optimizer.updated
            else:
                nn.functional.cross_entropy(problem.model(x), y).backward()
                optimizer.step()
                has_updated = optimizer.updated
            if has_updated:
                if now is not None:
                    truth.append(now)
                if optimizer.steps_done in (20, 30, num_steps):
                    noise, size = optimizer.noise, batch_size * (0.6 if is_weighted else 1)
                    variance = statistics.fmean(one.variance for one in truth)
                    square = statistics.fmean(one.square_norm for one in truth)
                    together = (noise.square_norm + noise.variance / size) / (square + variance / size)
                    found[optimizer.steps_done] = (math.log(noise.variance / variance), math.log(together))
            if optimizer.steps_done == num_steps:
                break
    return found


def vbs_pass(optimizer):
    optimizer.set_epoch(optimizer.epoch + bool(optimizer.steps_done))
    return optimizer.sampler


def runs():
    """Each optimizer with or without weights; both, and longer runs, in the long form."""
    for number, kind in enumerate(KINDS):
        for is_weighted, num_steps in itertools.product((False, True), (30, 40)):
            is_long = num_steps == 40 or is_weighted != (number != 1)
            name = f"{kind}-{'weights' if is_weighted else 'samples'}-{num_steps}"
            yield pytest.param(kind, is_weighted, num_steps, id=name, marks=pytest.mark.long if is_long else ())


@pytest.mark.parametrize(("kind", "is_weighted", "num_steps"), [*runs()])
def test_noise_agrees_with_that_of_all_samples_from_step_20_on(kind, is_weighted, num_steps):
    of_seeds = [errors(kind, seed, is_weighted, num_steps) for seed in range(6)]
    for step in of_seeds[0]:
        for number in (0, 1):
            values = [found[step][number] for found in of_seeds]
            deviation = statistics.stdev(values)
            assert deviation < 0.25
            assert abs(statistics.fmean(values)) < max(3 * deviation / math.sqrt(len(values)), 0.02), (step, values)


def test_without_enough_updates_there_is_no_estimate():
    optimizer = vbs.AdamScaleOptimizer(
        torch.optim.Adam([nn.Parameter(torch.zeros(3))]),
        vbs.CustomSampler(dataset_size=64, trace=4, minibatch_size=2),
        ref_batchsize=2,
    )
    (p,) = optimizer.parameters()
    optimizer.set_epoch(0)
    torch.manual_seed(0)
    for step in range(1, 13):
        for _ in range(2):
            p.grad = torch.randn(3)
            optimizer.step()
        assert (optimizer.noise is None) == (step <= 10)


def test_elements_without_second_moments_do_not_make_the_noise():
    p = nn.Parameter(torch.zeros(100))
    sampler = vbs.CustomSampler(dataset_size=256, trace=4, minibatch_size=2)
    optimizer = vbs.AdamScaleOptimizer(torch.optim.Adam([p], lr=1e-4), sampler, ref_batchsize=2)
    torch.manual_seed(0)
    optimizer.set_epoch(0)
    for step in range(20):
        for _ in range(2):
            p.grad = torch.randn(100)
            p.grad[:3] *= step > 12  # units that were dead so far
            optimizer.step()
    assert optimizer.noise.variance < 100 * 4 * 2


STEP = Step(batch_size=4, minibatch_size=2, ref_batchsize=2)


def test_a_group_without_a_gradient_is_not_measured():
    quiet, noisy, frozen = Norms(3.0, 2.0), Norms(30.0, 2.0), Norms(0.0, 0.0)
    for history in ([(quiet, frozen)] * 5 + [(quiet, noisy)] * 2, [(quiet, noisy)] * 9):
        meter = NoiseMeter()
        for norms in history:
            meter.observe(STEP, norms)
        both = Noise.from_norms(33.0, 4.0, batch_size=4, num_minibatches=2)
        assert meter.noise().scale == pytest.approx(both.scale)
        meter.observe(STEP, (quiet, frozen))
        assert meter.noise().scale == pytest.approx(Noise.from_norms(*quiet, batch_size=4, num_minibatches=2).scale)
        other = NoiseMeter()
        other.load_state_dict(meter.state_dict())
        assert other.noise() == meter.noise()
        meter.observe(STEP, (frozen, frozen))
        assert other.noise() == meter.noise()


def test_a_step_that_makes_most_of_the_average_is_logged_once(caplog):
    meter = NoiseMeter()
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            meter.observe(STEP, [Norms(3.0, 2.0)])
        assert caplog.messages == []
        for _ in range(2):
            meter.observe(STEP, [Norms(3e6, 2.0)])
    (message,) = caplog.messages
    assert message.startswith("step 0 makes up 100 % of the gradient noise averaged over 21 steps")


@pytest.mark.parametrize("smoothing", [0.0, 0.5])
def test_a_step_that_is_most_of_the_average_by_choice_is_not_logged(caplog, smoothing):
    meter = NoiseMeter(smoothing=smoothing)
    with caplog.at_level(logging.WARNING):
        for mean_of_squares in (3.0, 4.0) * 10:
            meter.observe(STEP, [Norms(mean_of_squares, 2.0)])
    assert caplog.messages == []
