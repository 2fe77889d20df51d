"""Checkpoints that are written during training."""

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
from variable_batch_size.runs.store import AsyncWriter, HostStaging


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


def test_asynchronously_saved_run_resumes_as_if_never_stopped(tmp_path):
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


def test_saved_state_is_that_of_its_step_and_not_of_later_ones(tmp_path):
    model, optimizer, checkpoint = run(tmp_path, every_steps=None, size=1_000_000)
    step(model, optimizer)
    saved = model.weight.detach().clone()
    checkpoint.save()
    for _ in range(3):
        step(model, optimizer)
    checkpoint.wait()
    assert torch.equal(state_file.load(state_file.path_of(tmp_path, 1))["model"]["weight"], saved)
    assert not torch.equal(model.weight, saved)


def test_failed_write_raises_at_the_next_step(tmp_path):
    num_steps = 60_000  # 10 minutes, longer than any write
    model, optimizer, checkpoint = run(tmp_path / "run", every_steps=None, num_steps=num_steps)
    shutil.rmtree(tmp_path / "run")
    step(model, optimizer)
    checkpoint.save()
    with pytest.raises(OSError, match=r"run/step-000000001\.pt could not be written: .*No such file or directory"):
        for _ in range(num_steps - 1):  # which save nothing
            time.sleep(0.01)
            step(model, optimizer)
            checkpoint.step()


def test_sigterm_waits_for_the_pending_checkpoint(tmp_path):
    model, optimizer, checkpoint = run(tmp_path, every_steps=None, size=1_000_000)
    with pytest.raises(SystemExit) as ended:
        for _ in checkpoint.epochs(1):
            step(model, optimizer)
            os.kill(os.getpid(), signal.SIGTERM)
            checkpoint.step()
    assert ended.value.code == vbs.EXIT_STOPPED
    assert torch.equal(state_file.load(state_file.path_of(tmp_path, 1))["model"]["weight"], model.weight)


def test_copy_preserves_shared_tensors_and_reuses_memory():
    weight = torch.arange(6.0).view(2, 3)
    state = {"model": {"a": weight, "tied": weight, "b": torch.ones(2)}, "numbers": [1, (2.0, None)]}
    copies = HostStaging()
    copies.reserve(state)
    reserved = copies._copies["['model']['b']"].data_ptr()
    first = copies.copy(state)
    assert first["model"]["b"].data_ptr() == reserved
    assert first["model"]["a"] is first["model"]["tied"]
    assert first["numbers"] == [1, (2.0, None)]
    assert first["model"]["a"].data_ptr() != weight.data_ptr()
    weight.add_(1)
    second = copies.copy(state)
    assert torch.equal(second["model"]["a"], weight)
    assert second["model"]["a"].data_ptr() == first["model"]["a"].data_ptr()
    state["model"]["b"] = torch.ones(3, dtype=torch.float64)
    assert torch.equal(copies.copy(state)["model"]["b"], state["model"]["b"])


def test_writer_reports_a_failure_once():
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


def test_conjugate_view_is_not_confused_with_its_base():
    values = torch.tensor([1 + 2j])
    assert HostStaging().copy({"a": values, "b": values.conj()})["b"].item() == 1 - 2j


def test_named_tuple_is_copied_like_in_a_file():
    kind = namedtuple("Range", "first last")
    assert HostStaging().copy({"range": kind(torch.ones(1), [2])}) == {"range": (torch.ones(1), [2])}


def test_exiting_process_logs_failures_and_its_children_do_not_wait():
    program = """
import os, threading
from variable_batch_size.runs.store import AsyncWriter

is_ending = threading.Event()

def fail():
    is_ending.wait()
    raise OSError("full")

writer = AsyncWriter()
writer.start(fail)
threading._register_atexit(is_ending.set)  # called first
if os.fork():
    os.wait()
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=600)
    assert done.stderr == "a write that was running when the process ended has failed: full\n"
