"""Buffers: a step that does not count has no effect on them, and earlier changes by the user are kept."""

import copy

import pytest
import torch
import torch.distributed as dist
from noted_programs import Programs
from small_runs import sgd
from torch import nn
from torch.nn.functional import batch_norm, linear

import variable_batch_size as vbs
from variable_batch_size.cores.communicator import Communicator, SingleProcess
from variable_batch_size.optim.buffers import Buffers


class Statistics(nn.Module):
    """Buffers that change in every possible way: in place, by F.batch_norm, and by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("variance", torch.ones(2))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("latest", torch.zeros(2), persistent=False)
        self.register_buffer("expanded", torch.ones(1).expand(2), persistent=False)  # which is read-only

    def forward(self, x):
        x = batch_norm(self.linear(x), self.mean, self.variance, training=self.training)
        if self.training:
            self.count += 1
            self.latest = x.detach().mean(0) + 1
        return x


def buffers_of(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def watching(*arguments, **options):
    """As in a pass of the optimizer."""
    buffers = Buffers(*arguments, **options)
    buffers.watch(True)
    return buffers


def make(trace, **options):
    torch.manual_seed(0)
    model = Statistics()
    sampler = vbs.CustomSampler(dataset_size=64, trace=trace, minibatch_size=4)
    return model, vbs.LinearRuleOptimizer(sgd(model), sampler, ref_batchsize=4, model=model, **options)


def train(model, optimizer, *, poison=1.0):
    (model(torch.randn(4, 2)).square().mean() * poison).backward()
    optimizer.step()
    return optimizer.updated


def test_skipped_step_undoes_only_its_own_changes():
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


def test_skipped_step_keeps_the_changes_of_minibatches_of_another_sampler():
    model, optimizer = make([4] * 4, skip_nonfinite=True)
    other = vbs.CustomSampler(dataset_size=64, trace=[8] * 2, minibatch_size=4)
    last = nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([last], lr=0.1)
    beside = vbs.LinearRuleOptimizer(inner, other, ref_batchsize=4, model=model, skip_nonfinite=True)
    minibatches, others = iter(optimizer.sampler), iter(other)
    for poison in (1.0, float("nan")):
        next(minibatches)
        before = buffers_of(model)
        train(model, optimizer, poison=poison)
        assert (model.count == before["count"] + 1) == (poison == 1.0)
        for _ in range(2):
            next(others)
            (model(torch.randn(4, 2)) * last).square().mean().backward(inputs=[last])
            beside.step()
    assert model.count == 5
    before = buffers_of(model)
    next(minibatches)
    assert not train(model, optimizer, poison=float("nan"))
    for name, buffer in before.items():
        assert torch.equal(buffers_of(model)[name], buffer), name


def test_buffers_are_restored_to_the_values_set_by_the_user():
    model, optimizer = make([4] * 4, skip_nonfinite=True)
    train(model, optimizer)
    with torch.no_grad():
        model.mean.fill_(5.0)
    model.latest = torch.full((2,), 7.0)
    assert not train(model, optimizer, poison=float("nan"))
    assert model.mean.tolist() == [5.0, 5.0]
    assert model.latest.tolist() == [7.0, 7.0]


class Around(nn.Module):
    """A model whose buffers belong to a submodule that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Statistics()

    def forward(self, x):
        x = linear(x, self.part.linear.weight)
        return batch_norm(x, self.part.mean, self.part.variance, training=self.training)


def test_buffers_of_unused_modules_are_restored_to_the_values_set_by_the_user():
    model = Around()
    sampler = vbs.CustomSampler(dataset_size=64, trace=[4, 4], minibatch_size=4)
    optimizer = vbs.LinearRuleOptimizer(sgd(model), sampler, ref_batchsize=4, model=model, skip_nonfinite=True)
    train(model, optimizer)
    with torch.no_grad():
        model.part.mean.fill_(5.0)
    assert not train(model, optimizer, poison=float("nan"))
    assert model.part.mean.tolist() == [5.0, 5.0]


