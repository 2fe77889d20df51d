"""Promise: kill -9 at any moment, and the run ends with the weights of the undisturbed one; SIGTERM saves first."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs
import torch

import variable_batch_size as vbs
from variable_batch_size import storage

SCRIPT = str(Path(__file__).parents[1] / "runs.py")
UNUSED = 2_000_000  # 8 MB, so that writing takes a while
RUN = ["--seconds_per_minibatch", "0.02", "--unused", str(UNUSED)]
# torchrun otherwise lets a restarted group meet in the store of the one before and find addresses of the dead there
# (https://github.com/pytorch/pytorch/issues/135712)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def start(directory, *options, launcher=()):
    directory.mkdir(exist_ok=True)
    (directory / "started").mkdir(exist_ok=True)
    command = [sys.executable, *launcher, SCRIPT, str(directory), "--result", str(directory / "weights.pt"), *options]
    # into a file: a pipe that nobody reads would be full after some tracebacks, and whoever writes to it would wait
    with open(directory / "output.txt", "w") as output:
        return subprocess.Popen(command, env=ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT)


def torchrun(workers, restarts):
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}", f"--max-restarts={restarts}"]


def wait_until(is_so, process):
    while not is_so():
        assert process.poll() is None, output_of(process)
        time.sleep(0.0005)


def finish(process):
    """Wait for the end; returns the exit code and what was printed."""
    return process.wait(), output_of(process)


def output_of(process):
    return (Path(process.args[process.args.index(SCRIPT) + 1]) / "output.txt").read_text()


def undisturbed(directory, **how):
    return runs.run(directory, unused=UNUSED, **how)["model"]


def check_every_file_loads(directory):
    for path in storage.checkpoints(directory):
        storage.load(path)


def kill_again_and_again(directory, kills, rng):
    """Kill a worker of a group under torchrun, time after time: every other time while core 0 writes a checkpoint.

    Returns the weights at the end, and those of the same run without that.
    """
    length = ["--times", str(1 + kills // 3), "--unused", str(UNUSED)]
    process = start(directory / "killed", *RUN, *length, launcher=torchrun(2, restarts=kills))
    whole = start(directory / "whole", *length, launcher=torchrun(2, restarts=0))
    kill(directory / "killed", process, kills, rng)
    for run in (process, whole):
        code, output = finish(run)
        assert code == 0, output
    check_every_file_loads(directory / "killed")
    assert not list((directory / "killed").glob("*.tmp"))
    return [torch.load(directory / name / "weights.pt", weights_only=True) for name in ("killed", "whole")]


def kill(directory, process, kills, rng):
    started = directory / "started"
    for attempt in range(kills):
        pids = [started / f"{attempt}-{rank}.pid" for rank in range(2)]
        steps = started / f"{attempt}.steps"
        wait_until(lambda: all(pid.exists() for pid in pids) and steps.exists(), process)  # noqa: B023
        if attempt % 2:
            wait_until(lambda: any(directory.glob("*.tmp")), process)
            victim = 0
        else:
            time.sleep(rng.uniform(0, 0.2))
            victim = rng.randrange(2)
        os.kill(int(pids[victim].read_text()), signal.SIGKILL)
        check_every_file_loads(directory)


def test_killed_again_and_again_a_group_of_workers_ends_with_the_same_weights(tmp_path):
    killed, whole = kill_again_and_again(tmp_path, kills=3, rng=random.Random(0))
    assert runs.same(killed, whole)


def terminate_after_some_steps(process, directory):
    wait_until((directory / "started" / "0.steps").exists, process)
    process.send_signal(signal.SIGTERM)
    return finish(process)


@pytest.mark.parametrize("backend", ["gloo", pytest.param("xla", marks=pytest.mark.xla)])
def test_sigterm_saves_ends_with_its_exit_code_and_the_run_goes_on(tmp_path, backend):
    directory = tmp_path / "run"
    process = start(directory, "--backend", backend, "--cores", "2", "--every_steps", "1000", *RUN)
    code, output = terminate_after_some_steps(process, directory)
    assert code == vbs.EXIT_STOPPED, output
    (path,) = storage.checkpoints(directory)
    assert 0 < storage.load(path)["optimizer"]["variable_batch_size"]["steps_done"] < runs.NUM_STEPS
    weights = undisturbed(directory)  # alone, where it was on two cores before
    expected = undisturbed(tmp_path / "whole")
    names = [name for name, _ in runs.network().named_parameters()]
    assert max((weights[name] - expected[name]).abs().max().item() for name in names) < 1e-5


def test_sigterm_to_torchrun_saves_too(tmp_path):
    directory = tmp_path / "run"
    process = start(directory, "--every_steps", "1000", *RUN, launcher=torchrun(2, restarts=0))
    terminate_after_some_steps(process, directory)
    (path,) = storage.checkpoints(directory)
    assert storage.load(path)["optimizer"]["variable_batch_size"]["steps_done"] > 0


def test_sigterm_without_a_checkpoint_ends_a_launch_as_it_ends_any_process(tmp_path):
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
    process = subprocess.Popen([sys.executable, str(script), str(started)], stderr=subprocess.DEVNULL)
    while not started.exists():
        time.sleep(0.01)
    process.terminate()
    assert process.wait() == -signal.SIGTERM


def exit_with(code):
    sys.exit(code)


def test_a_core_that_exits_ends_the_launch_with_its_code():
    with pytest.raises(SystemExit) as caught:
        vbs.launch(exit_with, (21,), cores=1, backend="gloo")
    assert caught.value.code == 21


def test_a_signal_while_nobody_listens_is_not_noted():
    code = (
        "import os, signal\n"
        "from variable_batch_size import stopping\n"
        "stopping.note_sigterm()\n"
        "with stopping.listening():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    assert stopping.was_told()\n"
        "    stopping.forget()\n"
        "assert not stopping.was_told()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGTERM
