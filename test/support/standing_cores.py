"""Forked torch.distributed processes that live for a session and run one job after another; starting them is slow."""

import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import time
import traceback
import warnings

import torch.distributed as dist

from variable_batch_size.data.sampler import MinibatchSource

MOST_SECONDS = 600


class StandingCores:
    """Some gloo processes, forked from this one, which has imported their dependencies.

    Args:
        cores: how many.
        directory: an empty directory for their rendezvous.
    """

    def __init__(self, cores, directory):
        self._pipes, self._pids = [], []
        self.is_broken = False
        for rank in range(cores):
            own, other = multiprocessing.Pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # forking a process with threads is intended
                pid = os.fork()  # not a child of multiprocessing, whose children are counted elsewhere
            if not pid:
                for pipe in [own, *self._pipes]:  # otherwise it would not detect the end of this process
                    pipe.close()
                _work(other, f"file://{directory}/store", rank, cores)
            other.close()
            self._pipes.append(own)
            self._pids.append(pid)

    def run(self, function, *args):
        """Run ``function(*args)`` on each core; returns the results, like a launch."""
        self.give(function, *args)
        found, end = {}, time.monotonic() + MOST_SECONDS
        while len(found) < len(self._pipes):
            left = [pipe for pipe in self._pipes if pipe not in found]
            for pipe in multiprocessing.connection.wait(left, max(0.0, end - time.monotonic())) or [None]:
                is_good, found[pipe] = _received(pipe)
                if not is_good:
                    self.kill()  # others may wait for this core forever
                    raise RuntimeError(f"a core failed:\n{found[pipe]}")
        return [found[pipe] for pipe in self._pipes]

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

    def kill(self):
        """End all of them at once, with SIGKILL."""
        self.is_broken = True
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._pids = []


def _received(pipe):
    if pipe is None:
        return False, f"none has answered for {MOST_SECONDS} s"
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return False, "it has died"


def _work(pipe, meeting_point, rank, cores):
    """Never returns: the following code is only for the other process."""
    warnings.resetwarnings()  # warnings are errors in tests, including those of torch.compile
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as a new process has it
    is_met = False
    try:
        while True:
            MinibatchSource.must_be_read, function, args = pickle.loads(pipe.recv_bytes())
            try:
                if not is_met:
                    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=cores)
                    is_met = True
                outcome = True, function(*args)
            except BaseException:
                outcome = False, traceback.format_exc()
            pipe.send_bytes(pickle.dumps(outcome))
            gc.collect()  # release the models of this job before the next one
    finally:
        os._exit(1)
