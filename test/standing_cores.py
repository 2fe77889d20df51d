"""Forked processes of torch.distributed that stay for a session and do one job after another: starting takes long."""

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

MOST_SECONDS = 600


class StandingCores:
    """Some gloo processes, forked from this one, which has imported all that they need.

    Args:
        cores: how many.
        directory: an empty one, where they meet.
    """

    def __init__(self, cores, directory):
        self._pipes, self._pids = [], []
        self.is_broken = False
        for rank in range(cores):
            own, other = multiprocessing.Pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # that this process may have threads
                pid = os.fork()  # no child of multiprocessing, whose children others count
            if not pid:
                for pipe in [own, *self._pipes]:  # else it would not see that this process has ended
                    pipe.close()
                _work(other, f"file://{directory}/store", rank, cores)
            other.close()
            self._pipes.append(own)
            self._pids.append(pid)

    def run(self, function, *args):
        """What ``function(*args)`` returns on each core, as from a launch."""
        self.give(function, *args)
        found, end = {}, time.monotonic() + MOST_SECONDS
        while len(found) < len(self._pipes):
            left = [pipe for pipe in self._pipes if pipe not in found]
            for pipe in multiprocessing.connection.wait(left, max(0.0, end - time.monotonic())) or [None]:
                is_good, found[pipe] = _received(pipe)
                if not is_good:
                    self.kill()  # others may wait for this one, for ever
                    raise RuntimeError(f"a core failed:\n{found[pipe]}")
        return [found[pipe] for pipe in self._pipes]

    def give(self, function, *args):
        """Have all cores begin with a job, each with a copy of the arguments; a pipe would let them share tensors."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args)))

    def have_answered(self):
        """Whether one of them has come to the end of its job, or to its own."""
        return bool(multiprocessing.connection.wait(self._pipes, 0))

    def answer(self):
        """What one of them has answered: whether its job went well, and the result or the error."""
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
    """Never returns: all that follows is the other process's."""
    warnings.resetwarnings()  # which are errors where tests run, also those of torch.compile about itself
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as a new process has it
    is_met = False
    try:
        while True:
            function, args = pickle.loads(pipe.recv_bytes())
            try:
                if not is_met:
                    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=cores)
                    is_met = True
                outcome = True, function(*args)
            except BaseException:
                outcome = False, traceback.format_exc()
            pipe.send_bytes(pickle.dumps(outcome))
            gc.collect()  # models of this job are not the next one's
    finally:
        os._exit(1)
