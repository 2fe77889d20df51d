"""step(closure): the minibatch's forward and backward pass, run once, within the step."""

import pytest
import torch
from torch import nn

import variable_batch_size as vbs

DATA = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))


def make(**options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1))
    sampler = vbs.CustomSampler(64, [8, 24, 16, 16, 32, 32], minibatch_size=8)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, vbs.AdaScaleOptimizer(inner, sampler, ref_batchsize=8, **options)


def weights_after(run_minibatch, **options):
    model, optimizer = make(**options)
    torch.manual_seed(2)
    for _ in optimizer.epochs(2):
        for indices in optimizer.sampler:
            run_minibatch(model, optimizer, DATA[indices])
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def backward(model, data):
    loss = model(data).square().mean()
    loss.backward()
    return loss.detach()


def run_then_step(model, optimizer, data):
    backward(model, data)
    assert optimizer.step() is optimizer.updated


def run_within_step(model, optimizer, data):
    with torch.no_grad():  # as callers may set it
        optimizer.step(lambda: backward(model, data))


def test_a_closure_is_a_minibatch_run_before_the_step():
    assert torch.equal(weights_after(run_within_step), weights_after(run_then_step))


def test_random_numbers_of_a_closure_are_seeded():
    options = {"seed_minibatches": True}
    assert torch.equal(weights_after(run_within_step, **options), weights_after(run_then_step, **options))


def test_closure_runs_once_and_its_result_is_returned():
    model, optimizer = make()
    calls = []

    def closure():
        calls.append(backward(model, DATA[:8]))
        return calls[-1]

    for _ in optimizer.epochs(1):
        assert optimizer.step(closure) is calls[0]
        assert optimizer.updated
        assert optimizer.step(closure) is calls[1]
        assert not optimizer.updated
    assert len(calls) == 2


def test_loop_of_a_framework_must_have_set_the_epoch():
    model, optimizer = make()
    with pytest.raises(RuntimeError, match=r"^step\(closure\) was called before set_epoch\(\): "):
        optimizer.step(lambda: backward(model, DATA[:8]))
    backward(model, DATA[:8])
    assert optimizer.step()


def test_updated_is_false_after_a_skipped_update():
    model, optimizer = make()
    assert not optimizer.updated
    for _ in optimizer.epochs(1):
        optimizer.step(lambda: backward(model, DATA[:8]))
        for _ in range(3):
            optimizer.step(lambda: backward(model, DATA[:8] * torch.nan))
    assert optimizer.steps_done == 2
    assert not optimizer.updated


def test_updated_is_false_after_a_failed_step():
    model, optimizer = make()
    for _ in optimizer.epochs(1):
        optimizer.step(lambda: backward(model, DATA[:8]))
        assert optimizer.updated
        try:
            optimizer.step(lambda: 1 / 0)
        except ZeroDivisionError:
            assert not optimizer.updated
