"""optimizer.attach, optimizer.epochs: schedulers, a log and a checkpoint are stepped, saved and restored together."""

import copy
import itertools
import json
import re

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR

import variable_batch_size as vbs
from variable_batch_size.runs.checkpoint import Checkpoint

DATA = torch.utils.data.TensorDataset(
    torch.randn(96, 4, generator=torch.Generator().manual_seed(1)),
    torch.randint(0, 3, (96,), generator=torch.Generator().manual_seed(2)),
)
TRACE = "0:16 3:32"
NUM_EPOCHS = 4


def make(trace=TRACE, *, rule="linear", lr=0.1):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    loader = vbs.DataLoader(DATA, trace=trace, minibatch_size=8)
    inner = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return model, loader, vbs.Optimizer(inner, loader, rule=rule, ref_batchsize=16, model=model)


def train(model, loader, optimizer, *, epochs=NUM_EPOCHS, weight=None, stop_after=None):
    """Train, and return the learning rate after each completed step."""
    found = []
    for _ in optimizer.epochs(epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if optimizer.step(loss=loss, weight=weight):
                found.append(optimizer.get_lr()[0])
                if len(found) == stop_after:
                    return found
    return found


MAKE = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=16),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.5, total_steps=20),
}


def position(optimizer, per, every):
    done = {
        "update": optimizer.steps_done,
        "epoch": optimizer.epoch + (optimizer.epoch_step == len(optimizer.sampler.get_epochtrace(optimizer.epoch))),
        "samples": optimizer.samples_done,
        "tokens": optimizer.weight_done,
        "progress": optimizer.progress,
    }
    return int(done[per] / every + 1e-9)


UNITS = [
    ("update", None, 1),
    ("update", 2, 2),
    ("epoch", None, 1),
    ("samples", None, 16),
    ("samples", 8, 8),
    ("tokens", 5, 5),
    ("progress", None, 1),
]


def in_units():
    """Two schedulers in each unit, all three in the long form."""
    for (number, units), (place, kind) in itertools.product(enumerate(UNITS), enumerate(MAKE)):
        yield pytest.param(*units, kind, marks=pytest.mark.long if number % 3 == place else ())


@pytest.mark.parametrize(("per", "every", "units", "kind"), [*in_units()])
def test_scheduler_steps_follow_the_length_of_the_run(per, every, units, kind):
    model, loader, optimizer = make()
    scheduler = MAKE[kind](optimizer)
    optimizer.attach(scheduler, per=per, every=every)
    by_hand = MAKE[kind](torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=0.1, momentum=0.9))
    expected = [by_hand.get_last_lr()]
    last = {"cosine": 16, "one cycle": 19, "lambda": 100}[kind]
    for _ in range(last):
        by_hand.optimizer.step()
        by_hand.step()
        expected.append(by_hand.get_last_lr())
    for _ in optimizer.epochs(NUM_EPOCHS):
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            if optimizer.step(weight=3 if per == "tokens" else None):
                assert [optimizer.get_lr()[0]] == expected[min(position(optimizer, per, units), last)]
    assert scheduler.last_epoch > 3


def test_scheduler_by_epochs_also_steps_where_an_epoch_is_left_early():
    model, loader, optimizer = make()
    optimizer.attach(StepLR(optimizer, 1, gamma=0.5), per="epoch")
    seen = []
    for _ in optimizer.epochs(3):
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            if optimizer.step():
                seen.append(optimizer.get_lr()[0])
                break
    assert seen == [0.1, 0.05, 0.025]


