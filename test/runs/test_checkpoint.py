"""Checkpoint: errors, kept files, and no lost state."""

import io
import itertools
import logging
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import stoppable_run
import torch
from stoppable_run import NUM_STEPS, SIZES, Settings
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.runs import state_file


def make(directory=None, *, trace=(8, 16, 8, 24), kind=vbs.LinearRuleOptimizer, model=None, **options):
    model = stoppable_run.network() if model is None else model
    how = {"dataset_size": 40, "minibatch_size": 4, "seed": 0, "shuffle": True, "on_end": "stop"}
    how |= {name: options.pop(name) for name in list(options) if name in how}
    inner = options.pop("inner", torch.optim.SGD)(model.parameters(), lr=0.1)
    ref_batchsize = options.pop("ref_batchsize", 16)
    sampler = vbs.CustomSampler(trace=list(trace) if isinstance(trace, tuple) else trace, **how)
    optimizer = kind(inner, sampler, ref_batchsize=ref_batchsize)
    return vbs.Checkpoint(directory, model=model, optimizer=optimizer, **options), sampler, optimizer, model


def train(checkpoint, sampler, optimizer, model, epochs=2):
    for _ in checkpoint.epochs(epochs):
        for indices in sampler:
            model(torch.ones(len(indices), 6)).sum().backward()
            optimizer.step()
            checkpoint.step()


@pytest.fixture
def saved(tmp_path):
    """A directory with the checkpoint of a completed run."""
    train(*make(tmp_path))
    return tmp_path


def test_a_tilde_is_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(*make("~/run"))
    assert "step-000000004.pt" in contents(tmp_path / "~" / "run")


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# ------------------------------------------------------------------------------------------------ what must be the same


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trace": (8, 16, 8, 28)}, r"trace was 4 steps, sha256 \w{16} and is 4 steps, sha256 \w{16}; use another"),
        ({"trace": 8}, r"trace was 4 steps, sha256 \w{16} and is always 8; on_end was stop and is hold"),
        ({"on_end": "cycle"}, "on_end was stop and is cycle"),
        ({"dataset_size": 41}, "dataset_size was 40 and is 41"),
        ({"seed": 3}, "seed was 0 and is 3"),
        ({"minibatch_size": 2}, "minibatch_size was 4 and is 2"),
        ({"shuffle": False}, "shuffle was True and is False"),
        ({"ref_batchsize": 32}, "ref_batchsize was 16 and is 32"),
        ({"kind": vbs.RootRuleOptimizer}, "rule was LinearRule and is RootRule"),
        ({"inner": torch.optim.Adam}, "optimizer was SGD and is Adam"),
        ({"seed": 3, "dataset_size": 44}, "dataset_size was 40 and is 44; seed was 0 and is 3"),
    ],
)
def test_checkpoint_of_another_run_raises_and_names_the_difference(saved, change, said):
    before = contents(saved)
    with pytest.raises(ValueError, match=rf"step-000000004\.pt was saved by another run: {said}"):
        make(saved, **change)
    assert contents(saved) == before


def test_checkpoint_of_another_model_raises(saved):
    before = contents(saved)
    with pytest.raises(
        ValueError, match=r"step-000000004\.pt does not match the model, use another directory for it: .*"
    ):
        make(saved, model=nn.Linear(6, 2))
    assert contents(saved) == before


def test_the_number_of_schedulers_must_be_the_same(saved):
    model = stoppable_run.network()
    with pytest.raises(ValueError, match="schedulers were 0 and are 1"):
        make(saved, model=model, schedulers=[torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1)])


class Evil:
    def __reduce__(self):
        return (Path("evil").touch, ())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"step,batchsize\n0,32\n", "is damaged, truncated or not a checkpoint: "),
        (pickle.dumps(Evil()), "is damaged, truncated or not a checkpoint: "),
        ({"model": {}}, "is not a checkpoint of variable_batch_size"),
        ([1, 2], "is not a checkpoint of variable_batch_size"),
        ({"format": "variable_batch_size checkpoint", "version": 99}, "has version 99 of the format, expected 1"),
    ],
)
def test_foreign_file_raises_and_its_code_does_not_run(tmp_path, monkeypatch, content, said):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "step-000000007.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=rf"step-000000007\.pt {said}"):
        make(tmp_path)
    assert contents(tmp_path) == before
    assert not Path("evil").exists()


