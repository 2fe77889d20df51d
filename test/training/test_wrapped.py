"""A model in DistributedDataParallel trains as without it: even, uneven and idle cores, passed or not."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs

SIZES = [4 * n for n in (3, 1, 4, 2, 5, 1, 7, 3)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(100, 3, generator=generator, dtype=torch.float64), torch.randint(
        0, 2, (100,), generator=generator
    )


def train(wrap, passed, kind=vbs.AdaScaleOptimizer, **ddp):
    """Train a model that is wrapped, with the wrapper, the module or nothing passed as `model`."""
    module = network()
    model = DistributedDataParallel(module, **ddp) if wrap == "before" else module
    sampler = vbs.CustomSampler(dataset_size=100, trace=SIZES, minibatch_size=4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given = {"wrapper": model, "module": module, "nothing": None}[passed]
    optimizer = kind(inner, sampler, ref_batchsize=4, model=given)
    if wrap == "after":
        model = DistributedDataParallel(module, **ddp)
    x, y = data()
    for epoch in range(sampler.schedule.num_epochs):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for indices in sampler:
            nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
            optimizer.step()
    gain = optimizer.gain() if kind is vbs.AdaScaleOptimizer else None
    return copy.deepcopy(module.state_dict()), gain


WAYS = [
    {"passed": "wrapper"},
    {"passed": "module"},
    {"passed": "nothing"},
    {"passed": "nothing", "kind": vbs.LinearRuleOptimizer},
    {"passed": "wrapper", "gradient_as_bucket_view": True},
    {"passed": "wrapper", "find_unused_parameters": True},
]


def train_all():
    results = [train("before", **way) for way in WAYS]
    return results, [message_of("after", "module"), message_of("before", "nothing", static_graph=True)]


def message_of(*args, **options):
    try:
        train(*args, **options)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("cores", [2, 4])
def test_a_wrapped_model_trains_as_an_unwrapped_one(cores):
    expected = {kind: train("never", "module", kind) for kind in (vbs.AdaScaleOptimizer, vbs.LinearRuleOptimizer)}
    for results, (late, static) in vbs.launch(train_all, cores=cores, backend="gloo"):
        for way, (state, gain) in zip(WAYS, results, strict=True):
            plain, plain_gain = expected[way.get("kind", vbs.AdaScaleOptimizer)]
            for name in plain:
                torch.testing.assert_close(state[name], plain[name], rtol=0, atol=1e-9, msg=f"{name}, {way}")
            assert gain == (None if plain_gain is None else pytest.approx(plain_gain, rel=1e-9))
        assert "wrapped in DistributedDataParallel after the optimizer was made" in late
        assert "a DistributedDataParallel with static_graph=True always reduces" in static
