"""A model in DistributedDataParallel trains as without it: even, uneven and idle cores, with and without `model=`."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs

SIZES = [4 * n for n in (3, 1, 4, 2, 5, 1, 7, 3)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(100, 3, generator=generator, dtype=torch.float64), torch.randint(
        0, 2, (100,), generator=generator
    )


def train(wrap, passed, kind=vbs.AdaScaleOptimizer, *, switches=False, trains_rest=False, **ddp):
    """Train a wrapped model, with the wrapper, the module or nothing passed as `model`.

    Args:
        wrap: when; or "middle" for its middle layer only, or "again" for once more in a later epoch.
        passed: what is passed.
        kind: the optimizer.
        switches: whether the loop toggles the wrapper's reduction, as many accumulating loops do.
        trains_rest: whether a separate torch optimizer trains the first layer.
        ddp: options of the wrapper.
    """
    module = network()
    model = DistributedDataParallel(module, **ddp) if wrap in ("before", "again") else module
    if wrap == "middle":
        module[2] = DistributedDataParallel(module[2])
    sampler = vbs.CustomSampler(dataset_size=100, trace=SIZES, minibatch_size=4)
    first, *others = list(model.parameters())
    inner = torch.optim.SGD(others if trains_rest else [first, *others], lr=0.1, momentum=0.9)
    rest = torch.optim.SGD([first], lr=0.1)
    given = {"wrapper": model, "module": module, "nothing": None}[passed]
    optimizer = kind(inner, sampler, ref_batchsize=4, model=given)
    if wrap == "after":
        model = DistributedDataParallel(module, **ddp)
    x, y = data()
    for epoch in range(sampler.schedule.num_epochs):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        if wrap == "again" and epoch == 1:
            model = DistributedDataParallel(module, **ddp)
        for number, indices in enumerate(sampler):
            if switches:
                model.require_backward_grad_sync = number % 2 == 0
            nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
            optimizer.step()
            if trains_rest:
                rest.step()
    gain = optimizer.gain() if kind is vbs.AdaScaleOptimizer else None
    state = {name.replace("module.", ""): value for name, value in module.state_dict().items()}
    return copy.deepcopy(state), gain


WAYS = [
    {"passed": "wrapper"},
    {"passed": "module"},
    {"passed": "nothing"},
    {"passed": "nothing", "kind": vbs.LinearRuleOptimizer},
    {"passed": "wrapper", "gradient_as_bucket_view": True},
    {"passed": "wrapper", "find_unused_parameters": True},
    {"passed": "wrapper", "switches": True},
    {"passed": "module", "wrap": "middle"},
]


def train_all():
    results = [train(**{"wrap": "before", **way}) for way in WAYS]
    messages = [
        message_of("after", "module"),
        message_of("again", "module"),
        message_of("before", "nothing", static_graph=True),
        message_of("before", "module", trains_rest=True),
    ]
    return results, messages


def message_of(*args, **options):
    try:
        train(*args, **options)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("cores", [2, pytest.param(4, marks=pytest.mark.long)])
def test_wrapped_model_equals_an_unwrapped_one(on_cores, cores):
    expected = {kind: train("never", "module", kind) for kind in (vbs.AdaScaleOptimizer, vbs.LinearRuleOptimizer)}
    for results, (late, again, static, rest) in on_cores(cores, train_all):
        for way, (state, gain) in zip(WAYS, results, strict=True):
            plain, plain_gain = expected[way.get("kind", vbs.AdaScaleOptimizer)]
            for name in plain:
                torch.testing.assert_close(state[name], plain[name], rtol=0, atol=1e-9, msg=f"{name}, {way}")
            assert gain == (None if plain_gain is None else pytest.approx(plain_gain, rel=1e-9))
        assert "wrapped in DistributedDataParallel after the optimizer was made" in late
        assert "wrapped in DistributedDataParallel after the optimizer was made" in again
        assert "DistributedDataParallel(static_graph=True) reduces in every backward pass" in static
        assert (
            "DistributedDataParallel no longer reduces must belong to optimizers of this library, but SGD has some"
            in rest
        )


def with_a_wrapped_group_added():
    """The middle layer is added after a step; on several cores, wrapped."""
    model = network()
    sampler = vbs.CustomSampler(dataset_size=100, trace=SIZES, minibatch_size=4)
    inner = torch.optim.SGD([*model[0].parameters(), *model[4].parameters()], lr=0.1)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=4, model=model)
    x, y = data()
    for indices in sampler:
        if optimizer.steps_done == 1 and len(optimizer.param_groups) == 1:
            late = list(model[2].parameters())
            if sampler.num_replicas > 1:
                model[2] = DistributedDataParallel(model[2])
            optimizer.add_param_group({"params": late})
        nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_a_group_that_is_added_may_be_wrapped(on_cores):
    expected = with_a_wrapped_group_added()
    for found in on_cores(2, with_a_wrapped_group_added):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def synchronized_norms():
    """Of models without, and with, parameters of the norm in the optimizer; and of none, in another model."""
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with_parameters, of_another = (nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)) for _ in range(2))
    without = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)))
    found = []
    for trained, model in [
        (with_parameters, None),
        (with_parameters, with_parameters),
        (without, None),
        (without, without),
        (with_parameters[0], None),
        (with_parameters[0], with_parameters),
        (plain, plain),
        (plain, None),
    ]:
        sampler = vbs.CustomSampler(dataset_size=8, trace=[4], minibatch_size=4)
        inner = torch.optim.SGD(trained.parameters(), lr=0.1)
        found.append(error_of(vbs.LinearRuleOptimizer, inner, sampler, ref_batchsize=4, model=model))
    assert of_another is not None
    return found


def error_of(function, *args, **options):
    try:
        function(*args, **options)
    except ValueError as error:
        return str(error)
    return None


def test_sync_batch_norm_in_the_model_raises(on_cores):
    for *refused, with_model, without_model in on_cores(2, synchronized_norms):
        assert all("SyncBatchNorm waits for all ranks in every minibatch" in message for message in refused)
        assert (with_model, without_model) == (None, None)


def message_about_join():
    model = DistributedDataParallel(nn.Linear(2, 2))
    sampler = vbs.CustomSampler(dataset_size=8, trace=[4], minibatch_size=4)
    vbs.LinearRuleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler, ref_batchsize=4)
    with pytest.raises(RuntimeError) as raised, model.join():
        model(torch.ones(4, 2))
    return str(raised.value)


def test_join_raises(on_cores):
    for message in on_cores(2, message_about_join):
        assert message.startswith("DistributedDataParallel.join() waits for all ranks in every forward pass")