def test_model_may_be_loaded_after_the_optimizer():
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
    return {**buffers_of(model), "weight": model.linear.weight.detach()}


def shared_buffers():
    model = Statistics()
    with torch.no_grad():
        model.mean.fill_(dist.get_rank() + 1.0)
        model.count.fill_(dist.get_rank() + 7.0)
    vbs.share_buffers(model)
    return buffers_of(model)


def on_a_core():
    return idle_core_with_changed_buffers(), shared_buffers()


@pytest.fixture(scope="module")
def found_on_two_cores(on_cores):
    return on_cores(2, on_a_core)


def test_idle_core_keeps_values_written_to_its_buffers(found_on_two_cores):
    first, idle = (changed for changed, _ in found_on_two_cores)
    assert idle["mean"].tolist() == [3.0, 3.0]
    assert idle["count"] == 0
    assert first["mean"].tolist() != [3.0, 3.0]
    assert first["count"] == 2
    # its gradient does not count either: the weights are those of a single core
    alone = idle_core_with_changed_buffers()
    torch.testing.assert_close(first["weight"], alone["weight"])
    torch.testing.assert_close(idle["weight"], alone["weight"])


def test_evaluation_between_steps_changes_nothing():
    model, optimizer = make([4] * 4, skip_nonfinite=True)
    train(model, optimizer)
    model.eval()
    model(torch.randn(4, 2))
    model.train()
    before = buffers_of(model)
    train(model, optimizer, poison=float("nan"))
    assert all(torch.equal(buffer, before[name]) for name, buffer in buffers_of(model).items())


def test_compiled_model_has_no_graph_break():
    model, optimizer = make([4] * 3, skip_nonfinite=True)
    compiled = torch.compile(model.linear, fullgraph=True, backend="eager")
    model.linear.register_buffer("steps", torch.zeros(()))
    compiled(torch.randn(4, 2)).square().mean().backward()
    assert optimizer.step()
    whole = torch.compile(nn.Sequential(model.linear), fullgraph=True, backend="eager")
    whole(torch.randn(4, 2)).square().mean().backward()
    assert optimizer.step()


class OfTwo(Communicator):
    """A communicator of two cores, one of which may be idle."""

    rank, num_replicas = 1, 2

    def __init__(self, *, is_one_program=False):
        self.is_one_program = is_one_program
        self.num_flushes = 0

    def flush(self):
        self.num_flushes += 1

    def sum(self, tensors):
        raise AssertionError("buffers are each core's own")

    broadcast = sum


@pytest.mark.parametrize("is_one_program", [False, True])
def test_padding_minibatch_is_undone_and_a_real_one_is_not(is_one_program):
    torch.manual_seed(0)
    model = Statistics()
    model.register_buffer("nothing", None)
    core = OfTwo(is_one_program=is_one_program)
    buffers = watching(model, core)
    counted = 0
    for is_idle in (True, False, True, True, False, False):
        buffers.snapshot(is_idle)
        before = buffers_of(model)
        model(torch.randn(4, 2))
        during = buffers_of(model)
        buffers.restore(is_undone=is_idle)
        for name, after in buffers_of(model).items():
            assert torch.equal(after, (before if is_idle else during)[name]), name
        counted += not is_idle
        assert model.count == counted
    assert core.num_flushes == 0  # because the user did not change the buffers


