"""Mistakes on a first day with the library: each raises an error, or logs a warning, that names what to do instead."""

import contextlib
import io
import itertools
import logging
import math
import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import IterableDataset, TensorDataset, WeightedRandomSampler

import variable_batch_size as vbs
from variable_batch_size.lab.command.main import main
from variable_batch_size.policies.builtin import make_policy

DATA = TensorDataset(torch.linspace(-1, 1, 96 * 4).view(96, 4), torch.arange(96) % 3)


def model():
    return nn.Linear(4, 3)


def sgd(network=None):
    return torch.optim.SGD((network or model()).parameters(), lr=0.1)


def adam():
    return torch.optim.Adam(model().parameters())


def loader(trace="0:16 3:32", **options):
    return vbs.DataLoader(DATA, trace, **{"minibatch_size": 8, **options})


def optimizer(inner=None, source=None, **options):
    source = loader() if source is None else source
    return vbs.Optimizer(inner or sgd(), source, **{"rule": "linear", "ref_batchsize": 16, **options})


class Run:
    """A training with one thing done differently."""

    def __init__(self, trace="0:16 3:32", **options):
        self.model, self.loader = model(), loader(trace)
        self.optimizer = optimizer(sgd(self.model), self.loader, **options)

    def train(self, *, network=None, epochs=1, has_epochs=True, between=None, step=None, after=None):
        for _ in self.optimizer.epochs(epochs) if has_epochs else range(epochs):
            for data, target in self.loader:
                nn.functional.cross_entropy((network or self.model)(data), target).backward()
                (between or (lambda: None))()
                (step or self.optimizer.step)()
                (after or (lambda: None))()
        return self

    def attach(self, *parts, **how):
        self.optimizer.attach(*parts, **how)
        return self

    def scheduler(self):
        return StepLR(self.optimizer, 1)


def csv(text):
    Path("trace.csv").write_text(text)
    return loader("trace.csv")


def saved(directory="run", *, network=None, trace="0:16 3:32", seed=0, **options):
    """A run with a checkpoint, for three steps."""
    network, source = network or model(), loader(trace, seed=seed)
    made = optimizer(sgd(network), source)
    made.attach(vbs.Checkpoint(directory, model=network, optimizer=made, every_steps=1, **options))
    for _ in made.epochs(1):
        for data, _ in source:
            network(data).sum().backward()
            made.step()
            if made.steps_done == 3:
                break


def resumed(**options):
    saved()
    saved(**options)


def truncated():
    saved()
    for path in Path("run").glob("step-*.pt"):
        path.write_bytes(path.read_bytes()[:1000])
    saved()


def in_the_place_of_a_directory():
    Path("run").write_text("")
    saved()


def in_the_place_of_its_directory():
    saved()
    saved("run/step-000000003.pt")


def command(line):
    """Run a command, and raise what it prints as an error."""
    Path("devices.csv").write_text("time,devices\n0,4\n60,8\n")
    Path("trace.csv").write_text("step,batchsize\n0,64\n1,32\n")
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.suppress(SystemExit):
        main(shlex.split(line)[1:])
    raise OSError(printed.getvalue())


PLAN = "vbs plan trace.csv --dataset-size 300 --cores 4 --minibatch-size"
CONVERT = "vbs convert devices.csv --samples-per-device 8 --minibatch-size 8 --when-empty skip --round up"


class Endless(IterableDataset):
    def __iter__(self):
        return itertools.count()


def not_a_core():
    """Not called."""


def weighted_once():
    run, number = Run(), itertools.count()
    run.train(step=lambda: run.optimizer.step(weight=None if next(number) else 8))


def with_weight(weight):
    run = Run()
    run.train(step=lambda: run.optimizer.step(weight=weight))


def two_passes():
    made = loader()
    optimizer(source=made)
    return [*made, *made]


def scheduler_by_hand():
    run = Run()
    scheduler = run.scheduler()
    run.attach(scheduler).train(after=scheduler.step)


