"""Noise in the norm of the inner optimizer's steps: against all per-sample gradients, and in every kind of run."""

import copy
import dataclasses
import math
from itertools import chain

import pytest
import torch
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.optim import flow
from variable_batch_size.optim.own_norms import EVERY, _polar, deviation_factor
from variable_batch_size.policies import CriticalBatch
from variable_batch_size.rules.noise import Noise

NUM_SAMPLES, MINIBATCH = 256, 8
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(NUM_SAMPLES, 6, generator=GENERATOR)
Y = X @ torch.randn(6, 3, generator=GENERATOR) + torch.randn(NUM_SAMPLES, 3, generator=GENERATOR)


class Lion(torch.optim.SGD):
    """Recognized by its name."""


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def loss_of(model, x, y, reduction="mean"):
    loss = (model(x) - y).square().sum(1)
    return loss.sum() if reduction == "sum" else loss.mean()


INNER = {
    "sign": lambda model, lr: Lion(model.parameters(), lr=lr),
    "adam": lambda model, lr: torch.optim.AdamW(model.parameters(), lr=lr),
    "euclidean": lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr),
}


def make(model, inner="sign", /, *, trace=4 * MINIBATCH, lr=0.0, measure_noise="own norm", rule="constant", **options):
    inner = INNER[inner](model, lr) if isinstance(inner, str) else inner
    sampler = vbs.CustomSampler(dataset_size=NUM_SAMPLES, trace=trace, minibatch_size=MINIBATCH)
    options = {"rule": rule, "measure_noise": measure_noise, "model": model, **options}
    return sampler, vbs.Optimizer(inner, sampler, ref_batchsize=MINIBATCH, **options)


def train(model, sampler, optimizer, *, num_epochs=1, num_steps=None, weigh=None):
    """Returns the samples of each minibatch."""
    found = []
    for _ in optimizer.epochs(num_epochs):
        for indices in sampler:
            found.append(list(indices))
            kept = indices if weigh is None else indices[: weigh(len(found) - 1)]
            loss_of(model, X[kept], Y[kept], "mean" if weigh is None else "sum").backward()
            optimizer.step(**({} if weigh is None else {"weight": len(kept)}))
            if optimizer.steps_done == num_steps:
                return found
    return found


def sample_gradients(model, indices):
    """The gradient of each sample by itself, for each parameter."""
    rows = [torch.autograd.grad(loss_of(model, X[[i]], Y[[i]]), list(model.parameters())) for i in indices]
    return [torch.stack(column).double() for column in zip(*rows, strict=True)]


def deviation_of(values, weights=None):
    """The deviation per sample of each element, from means over minibatches; `weights` are their numbers of samples."""
    w = torch.tensor(weights, dtype=torch.float64).view(-1, *[1] * (values.dim() - 1))
    mean = (w * values).sum(0) / w.sum()
    return ((w * (values - mean).square()).sum(0) / (len(values) - 1)).sqrt()


def expected_noise(gradients, minibatches, *, is_matrix=lambda g: False, population=None):
    """The noise by its definition, from per-sample gradients; minibatches are given as the indices of their samples."""
    weights = [len(one) for one in minibatches]
    deviation, norms, pairs, total = 0.0, [0.0] * len(weights), 0.0, sum(weights)
    for gradient in gradients:
        means = torch.stack([gradient[one].mean(0) for one in minibatches])
        sigma = deviation_of(means, weights)
        if is_matrix(gradient[0]):
            deviation += min(float(sigma.square().sum(axis).sqrt().sum()) for axis in (0, 1))
            parts = [torch.linalg.svd(mean, full_matrices=False) for mean in means]
            steps = [u @ v for u, _, v in parts]
        else:
            deviation += float(sigma.sum()) / deviation_factor(len(weights))
            steps = [mean.sign() for mean in means]
        for i, step in enumerate(steps):
            norms[i] += float((step * means[i]).sum())
            pairs += sum(weights[i] * weights[k] * float((step * means[k]).sum()) for k in range(len(means)) if k != i)
    mean_norm = sum(w * norm for w, norm in zip(weights, norms, strict=True)) / total
    progress = pairs / (total**2 - sum(w * w for w in weights))
    if population is not None:
        progress += (mean_norm - progress) * MINIBATCH / population
    return Noise(deviation**2, progress * mean_norm)


def check(found, expected, rel=1e-4):
    assert found.variance == pytest.approx(expected.variance, rel=rel)
    assert found.square_norm == pytest.approx(expected.square_norm, rel=rel)


@pytest.mark.parametrize("inner", ["sign", "adam"])
@pytest.mark.parametrize("number", [2, 5])
def test_sign_like_steps_are_measured_as_by_all_per_sample_gradients(inner, number):
    model = network()
    sampler, optimizer = make(model, inner, trace=number * MINIBATCH)
    minibatches = train(model, sampler, optimizer, num_steps=1)
    gradients = [one.flatten(1) for one in sample_gradients(network(), chain(*minibatches))]
    places = [list(range(i * MINIBATCH, (i + 1) * MINIBATCH)) for i in range(number)]
    check(optimizer.noise, expected_noise(gradients, places, population=NUM_SAMPLES))


def test_weighted_minibatches_are_measured_per_unit_of_weight():
    """One of them weighs nothing, and does not count."""
    model = network()
    sampler, optimizer = make(model)
    minibatches = train(model, sampler, optimizer, num_steps=1, weigh=[4, 0, 8, 5].__getitem__)
    kept = [one[:size] for one, size in zip(minibatches, (4, 0, 8, 5), strict=True) if size]
    gradients, places, start = sample_gradients(network(), chain(*kept)), [], 0
    for one in kept:
        places.append(list(range(start, start + len(one))))
        start += len(one)
    check(optimizer.noise, expected_noise(gradients, places, population=NUM_SAMPLES))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_matrices_of_muon_are_measured_in_the_nuclear_norm_and_the_rest_by_sign():
    model = network()
    matrices, others = ([p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
    inner = [torch.optim.Muon(matrices, lr=0.0), torch.optim.AdamW(others, lr=0.0)]
    sampler, optimizer = make(model, inner)
    minibatches = train(model, sampler, optimizer, num_steps=1)
    gradients = sample_gradients(network(), chain(*minibatches))
    places = [list(range(i * MINIBATCH, (i + 1) * MINIBATCH)) for i in range(4)]
    for group, is_matrix in enumerate((True, False)):
        own = [one for one in gradients if (one.dim() > 2) == is_matrix]
        kind = {"is_matrix": lambda g: g.dim() > 1, "population": NUM_SAMPLES}
        check(optimizer._flow.noise_meter().noise(group), expected_noise(own, places, **kind), rel=1e-3)


@pytest.mark.parametrize("shape", [(20, 20), (8, 40), (40, 8), (6, 3, 3, 3)])
def test_polar_factor_is_that_of_singular_vectors(shape):
    matrix = torch.randn(shape, generator=GENERATOR)
    u, s, v = torch.linalg.svd(matrix.flatten(1), full_matrices=False)
    found = _polar(matrix)
    assert float((found * matrix).sum()) == pytest.approx(float(s.sum()), rel=1e-4)
    assert torch.allclose(found, (u @ v).view(shape), atol=2e-2)
    assert torch.equal(_polar(torch.zeros(shape)), torch.zeros(shape))


def test_own_norm_of_euclidean_steps_gives_the_usual_noise():
    found = []
    for measure_noise in ("own norm", True):
        model = network()
        sampler, optimizer = make(model, "euclidean", measure_noise=measure_noise)
        train(model, sampler, optimizer, num_steps=1)
        found.append(optimizer.noise)
    check(*found, rel=1e-5)


def test_noise_scale_is_near_that_of_all_samples_over_a_run():
    """(‖σ‖₁/‖μ‖₁)² of all samples, at a batch size well below it."""
    model = network()
    sampler, optimizer = make(model, trace=2 * MINIBATCH, smoothing=0.999)
    train(model, sampler, optimizer, num_epochs=20)
    gradients = torch.cat([one.flatten(1) for one in sample_gradients(network(), range(NUM_SAMPLES))], 1)
    truth = float(gradients.std(0).sum() / gradients.mean(0).abs().sum()) ** 2
    assert optimizer._flow.noise_meter().averages[0].count == 20 * 16 // EVERY
    assert optimizer.noise_scale == pytest.approx(truth, rel=0.35)


def steps_measured(optimizer, model, sampler, **options):
    """The numbers of the steps after which the average had one more estimate."""
    found, meter = [], optimizer._flow.noise_meter()
    add = meter.observe
    meter.observe = lambda step, norms, *more: (found.append(step.steps_done) if any(norms) else None, add(step, norms))
    train(model, sampler, optimizer, **options)
    return found


def test_one_in_sixteen_steps_of_several_minibatches_is_measured():
    model = network()
    trace = [MINIBATCH] * 3 + [2 * MINIBATCH, MINIBATCH] * 20
    sampler, optimizer = make(model, trace=trace, skip_nonfinite=False)
    assert steps_measured(optimizer, model, sampler, num_epochs=2) == [3, 19, 35]


def test_resumed_run_measures_the_same_steps():
    trace = [2 * MINIBATCH] * 48
    model = network()
    sampler, optimizer = make(model, "adam", trace=trace, lr=0.01, rule="surge")
    train(model, sampler, optimizer, num_epochs=3)
    first = network()
    sampler, stopped = make(first, "adam", trace=trace, lr=0.01, rule="surge")
    train(first, sampler, stopped, num_epochs=3, num_steps=21)
    second = network()
    sampler, resumed = make(second, "adam", trace=trace, lr=0.01, rule="surge")
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(copy.deepcopy(stopped.state_dict()))
    train(second, sampler, resumed, num_epochs=3)
    assert resumed.noise == optimizer.noise
    assert all(map(torch.equal, model.parameters(), second.parameters()))


@pytest.mark.parametrize("now", [True, "own norm"])
def test_averages_of_another_norm_are_not_continued(now, caplog):
    before = "own norm" if now is True else True
    model = network()
    sampler, optimizer = make(model, measure_noise=before, rule="surge")
    train(model, sampler, optimizer, num_steps=2)
    sampler, resumed = make(network(), measure_noise=now, rule="surge")
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.noise is None
    assert "the noise in this state was measured in another norm: its averages restart" in caplog.text


def noise_on_cores(inner, is_weighted):
    model = network()
    sampler, optimizer = make(model, inner, trace=[2 * MINIBATCH, MINIBATCH, 5 * MINIBATCH] * 8, lr=0.01, rule="surge")
    sizes = (lambda number: 1 + sum(map(int, str(number))) % 8) if is_weighted else None
    for _ in optimizer.epochs(2):
        for indices in sampler:
            kept = indices if sizes is None else indices[: sizes(indices[0])]
            loss_of(model, X[kept], Y[kept], "mean" if sizes is None else "sum").backward()
            optimizer.step(**({} if sizes is None else {"weight": len(kept)}))
    return optimizer.report()


LONG_ON_CORES = [
    pytest.param(num_cores, is_weighted, marks=pytest.mark.long) for num_cores, is_weighted in ((2, 0), (3, 1))
]


@pytest.mark.parametrize(("num_cores", "is_weighted"), [(2, True), (3, False), *LONG_ON_CORES])
def test_noise_is_the_same_on_several_cores(on_cores, num_cores, is_weighted):
    expected = noise_on_cores("adam", is_weighted)
    assert math.isfinite(expected["noise_scale"])
    for found in on_cores(num_cores, noise_on_cores, "adam", is_weighted):
        assert found == pytest.approx(expected, rel=1e-3, nan_ok=True)


@pytest.mark.parametrize(("is_fused", "way"), [(True, "on the device"), (False, "one step late")])
def test_numbers_on_an_accelerator_are_those_read_at_once(monkeypatch, is_fused, way):
    def run():
        model = network()
        inner = torch.optim.AdamW(model.parameters(), lr=0.01, **({"fused": True} if is_fused else {}))
        sampler, optimizer = make(model, inner, trace=[2 * MINIBATCH, MINIBATCH] * 40, rule="surge")
        train(model, sampler, optimizer, num_epochs=4)
        return optimizer._flow.way, optimizer.report()

    _, expected = run()
    monkeypatch.setattr(flow, "_HOSTS", ())
    found_way, found = run()
    assert found_way == way
    assert found == pytest.approx(expected, rel=1e-4, nan_ok=True)


def test_critical_batch_decides_by_the_noise_scale_of_the_norm():
    scales = []
    for measure_noise in ("own norm", True):
        model = network()
        sampler, optimizer = make(model, trace=CriticalBatch(max_batch_size=16), measure_noise=measure_noise)
        train(model, sampler, optimizer, num_epochs=2)
        situation = dataclasses.replace(optimizer._driver._situation(), batch_size=16)
        cost = 16 / (optimizer.noise_scale + 16)
        sizes = [CriticalBatch(cost=cost * factor).answer(situation).batch_size for factor in (0.99, 1.01)]
        assert sizes == [16, 32]
        scales.append(optimizer.noise_scale)
    assert scales[0] != pytest.approx(scales[1], rel=0.01)


def test_gradient_that_is_not_finite_leaves_the_averages_alone():
    model = network()
    sampler, optimizer = make(model)
    optimizer.set_epoch(0)
    for number, indices in enumerate(sampler):
        (loss_of(model, X[indices], Y[indices]) * (math.nan if number == 1 else 1)).backward()
        optimizer.step()
        if optimizer.steps_done == 1:
            assert optimizer.steps_skipped == 1
            assert optimizer.noise is None
    assert optimizer.noise is None  # 16 steps later


class Shampoo(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-group["lr"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exact": True}, r"^`measure_noise` must not be 'own norm' with exact=True: use True instead$"),
        ({"gradient_as_bucket_view": True}, r"with gradient_as_bucket_view=True: use True instead$"),
        ({"rule": "adamscale"}, r"^`measure_noise` must not be 'own norm' with AdamScaleRule: use True instead$"),
        ({"measure_noise": "own"}, r"^`measure_noise` must be one of 'norm layers', 'own norm', got 'own'"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(network(), "adam", **options)


def test_unknown_optimizer_is_refused():
    model = network()
    message = r"^`measure_noise='own norm'` must be used with SGD, Adam, Lion, Muon and the like, got Shampoo: use True"
    with pytest.raises(ValueError, match=message):
        make(model, Shampoo(model.parameters()))