class Created(nn.Module):
    """A buffer that the first forward pass creates."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)

    def forward(self, x):
        self.scale = x.abs().max() if self.scale is None else 0.5 * self.scale + 0.5 * x.abs().max()
        return x / self.scale


@pytest.mark.parametrize("has_others", [False, True])
@pytest.mark.parametrize("is_one_program", [False, True])
def test_buffer_that_a_padding_minibatch_creates_is_removed(is_one_program, has_others):
    model = nn.Sequential(Created(), nn.BatchNorm1d(2) if has_others else nn.Identity())
    buffers = watching(model, OfTwo(is_one_program=is_one_program))
    buffers.snapshot(is_idle=True)
    model(torch.full((4, 2), 8.0))
    buffers.restore(is_undone=True)
    assert model[0].scale is None
    buffers.snapshot(is_idle=False)
    model(torch.full((4, 2), 2.0))
    buffers.restore(is_undone=False)
    assert model[0].scale == 2.0
    buffers.snapshot(is_idle=True)
    model(torch.full((4, 2), 8.0))
    buffers.restore(is_undone=True)
    assert model[0].scale == 2.0


@pytest.mark.parametrize("is_skipped", [False, True])
def test_buffer_that_a_skipped_step_creates_is_removed_where_the_device_decides(is_skipped):
    model = Created()
    buffers = watching(model, SingleProcess(), may_skip=True)
    buffers.snapshot(is_idle=False)
    model(torch.full((4, 2), 8.0))
    buffers.restore(False, torch.tensor([is_skipped]))
    assert (model.scale is None) == is_skipped


@pytest.mark.parametrize("is_one_program", [False, True])
def test_padding_minibatch_is_undone_to_the_values_set_by_the_user(is_one_program):
    model = Statistics()
    core = OfTwo(is_one_program=is_one_program)
    buffers = watching(model, core)
    buffers.snapshot(is_idle=True)
    with torch.no_grad():
        model.mean.fill_(5.0)
    for _ in range(2):
        model(torch.randn(4, 2))
    buffers.restore(is_undone=True)
    assert (model.mean.tolist(), model.count.item()) == ([5.0, 5.0], 0)
    assert core.num_flushes == 1  # before the model runs, so that its graph is the same in every minibatch


def test_padding_and_real_minibatches_trace_the_same_operations():
    model = Statistics()
    buffers = watching(model, OfTwo(is_one_program=True))
    found = []
    for is_idle in (True, False):
        buffers.snapshot(is_idle)
        model(torch.randn(4, 2))
        with Programs() as programs:
            buffers.restore(is_undone=is_idle)
        found.append(programs.current)
    assert found[0] == found[1] != []


@pytest.mark.parametrize("is_one_program", [False, True])
def test_submodules_may_be_called_instead_of_the_model(is_one_program):
    model = nn.Sequential(nn.Linear(2, 2), Statistics(), nn.Linear(2, 2))
    buffers = watching(model, OfTwo(is_one_program=is_one_program))
    buffers.snapshot(is_idle=True)
    with torch.no_grad():
        model[1].mean.fill_(5.0)
    model[2](model[1](model[0](torch.randn(4, 2))))
    buffers.restore(is_undone=True)
    assert (model[1].mean.tolist(), model[1].count.item()) == ([5.0, 5.0], 0)


@pytest.mark.parametrize("is_one_program", [False, True])
def test_a_model_may_have_a_single_buffer(is_one_program):
    model = nn.Module()
    model.register_buffer("count", torch.zeros(()))
    buffers = watching(model, OfTwo(is_one_program=is_one_program))
    buffers.snapshot(is_idle=True)
    model.count += 1
    buffers.restore(is_undone=True)
    assert model.count == 0


def test_nothing_is_restored_before_the_first_snapshot():
    model = Statistics()
    buffers = watching(model, OfTwo())
    model(torch.randn(4, 2))
    model.count += 1
    buffers.restore(is_undone=True)
    assert model.count == 2


def test_change_without_a_new_tensor_version_is_kept():
    torch.manual_seed(0)
    model = Around()
    buffers = watching(model, SingleProcess(), may_skip=True)
    buffers.snapshot(is_idle=False)
    model(torch.randn(4, 2))
    buffers.restore(is_undone=False)
    buffers.snapshot(is_idle=False)
    before = buffers_of(model)
    model(torch.randn(4, 2))
    buffers.restore(is_undone=True)
    assert all(torch.equal(buffer, before[name]) for name, buffer in buffers_of(model).items())
    assert before["part.mean"].abs().sum() > 0


@pytest.mark.parametrize("is_one_program", [False, True])
def test_padding_minibatch_may_be_nan(is_one_program):
    model = nn.BatchNorm1d(2)
    buffers = watching(model, OfTwo(is_one_program=is_one_program))
    buffers.snapshot(is_idle=True)
    model(torch.full((4, 2), float("nan")))
    buffers.restore(is_undone=True)
    assert model.running_mean.tolist() == [0, 0]
    assert model.num_batches_tracked == 0


def test_core_that_is_never_idle_and_never_skips_has_no_copies_and_hooks():
    model = Statistics()
    buffers = watching(model, SingleProcess())
    buffers.snapshot(is_idle=False)
    model(torch.randn(4, 2))
    before = buffers_of(model)
    buffers.restore(is_undone=True)
    assert all(torch.equal(buffer, before[name]) for name, buffer in buffers_of(model).items())
    assert not model._forward_pre_hooks


def test_no_snapshot_of_an_earlier_step_is_kept():
    model = Statistics()
    buffers = watching(model, OfTwo())
    buffers.snapshot(is_idle=True)
    model(torch.randn(4, 2))
    buffers.restore(is_undone=True)
    buffers.snapshot(is_idle=False)
    model(torch.randn(4, 2))
    before = buffers_of(model)
    buffers.restore(is_undone=True)  # without a snapshot
    assert all(torch.equal(buffer, before[name]) for name, buffer in buffers_of(model).items())


def test_later_minibatches_of_a_step_do_not_replace_the_snapshot():
    torch.manual_seed(0)
    model = Statistics()
    buffers = watching(model, SingleProcess(), may_skip=True)
    buffers.snapshot(is_idle=False)
    with torch.no_grad():
        model.mean.fill_(5.0)  # by the user, before the step
    for _ in range(3):
        model(torch.randn(4, 2))
    buffers.restore(is_undone=True)
    assert model.mean.tolist() == [5.0, 5.0]
    assert model.count == 0


def test_evaluation_does_not_hide_changes_by_the_user():
    model = Statistics()
    buffers = watching(model, SingleProcess(), may_skip=True)
    buffers.snapshot(is_idle=False)
    model.eval()
    model(torch.randn(4, 2))
    model.train()
    with torch.no_grad():
        model.mean.fill_(5.0)
    model(torch.randn(4, 2))
    buffers.restore(is_undone=True)
    assert model.mean.tolist() == [5.0, 5.0]


def test_share_buffers_on_one_core_changes_nothing():
    model = Statistics()
    before = buffers_of(model)
    vbs.share_buffers(model)
    assert all(torch.equal(buffer, before[name]) for name, buffer in buffers_of(model).items())


def test_share_buffers_with_a_group_requires_torch_distributed():
    message = "^`process_group` must be None if torch.distributed is not initialized$"
    with pytest.raises(ValueError, match=message):
        vbs.share_buffers(Statistics(), process_group="data")


def test_shared_buffers_on_an_idle_core_are_those_of_core_0(found_on_two_cores):
    for _, found in found_on_two_cores:
        assert (found["mean"].tolist(), found["count"].item()) == ([1.0, 1.0], 7.0)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_fully_compiled_model_trains(is_compiled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    sampler = vbs.CustomSampler(dataset_size=64, trace=[4] * 4, minibatch_size=4)
    optimizer = vbs.AdaScaleOptimizer(sgd(model), sampler, ref_batchsize=4, model=model)
    run = torch.compile(model, fullgraph=True, backend="eager") if is_compiled else model
    for poison in (1.0, float("nan"), 1.0):
        before = model[1].running_mean.clone()
        (run(torch.ones(4, 2) * torch.arange(4).view(4, 1)).square().mean() * poison).backward()
        optimizer.step()
        has_updated = optimizer.updated
        assert has_updated == (poison == 1.0)
        assert torch.equal(model[1].running_mean, before) == (not has_updated)
