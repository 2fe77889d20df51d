"""SIGTERM and Ctrl-C: recorded while a handler is installed, and left to the parent in loader workers."""

import signal
import subprocess
import sys

import forked

from variable_batch_size import cores

TERMINATED = -signal.SIGTERM
MOST_SECONDS = 600  # exceeded only by a hang, even on a busy machine


def fork(code):
    """Run code in a forked process, which need not import torch; returns its exit code and output."""
    done = forked.run(_execute, code, folder=".")
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.split()


def _execute(code):
    """Run code with the modules as a new process has them."""
    for name in ("launch", "signals"):
        del sys.modules[f"{cores.__name__}.{name}"]
        delattr(cores, name)
    exec(code, {"__name__": "__main__"})


def run(code):
    """Run code in a new process; returns its exit code and output."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=MOST_SECONDS
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.split()


NOTED = """
import os, signal, time
from variable_batch_size.cores import signals
signals._SECONDS_OF_ONE_REQUEST = float("inf")
signals.note_signals()
with signals.listening():
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.is_stop_requested()
    {acknowledge}
print("after")
os.kill(os.getpid(), signal.SIGTERM)
print("again", flush=True)
signals._SECONDS_OF_ONE_REQUEST = 0.0
os.kill(os.getpid(), signal.SIGTERM)
print("never")
"""


def test_unacknowledged_signal_takes_effect_when_the_handler_is_removed():
    assert fork(NOTED.format(acknowledge="pass")) == (TERMINATED, [])


INTERRUPTED = """
import signal, sys
from variable_batch_size.cores import signals
interrupted = set()
def interrupt(frame, event, arg):
    # the signal once more at every line of what the first one leads to, here and in the standard library
    if event == "line" and (frame.f_code, frame.f_lineno) not in interrupted:
        interrupted.add((frame.f_code, frame.f_lineno))
        signal.raise_signal(signal.SIGTERM)
    return interrupt
with signals.listening():
    sys.settrace(interrupt)
    signal.raise_signal(signal.SIGTERM)
    sys.settrace(None)
    assert len(interrupted) > 1, interrupted
    signals.acknowledge()
print("ended")
"""


LATE = """
import os, signal
from variable_batch_size.cores import signals

def handler(number, frame):
    print("user")

signal.signal(signal.SIGTERM, handler)
first, second = signals.listening(), signals.listening()
first.__enter__()
second.__enter__()
first.__exit__(None, None, None)  # as a generator that an exception has left and that is collected later
os.kill(os.getpid(), signal.SIGTERM)
print(signals.is_stop_requested())
signals.acknowledge()
second.__exit__(None, None, None)
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_loop_that_ends_late_does_not_take_the_signal_from_another():
    assert fork(LATE) == (0, ["True", "user"])


def test_signal_may_interrupt_the_recording_of_another():
    """As when a signal is sent to a process group, and again by the launching process."""
    assert fork(INTERRUPTED) == (0, ["ended"])


def test_launch_forwards_the_signal_after_a_run_in_this_process_acknowledged_one():
    code = """
import signal
from variable_batch_size.cores import launch, signals
with signals.listening():
    signal.raise_signal(signal.SIGTERM)
    signals.acknowledge()

def receive(running, results, forwards):
    assert forwards and signals.is_stop_requested()
    signals.acknowledge()
    print("forwarded")

launch._start = lambda processes, work, started: signal.raise_signal(signal.SIGTERM)
launch._receive = receive
launch.run_processes([], b"")
print("ended")
"""
    assert fork(code) == (0, ["forwarded", "ended"])


ENDED_BY_ITS_CORES = """
import signal, sys
from variable_batch_size.cores import launch, signals
signals._SECONDS_OF_ONE_REQUEST = float("inf")
launch._start = lambda processes, work, started: signal.raise_signal(signal.SIGTERM)
launch._receive = lambda running, results, forwards: sys.exit({code})
try:
    launch.run_processes([], b"")
finally:
    print("ended", flush=True)
    signal.raise_signal(signal.SIGTERM)
    print("again", flush=True)
"""


def test_second_signal_while_a_launch_exits_is_ignored():
    assert fork(ENDED_BY_ITS_CORES.format(code=75)) == (75, ["ended", "again"])
    assert fork(ENDED_BY_ITS_CORES.format(code=3)) == (TERMINATED, ["ended"])


