"""Halves of the only minibatch of a step: the same update, and noise without bias."""

from collections import UserDict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import variable_batch_size as vbs


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


X, Y = torch.randn(512, 5, generator=torch.Generator().manual_seed(1)), torch.arange(512) % 3


def make(*, trace=8, minibatch_size=8, model=None, lr=0.1, rule="constant", measure_noise=True, **options):
    model = model or network()
    sampler = vbs.CustomSampler(dataset_size=len(X), trace=trace, minibatch_size=minibatch_size)
    inner = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    optimizer = vbs.Optimizer(inner, sampler, rule=rule, ref_batchsize=8, measure_noise=measure_noise, **options)
    return model, sampler, optimizer


def train(model, sampler, optimizer, *, every, is_weighted=False, num_epochs=1):
    sizes = []
    for _ in optimizer.epochs(num_epochs):
        for indices in sampler:
            for x, y in optimizer.halves(X[indices], Y[indices], every=every):
                sizes.append(len(x))
                loss = nn.functional.cross_entropy(model(x), y, reduction="sum" if is_weighted else "mean")
                loss.backward()
                optimizer.step(loss=loss, **({"weight": len(x)} if is_weighted else {}))
    return sizes


@pytest.mark.parametrize("options", [{}, {"exact": True}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("is_weighted", [False, True], ids=["samples", "weights"])
def test_halves_make_the_updates_of_whole_minibatches(options, is_weighted):
    (model, *whole), (halved, *parts) = make(**options), make(**options)
    assert set(train(model, *whole, every=10**9, is_weighted=is_weighted)[2:]) == {8}
    sizes = train(halved, *parts, every=3, is_weighted=is_weighted)
    assert sizes[:5] == [4, 4, 8, 8, 4]
    assert parts[1].steps_done == whole[1].steps_done == 64
    for some, other in zip(model.parameters(), halved.parameters(), strict=True):
        torch.testing.assert_close(some, other, rtol=1e-4, atol=1e-6)


def test_steps_of_several_minibatches_are_not_split():
    model, *rest = make(trace=[8] * 4 + [16] * 4)
    sizes = train(model, *rest, every=1)
    assert sizes[:2] == [4, 4]
    assert sizes[-2:] == [8, 8]


def test_noise_from_halves_is_unbiased_over_500_draws():
    model, sampler, optimizer = make(lr=0.0, smoothing=lambda scale: 0.99999)
    train(model, sampler, optimizer, every=1, num_epochs=8)
    of_samples = []
    for x, y in zip(X, Y, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        of_samples.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
    gradients = torch.stack(of_samples).numpy()
    mean = gradients.mean(0)
    found = {"variance": [], "square_norm": []}
    rng = np.random.default_rng(0)
    for _ in range(2000):  # the deviation of one estimate
        halves = gradients[rng.permutation(len(X))[:8]].reshape(2, 4, -1).mean(1)
        pair = (halves**2).sum(1).mean(), (halves.mean(0) ** 2).sum()
        noise = vbs.rules.Noise.from_norms(*pair, batch_size=8, num_minibatches=2, population=len(X))
        for name, values in found.items():
            values.append(getattr(noise, name))
    errors = {name: np.std(values) / optimizer.steps_done**0.5 for name, values in found.items()}
    assert optimizer.steps_done == 512
    assert optimizer.noise.variance == pytest.approx(gradients.var(0, ddof=1).sum(), abs=2 * errors["variance"])
    assert optimizer.noise.square_norm == pytest.approx(mean @ mean, abs=2 * errors["square_norm"])


def test_log_has_the_loss_of_both_halves():
    records = {}
    for every in (1, 10**9):
        for is_weighted in (False, True):
            model, sampler, optimizer = make()
            found = []
            optimizer.attach(vbs.Log(optimizer, every=16, to=[found.append]))
            train(model, sampler, optimizer, every=every, is_weighted=is_weighted)
            records[every, is_weighted] = [record["loss"] for record in found]
    for losses in records.values():
        assert losses == pytest.approx(records[1, False], rel=1e-4)


def test_structures_of_tensors_are_halved():
    _, sampler, optimizer = make()
    optimizer.set_epoch(0)
    data = {"x": torch.arange(8), "size": 3, "y": [torch.arange(8) * 2, torch.tensor(1.0)]}
    next(iter(sampler))
    first = next(optimizer.halves(data))
    assert first["x"].tolist() == [0, 1, 2, 3]
    assert first["size"] == 3
    assert first["y"][0].tolist() == [0, 2, 4, 6]
    assert first["y"][1] == 1.0


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize("data", [UserDict(x=torch.arange(8)), Pair(torch.arange(8), torch.arange(8))])
def test_mappings_and_named_tuples_keep_their_kind(data):
    """Those of transformers are no dictionaries."""
    _, _, optimizer = make()
    optimizer.set_epoch(0)
    first = next(optimizer.halves(data))
    assert type(first) is type(data)
    assert (first["x"] if isinstance(data, UserDict) else first.x).tolist() == [0, 1, 2, 3]


def test_data_without_tensors_is_refused_as_its_halves_would_be_the_same():
    _, _, optimizer = make()
    optimizer.set_epoch(0)
    with pytest.raises(ValueError, match=r"^halves\(\) needs tensors, or lists, .*, got ndarray, list$"):
        next(optimizer.halves(np.zeros(8), ["text"] * 8))


def test_minibatch_that_is_not_the_size_of_the_sampler_is_refused():
    _, _, optimizer = make()
    optimizer.set_epoch(0)
    with pytest.raises(ValueError, match=r"^halves\(\) needs tensors of 8 samples, the minibatch size, got \(5, 2\)$"):
        list(optimizer.halves(torch.zeros(5, 2)))


def test_missing_and_additional_calls_of_step_raise():
    model, sampler, optimizer = make()
    message = r"^step\(\) must be called once after each half that halves\(\) yields, before another minibatch$"
    optimizer.set_epoch(0)
    for number, indices in enumerate(sampler):
        with pytest.raises(RuntimeError, match=message):
            for _ in optimizer.halves(X[indices], every=1):
                model(X[indices]).sum().backward()
                if number == 1:
                    optimizer.step()
                    break
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        break
    optimizer.set_epoch(0)
    (indices, *_) = sampler
    for _ in optimizer.halves(X[indices], every=1):
        model(X[indices]).sum().backward()
        optimizer.step()
        break
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measure_noise": False}, r"^halves\(\) needs a rule that measures noise, or `measure_noise=True`, got Const"),
        ({"minibatch_size": 7, "trace": 7}, r"^`minibatch_size` must be even for halves\(\), got 7$"),
        ({"rule": "linear_momentum"}, r"^halves\(\) needs a rule of mean gradients, but LinearMomentumRule sums them$"),
    ],
)
def test_what_halves_cannot_do_is_refused(options, message):
    _, _, optimizer = make(**options)
    with pytest.raises(ValueError, match=message):
        next(optimizer.halves(X[:8]))
