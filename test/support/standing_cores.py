"""torch.distributed processes that live for a session and run one job after another; starting them is slow."""

import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from fresh_process import FreshProcess

from variable_batch_size.data.sampler import MinibatchSource

MOST_SECONDS = 600  # without an answer they hang, however busy the machine is
MOST_THREADS = 16  # of an idle process: those of about four process groups


class StandingCores:
    """Some gloo processes, forked from one that has imported their dependencies.

    Args:
        cores: how many.
        directory: an empty directory for their rendezvous.
        imports: names of further modules to import before forking.
    """

    _parent = None

    def __init__(self, cores, directory, imports=()):
        if StandingCores._parent is None:
            StandingCores._parent = FreshProcess("standing_cores")
        self._directory = Path(directory)
        self.is_broken = False
        with (
            tempfile.TemporaryDirectory() as folder,
            multiprocessing.connection.Listener(f"{folder}/listener", backlog=cores) as listener,
        ):
            self._pids = self._parent.ask(cores, self._directory, listener.address, imports)
            pipes = [listener.accept() for _ in self._pids]
        self._pipes = [pipe for _, pipe in sorted((pipe.recv(), pipe) for pipe in pipes)]

    def run(self, function, *args):
        """Run ``function(*args)`` on each core; returns the results, like a launch."""
        self.give(function, *args)
        found, end = {}, time.monotonic() + MOST_SECONDS
        while len(found) < len(self._pipes):
            left = [pipe for pipe in self._pipes if pipe not in found]
            for pipe in multiprocessing.connection.wait(left, max(0.0, end - time.monotonic())) or [None]:
                is_good, found[pipe] = _received(pipe) if pipe else (False, self._tracebacks())
                if not is_good:
                    self.kill()  # others may wait for this core forever
                    raise RuntimeError(f"a core failed:\n{found[pipe]}")
        return [found[pipe] for pipe in self._pipes]

    def are_busy_when_idle(self):
        """Whether jobs have left many process groups: gloo wakes up 100 times per second for each of them."""
        folders = (Path(f"/proc/{pid}/task") for pid in self._pids)
        return any(folder.is_dir() and len(list(folder.iterdir())) > MOST_THREADS for folder in folders)

    def give(self, function, *args):
        """Start a job on all cores, each with a copy of the arguments; a pipe would share tensors."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((MinibatchSource.must_be_read, function, args)))

    def have_answered(self):
        """Whether one of them has finished its job, or has exited."""
        return bool(multiprocessing.connection.wait(self._pipes, 0))

    def answer(self):
        """The answer of one of them: whether its job succeeded, and the result or the error."""
        return _received(multiprocessing.connection.wait(self._pipes)[0])

    def _tracebacks(self):
        """What each of them was doing when it hung."""
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
        multiprocessing.connection.wait(self._pipes, 10)
        found = [path.read_text() for path in sorted(self._directory.glob("*.traceback"))]
        return "\n".join([f"none has answered for {MOST_SECONDS} s; they were at", *found])

    def kill(self):
        """End all of them at once, with SIGKILL; their parent waits for them."""
        self.is_broken = True
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pipe in self._pipes:
            with suppress(EOFError, OSError):
                while True:
                    pipe.recv_bytes()
            pipe.close()
        self._pids = []


def _received(pipe):
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return False, "it has died"


def prepare():
    """In their parent: import what an optimizer's first step imports, which takes a second."""
    import_module("torch._dynamo")
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for them


def answer(cores, directory, address, imports):
    """In their parent: fork them."""
    for name in imports:
        import_module(name)
    pids = []
    for rank in range(cores):
        pid = os.fork()
        if not pid:
            _work(directory, address, rank, cores)
        pids.append(pid)
    return pids


def _work(directory, address, rank, cores):
    """Never returns: the following code is only for the other process."""
    try:
        warnings.resetwarnings()  # warnings are errors in tests, including those of torch.compile
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # as a new process has it
        os.closerange(3, 1024)  # the pipe of the parent, which must end with the tests
        file = (directory / f"{rank}.traceback").open("w")
        faulthandler.enable(file)
        pipe = multiprocessing.connection.Client(address)
        pipe.send(rank)
        # so that no object reaches the oldest generation in a job, unless it collects all
        gc.set_threshold(gc.get_threshold()[0], 10**6)
        while True:
            MinibatchSource.must_be_read, function, args = pickle.loads(pipe.recv_bytes())
            num_complete = _num_complete_collections()
            try:
                if not dist.is_initialized():
                    store = f"file://{directory}/store"
                    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=cores)
                outcome = True, function(*args)
            except BaseException:
                outcome = False, traceback.format_exc()
            pipe.send_bytes(pickle.dumps(outcome))
            # release the models of this job before the next one, which would find their shards; a search of all that
            # was imported takes longer than most jobs
            gc.collect(1 if _num_complete_collections() == num_complete else 2)
    finally:
        os._exit(1)


def _num_complete_collections():
    return gc.get_stats()[2]["collections"]
