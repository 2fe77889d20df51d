"""Promise: after kill -9 at any time, the run ends with the undisturbed weights; SIGTERM and Ctrl-C save first."""

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time

import forked
import pytest
import stoppable_run
from session_process import Place, SessionProcess
from stoppable_run import NUM_STEPS, Settings
from torch.distributed import run as torchrun_program

import variable_batch_size as vbs
from variable_batch_size.runs import state_file

# cores check for a stop request about once a second: a run must be much longer than that
SAVES_ONLY_AT_THE_END = Settings(seconds_per_minibatch=0.02, every_steps=10_000, repeats=40)


def check_every_file_loads(directory):
    for path in state_file.checkpoints(directory):
        with contextlib.suppress(FileNotFoundError):  # already removed by a core that is still running
            state_file.load(path)


def steps_saved(directory):
    (path,) = state_file.checkpoints(directory)
    return state_file.load(path)["optimizer"]["variable_batch_size"]["steps_done"]


# --------------------------------------------------------------------------------------------------------------- killed


@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.long)])
def test_repeatedly_killed_workers_end_with_the_same_weights(on_cores, tmp_path, kills):
    """Under torchrun: every other time, and the first, while core 0 writes a checkpoint; or a core at any time."""
    killed = Place(tmp_path / "killed")
    whole = Settings(repeats=2 if kills > 1 else 1, every_steps=10_000)
    undisturbed = on_cores(2, stoppable_run.run, tmp_path / "whole", whole)
    # without the holds, a session could complete the run before it is killed
    holds = {str(attempt): ("save", 2) if attempt % 2 == 0 else ("step", 10) for attempt in range(kills)}
    settings = dataclasses.replace(whole, seconds_per_minibatch=0.02, every_steps=2, holds=holds)
    session = SessionProcess(killed, settings, launcher="forked torchrun", cores=2, restarts=kills)
    rng = random.Random(0)
    for attempt in map(str, range(kills)):
        session.wait_for_steps(name=attempt)
        victim = 0
        if holds[attempt][0] == "save":
            session.wait_for_hold(attempt)
            assert list(killed.checkpoints.glob("*.tmp"))
        else:
            time.sleep(rng.uniform(0, 0.4))
            victim = rng.randrange(2)
        os.kill(session.pid_of_core(victim, name=attempt), signal.SIGKILL)
        stoppable_run.hold_of(killed.diary, attempt).release()  # if the other core is killed
        check_every_file_loads(killed.checkpoints)
    assert session.finish() == 0, session.output
    check_every_file_loads(killed.checkpoints)
    assert not list(killed.checkpoints.glob("*.tmp"))
    assert stoppable_run.same(killed.read_weights(), undisturbed[0]["model"])


# ----------------------------------------------------------------------------------------------------------- terminated


@pytest.mark.parametrize("backend", ["gloo", pytest.param("xla", marks=pytest.mark.xla)])
def test_sigterm_saves_exits_with_its_code_and_the_run_resumes(tmp_path, backend):
    place = Place(tmp_path)
    slow = Settings(seconds_per_minibatch=0.2, every_steps=1000, repeats=5)  # a minute on two cores
    session = SessionProcess(place, slow, cores=2, backend=backend)
    session.wait_for_steps()
    session.signal(signal.SIGTERM)
    assert session.finish() == vbs.EXIT_STOPPED, session.output
    assert 0 < steps_saved(place.checkpoints) < NUM_STEPS * slow.repeats
    at_once = dataclasses.replace(slow, seconds_per_minibatch=0.0)
    weights = stoppable_run.run(place.checkpoints, at_once)["model"]  # in one process, after two cores
    expected = stoppable_run.run(tmp_path / "whole", at_once)["model"]
    assert stoppable_run.largest_difference(weights, expected) < 1e-5


def with_workers(number, **more):
    return dataclasses.replace(SAVES_ONLY_AT_THE_END, num_workers=number, **more)