def test_other_files_are_not_touched_and_leftovers_of_a_crash_are_removed(tmp_path):
    (tmp_path / "notes.pt").write_text("mine")
    (tmp_path / "step-12.pt").write_text("mine, too")
    (tmp_path / "step-000000003.pt.tmp").write_bytes(b"half a checkp")
    train(*make(tmp_path, every_steps=1, keep=1))
    assert sorted(contents(tmp_path)) == ["executed.csv", "notes.pt", "run.json", "step-000000004.pt", "step-12.pt"]


def test_unwritable_directory_raises_at_the_start(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"`directory` must be writable, got .*link/runs"):
        make(tmp_path / "link" / "runs")


@pytest.mark.parametrize("name", ["run.lock", "run.json", "executed.csv", "assigned.csv", "decisions.jsonl"])
def test_a_directory_in_the_place_of_a_file_raises_at_the_start(tmp_path, name):
    (tmp_path / name).mkdir()
    message = f"{tmp_path / name} must be a file of the run, got a directory: remove it"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make(tmp_path)


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path):
    checkpoint, sampler, optimizer, model = make(tmp_path, every_steps=1)
    train(checkpoint, sampler, optimizer, model, epochs=1)
    before = contents(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"step-000000003\.pt could not be written: .*File too large"):
            checkpoint.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path) == before


def test_removed_directory_raises(tmp_path):
    checkpoint, sampler, optimizer, model = make(tmp_path / "run", every_steps=1)
    train(checkpoint, sampler, optimizer, model, epochs=1)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(OSError, match=r"step-000000003\.pt could not be written: .*No such file or directory"):
        checkpoint.save()
    assert not (tmp_path / "run").exists()  # the intended disk may not be mounted


# ------------------------------------------------------------------------------------------------------- what is saved


def test_it_loads_without_unpickling_anything_but_tensors_and_primitives(saved):
    state = torch.load(saved / "step-000000004.pt", weights_only=True)
    assert state["epoch"] == 2
    assert state["model"]._metadata["1"] == {"version": 2}
    leaves = torch.utils._pytree.tree_leaves(state)
    assert {type(leaf) for leaf in leaves} <= {torch.Tensor, int, float, str, bool, type(None)}


def test_numpy_numbers_are_converted_and_other_objects_raise(tmp_path):
    import numpy as np

    class Odd:
        def __init__(self, value):
            self.value = value

        def state_dict(self):
            return {"deep": [1, (self.value,)]}

        def load_state_dict(self, state):
            self.value = state["deep"][1][0]

    train(*make(tmp_path / "a", schedulers=[Odd(np.float64(0.5))]))
    odd = Odd(None)
    make(tmp_path / "a", schedulers=[odd])
    assert type(odd.value) is float
    with pytest.raises(
        ValueError, match=r"tensors and primitives only, got BytesIO at state\['schedulers'\]\[0\]\['de"
    ):
        train(*make(tmp_path / "b", schedulers=[Odd(io.BytesIO())]))
    assert contents(tmp_path / "b") == {}


class Counting(nn.Sequential):
    """A model whose extra state is whatever `seen` is."""

    seen = 0

    def get_extra_state(self):
        return {"seen": self.seen, "as a tensor": torch.tensor(1.5)}

    def set_extra_state(self, state):
        self.seen = state["seen"]
        assert state["as a tensor"] == 1.5


def counting(*seen):
    model = nn.Sequential(nn.Linear(6, 3), *(Counting() for _ in seen))
    for module, value in zip(model[1:], seen, strict=True):
        module.seen = value
    return model


