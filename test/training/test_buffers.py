"""Buffers: a step that does not count leaves no mark on them, and what the user did to them before stays."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm

import variable_batch_size as vbs


class Statistics(nn.Module):
    """Buffers that change in each way there is: in place, by F.batch_norm, and by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("variance", torch.ones(2))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("latest", torch.zeros(2), persistent=False)
        self.register_buffer("expanded", torch.ones(1).expand(2), persistent=False)  # which cannot be written to

    def forward(self, x):
        x = batch_norm(self.linear(x), self.mean, self.variance, training=self.training)
        if self.training:
            self.count += 1
            self.latest = x.detach().mean(0) + 1
        return x


def buffers_of(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def make(trace, **options):
    torch.manual_seed(0)
    model = Statistics()
    sampler = vbs.CustomSampler(dataset_size=64, trace=trace, minibatch_size=4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=4, model=model, **options)


def train(model, optimizer, *, poison=1.0):
    (model(torch.randn(4, 2)).square().mean() * poison).backward()
    return optimizer.step()


def test_a_skipped_step_takes_back_what_it_did_and_nothing_else():
    model, optimizer = make([4] * 4, skip_nonfinite=True)
    assert train(model, optimizer)
    assert train(model, optimizer)
    before = buffers_of(model)
    assert not train(model, optimizer, poison=float("nan"))
    after = buffers_of(model)
    for name, buffer in before.items():
        assert torch.equal(after[name], buffer), name
        assert buffer.abs().sum() > 0, name
    assert train(model, optimizer)
    assert not torch.equal(model.mean, before["mean"])


def test_buffers_that_the_user_has_changed_since_are_put_back_to_that():
    model, optimizer = make([4] * 4, skip_nonfinite=True)
    train(model, optimizer)
    with torch.no_grad():
        model.mean.fill_(5.0)
    model.latest = torch.full((2,), 7.0)
    assert not train(model, optimizer, poison=float("nan"))
    assert model.mean.tolist() == [5.0, 5.0]
    assert model.latest.tolist() == [7.0, 7.0]


def test_the_model_may_be_loaded_after_the_optimizer():
    model, optimizer = make([4] * 4, skip_nonfinite=True)
    train(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, resumed = make([4] * 4, skip_nonfinite=True)
    resumed.load_state_dict(saved[1])
    other.load_state_dict(saved[0])
    resumed.sampler.set_epoch(resumed.epoch, resumed.epoch_step)
    assert not train(other, resumed, poison=float("nan"))
    assert torch.equal(other.mean, saved[0]["mean"])
    assert torch.equal(other.count, saved[0]["count"])


def idle_core_with_changed_buffers():
    model, optimizer = make([4, 4])
    train(model, optimizer)
    with torch.no_grad():
        model.mean.fill_(3.0)  # as share_buffers may do before an evaluation
    train(model, optimizer)
    return buffers_of(model)


def test_an_idle_core_keeps_what_was_put_into_its_buffers():
    first, idle = vbs.launch(idle_core_with_changed_buffers, cores=2, backend="gloo")
    assert idle["mean"].tolist() == [3.0, 3.0]
    assert idle["count"] == 0
    assert first["mean"].tolist() != [3.0, 3.0]
    assert first["count"] == 2


def test_evaluation_in_between_changes_nothing():
    model, optimizer = make([4] * 4, skip_nonfinite=True)
    train(model, optimizer)
    model.eval()
    model(torch.randn(4, 2))
    model.train()
    before = buffers_of(model)
    train(model, optimizer, poison=float("nan"))
    assert all(torch.equal(buffer, before[name]) for name, buffer in buffers_of(model).items())


def test_a_compiled_model_has_no_break_in_its_graph():
    model, optimizer = make([4] * 3, skip_nonfinite=True)
    compiled = torch.compile(model.linear, fullgraph=True, backend="eager")
    model.linear.register_buffer("steps", torch.zeros(()))
    compiled(torch.randn(4, 2)).square().mean().backward()
    assert optimizer.step()
    whole = torch.compile(nn.Sequential(model.linear), fullgraph=True, backend="eager")
    whole(torch.randn(4, 2)).square().mean().backward()
    assert optimizer.step()


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_compiled_whole_model_trains(is_compiled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    sampler = vbs.CustomSampler(dataset_size=64, trace=[4] * 4, minibatch_size=4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = vbs.AdaScaleOptimizer(inner, sampler, ref_batchsize=4, model=model)
    run = torch.compile(model, fullgraph=True, backend="eager") if is_compiled else model
    for poison in (1.0, float("nan"), 1.0):
        before = model[1].running_mean.clone()
        (run(torch.ones(4, 2) * torch.arange(4).view(4, 1)).square().mean() * poison).backward()
        has_updated = optimizer.step()
        assert has_updated == (poison == 1.0)
        assert torch.equal(model[1].running_mean, before) == (not has_updated)
