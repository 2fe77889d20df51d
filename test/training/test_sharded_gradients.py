"""Sharded gradients in the cases that a run through a trace does not meet."""

import random
import re
import time

import pytest
import sharded_models
import torch
from sharded_models import Transformer, largest_difference

import variable_batch_size as vbs


def parts(spread, **options):
    model, more = spread(sharded_models.model_of(Transformer))
    sampler = vbs.CustomSampler(dataset_size=64, minibatch_size=4, **{"trace": sharded_models.SIZES, **more, **options})
    return model, sampler


def run(model, sampler, optimizer, between=lambda: None):
    x, y = sharded_models.data()
    for epoch in range(sampler.schedule.num_epochs):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for indices in sampler:
            sharded_models.loss_of(model, x[indices], y[indices]).backward()
            if optimizer.step():
                between()


def with_an_added_group(spread):
    """The last block joins after the first step, until when it stays as it is."""
    model, sampler = parts(spread)
    late = list(model.blocks[1].parameters())
    first = [p for p in model.parameters() if all(p is not other for other in late)]
    optimizer = vbs.AdaScaleOptimizer(sharded_models.sgd(first), sampler, ref_batchsize=8, model=model)

    def add():
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": late})

    run(model, sampler, optimizer, add)
    return sharded_models.state_of(model), [optimizer.gain(group=group) for group in range(2)]


def with_another_optimizer_before(spread):
    """One is left in the middle of a step, before a stand-in, and stays alive."""
    model, sampler = parts(spread, trace=[12, 20])
    before = vbs.AdaScaleOptimizer(sharded_models.sgd(model.parameters()), sampler, ref_batchsize=8, model=model)
    x, y = sharded_models.data()
    sharded_models.loss_of(model, x[:4], y[:4]).backward()
    before._gradients.expect(is_stand_in=True)
    before._gradients.drop()
    model_2, sampler_2 = model, parts(sharded_models.plain)[1]
    optimizer = vbs.AdaScaleOptimizer(sharded_models.sgd(model_2.parameters()), sampler_2, ref_batchsize=8, model=model)
    run(model_2, sampler_2, optimizer)
    return sharded_models.state_of(model_2), optimizer.gain()


def along_random_traces(spread):
    found = []
    draw = random.Random(3)
    for _ in range(3):
        trace = [4 * draw.randint(1, 9) for _ in range(4)]
        model, sampler = parts(spread, trace=trace)
        inner = sharded_models.sgd(model.parameters())
        optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=8, model=model, measure_noise=True)
        run(model, sampler, optimizer)
        found.append((sharded_models.state_of(model), optimizer.gain(8)))
    return found


def dropped(spread):
    """A backward pass that no step() takes over, and an evaluation, leave no mark."""
    model, sampler = parts(spread)
    optimizer = vbs.AdaScaleOptimizer(sharded_models.sgd(model.parameters()), sampler, ref_batchsize=8, model=model)
    x, y = sharded_models.data()

    def disturb():
        optimizer.zero_grad()
        sharded_models.loss_of(model, x[:4], y[:4]).backward()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(x[:4])
        model.train()

    run(model, sampler, optimizer, disturb)
    return sharded_models.state_of(model), optimizer.gain()


def all_of_them(name):
    spread = getattr(sharded_models, name)
    rounds = [len(parts(spread)[1]), len(parts(sharded_models.plain, lockstep=True)[1])]
    return {
        "added": with_an_added_group(spread),
        "before": with_another_optimizer_before(spread),
        "random": along_random_traces(spread),
        "dropped": dropped(spread),
        "rounds": rounds,
    }


@pytest.fixture(scope="module")
def expected():
    return all_of_them("plain")


@pytest.fixture(scope="module")
def found():
    return vbs.launch(all_of_them, ("sharded",), cores=3, backend="gloo")


@pytest.mark.parametrize("name", ["added", "before", "dropped"])
def test_it_is_as_in_one_plain_process(found, expected, name):
    state, gain = expected[name]
    for core in found:
        assert largest_difference(core[name][0], state) < 1e-5
        assert core[name][1] == pytest.approx(gain, rel=1e-4)


def test_random_traces_give_what_one_plain_process_does(found, expected):
    for core in found:
        for (state, gain), (plain, plain_gain) in zip(core["random"], expected["random"], strict=True):
            assert largest_difference(state, plain) < 1e-5
            assert gain == pytest.approx(plain_gain, rel=1e-4)


def test_the_optimizer_puts_the_sampler_into_lockstep_and_the_user_may_do_so_before(found):
    # 3, 1, 4, 2 and 5 minibatches on 3 cores: 1, 1, 2, 1 and 2 rounds
    for rank, core in enumerate(found):
        assert core["rounds"] == [[7, 6, 5][rank], 7]


def fail_on_core_1():
    model, sampler = parts(sharded_models.sharded)
    optimizer = vbs.LinearRuleOptimizer(sharded_models.sgd(model.parameters()), sampler, ref_batchsize=8)
    x, y = sharded_models.data()
    for indices in sampler:
        if sampler.rank == 1 and optimizer.steps_done == 2:
            raise FloatingPointError(f"on core 1 at {time.time()}")
        sharded_models.loss_of(model, x[indices], y[indices]).backward()
        optimizer.step()


def test_an_error_on_one_core_ends_all_while_the_others_wait_for_it():
    with pytest.raises(RuntimeError, match="FloatingPointError: on core 1 at") as raised:
        vbs.launch(fail_on_core_1, cores=2, backend="gloo")
    at = float(re.findall(r"on core 1 at ([0-9.]+)", str(raised.value))[-1])
    assert time.time() - at < 20