@pytest.mark.parametrize("format", ["file", "sharded"])
def test_extra_state_of_any_type_is_restored(tmp_path, format):
    train(*make(tmp_path, model=counting([3, "x"], None), format=format, inner=Remembering))
    *_, optimizer, model = make(tmp_path, model=counting(0, 0), inner=Remembering)
    assert [module.seen for module in model[1:]] == [[3, "x"], None]
    states = optimizer.inner.state_dict()["state"]
    assert (states[0], states[1]["nested"][0].shape, states["updates"]) == (4, (3,), 4)


class Remembering(torch.optim.SGD):
    """Its state of a parameter is a number, or a tensor in a list; one number is of no parameter."""

    kept = staticmethod(lambda p, before: {"nested": [p.detach().clone()]} if p.dim() == 1 else (before or 0) + 1)

    def step(self, closure=None):
        super().step(closure)
        self.state["updates"] = self.state.get("updates", 0) + 1
        for p in self.param_groups[0]["params"]:
            self.state[p] = self.kept(p, self.state.get(p))


class Unsaveable(Remembering):
    kept = staticmethod(lambda p, before: {"generator": torch.Generator()})


class Pair(NamedTuple):
    one: int


class Forgetful(Counting):
    set_extra_state = nn.Module.set_extra_state


class Attributes(Counting):
    def set_extra_state(self, state):
        self.seen = state["seen"].one


@pytest.mark.parametrize(
    ("kind", "seen", "said"),
    [
        (Counting, io.BytesIO(), "only, got BytesIO at state['model']['1._extra_state']['seen']"),
        (Forgetful, 0, "1._extra_state of the model's state can be saved, but not loaded: Reached a code path"),
        (Attributes, Pair(1), "1._extra_state of the model's state can be saved, but not loaded: 'tuple' object"),
    ],
)
def test_model_state_that_cannot_be_restored_raises_at_the_start(tmp_path, kind, seen, said):
    model = nn.Sequential(nn.Linear(6, 3), kind())
    model[1].seen = seen
    with pytest.raises(ValueError, match=re.escape(said)):
        make(tmp_path, model=model)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("format", ["file", "sharded"])
def test_optimizer_state_that_cannot_be_saved_raises_after_the_first_step(tmp_path, format, asynchronous):
    checkpoint, sampler, optimizer, model = make(tmp_path, inner=Unsaveable, format=format, asynchronous=asynchronous)
    with pytest.raises(ValueError, match=r"got Generator at state\['optimizer'\]\['state'\]\[0\]\['generator'\]"):
        train(checkpoint, sampler, optimizer, model)
    assert optimizer.steps_done == 1


def test_state_is_tried_out_without_the_contents_of_tensors():
    weight = torch.ones(3)
    state = {"model": {"weight": weight, "parameter": nn.Parameter(weight), "a._extra_state": weight}, "step": 1}
    loaded = state_file.in_memory(state)
    torch.testing.assert_close(loaded["model"].pop("a._extra_state"), weight)
    assert loaded == {"model": {"weight": None, "parameter": None}, "step": 1}


class Tagged(torch.Tensor):
    """A subclass that torch.load does not accept."""


def test_tensor_subclass_that_does_not_load_raises():
    with pytest.raises(ValueError, match=r"not loaded: Unsupported global: GLOBAL .*Tagged was not .*; convert it"):
        state_file.in_memory({"weight": torch.ones(3).as_subclass(Tagged)})


def test_checkpoint_saves_every_n_steps_and_keeps_some(tmp_path):
    train(*make(tmp_path, trace=(4,) * 20, every_steps=3, keep=3))
    assert [path.name[-6:] for path in state_file.checkpoints(tmp_path)] == ["015.pt", "018.pt", "020.pt"]


def test_checkpoint_saves_every_n_seconds(tmp_path):
    train(*make(tmp_path, every_seconds=1e-9, keep=100))
    assert len(state_file.checkpoints(tmp_path)) == 4
    other = tmp_path / "other"
    train(*make(other, every_seconds=1e9, keep=100))
    assert len(state_file.checkpoints(other)) == 1  # the end


def test_completed_run_has_no_epochs_left_and_can_be_extended(saved):
    checkpoint, *_ = make(saved)
    assert list(checkpoint.epochs(2)) == []
    checkpoint, *_ = make(saved, trace=(8, 16, 8, 24))
    with pytest.raises(ValueError, match="trace holds 2 epochs of 40 samples, got epoch 2"):
        next(checkpoint.epochs(3))


