"""Checkpoints that are written while training goes on."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple

import pytest
import torch
from bucket_run import SIZES, train
from torch import nn

import variable_batch_size as vbs
from variable_batch_size.runs import state_file
from variable_batch_size.runs.async_writer import AsyncWriter, HostStaging, needs_of


def run(directory, *, every_steps=1, size=4, num_steps=100):
    """A model, its optimizer and an asynchronous checkpoint of both."""
    model = nn.Linear(size, 1)
    sampler = vbs.CustomSampler(dataset_size=4 * num_steps, trace=4, minibatch_size=4)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=4, model=model)
    checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer, every_steps=every_steps, asynchronous=True)
    return model, optimizer, checkpoint


def step(model, optimizer):
    model(torch.ones(4, model.in_features)).sum().backward()
    optimizer.step()


def test_a_run_that_is_saved_meanwhile_and_goes_on_is_the_run_that_was_never_stopped(tmp_path):
    expected = train(None)
    with pytest.raises(InterruptedError):
        train(tmp_path, every_steps=1, asynchronous=True, before_save=_interrupt_after(len(SIZES) // 2))
    assert torch.equal(train(tmp_path, asynchronous=True), expected)


def _interrupt_after(number):
    saves = iter(range(number))

    def before_save():
        if next(saves, None) is None:
            raise InterruptedError

    return before_save


def test_what_is_saved_is_the_state_of_the_step_and_not_of_those_made_since(tmp_path):
    model, optimizer, checkpoint = run(tmp_path, every_steps=None, size=1_000_000)
    step(model, optimizer)
    saved = model.weight.detach().clone()
    checkpoint.save()
    for _ in range(3):
        step(model, optimizer)
    checkpoint.wait()
    assert torch.equal(state_file.load(state_file.path_of(tmp_path, 1))["model"]["weight"], saved)
    assert not torch.equal(model.weight, saved)


def test_a_write_that_failed_is_an_error_at_the_next_step(tmp_path):
    num_steps = 60_000  # 10 minutes, which no write takes
    model, optimizer, checkpoint = run(tmp_path / "run", every_steps=None, num_steps=num_steps)
    shutil.rmtree(tmp_path / "run")
    step(model, optimizer)
    checkpoint.save()
    with pytest.raises(OSError, match=r"run/step-000000001\.pt could not be written: .*No such file or directory"):
        for _ in range(num_steps - 1):  # that save nothing
            time.sleep(0.01)
            step(model, optimizer)
            checkpoint.step()


def test_sigterm_waits_until_the_checkpoint_is_there(tmp_path):
    model, optimizer, checkpoint = run(tmp_path, every_steps=None, size=1_000_000)
    with pytest.raises(SystemExit) as ended:
        for _ in checkpoint.epochs(1):
            step(model, optimizer)
            os.kill(os.getpid(), signal.SIGTERM)
            checkpoint.step()
    assert ended.value.code == vbs.EXIT_STOPPED
    assert torch.equal(state_file.load(state_file.path_of(tmp_path, 1))["model"]["weight"], model.weight)


def test_a_copy_keeps_tensors_that_are_one_and_uses_the_memory_of_the_one_before():
    weight = torch.arange(6.0).view(2, 3)
    state = {"model": {"a": weight, "tied": weight, "b": torch.ones(2)}, "numbers": [1, (2.0, None)]}
    copies = HostStaging()
    copies.reserve(needs_of(state))
    first = copies.of(state)
    assert first["model"]["a"] is first["model"]["tied"]
    assert first["numbers"] == [1, (2.0, None)]
    assert first["model"]["a"].data_ptr() != weight.data_ptr()
    weight.add_(1)
    second = copies.of(state)
    assert torch.equal(second["model"]["a"], weight)
    assert second["model"]["a"].data_ptr() == first["model"]["a"].data_ptr()
    state["model"]["b"] = torch.ones(3, dtype=torch.float64)
    assert torch.equal(copies.of(state)["model"]["b"], state["model"]["b"])


def test_a_writer_says_once_what_has_failed():
    writer = AsyncWriter()
    writer.start(lambda: None)
    writer.wait()

    def fail():
        raise OSError("full")

    writer.start(fail)
    with pytest.raises(OSError, match="full"):
        writer.wait()
    writer.wait()
    writer.check()


def test_a_conjugate_view_is_not_taken_for_the_tensor_that_it_shows():
    values = torch.tensor([1 + 2j])
    assert HostStaging().of({"a": values, "b": values.conj()})["b"].item() == 1 - 2j


def test_a_named_tuple_is_copied_as_a_file_has_it():
    kind = namedtuple("Range", "first last")
    assert HostStaging().of({"range": kind(torch.ones(1), [2])}) == {"range": (torch.ones(1), [2])}


def test_a_process_that_ends_logs_what_has_failed_and_its_children_do_not_wait():
    program = """
import os, time
from variable_batch_size.runs.async_writer import AsyncWriter

def fail():
    time.sleep(1)
    raise OSError("full")

writer = AsyncWriter()
writer.start(fail)
if os.fork():
    os.wait()
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=600)
    assert done.stderr == "what was being written when the process ended is lost: full\n"