def checkpoint_with_a_scheduler():
    run = Run()
    checkpoint = vbs.Checkpoint("run", model=run.model, optimizer=run.optimizer, schedulers=[run.scheduler()])
    run.attach(checkpoint).train()


def set_epoch_beside_a_checkpoint():
    run = Run()
    run.attach(vbs.Checkpoint("run", model=run.model, optimizer=run.optimizer, every_steps=1))
    for epoch in range(2):
        run.optimizer.set_epoch(epoch)
        run.train(has_epochs=False)


def step_of_every_other_minibatch():
    run, number = Run(), itertools.count()
    run.train(step=lambda: next(number) % 2 and run.optimizer.step())


def epoch_of_torch_loader(**options):
    sampler = vbs.CustomSampler(DATA, "0:16 3:32", minibatch_size=8)
    return list(torch.utils.data.DataLoader(DATA, **dict.fromkeys(options.pop("names"), sampler), **options))


KINDS = "`trace` must be a CSV file of step,batchsize, stages that begin at 0, such as '0:64 20:128', or a list"
AS_MODEL = "`model` must be the model that the optimizer trains, got Linear with other parameters"
ONCE = "call it once after each minibatch"

MISTAKES = {
    # traces
    "a path that does not exist": (lambda: loader("trace.cvs"), f"there is no file 'trace.cvs': {KINDS}"),
    "a directory": (lambda: loader("."), f"'.' is a directory: {KINDS}"),
    "batch sizes as text": (lambda: loader("16, 32"), f"there is no file '16, 32': {KINDS}"),
    "stages that begin later": (lambda: loader("5:16 9:32"), f"there is no file '5:16 9:32': {KINDS}"),
    "another column": (
        lambda: csv("step,size\n0,64\n"),
        "trace.csv:1: the header must name the column 'batchsize' once",
    ),
    "no header": (lambda: csv("0,16\n1,16\n"), "the header must name the column 'step' once, got ['0', '16']"),
    "a batch size of 0": (
        lambda: csv("step,batchsize\n0,16\n1,0\n"),
        "trace.csv:3: batchsize must be a positive integer",
    ),
    "an empty file": (lambda: csv(""), "the file is empty, expected the columns step,batchsize"),
    "not a multiple of the minibatch": (
        lambda: loader([16, 12]),
        "trace[1]: batchsize must be a multiple of 8 (the minibatch",
    ),
    "more than the data": (
        lambda: loader(128),
        "batchsize must be at most 96 (all full minibatches in 96 samples), got 128",
    ),
    "too few epochs": (
        lambda: Run([16] * 12).train(epochs=5),
        "trace holds 2 epochs of 96 samples, got epoch 4 (counting from 0): train for fewer epochs, or pass",
    ),
    "floats": (lambda: loader([16.0, 32.0]), "trace[0]: batchsize must be a positive integer, got 16.0"),
    "a stage without a size": (lambda: loader("0:16 20"), "stage 2 must have the form start:size, got '20'"),
    "stages out of order": (
        lambda: loader("0:16 20:32 10:8"),
        "stage 3 must begin after 20, where stage 2 begins, got 10",
    ),
    "stages of floats": (
        lambda: loader({0: 16.0}),
        "stages must map integer steps to integer batch sizes, got 0: 16.0",
    ),
    "a trace of a list": (lambda: vbs.Trace([16, 32]), "got [16, 32]: use Trace.of(…), which converts and checks"),
    "stages that stop": (lambda: loader(on_end="stop"), "give them an end with vbs.traces.Stages.parse(…, until=N)"),
    "an unknown end": (
        lambda: loader([16], on_end="holds"),
        "`on_end` must be one of 'stop', 'hold', 'cycle', got 'holds' (did you mean 'hold'?)",
    ),
    "the class of a policy": (
        lambda: loader(vbs.Autoscale),
        "`trace` must be an object, got the class Autoscale: make one",
    ),
    # samplers and loaders
    "no trace": (
        lambda: vbs.DataLoader(DATA, minibatch_size=8),
        "`trace` must be given: a path, stages such as '0:64 20:128'",
    ),
    "data without a length": (
        lambda: vbs.DataLoader(Endless(), 16, minibatch_size=8),
        "got Endless: use vbs.Stream for data without one",
    ),
    "a sampler of such data": (
        lambda: vbs.CustomSampler(Endless(), 16, minibatch_size=8),
        "got Endless: use vbs.Stream for data without one",
    ),
    "a loader as data set": (
        lambda: vbs.DataLoader(torch.utils.data.DataLoader(DATA, batch_size=2), 16, minibatch_size=8),
        "got DataLoader, whose samples and order would be ignored: pass the data set that it reads, or use vbs.Stream",
    ),
    "a sampler as data set": (
        lambda: vbs.CustomSampler(WeightedRandomSampler([1.0] * 96, 96), 16, minibatch_size=8),
        "`dataset` must be a data set, got WeightedRandomSampler, whose samples and order would be ignored",
    ),
    "a dict of tensors": (
        lambda: vbs.DataLoader({"x": DATA.tensors[0]}, 16, minibatch_size=8),
        "got dict with the keys 'x': pass a TensorDataset of its tensors, or one of its values",
    ),
    "an evaluation of a loader": (
        lambda: vbs.EvaluationLoader(torch.utils.data.DataLoader(DATA), minibatch_size=8),
        "`dataset` must be a data set, got DataLoader, whose samples and order would be ignored",
    ),
    "shuffle as text": (lambda: loader(shuffle="no"), "`shuffle` must be True or False, got 'no'"),
    "batch_size of a loader": (
        lambda: loader(batch_size=8),
        "`batch_size` must not be given: `trace` and `minibatch_size` determine",
    ),
    "shuffle beside a sampler": (
        lambda: epoch_of_torch_loader(names=["batch_sampler"], shuffle=True),
        "batch_sampler option is mutually exclusive with batch_size, shuffle",
    ),
    "sampler= of a loader": (
        lambda: epoch_of_torch_loader(names=["sampler"]),
        "train with DataLoader(dataset, batch_sampler=sampler)",
    ),
    "out of order": (lambda: loader(in_order=False), "`in_order` must be True: which step a minibatch belongs to"),
    "out of order in torch": (
        lambda: epoch_of_torch_loader(names=["batch_sampler"], in_order=False),
        "`in_order` must be True",
    ),
    "no set_epoch": (
        lambda: Run().train(epochs=2, has_epochs=False),
        "call set_epoch() before each pass over the loader, as optimizer.epochs() does",
    ),
    "two passes over an epoch": (two_passes, "epoch 0 is read for the second time"),
    "a rank beyond the cores": (lambda: loader(num_replicas=2, rank=2), "`rank` must be an integer from 0 to 1, got 2"),
    # optimizers
    "a class as rule": (lambda: optimizer(rule=vbs.rules.LinearRule), "pass an object, not the class"),
    "a wrong rule": (lambda: optimizer(rule="liner"), "got 'liner' (did you mean 'linear'?)"),
    "another name of a rule": (lambda: optimizer(rule="sqrt"), "got 'sqrt' (did you mean 'root'?)"),
    "no reference": (
        lambda: optimizer(ref_batchsize=None),
        "`ref_batchsize` must be given: the batch size at which the settings of `inner`",
    ),
    "our optimizer twice": (
        lambda: optimizer(optimizer()),
        "got CustomOptimizer, which has one already: pass its `inner`",
    ),
    "parameters as optimizer": (
        lambda: optimizer(model().parameters()),
        "got generator: make one, such as torch.optim.SGD(model.parameters(), lr=0.1)",
    ),
    "a class as optimizer": (lambda: optimizer(torch.optim.SGD), "got the class SGD: make one"),
    "LBFGS": (
        lambda: optimizer(torch.optim.LBFGS(model().parameters())),
        "got LBFGS, which needs several: use SGD or Adam",
    ),
    "a plain loader": (
        lambda: optimizer(source=torch.utils.data.DataLoader(DATA)),
        "make it with vbs.DataLoader(dataset, trace=…), or batch_sampler=sampler",
    ),
    "no step": (
        lambda: Run().train(step=lambda: None),
        f"step() was not called in epoch 0, although 10 minibatches were read: {ONCE}",
    ),
    "own accumulation": (step_of_every_other_minibatch, f"{ONCE}. It accumulates by itself"),
    "step twice": (
        lambda: (run := Run()).train(after=run.optimizer.step),
        f"step() was called for minibatch 2 of epoch 0, but this pass has read only 1: {ONCE}",
    ),
    "step of the inner optimizer": (
        lambda: (run := Run()).train(step=run.optimizer.inner.step),
        "call step() of the CustomOptimizer that SGD belongs to",
    ),
    "a weight without its name": (
        lambda: (run := Run()).train(step=lambda: run.optimizer.step(8)),
        "got 8: pass a weight as step(weight=…)",
    ),
    "a weight in one step": (
        weighted_once,
        "`weight` must be passed for all minibatches of a run or for none, got none after some had one",
    ),
    "a negative weight": (lambda: with_weight(-1), "`weight` must be finite and at least 0, got -1.0"),
    "a weight of NaN": (lambda: with_weight(math.nan), "`weight` must be finite and at least 0, got nan"),
    "weights of each sample": (
        lambda: with_weight(torch.ones(8)),
        "`weight` must be one number, got a value of the shape (8,)",
    ),
    "epochs without an end": (
        lambda: optimizer().epochs(),
        "`num_epochs` or a limit such as `samples` must be given: the trace has no end",
    ),
    # what is attached
    "scheduler.step()": (scheduler_by_hand, "don't call step() of an attached scheduler"),
    "a wrong unit": (
        lambda: (run := Run()).attach(run.scheduler(), per="sample"),
        "got 'sample' (did you mean 'samples'?)",
    ),
    "tokens without every": (
        lambda: (run := Run()).attach(run.scheduler(), per="tokens"),
        '`every` must be given with per="tokens"',
    ),
    "tokens without weights": (
        lambda: (run := Run()).attach(run.scheduler(), per="tokens", every=9).train(),
        'per="tokens" needs the number of tokens of each minibatch: pass it as optimizer.step(weight=…)',
    ),
    "a scheduler of a metric": (
        lambda: (run := Run()).attach(ReduceLROnPlateau(run.optimizer)),
        "call its step(metric) yourself",
    ),
    "a scheduler of another": (
        lambda: Run().attach(Run().scheduler()),
        "StepLR belongs to another optimizer: attach it there",
    ),
    "something else": (
        lambda: Run().attach(print),
        "attach() takes a scheduler of torch, a vbs.Log, a vbs.Checkpoint",
    ),
    "a log without a loss": (
        lambda: (run := Run()).attach(vbs.Log(run.optimizer, every=1, to=[])).train(),
        "optimizer.step(loss=loss)",
    ),
    "a log to a path": (
        lambda: vbs.Log(optimizer(), every=1, to=["log.jsonl"]),
        "`to` must be a list of functions, such as [vbs.JsonLines(path), print]",
    ),
    "a log to one function": (lambda: vbs.Log(optimizer(), every=1, to=print), "`to` must be a list of functions"),
    "a log of torch's optimizer": (
        lambda: vbs.Log(sgd(), every=1, to=[]),
        "`optimizer` must be a CustomOptimizer, got SGD",
    ),
    # rules and optimizers that do not fit
    "adamscale with SGD": (lambda: optimizer(rule="adamscale"), "got SGD: use AdaScaleRule, LinearRule or RootRule"),
    "muon with Adam": (lambda: optimizer(adam(), rule="muon"), "got Adam: use AdamRule for Adam"),
    "momentum with Adam": (lambda: optimizer(adam(), rule="linear_momentum"), "Use LinearRule, RootRule or AdamRule"),
    "legw without a warmup": (lambda: optimizer(rule="legw"), "`rule` legw needs warmup_samples, as in legw:5000"),
    # checkpoints
    "another architecture": (
        lambda: resumed(network=nn.Linear(4, 5)),
        "does not match the model, use another directory for it",
    ),
    "another trace": (lambda: resumed(trace="0:16 3:24"), "was saved by another run: trace was"),
    "another seed": (lambda: resumed(seed=3), "seed was 0 and is 3; use another directory, or `allow_changes`"),
    "changes as text": (
        lambda: saved(allow_changes="trace"),
        "`allow_changes` must be a set of names, got the str 'trace'",
    ),
    "an unknown change": (lambda: saved(allow_changes={"traces"}), "got 'traces' (did you mean 'trace'?)"),
    "truncated files": (truncated, "no older checkpoint is left: move step-000000003.pt, step-000000002.pt away"),
    "a file as directory": (
        in_the_place_of_a_directory,
        "`directory` must be a directory, got run, but run is a file: pass another place",
    ),
    "a checkpoint as directory": (
        in_the_place_of_its_directory,
        "step-000000003.pt is a file: pass another place, or the directory that it is in",
    ),
    "a number as directory": (
        lambda: saved(5),
        "`directory` must be a path, a URL, or None to save nothing, got 5",
    ),
    "an empty directory": (lambda: saved(""), '`directory` must not be empty: pass None to save nothing, or "." for'),
    "a checkpoint of another model": (lambda: vbs.Checkpoint("run", model=model(), optimizer=optimizer()), AS_MODEL),
    "a checkpoint of torch's optimizer": (
        lambda: vbs.Checkpoint("run", model=model(), optimizer=sgd()),
        "`optimizer` must be a CustomOptimizer, got SGD",
    ),
    "a checkpoint that saves too early": (
        checkpoint_with_a_scheduler,
        "Attach the schedulers, and for other objects call checkpoint.step()",
    ),
    "set_epoch beside a checkpoint": (set_epoch_beside_a_checkpoint, "Loop with `for epoch in checkpoint.epochs(…)`"),
    "a state of torch's optimizer": (
        lambda: optimizer().load_state_dict(sgd().state_dict()),
        "load the state of an optimizer of torch into `optimizer.inner`",
    ),
    "loss_scale of another library": (
        lambda: setattr(optimizer(), "loss_scale", 1024.0),
        "`loss_scale` of the optimizer must not be set, got 1024.0: gradients are divided by the scale of a torch.amp",
    ),
    # launch
    "a lambda": (
        lambda: vbs.launch(lambda: None, backend="gloo", cores=1),
        "`fn` must be a function at the top level of a module",
    ),
    "a call": (
        lambda: vbs.launch(not_a_core(), backend="gloo", cores=1),
        "`fn` must be a function, got None: pass main, not main()",
    ),
    "one argument": (
        lambda: vbs.launch(not_a_core, "run", backend="gloo"),
        "`args` must be a tuple, got 'run': write ('run',)",
    ),
    "no cores": (lambda: vbs.launch(not_a_core, cores=0), "`cores` must be a positive integer, got 0"),
    "a wrong backend": (lambda: vbs.launch(not_a_core, backend="glo"), "got 'glo' (did you mean 'gloo'?)"),
    # policies
    "an unknown policy": (lambda: make_policy("autoscal"), "got 'autoscal' (did you mean 'autoscale'?)"),
    "bounds out of order": (
        lambda: vbs.Autoscale(max_batch_size=16, min_batch_size=32),
        "`min_batch_size` must be at most `max_batch_size`, which is 16, got 32",
    ),
    "no noise": (
        lambda: optimizer(source=loader(vbs.Autoscale(max_batch_size=64))),
        "use AdaScaleRule, or pass `measure_noise=True`",
    ),
    "a function that returns nothing": (
        lambda: optimizer(source=loader(lambda situation: None)),
        "a policy must return a positive batch size, got None",
    ),
    # commands
    "a plan of no file": (
        lambda: command("vbs plan no.csv --dataset-size 9 --minibatch-size 8 --cores 2"),
        f"there is no file 'no.csv': {KINDS}",
    ),
    "a plan of other minibatches": (lambda: command(f"{PLAN} 48"), "trace.csv:2: batchsize must be a multiple of 48"),
    "a plan of another rule": (lambda: command(f"{PLAN} 32 --rule linaer"), "(did you mean 'linear'?)"),
    "a comparison of another rule": (
        lambda: command("vbs compare --workload digits --rules linaer --out page"),
        "`rules` must be some of linear, root, ",
    ),
    "another column of a recording": (
        lambda: command(f"{CONVERT} --seconds-per-step 1 --time-column time --count-column cores"),
        "devices.csv:1: the header must name the column 'cores' once, got ['time', 'devices']",
    ),
    "one column of a recording": (
        lambda: command(f"{CONVERT} --seconds-per-step 1 --count-column cores"),
        "pass both --time-column and --count-column or neither",
    ),
    "another unit of time": (
        lambda: command(f"{CONVERT} --seconds-per-step 1 --time-unit hours"),
        "--time-unit: invalid choice: 'hours' (choose from",
    ),
    "another unit of stages": (
        lambda: command("vbs make stages '0:64' --until 9 --unit token"),
        "--unit: invalid choice: 'token' (choose from",
    ),
    "an unknown workload": (lambda: command("vbs advise digit --max-cores 2"), "got 'digit': did you mean digits?"),
    "a negative price": (
        lambda: command("vbs advise digits --max-cores 2 --price -1"),
        "`price` must be a non-negative number, got -1.0",
    ),
    "no results": (lambda: command("vbs report page"), "page has no results of vbs compare"),
    # names
    "vbs.LinearOptimizer": (lambda: vbs.LinearOptimizer, "did you mean vbs.LinearRuleOptimizer?"),
    "vbs.AdaScaleRule": (lambda: vbs.AdaScaleRule, "did you mean vbs.rules.AdaScaleRule?"),
    "vbs.Sampler": (lambda: vbs.Sampler, "did you mean vbs.CustomSampler?"),
    "vbs.make_rule": (lambda: vbs.make_rule, "did you mean vbs.rules.make_rule?"),
}


@pytest.mark.parametrize(("make", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_raises_what_to_do(make, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, RuntimeError, OSError, AttributeError), match=re.escape(sentence)):
        make()


WITHOUT_A_GRADIENT = {
    "another model": lambda run: run.train(network=model()),
    "zero_grad between backward and step": lambda run: run.train(between=run.optimizer.zero_grad),
}


@pytest.mark.parametrize("mistake", WITHOUT_A_GRADIENT)
def test_training_nothing_warns_once(mistake, caplog):
    with caplog.at_level(logging.WARNING):
        WITHOUT_A_GRADIENT[mistake](Run())
    assert caplog.text.count("No parameter has a gradient in the first step. Call backward() before step()") == 1


@pytest.mark.parametrize("where", ["before the loop", "after"])
def test_zero_grad_elsewhere_changes_nothing(where, caplog):
    plain, other = Run(), Run()
    other.model.load_state_dict(plain.model.state_dict())
    plain.train()
    other.optimizer.zero_grad()
    other.train(after=other.optimizer.zero_grad if where == "after" else None)
    assert torch.equal(plain.model.weight, other.model.weight) and not caplog.text


def test_there_are_more_than_fifty():
    assert len(MISTAKES) > 50