@pytest.mark.parametrize(
    ("launcher", "cores", "settings"),
    [
        ("forked", 1, with_workers(0)),
        ("forked", 1, with_workers(1)),
        pytest.param("alone", 1, with_workers(1), marks=pytest.mark.long),  # as is Ctrl-C below
        ("forked", 1, with_workers(3, keeps_workers=True)),
        ("forked", 1, with_workers(1, start_method="spawn")),
        ("launch", 2, with_workers(0)),
        ("launch", 2, with_workers(2)),
        ("launch", 2, with_workers(1, keeps_workers=True)),
    ],
    ids=lambda value: f"{value.num_workers} workers" if isinstance(value, Settings) else None,
)
def test_sigterm_to_the_process_group_saves_and_leaves_no_process(tmp_path, launcher, cores, settings):
    session = SessionProcess(Place(tmp_path), settings, launcher=launcher, cores=cores)
    session.wait_for_steps(3)
    session.signal_group(signal.SIGTERM)
    assert session.finish() == vbs.EXIT_STOPPED, session.output
    assert 0 < steps_saved(session.place.checkpoints) < NUM_STEPS * settings.repeats
    assert not session.left_behind()


@pytest.mark.parametrize(("to_group", "num_workers"), [(False, 0), (True, 2)])
def test_sigterm_to_torchrun_saves(tmp_path, to_group, num_workers):
    session = SessionProcess(Place(tmp_path), with_workers(num_workers), launcher="forked torchrun", cores=2)
    session.wait_for_steps(3)
    (session.signal_group if to_group else session.signal)(signal.SIGTERM)
    session.finish()  # with torchrun's own exit code
    assert steps_saved(session.place.checkpoints) > 0
    assert not session.left_behind()


def test_sigterm_in_the_last_epoch_saves_its_end_and_is_not_lost(tmp_path):
    script = """
import os, signal, sys
import torch
import variable_batch_size as vbs
model = torch.nn.Linear(2, 1)
sampler = vbs.CustomSampler(dataset_size=4, trace=[2, 4], minibatch_size=2)
optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler)
for epoch in vbs.Checkpoint(sys.argv[1], model=model, optimizer=optimizer).epochs(2):
    for _ in sampler:
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
    if epoch == 1:
        os.kill(os.getpid(), signal.SIGTERM)
print("went on")
"""
    path, directory = tmp_path / "script.py", tmp_path / "checkpoints"
    path.write_text(script)
    done = forked.run_script(path, directory, folder=tmp_path)
    assert done.returncode == vbs.EXIT_STOPPED, done.stderr
    assert done.stdout == ""
    assert steps_saved(directory) == 2
    again = forked.run_script(path, directory, folder=tmp_path)
    assert (again.returncode, again.stdout) == (0, "went on\n")


def test_killed_run_leaves_no_loader_worker(tmp_path):
    session = SessionProcess(Place(tmp_path), with_workers(2), launcher="forked")
    session.wait_for_steps()
    session.signal(signal.SIGKILL)
    session.finish()
    assert not session.left_behind()


def test_sigterm_without_a_checkpoint_terminates_a_launch_as_usual(tmp_path):
    script = tmp_path / "sleep.py"
    script.write_text(
        "import sys, time\n"
        "import variable_batch_size as vbs\n"
        "def sleep(path):\n"
        "    open(path, 'w').close()\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    vbs.launch(sleep, (sys.argv[1],), cores=1, backend='gloo')\n"
    )
    started = tmp_path / "started"
    program = forked.start_script(script, started, folder=tmp_path)
    while not started.exists():
        assert program.poll() is None
        time.sleep(0.01)
    program.send_signal(signal.SIGTERM)
    assert program.finish().returncode == -signal.SIGTERM


# --------------------------------------------------------------------------------------------------------------- Ctrl-C

ANNOUNCED = "Ctrl-C: the run saves at the end of this step; press it again to end at once, without a save"
# a session that multiprocessing has forked exits with 1 after KeyboardInterrupt, where a program dies of SIGINT
INTERRUPTED = {"alone": -signal.SIGINT, "forked": 1, "launch": 1}