def test_parts_are_stepped_as_by_hand(tmp_path):
    def by_hand(directory):
        model, loader, optimizer = make()
        scheduler = MAKE["cosine"](optimizer)
        log = vbs.Log(optimizer, every=2, to=[vbs.JsonLines(directory / "log.jsonl")])
        checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer, every_steps=3)
        for _ in checkpoint.epochs(NUM_EPOCHS):
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                if optimizer.step() and scheduler.last_epoch < 16:
                    scheduler.step()
                log.step(loss)
                checkpoint.step()
        log.close()
        return model

    def attached(directory):
        model, loader, optimizer = make()
        log = vbs.Log(optimizer, every=2, to=[vbs.JsonLines(directory / "log.jsonl")])
        checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer, every_steps=3)
        optimizer.attach(checkpoint, log)  # in any order
        optimizer.attach(MAKE["cosine"](optimizer))
        train(model, loader, optimizer)
        return model

    for name in ("by hand", "attached"):
        (tmp_path / name).mkdir()
    models = by_hand(tmp_path / "by hand"), attached(tmp_path / "attached")
    assert torch.equal(models[0].weight, models[1].weight)
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("by hand", "attached")]
    assert files[0] == files[1]
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("by hand", "attached")]
    records = [[{**json.loads(line), "samples_per_second": 0} for line in log] for log in logs]
    assert records[0] == records[1]
    assert len(records[0]) > 5


def orders():
    """Each pair of an order, a scheduler and a unit in one run; each three in the long form."""
    lists = ["scheduler first", "checkpoint first", "scheduler made after"], [*MAKE], ["update", "epoch", "samples"]
    for (one, order), (two, kind), (three, per) in itertools.product(*map(enumerate, lists)):
        yield pytest.param(order, kind, per, marks=pytest.mark.long if (one + two + three) % 3 else ())


@pytest.mark.parametrize(("order", "kind", "per"), [*orders()])
def test_run_that_resumes_has_the_learning_rates_of_one_that_was_never_stopped(tmp_path, order, kind, per):
    def run(directory, stop_after=None):
        model, loader, optimizer = make()
        scheduler = None if order == "scheduler made after" else MAKE[kind](optimizer)
        if order == "scheduler first":
            optimizer.attach(scheduler, per=per)
        optimizer.attach(vbs.Checkpoint(directory, model=model, optimizer=optimizer, every_steps=1))
        if order != "scheduler first":
            optimizer.attach(scheduler or MAKE[kind](optimizer), per=per)
        return train(model, loader, optimizer, stop_after=stop_after), model

    expected, model = run(tmp_path / "whole")
    first, _ = run(tmp_path / "stopped", stop_after=5)
    rest, resumed = run(tmp_path / "stopped")
    assert first + rest[-(len(expected) - 5) :] == expected
    assert torch.equal(model.weight, resumed.weight)


def test_state_dict_holds_the_schedulers_and_loads_with_weights_only(tmp_path):
    model, loader, optimizer = make()
    optimizer.attach(MAKE["lambda"](optimizer), per="samples")
    train(model, loader, optimizer, stop_after=5)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    _, _, other = make()
    scheduler = MAKE["lambda"](other)
    other.attach(scheduler, per="samples")
    other.load_state_dict(state)
    assert other.get_lr() == optimizer.get_lr()
    assert scheduler.last_epoch == optimizer.samples_done // 16


def test_scheduler_of_the_state_that_is_not_attached_again_raises_before_training():
    model, loader, optimizer = make()
    optimizer.attach(MAKE["cosine"](optimizer))
    train(model, loader, optimizer, stop_after=2)
    model, loader, other = make()
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match=r"scheduler that was attached \(CosineAnnealingLR\): attach it again first"):
        train(model, loader, other)


OTHERS = [("lambda", "update", 1), ("cosine", "samples", 1), ("cosine", "update", 2)]


@pytest.mark.parametrize(("kind", "per", "every"), OTHERS)
def test_state_of_another_scheduler_is_refused(kind, per, every):
    model, loader, optimizer = make()
    optimizer.attach(MAKE["cosine"](optimizer))
    train(model, loader, optimizer, stop_after=2)
    _, _, other = make()
    other.attach(MAKE[kind](other), per=per, every=every)
    before = "the scheduler was CosineAnnealingLR with per='update', every=1 when the state was saved"
    with pytest.raises(ValueError, match=re.escape(before)):
        other.load_state_dict(optimizer.state_dict())


def test_scheduler_that_is_new_in_a_resumed_run_is_at_the_position_of_the_run():
    model, loader, optimizer = make()
    train(model, loader, optimizer, stop_after=5)
    _, _, other = make()
    other.load_state_dict(optimizer.state_dict())
    scheduler = MAKE["lambda"](other)
    other.attach(scheduler)
    assert scheduler.last_epoch == 5


