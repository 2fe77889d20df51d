"""Parts: when their methods are called, in which order, and what a checkpoint keeps of them."""

import copy

import pytest
import torch
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.optim.parts.part import Hooks

TRACE = [4, 8, 4, 12]  # in minibatches of 4
NAMES = ("after_backward", "before_reduce", "before_update", "after_step", "before_minibatch", "after_minibatch")


class Noting(vbs.Part):
    """Notes what is called."""

    def __init__(self, found):
        self.found, self.num_steps = found, 0

    def on_attach(self, optimizer):
        self.parameters = list(optimizer.parameters())

    def begin_pass(self, run):
        self.run = run
        self.found.append(("begin_pass", run.epoch, run.epoch_step))

    def after_backward(self, plan):
        self.found.append(("after_backward", plan.step, self.parameters[0].grad is not None))

    def before_reduce(self, plan):
        self.found.append(("before_reduce", plan.step, self.run.steps_done))

    def before_update(self, step, gradient):
        self.found.append(("before_update", step.batch_size, self.parameters[0].grad.tolist()))

    def after_step(self, plan, step, outcome):
        self.num_steps += 1
        self.found.append(("after_step", plan.step, self.run.steps_done, outcome.factors))

    def before_minibatch(self, upcoming):
        self.found.append(("before_minibatch", None if upcoming is None else upcoming.step))

    def after_minibatch(self, plan, loss):
        self.found.append(("after_minibatch", plan.is_last, loss))

    def state_dict(self):
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state):
        self.num_steps = state["num_steps"]


def make():
    weight = nn.Parameter(torch.zeros(1))
    loader = vbs.DataLoader(
        torch.utils.data.TensorDataset(torch.ones(28)), trace=TRACE, minibatch_size=4, on_end="hold"
    )
    inner = torch.optim.SGD([weight], lr=1.0)
    return weight, loader, vbs.Optimizer(inner, loader, rule="linear", ref_batchsize=4)


def train(weight, loader, optimizer):
    for _ in optimizer.epochs(1):
        for number, _ in enumerate(loader):
            (weight * (number + 1)).sum().backward()
            optimizer.step(loss=float(number))


def test_methods_are_called_in_the_order_of_a_step():
    weight, loader, optimizer = make()
    optimizer.attach(Noting(found := []))
    train(weight, loader, optimizer)
    begin = next(number for number, (name, *_) in enumerate(found) if name == "after_backward")
    assert found[begin : begin + 14] == [
        ("after_backward", 0, True),
        ("before_reduce", 0, 0),
        ("before_update", 4, [1.0]),
        ("after_step", 0, 1, [1.0]),
        ("before_minibatch", 1),
        ("after_minibatch", True, 0.0),
        ("after_backward", 1, True),
        ("before_minibatch", 1),
        ("after_minibatch", False, 1.0),
        ("after_backward", 1, True),
        ("before_reduce", 1, 1),
        ("before_update", 8, [2.5]),  # the mean of the minibatches, before the factor
        ("after_step", 1, 2, [2.0]),
        ("before_minibatch", 2),
    ]
    assert found[-2:] == [("before_minibatch", None), ("after_minibatch", True, 6.0)]
    assert [name for name, *_ in found[:begin]].count("begin_pass") == 2  # when attached, and in the epoch


def test_what_is_not_overridden_is_not_called():
    class OnlyAfterStep(vbs.Part):
        def after_step(self, plan, step, outcome):
            pass

    hooks = Hooks([vbs.Part(), OnlyAfterStep()])
    assert [len(getattr(hooks, name)) for name in NAMES] == [0, 0, 0, 1, 0, 0]


def test_a_part_is_called_although_the_next_one_was_refused():
    weight, loader, optimizer = make()
    found = []
    with pytest.raises(ValueError, match=r"^attach\("):
        optimizer.attach(Noting(found), print)
    train(weight, loader, optimizer)
    assert ("after_minibatch", True, 0.0) in found


def test_what_a_part_names_is_compared_between_cores():
    class Named(vbs.Part):
        names = ("every 100 steps",)

    weight, loader, optimizer = make()
    optimizer.attach(Named())
    train(weight, loader, optimizer)
    assert optimizer._accumulator.attached == "Named, every 100 steps"


def test_the_state_of_a_part_is_resumed_with_the_checkpoint_that_is_attached(tmp_path):
    for number, expected in enumerate((4, 6)):  # the last row holds in the second epoch
        weight, loader, optimizer = make()
        model = nn.ParameterList([weight])
        checkpoint = vbs.Checkpoint(tmp_path, model=model, optimizer=optimizer)
        optimizer.attach(checkpoint)
        part = Noting([])
        optimizer.attach(part)  # it is stepped before the checkpoint all the same
        for _ in optimizer.epochs(number + 1):
            for _ in loader:
                weight.sum().backward()
                optimizer.step()
        assert part.num_steps == expected


def test_a_copy_has_parts_of_its_own():
    weight, loader, optimizer = make()
    part = Noting(found := [])
    optimizer.attach(part)
    weights, copied_loader, copied = copy.deepcopy((weight, loader, optimizer))
    found.clear()
    train(weights, copied_loader, copied)
    assert not found
    assert copied.steps_done == 4


@pytest.mark.parametrize("what", [vbs.Part, lambda: print])
def test_only_an_instance_of_a_part_is_attached_and_only_once(what):
    _, _, optimizer = make()
    part = what()
    if isinstance(part, vbs.Part):
        optimizer.attach(part)
        message = "^Part is attached already$"
    else:
        message = r"^attach\(\) takes a scheduler of torch, a vbs.Log, a vbs.Checkpoint or another vbs.Part, got"
    with pytest.raises(ValueError, match=message):
        optimizer.attach(part)


def test_each_part_comes_before_the_next_one():
    """See the reasons in the comments of _make_parts()."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    sampler = vbs.CustomSampler(dataset_size=64, trace=vbs.policies.CriticalBatch(), minibatch_size=4)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"log_steps": 1, "seed_minibatches": True, "measure_noise": True}
    optimizer = vbs.Optimizer(inner, sampler, rule="linear", ref_batchsize=4, model=model, **options)
    assert [type(part).__name__ for part in optimizer._engine.hooks.parts] == [
        "Unscaling",
        "ForwardState",
        "LoopChecks",
        "GradientNorm",
        "PolicyDriver",
        "Buffers",
        "LogLine",
        "MinibatchSeeder",
    ]