def test_none_saves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(*make(None, every_steps=1))
    assert contents(tmp_path) == {}


def test_resume_position_is_logged(saved, caplog):
    with caplog.at_level(logging.INFO):
        make(saved)
    assert re.search(r"resumed from .*step-000000004\.pt: epoch 2, step 4 of 4", caplog.text)


def test_saving_in_the_middle_of_a_step_raises(tmp_path):
    checkpoint, sampler, optimizer, model = make(tmp_path)
    for _ in checkpoint.epochs(1):
        model(torch.ones(len(next(iter(sampler))), 6)).sum().backward()
        optimizer.step()
        message = "save() was called in the middle of a step: call it after optimizer.step() has completed one"
        with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
            checkpoint.save()
        break


def train_and_leave_each_epoch_after(num_minibatches, checkpoint, sampler, optimizer, model, after=lambda: None):
    for _ in checkpoint.epochs(2):
        for indices in itertools.islice(sampler, num_minibatches):
            model(torch.ones(len(indices), 6)).sum().backward()
            optimizer.step()
            checkpoint.step()
        after()


def test_an_epoch_may_be_left_in_the_middle_of_a_step(tmp_path):
    parts = make(tmp_path, every_seconds=1e-9, keep=100)
    train_and_leave_each_epoch_after(3, *parts)  # of a step of 2 and one of 4, and of a step of 6
    states = [state_file.load(path) for path in state_file.checkpoints(tmp_path)]
    assert [(state["epoch"], state["steps_of_epochs"]) for state in states] == [(2, [1, 0])]
    assert list(vbs.Trace.read(tmp_path / "executed.csv")) == [8]

    alone, sampler, optimizer, model = make(None)
    train_and_leave_each_epoch_after(2, alone, sampler, optimizer, model)  # nothing remains of the incomplete steps
    assert stoppable_run.same(dict(model.named_parameters()), dict(parts[-1].named_parameters()))


@pytest.mark.parametrize("num_minibatches", [1, 2, 3, 5, 6])  # of two steps of 2 and 4, then two of 2 and 6
@pytest.mark.parametrize("saves", [True, False])
def test_interrupted_loop_resumes_when_run_again(tmp_path, num_minibatches, saves):
    parts = checkpoint, sampler, optimizer, model = make(tmp_path if saves else None, every_steps=1)
    with pytest.raises(KeyboardInterrupt):
        for _ in checkpoint.epochs(2):
            for number, indices in enumerate(sampler):
                model(torch.ones(len(indices), 6)).sum().backward()
                if number == num_minibatches:
                    raise KeyboardInterrupt
                optimizer.step()
                checkpoint.step()
    train(*parts)
    undisturbed = make(None)
    train(*undisturbed)
    assert optimizer.steps_done == undisturbed[2].steps_done
    assert stoppable_run.same(dict(model.named_parameters()), dict(undisturbed[-1].named_parameters()))
    assert not saves or list(vbs.Trace.read(tmp_path / "executed.csv")) == [8, 16, 8, 24]