@pytest.mark.parametrize(("launcher", "cores", "num_workers"), [("alone", 1, 1), ("forked", 1, 0), ("launch", 2, 1)])
def test_ctrl_c_saves_and_leaves_no_process(tmp_path, launcher, cores, num_workers):
    settings = with_workers(num_workers)
    session = SessionProcess(Place(tmp_path), settings, launcher=launcher, cores=cores)
    session.wait_for_steps(3)
    session.signal_group(signal.SIGINT)  # as a terminal does
    assert session.finish() == INTERRUPTED[launcher], session.output
    assert 0 < steps_saved(session.place.checkpoints) < NUM_STEPS * settings.repeats
    if launcher == "alone":  # its own interpreter
        assert session.output.count(ANNOUNCED) == 1
        assert session.output.endswith("KeyboardInterrupt\n")
    assert not session.left_behind()


def test_sigint_to_a_launch_alone_saves(tmp_path):
    session = SessionProcess(Place(tmp_path), with_workers(0), launcher="launch", cores=2)
    session.wait_for_steps(3)
    session.signal(signal.SIGINT)
    assert session.finish() == INTERRUPTED["launch"], session.output
    assert steps_saved(session.place.checkpoints) > 0


def test_ctrl_c_to_torchrun_saves(tmp_path):
    session = SessionProcess(Place(tmp_path), with_workers(1), launcher="forked torchrun", cores=2)
    session.wait_for_steps(3)
    session.signal_group(signal.SIGINT)  # each worker has its own session
    session.finish()
    assert steps_saved(session.place.checkpoints) > 0
    assert session.output.count(ANNOUNCED) == 1
    assert not session.left_behind()


READY = "in an endless step"
ENDLESS_STEP = """
import os, sys, time
import torch
import variable_batch_size as vbs

def train(directory):
    model = torch.nn.Linear(2, 1)
    sampler = vbs.CustomSampler(dataset_size=4, trace=[2, 4], minibatch_size=2)
    optimizer = vbs.ConstantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler)
    for epoch in vbs.Checkpoint(directory, model=model, optimizer=optimizer).epochs(2):
        for _ in sampler:
            print("in an endless step", flush=True)
            time.sleep(600)

if __name__ == "__main__":
    vbs.launch(train, (sys.argv[1],), cores=1, backend="gloo")
"""


def script_in_a_fork(path, directory, output):
    return forked.Leader(forked.run_script_here, path, directory, environment={}, output=output)


UNDER_TORCHRUN = ["--standalone", "--nproc-per-node=1"]


def script_under_a_forked_torchrun(path, directory, output):
    """Under a separate torchrun, which forwards the signal, with the script in a new interpreter."""
    arguments = [*UNDER_TORCHRUN, str(path), str(directory)]
    return forked.Leader(torchrun_program.main, arguments, environment={}, output=output)


def script_under_torchrun(path, directory, output):
    """The same with torchrun in a new interpreter, too."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *UNDER_TORCHRUN, path, directory],
        stdout=output,
        stderr=output,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # also if tests run in the background
        start_new_session=True,
    )


@pytest.mark.parametrize(
    "start",
    [
        script_in_a_fork,
        script_under_a_forked_torchrun,
        pytest.param(script_under_torchrun, marks=pytest.mark.long),
    ],
)
def test_second_ctrl_c_ends_at_once(tmp_path, start):
    """In a step that takes ten minutes, in which the first one cannot be acknowledged."""
    (tmp_path / "script.py").write_text(ENDLESS_STEP)
    output, end_of_the_program = os.pipe()
    running = start(tmp_path / "script.py", tmp_path, end_of_the_program)
    os.close(end_of_the_program)
    with open(output) as said:
        assert any(READY in line for line in said)  # which waits for it
        os.killpg(running.pid, signal.SIGINT)
        assert any(ANNOUNCED in line for line in said)
        time.sleep(1.2)
        begin = time.monotonic()
        os.killpg(running.pid, signal.SIGINT)
        text = said.read()  # until its cores have also closed their output
    assert running.wait() != 0
    assert "forcefully exiting" not in text  # of torchrun, after 30 s
    assert time.monotonic() - begin < 300
    assert not state_file.checkpoints(tmp_path)


def exit_with(code):
    sys.exit(code)


def test_a_core_that_exits_ends_the_launch_with_its_code():
    with pytest.raises(SystemExit) as caught, forked.launches():
        vbs.launch(exit_with, (21,), cores=1, backend="gloo")
    assert caught.value.code == 21
