"""Cores as threads of one process: fast, and their state can be inspected.

One runs at a time, until it waits for the others: several modes of torch's dispatcher at once may end the process.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils import _python_dispatch as dispatcher

from variable_batch_size.cores.communicator import Communicator

MOST_SECONDS = 600  # exceeded only by a hang


class Threads(Communicator):
    """One of several threads that synchronize at every sum."""

    def __init__(self, rank, num_replicas, barrier, turn, shown, *, is_one_program=False):
        self.rank = rank
        self.num_replicas = num_replicas
        self.is_one_program = is_one_program
        self._barrier, self._turn = barrier, turn
        self._shown = shown

    def sum(self, tensors):
        for tensor, *others in zip(tensors, *self._of_all(tensors), strict=True):
            tensor.copy_(torch.stack(others).sum(0))

    def broadcast(self, tensors):
        for tensor, first in zip(tensors, self._of_all(tensors)[0], strict=True):
            tensor.copy_(first)

    def _of_all(self, tensors):
        self._shown[self.rank] = [tensor.detach().clone() for tensor in tensors]
        self._wait()
        found = list(self._shown)
        self._wait()
        return found

    def _wait(self):
        self._turn.release()
        try:
            self._barrier.wait(timeout=MOST_SECONDS)
        finally:
            self._turn.acquire()


def run_on(num_replicas, function, **options):
    """Run ``function(communicator)`` on each core; returns the results."""
    barrier, turn, shown = threading.Barrier(num_replicas), threading.Lock(), [None] * num_replicas
    cores = [Threads(rank, num_replicas, barrier, turn, shown, **options) for rank in range(num_replicas)]

    def run(core):
        try:
            with turn, torch.no_grad():
                return function(core)
        except BaseException:
            barrier.abort()  # otherwise the others would wait for this core
            raise

    flags = {name: value for name, value in vars(dispatcher).items() if name.startswith("_is_in_")}
    try:
        with ThreadPoolExecutor(num_replicas) as pool:
            return list(pool.map(run, cores))
    finally:  # torch has one flag "in a mode" for all threads: modes that overlap leave it set, and nothing is compiled
        vars(dispatcher).update(flags)