@pytest.fixture
def survives_sigterm():
    """Lets the tests continue if SIGTERM is not handled."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("survives_sigterm")
def test_stop_request_saves_if_the_epoch_was_left_in_the_middle_of_a_step(tmp_path):
    with pytest.raises(SystemExit) as caught:
        train_and_leave_each_epoch_after(3, *make(tmp_path), after=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert caught.value.code == vbs.EXIT_STOPPED
    (path,) = state_file.checkpoints(tmp_path)
    assert (state_file.load(path)["epoch"], state_file.load(path)["steps_of_epochs"]) == (1, [1])


@pytest.mark.usefixtures("survives_sigterm")
@pytest.mark.parametrize("is_saved", [True, False])
def test_stop_request_logs_the_saved_position(tmp_path, caplog, is_saved):
    checkpoint, sampler, optimizer, model = make(tmp_path if is_saved else None)
    model.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as caught:
        train(checkpoint, sampler, optimizer, model)
    assert caught.value.code == vbs.EXIT_STOPPED
    said = "stop requested: ended after 1 steps" + (f", saved in {tmp_path}" if is_saved else "")
    assert caplog.record_tuples == [("variable_batch_size.runs.checkpoint", logging.WARNING, said)]
    assert len(state_file.checkpoints(tmp_path)) == is_saved


def test_too_short_trace_raises_before_training():
    with pytest.raises(ValueError, match="trace holds 2 epochs of 40 samples, got epoch 2"):
        next(make(None)[0].epochs(3))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every_steps": 0}, "`every_steps` must be a positive integer, got 0"),
        ({"every_seconds": 0}, "`every_seconds` must be positive, got 0"),
        ({"keep": 0}, "`keep` must be a positive integer, got 0"),
    ],
)
def test_arguments_are_checked(options, said):
    with pytest.raises(ValueError, match=said):
        make(None, **options)


def test_the_optimizer_must_be_ours():
    model = stoppable_run.network()
    with pytest.raises(ValueError, match=r"^`optimizer` must be a CustomOptimizer, got SGD$"):
        vbs.Checkpoint(None, model=model, optimizer=torch.optim.SGD(model.parameters()))


def test_the_number_of_epochs_is_checked():
    with pytest.raises(ValueError, match=r"`num_epochs` must be a non-negative integer, got 1\.5"):
        next(make(None)[0].epochs(1.5))


# ------------------------------------------------------------------------------------------------- the executed trace


def test_executed_trace_contains_the_completed_steps_and_replays_to_the_same_weights(tmp_path):
    result = stoppable_run.run_and_stop(tmp_path / "run", (14, 1), Settings(every_steps=4))
    path = tmp_path / "run" / "executed.csv"
    assert tuple(vbs.Trace.read(path)) == SIZES[:NUM_STEPS]
    assert vbs.Trace.read(path).comment.startswith("executed from trace: trace 26 steps, sha256 ")
    replayed = stoppable_run.run(tmp_path / "replay", Settings(trace=tuple(vbs.Trace.read(path))))
    assert stoppable_run.same(replayed["model"], result["model"])


def test_executed_trace_of_an_endless_trace_is_finite(tmp_path):
    train(*make(tmp_path, trace=8))
    assert list(vbs.Trace.read(tmp_path / "executed.csv")) == [8] * 10


def test_executed_trace_marks_epochs_that_ended_early(tmp_path):
    checkpoint, sampler, optimizer, model = make(tmp_path, trace=8)
    for _ in checkpoint.epochs(2):
        for indices in sampler:
            model(torch.ones(len(indices), 6)).sum().backward()
            if optimizer.step() and optimizer.epoch_step == 3:
                break
    assert list(vbs.Trace.read(tmp_path / "executed.csv")) == [8] * 6
    lines = (tmp_path / "executed.csv").read_text().splitlines()
    assert lines[4:7] == [
        "2,8",
        "# epoch 0 was left after 3 of its 5 steps: in a replay, epochs begin elsewhere",
        "3,8",
    ]


# -------------------------------------------------------------------------------------------------- other programs


def test_a_checkpoint_is_readable_without_the_library(saved):
    code = (
        "import sys, torch\n"
        "state = torch.load(sys.argv[1], weights_only=True)\n"
        "assert 'variable_batch_size' not in sys.modules\n"
        "print(sorted(state['model']))"
    )
    path = str(saved / "step-000000004.pt")
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert "0.weight" in done.stdout


def test_custom_epoch_loop_raises(tmp_path):
    checkpoint, sampler, optimizer, model = make(tmp_path, every_steps=1)
    message = r"^Optimizer is at epoch 1, step 1, but checkpoint\.epochs\(\) expected epoch 0, step \d+\. "
    with pytest.raises(RuntimeError, match=message):
        for _ in optimizer.epochs(2):
            for indices in sampler:
                model(torch.ones(len(indices), 6)).sum().backward()
                optimizer.step()
                checkpoint.step()