def test_copy_of_an_optimizer_has_nothing_attached():
    _, _, optimizer = make()
    log = vbs.Log(optimizer, every=1, to=[lambda record: None])
    optimizer.attach(log, MAKE["cosine"](optimizer))
    assert not copy.deepcopy(optimizer)._attachments.parts


def test_epochs_by_default_are_those_of_the_trace():
    _, loader, optimizer = make([16, 32, 64, 32])
    assert list(range(loader.sampler.schedule.num_epochs)) == [0, 1]
    model, loader, optimizer = make([16, 32, 64, 32])
    train(model, loader, optimizer, epochs=None)
    assert optimizer.steps_done == 4
    with pytest.raises(
        ValueError, match="`num_epochs` or a limit such as `samples` must be given: the trace has no end"
    ):
        make()[2].epochs()
    with pytest.raises(ValueError, match="2 epochs"):
        make([16, 32, 64, 32])[2].epochs(3)


def test_closure_gives_the_loss_of_the_log():
    model, loader, optimizer = make()
    records = []
    optimizer.attach(vbs.Log(optimizer, every=1, to=[records.append]))
    for _ in optimizer.epochs(1):
        for x, y in loader:

            def closure(x=x, y=y):
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
    assert len(records) == optimizer.steps_done > 3
    assert all(0.3 < record["loss"] < 3 for record in records)


def _log_of(other):
    return vbs.Log(other, every=1, to=[])


WRONG = {
    "no part": (
        lambda optimizer, other: optimizer.attach(print),
        r"attach\(\) takes a scheduler of torch, a vbs.Log, a",
    ),
    "scheduler twice": (
        lambda optimizer, other: optimizer.attach(*[MAKE["cosine"](optimizer)] * 2),
        "CosineAnnealingLR is attached already",
    ),
    "log twice": (lambda optimizer, other: optimizer.attach(*[_log_of(optimizer)] * 2), "Log is attached already"),
    "scheduler of another": (
        lambda optimizer, other: optimizer.attach(MAKE["cosine"](other)),
        "CosineAnnealingLR belongs to another optimizer",
    ),
    "log of another": (
        lambda optimizer, other: optimizer.attach(_log_of(other)),
        "the log belongs to another optimizer",
    ),
    "checkpoint of another": (
        lambda optimizer, other: optimizer.attach(
            Checkpoint(None, model=nn.ParameterList(other.parameters()), optimizer=other)
        ),
        "the checkpoint belongs to another optimizer",
    ),
    "unit": (
        lambda optimizer, other: optimizer.attach(MAKE["cosine"](optimizer), per="sample"),
        r"`per` must be one of .*, got 'sample' \(did you mean 'samples'\?\)",
    ),
    "tokens": (
        lambda optimizer, other: optimizer.attach(MAKE["cosine"](optimizer), per="tokens"),
        '`every` must be given with per="tokens"',
    ),
    "every": (
        lambda optimizer, other: optimizer.attach(MAKE["cosine"](optimizer), every=0),
        "`every` must be a positive number, got 0",
    ),
    "plateau": (
        lambda optimizer, other: optimizer.attach(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)),
        r"got ReduceLROnPlateau, which depends on a metric: call its step\(metric\) yourself",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_attached_is_refused(kind):
    attach, message = WRONG[kind]
    with pytest.raises(ValueError, match=message):
        attach(make()[2], make()[2])


def test_log_needs_the_loss_and_is_not_called_by_hand():
    model, loader, optimizer = make()
    log = vbs.Log(optimizer, every=1, to=[])
    optimizer.attach(log)
    with pytest.raises(RuntimeError, match=r"log.step\(\) was called, but the log is attached to the optimizer"):
        log.step(0.0)
    next(iter(optimizer.epochs(1)))
    x, y = next(iter(loader))
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match=r"`loss` must be passed if a log is attached: optimizer.step\(loss=loss\)"):
        optimizer.step()