def test_acknowledged_signal_may_repeat_for_a_while():
    assert fork(NOTED.format(acknowledge="signals.acknowledge()")) == (TERMINATED, ["after", "again"])


ON_REQUEST = """
import logging, sys, threading
import torch
import variable_batch_size as vbs

logging.basicConfig(stream=sys.stdout, format="%(message)s")

def run(directory):
    weight = torch.nn.Parameter(torch.zeros(1))
    sampler = vbs.CustomSampler(100, 1, minibatch_size=1)
    optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD([weight], lr=1.0), sampler, ref_batchsize=1)
    model = torch.nn.ParameterList([weight])
    checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer)
    for epoch in checkpoint.epochs(1):
        for _ in sampler:
            weight.grad = torch.ones(1)
            optimizer.step()
            if optimizer.steps_done == 7:
                vbs.request_stop()
            checkpoint.step()
"""


def test_run_stops_on_request_and_warns_outside_of_the_main_thread(tmp_path):
    code = """
thread = threading.Thread(target=run, args=(sys.argv[1] + "/thread",))
thread.start()
thread.join()
run(sys.argv[1] + "/main")
"""
    (tmp_path / "script.py").write_text(ON_REQUEST + code)
    done = forked.run_script(tmp_path / "script.py", tmp_path, folder=tmp_path)
    assert (done.returncode, done.stderr) == (75, "")
    assert done.stdout.splitlines() == [
        "SIGTERM can only be handled in the main thread, and will end this process without a checkpoint: call "
        "vbs.request_stop() when the machine is about to stop",
        f"stop requested: ended after 7 steps, saved in {tmp_path}/thread",
        f"stop requested: ended after 7 steps, saved in {tmp_path}/main",
    ]


# ------------------------------------------------------------------------------------------------------- loader workers

SHIELDED = """
import multiprocessing, os, signal, subprocess, time
import torch
from torch.utils.data import DataLoader
from variable_batch_size.cores import signals

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        if index:
            time.sleep(3600)
        return index

def terminate(pid):
    subprocess.run(["kill", "-TERM", str(pid)], check=True)

signals.shield_loader_workers()
signals.note_signals()
"""


def test_loader_worker_ignores_sigterm_except_from_its_parent():
    code = """
with signals.listening():
    iterator = iter(DataLoader(Slow(), num_workers=1))
    (worker,) = multiprocessing.active_children()
    terminate(worker.pid)  # perhaps before torch has set it up
    print(int(next(iterator)))
    terminate(worker.pid)
    worker.join(1.5)
    print(worker.exitcode)
    worker.terminate()
    worker.join()
    print(worker.exitcode)
"""
    assert fork(SHIELDED + code) == (0, ["0", "None", "0"])


def test_busy_workers_do_not_delay_the_exit_of_their_parent():
    code = """
iterator = iter(DataLoader(Slow(), num_workers=2, persistent_workers=True))
print(int(next(iterator)))
"""
    assert run(SHIELDED + code) == (0, ["0"])


def test_worker_exits_although_a_signal_of_its_parent_is_lost():
    """A process that does not run between two SIGTERMs, as on a busy machine, receives the first."""
    code = """
from multiprocessing.util import Finalize

def pause():
    os.kill(worker.pid, signal.SIGSTOP)
    terminate(worker.pid)
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -CONT {worker.pid}"], stdout=subprocess.DEVNULL)

iterator = iter(DataLoader(Slow(), num_workers=1))
print(int(next(iterator)))
(worker,) = multiprocessing.active_children()
Finalize(None, pause, exitpriority=1)  # before the first signal of this process
signals._SECONDS_TO_END = 0.6
"""
    assert fork(SHIELDED + code) == (0, ["0"])


def test_busy_worker_that_received_sigterm_exits_with_its_parent():
    code = """
iterator = iter(DataLoader(Slow(), num_workers=1))
print(int(next(iterator)))
(worker,) = multiprocessing.active_children()
terminate(worker.pid)
os.kill(os.getpid(), signal.SIGKILL)
"""
    # which returns only when the worker has also closed its output
    assert run(SHIELDED + code)[0] == -signal.SIGKILL


