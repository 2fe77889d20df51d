"""RunLock: two runs at one directory or URL are refused; the lock of a process that has ended is taken over."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import variable_batch_size as vbs
from variable_batch_size.runs import lock
from variable_batch_size.runs.lock import LOCK, RunLock
from variable_batch_size.runs.remote import RemoteDirectory


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(lock, "_SECONDS_BETWEEN_RENEWALS", {"directory": 0.02, "URL": 0.02})
    monkeypatch.setattr(lock, "_SECONDS_UNTIL_ABANDONED", {"directory": 0.3, "URL": 0.3})
    monkeypatch.setattr(lock, "_SECONDS_BETWEEN_LOOKS", 0.05)


def owned_by(process=1, **others):
    """A lock of a process that runs: the first one of this machine."""
    owner = {"host": "here", "machine": lock._machine(), "process": process, "started": lock._started(process)}
    return json.dumps({**owner, "since": "noon", **others})


ELSEWHERE = {"host": "there", "machine": "another one"}


def make(directory):
    model = torch.nn.Linear(2, 1)
    sampler = vbs.CustomSampler(dataset_size=16, trace=[4, 4, 4], minibatch_size=4)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler)
    return model, sampler, optimizer, vbs.Checkpoint(directory, model=model, optimizer=optimizer, every_steps=1)


def train(directory, after_step=lambda checkpoint: None):
    model, sampler, optimizer, checkpoint = make(directory)
    for _ in checkpoint.epochs(1):
        for _ in sampler:
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
            after_step(checkpoint)
            checkpoint.step()
    return optimizer.steps_done


# ------------------------------------------------------------------------------------------------------------- refused


def test_run_of_another_process_is_refused_and_its_files_are_left(tmp_path):
    train(tmp_path)
    for name in ("step-000000009.pt.tmp", LOCK):
        (tmp_path / name).write_text(owned_by())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    _, _, optimizer, checkpoint = make(tmp_path)
    assert optimizer.steps_done == 3  # it can be read
    refusal = r"belongs to process 1 on here since noon, which is still running: end that run, or use another directory"
    with pytest.raises(RuntimeError, match=refusal):
        next(checkpoint.epochs(1))
    with pytest.raises(RuntimeError, match=refusal):
        checkpoint.save()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_run_that_was_read_while_another_one_saved_must_be_read_again(tmp_path):
    train(tmp_path)
    (tmp_path / LOCK).write_text(owned_by())
    _, _, _, checkpoint = make(tmp_path)
    (tmp_path / LOCK).unlink()
    (tmp_path / "step-000000003.pt").rename(tmp_path / "step-000000004.pt")
    with pytest.raises(RuntimeError, match=r"another run has saved to .* since: create a new Checkpoint"):
        next(checkpoint.epochs(1))
    assert not (tmp_path / LOCK).exists()


def refused_on_cores(directory):
    try:
        train(directory)
    except RuntimeError as error:
        return str(error)


def test_all_cores_are_refused(tmp_path, on_cores):
    (tmp_path / LOCK).write_text(owned_by())
    first, second = on_cores(2, refused_on_cores, tmp_path)
    assert "belongs to process 1" in first
    assert second == f"rank 0 could not begin to write to {tmp_path}"


def test_lock_that_another_run_has_replaced_raises_at_the_next_save(tmp_path):
    def replace(checkpoint):
        (tmp_path / LOCK).write_text(owned_by())

    with pytest.raises(RuntimeError, match="belongs to process 1 on here"):
        train(tmp_path, after_step=replace)
    assert (tmp_path / LOCK).read_text() == owned_by()  # it is not ours to remove


def test_of_two_runs_that_find_no_lock_at_the_same_moment_one_is_refused(tmp_path, monkeypatch):
    one, has_read, refused = RunLock(tmp_path, None), threading.Event(), []

    def read(self, read=RunLock._read):
        found = read(self)
        has_read.set()
        return found

    def acquire():
        with pytest.raises(RuntimeError, match="belongs to process 1 on here") as error:
            one.acquire()
        refused.append(error)

    monkeypatch.setattr(RunLock, "_read", read)
    with lock._alone(tmp_path):  # as another process, between looking and writing
        thread = threading.Thread(target=acquire)
        thread.start()
        has_read.wait()
        (tmp_path / LOCK).write_text(owned_by())
    thread.join()
    assert refused
    assert (tmp_path / LOCK).read_text() == owned_by()


# ---------------------------------------------------------------------------------------------------------- taken over


@pytest.mark.parametrize("is_reaped", [True, False])
def test_lock_of_a_killed_process_is_taken_over_at_once(tmp_path, is_reaped):
    program = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=-1)
    program.stdout.readline()
    (tmp_path / LOCK).write_text(owned_by(program.pid))
    with pytest.raises(RuntimeError, match=f"belongs to process {program.pid}"):
        train(tmp_path)
    program.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
    if is_reaped:
        program.wait()
    assert train(tmp_path) == 3
    program.communicate()


@pytest.mark.parametrize("text", [owned_by(started="another time"), "", "{", "[]", "null", '{"host": "here"}'])
def test_lock_of_a_number_that_another_process_has_now_or_a_truncated_one_is_taken_over(tmp_path, text):
    (tmp_path / LOCK).write_text(text)
    assert train(tmp_path) == 3
    assert not (tmp_path / LOCK).exists()


def test_lock_of_another_machine_is_taken_over_unless_it_is_renewed(tmp_path, caplog):
    train(tmp_path)
    (tmp_path / "step-000000009.pt.tmp").touch()
    (tmp_path / LOCK).write_text(owned_by(**ELSEWHERE))
    _, _, _, checkpoint = make(tmp_path)
    assert (tmp_path / "step-000000009.pt.tmp").exists()
    checkpoint._store._lock._read = renewed(checkpoint._store._lock._read)
    with pytest.raises(RuntimeError, match="belongs to process 1 on there since noon"):
        next(checkpoint.epochs(1))
    del checkpoint._store._lock._read
    assert list(checkpoint.epochs(1)) == []
    assert f"{tmp_path} belongs to process 1 on there since noon: waiting 0.3 s for it to end" in caplog.messages
    assert not (tmp_path / "step-000000009.pt.tmp").exists()


def renewed(read):
    def and_renew():
        owner, _ = read()
        return owner, time.monotonic()

    return and_renew


# ------------------------------------------------------------------------------------------------------------ released


def test_lock_is_held_in_the_loop_and_released_after_it_however_it_ends(tmp_path):
    held = []
    train(tmp_path / "a", after_step=lambda _: held.append(json.loads((tmp_path / "a" / LOCK).read_text())["process"]))
    assert held == [os.getpid()] * 3
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "b", after_step=lambda _: 1 / 0)
    for _ in make(tmp_path / "c")[-1].epochs(1):
        assert (tmp_path / "c" / LOCK).exists()
        break
    assert not list(tmp_path.rglob(LOCK))


def test_this_process_may_use_a_directory_again(tmp_path):
    epochs = make(tmp_path)[-1].epochs(1)
    next(epochs)  # left, and not collected
    assert train(tmp_path) == 3
    epochs.close()


def test_process_that_exits_in_its_loop_leaves_no_lock(tmp_path):
    script = (
        "import sys, torch, variable_batch_size as vbs\n"
        "model = torch.nn.Linear(2, 1)\n"
        "sampler = vbs.CustomSampler(dataset_size=16, trace=[4], minibatch_size=4)\n"
        "optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler)\n"
        "epochs = vbs.Checkpoint(sys.argv[1], model=model, optimizer=optimizer).epochs(1)\n"
        "next(epochs)\n"
        "sys.exit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == 3
    assert list(tmp_path.iterdir()) == []


def test_removed_lock_of_a_running_run_is_written_again(tmp_path):
    held = []

    def remove(checkpoint):
        held.append((tmp_path / LOCK).exists())
        (tmp_path / LOCK).unlink(missing_ok=True)

    train(tmp_path, after_step=remove)
    assert held == [True] * 3


# ------------------------------------------------------------------------------------------------------------- renewed


@pytest.mark.parametrize("is_remote", [False, True])
def test_lock_is_renewed_and_its_owner_is_not_changed(tmp_path, is_remote):
    remote = RemoteDirectory(f"memory://{tmp_path}") if is_remote else None
    one = RunLock(tmp_path, remote)
    one.acquire()
    owner, version = one._read()
    while one._read()[1] == version:
        time.sleep(0.01)
    assert {**one._read()[0], "renewed": 0, "since": ""} == {**owner, "since": ""}
    one.release()
    assert one._read() == (None, None)


def test_url_has_one_run_at_a_time(tmp_path):
    url = f"memory://{tmp_path}"
    remote = RemoteDirectory(url)
    assert train(url) == 3
    remote.write_text(LOCK, owned_by())
    with pytest.raises(RuntimeError, match=f"^{url} belongs to process 1 on here"):
        train(url)
    remote.write_text(LOCK, owned_by(**ELSEWHERE))
    assert train(url) == 3
    assert LOCK not in remote.names()