@pytest.mark.parametrize("per", ["update", "samples", "epoch"])
def test_scheduler_that_is_also_stepped_by_hand_raises(per):
    model, loader, optimizer = make()
    scheduler = MAKE["lambda"](optimizer)
    optimizer.attach(scheduler, per=per)
    message = r"LambdaLR has made \d steps, but the optimizer has stepped it to \d: don't call step\(\) of an attached"
    with pytest.raises(RuntimeError, match=message):
        for _ in optimizer.epochs(2):
            for x, y in loader:
                nn.functional.cross_entropy(model(x), y).backward()
                if optimizer.step():
                    scheduler.step()


def test_scheduler_does_not_go_back_without_a_state():
    model, loader, optimizer = make()
    optimizer.attach(MAKE["lambda"](optimizer), per="epoch")
    train(model, loader, optimizer, epochs=2)
    message = r"LambdaLR has made 2 steps, but the run has reached only 0: .* load a state that holds both"
    with pytest.raises(RuntimeError, match=message):
        optimizer.set_epoch(0)


def test_scheduler_that_was_loaded_by_hand_continues():
    model, loader, optimizer = make()
    train(model, loader, optimizer, epochs=1)
    state = copy.deepcopy(optimizer.state_dict())
    model, loader, optimizer = make()
    scheduler = MAKE["lambda"](optimizer)
    optimizer.attach(scheduler)
    optimizer.load_state_dict(state)
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": optimizer.steps_done})
    train(model, loader, optimizer, epochs=2)
    assert scheduler.last_epoch == optimizer.steps_done


def test_scheduler_by_tokens_needs_weights():
    model, loader, optimizer = make()
    optimizer.attach(MAKE["lambda"](optimizer), per="tokens", every=10)
    with pytest.raises(
        ValueError,
        match=r'per="tokens" needs the number of tokens of each minibatch: pass it as optimizer.step\(weight=…\)',
    ):
        train(model, loader, optimizer)


def test_attached_checkpoint_saves_nothing_that_changes_after_the_step(tmp_path):
    model, loader, optimizer = make()
    scheduler = MAKE["lambda"](optimizer)
    optimizer.attach(Checkpoint(tmp_path, model=model, optimizer=optimizer, schedulers=[scheduler]))
    message = (
        r"a checkpoint with LambdaLR in `schedulers`, which is not attached, must not be attached: .*checkpoint\.step"
    )
    with pytest.raises(ValueError, match=message):
        train(model, loader, optimizer)
    optimizer.attach(scheduler)
    train(model, loader, optimizer)
    metrics = vbs.Metrics("seen", device="cpu")
    own, _, other = make()
    with pytest.raises(ValueError, match="a checkpoint with `metrics` must not be attached: it would save within"):
        other.attach(Checkpoint(tmp_path / "other", model=own, optimizer=other, metrics=[metrics]))


def test_attached_checkpoint_saves_the_state_of_a_stream(tmp_path):
    model = nn.Linear(1, 1)
    stream = vbs.Stream((torch.ones(1) for _ in range(64)), trace=8, minibatch_size=4)
    optimizer = vbs.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), stream, rule="linear", ref_batchsize=8)
    optimizer.attach(Checkpoint(tmp_path, model=model, optimizer=optimizer, schedulers=[stream], every_steps=1))
    for _ in optimizer.epochs(1):
        for x in torch.utils.data.DataLoader(stream, batch_size=None):
            model(x).sum().backward()
            optimizer.step()
    assert optimizer.steps_done == 8 and list(tmp_path.glob("step-*.pt"))


def test_run_has_one_checkpoint(tmp_path):
    model, _, optimizer = make()
    optimizer.attach(Checkpoint(tmp_path / "a", model=model, optimizer=optimizer))
    with pytest.raises(ValueError, match="another Checkpoint is attached already, and a run has one position"):
        optimizer.attach(Checkpoint(tmp_path / "b", model=model, optimizer=optimizer))


def test_log_is_closed_where_the_loop_is_left():
    class Sink(list):
        def __call__(self, record):
            self.append(record)

        def close(self):
            self.append("closed")

    _, _, optimizer = make()
    sink = Sink()
    optimizer.attach(vbs.Log(optimizer, every=1, to=[sink]))
    for _ in optimizer.epochs(2):
        break
    assert sink == ["closed"]