def test_other_forked_processes_can_be_terminated_as_usual():
    code = """
def sleep(has_begun):
    has_begun.set()
    while True:
        time.sleep(0.01)  # Python runs the handler of a signal that comes just before a sleep after it

with signals.listening():
    program = subprocess.Popen(["sleep", "3600"], preexec_fn=os.setsid)
    program.terminate()
    print(program.wait())
    forking = multiprocessing.get_context("fork")
    has_begun = forking.Event()
    process = forking.Process(target=sleep, args=(has_begun,))
    process.start()
    has_begun.wait()  # a signal that comes while Python forks is lost
    process.terminate()
    process.join()
    print(process.exitcode)
"""
    assert fork(SHIELDED + code) == (0, [str(TERMINATED), str(TERMINATED)])


# --------------------------------------------------------------------------------------------------------------- Ctrl-C

INTERRUPTS = """
import os, signal, sys, threading, time
from variable_batch_size.cores import signals
signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests run in the background
signals._SECONDS_OF_ONE_CTRL_C = float("inf")
told = threading.Event()

def press():
    signal.raise_signal(signal.SIGINT)

"""


def test_first_ctrl_c_is_a_request_and_the_second_has_its_usual_effect():
    code = """
try:
    with signals.listening(told.set):
        press()
        told.wait()
        press()  # the same one, from a launching process
        print(signals.is_stop_requested(), signals.was_interrupted())
        signals._SECONDS_OF_ONE_CTRL_C = 0.0
        press()
        print("never")
except KeyboardInterrupt:
    print("interrupted", signals.is_stop_requested())
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
time.sleep(0.2)
"""
    assert fork(INTERRUPTS + code) == (0, ["True", "True", "interrupted", "False", "True"])


def test_what_ctrl_c_calls_is_awaited():
    code = """
def announce():
    time.sleep(0.2)
    print("announced")

with signals.listening(announce):
    press()
    signals.acknowledge(is_exiting=False)
    signals.await_calls()
    print("saved")
    signals.await_calls()
"""
    assert fork(INTERRUPTS + code) == (0, ["announced", "saved"])


def test_ctrl_c_without_a_place_to_save_has_its_usual_effect():
    code = """
try:
    with signals.listening():
        press()
        print("never")
except KeyboardInterrupt:
    print("interrupted", signals.is_stop_requested())
"""
    assert fork(INTERRUPTS + code) == (0, ["interrupted", "False"])


def test_handler_of_the_user_keeps_ctrl_c():
    code = """
for handler in (signal.SIG_IGN, lambda number, frame: print("user")):
    signal.signal(signal.SIGINT, handler)
    with signals.listening(told.set):
        press()
    print(told.is_set(), signal.getsignal(signal.SIGINT) is handler)
"""
    assert fork(INTERRUPTS + code) == (0, ["False", "True", "user", "False", "True"])


def test_ctrl_c_that_was_not_acknowledged_is_not_lost_with_its_loop():
    code = """
def epochs():
    with signals.listening(told.set):
        yield 1

try:
    for epoch in epochs():
        press()
        break
    while True:
        time.sleep(0.01)
except KeyboardInterrupt:
    print("interrupted", signals.is_stop_requested())
"""
    assert fork(INTERRUPTS + code) == (0, ["interrupted", "False"])


def test_ctrl_c_is_noted_once_where_it_is_acknowledged():
    """A second SIGINT of the same Ctrl-C, after the save, neither requests another stop nor interrupts the exit."""
    code = """
with signals.listening(told.set):
    press()
    signals.acknowledge(is_exiting=False)
    press()
    print(signals.is_stop_requested())
"""
    assert fork(INTERRUPTS + code) == (0, ["False"])


def test_sigterm_after_ctrl_c_ends_the_process_at_once_as_torchrun_expects():
    code = """
with signals.listening(told.set):
    press()
    signal.raise_signal(signal.SIGTERM)
    print("requested", flush=True)
    signals._SECONDS_OF_ONE_CTRL_C = 0.0
    signal.raise_signal(signal.SIGTERM)
    print("never", flush=True)
"""
    assert run(INTERRUPTS + code) == (TERMINATED, ["requested"])


def test_loader_worker_ignores_ctrl_c():
    code = """
with signals.listening(lambda: None):
    iterator = iter(DataLoader(Slow(), num_workers=1))
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGINT)  # perhaps before torch has set it up
    print(int(next(iterator)))
    os.kill(worker.pid, signal.SIGINT)
    worker.join(0.5)
    print(worker.exitcode)
"""
    assert fork(SHIELDED + code) == (0, ["0", "None"])
