"""SIGTERM: noted while somebody listens, and left to the parent in loader workers."""

import signal
import subprocess
import sys

TERMINATED = -signal.SIGTERM
MOST_SECONDS = 600  # which only a hang takes, however busy the machine is


def run(code):
    """The exit code of a process of its own, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=MOST_SECONDS
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.split()


NOTED = """
import os, signal, time
from variable_batch_size.cores import signals
signals._SECONDS_OF_ONE_ORDER = float("inf")
signals.note_sigterm()
with signals.listening():
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.was_told()
    {obey}
print("after")
os.kill(os.getpid(), signal.SIGTERM)
print("again", flush=True)
signals._SECONDS_OF_ONE_ORDER = 0.0
os.kill(os.getpid(), signal.SIGTERM)
print("never")
"""


def test_a_signal_that_nobody_obeys_has_its_effect_when_nobody_listens_any_more():
    assert run(NOTED.format(obey="pass")) == (TERMINATED, [])


INTERRUPTED = """
import signal, sys
from variable_batch_size.cores import signals
{set_up}
interrupted = set()
def interrupt(frame, event, arg):
    # the signal once more at every line of what the first one leads to, here and in the standard library
    if event == "line" and (frame.f_code, frame.f_lineno) not in interrupted:
        interrupted.add((frame.f_code, frame.f_lineno))
        signal.raise_signal(signal.SIGTERM)
    return interrupt
with {listening} as order:
    sys.settrace(interrupt)
    signal.raise_signal(signal.SIGTERM)
    sys.settrace(None)
    assert len(interrupted) > 1, interrupted
    {obey}
print("ended")
"""


def test_a_signal_may_interrupt_the_note_of_another():
    """As where one comes to all processes of a group, and again from the process that launched them."""
    code = INTERRUPTED.format(set_up="", listening="signals.listening()", obey="signals.obey()")
    assert run(code) == (0, ["ended"])


def test_a_signal_may_interrupt_the_passing_on_of_another():
    code = INTERRUPTED.format(
        set_up="from variable_batch_size.cores import launch",
        listening="launch._passing_on_sigterm([])",
        obey="assert order.is_given; order.is_given = False",
    )
    assert run(code) == (0, ["ended"])


def test_a_launch_passes_the_signal_on_also_after_a_run_of_this_process_has_obeyed_one():
    code = """
import signal
from variable_batch_size.cores import launch, signals
with signals.listening():
    signal.raise_signal(signal.SIGTERM)
    signals.obey()
with launch._passing_on_sigterm([]) as order:
    signal.raise_signal(signal.SIGTERM)
    assert order.is_given
    order.is_given = False
print("ended")
"""
    assert run(code) == (0, ["ended"])


ENDED_BY_ITS_CORES = """
import signal, sys
from variable_batch_size.cores import launch, signals
signals._SECONDS_OF_ONE_ORDER = float("inf")
try:
    with launch._passing_on_sigterm([]):
        signal.raise_signal(signal.SIGTERM)
        sys.exit({code})
finally:
    print("ended", flush=True)
    signal.raise_signal(signal.SIGTERM)
    print("again", flush=True)
"""


def test_a_launch_whose_cores_have_saved_and_stopped_may_be_told_again_as_it_ends():
    assert run(ENDED_BY_ITS_CORES.format(code=75)) == (75, ["ended", "again"])
    assert run(ENDED_BY_ITS_CORES.format(code=3)) == (TERMINATED, ["ended"])


def test_a_signal_that_was_obeyed_may_come_again_for_a_while():
    assert run(NOTED.format(obey="signals.obey()")) == (TERMINATED, ["after", "again"])


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


def test_a_run_stops_on_request_and_outside_of_the_main_thread_a_warning_says_so(tmp_path):
    code = """
thread = threading.Thread(target=run, args=(sys.argv[1] + "/thread",))
thread.start()
thread.join()
run(sys.argv[1] + "/main")
"""
    command = [sys.executable, "-c", ON_REQUEST + code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=MOST_SECONDS)
    assert (done.returncode, done.stderr) == (75, "")
    assert done.stdout.splitlines() == [
        "SIGTERM cannot be listened to outside of the main thread, and will end the process without a save: call "
        "vbs.request_stop() from where the end of this machine is announced",
        f"told to stop: ended after 7 steps, saved in {tmp_path}/thread",
        f"told to stop: ended after 7 steps, saved in {tmp_path}/main",
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
signals.note_sigterm()
"""


def test_a_loader_worker_ignores_the_signal_of_others_and_obeys_its_parent():
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
    assert run(SHIELDED + code) == (0, ["0", "None", "0"])


def test_workers_that_are_busy_hold_nobody_up_when_their_parent_ends():
    code = """
iterator = iter(DataLoader(Slow(), num_workers=2, persistent_workers=True))
print(int(next(iterator)))
"""
    assert run(SHIELDED + code) == (0, ["0"])


def test_a_worker_that_was_told_and_is_busy_ends_with_its_parent():
    code = """
iterator = iter(DataLoader(Slow(), num_workers=1))
print(int(next(iterator)))
(worker,) = multiprocessing.active_children()
terminate(worker.pid)
os.kill(os.getpid(), signal.SIGKILL)
"""
    # which returns when the worker has closed its output, too
    assert run(SHIELDED + code)[0] == -signal.SIGKILL


def test_whatever_else_is_forked_can_be_terminated_as_always():
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
    assert run(SHIELDED + code) == (0, [str(TERMINATED), str(TERMINATED)])
