"""A new Python process that answers one request after another, and can be forked safely.

Tests leave threads in their own process (of Ray, of progress bars, of uploads); a fork may inherit a lock that one of
them held, and wait for it forever.
"""

import atexit
import gc
import multiprocessing
import pickle
import subprocess
import sys
import traceback
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from unittest.mock import patch


class FreshProcess:
    """Calls ``module.answer(…)`` in a separate process, after ``module.prepare()``.

    Args:
        module: the name of a module in this folder.
    """

    def __init__(self, module):
        self._pipe, other = multiprocessing.Pipe()
        with other:
            command = [sys.executable, __file__, module, str(other.fileno())]
            # not a child of multiprocessing, whose children are counted elsewhere
            self._process = subprocess.Popen(command, pass_fds=[other.fileno()])
        atexit.register(self.close)

    def ask(self, *args):
        """What ``module.answer(*args)`` returns; raises if it fails."""
        self._pipe.send_bytes(pickle.dumps((sys.path, pickle.dumps(args))))
        is_good, result = pickle.loads(self._pipe.recv_bytes())
        if not is_good:
            raise RuntimeError(result)
        return result

    def close(self):
        """End the process; forks of this one may hold the pipe open."""
        atexit.unregister(self.close)
        self._process.kill()
        self._process.wait()
        self._pipe.close()


@contextmanager
def quick_searches_for_garbage():
    """Let frameworks collect only new objects: they collect at each run, and a full collection takes a while."""
    with patch.object(gc, "collect", partial(gc.collect, 1)):
        yield


def _serve(module, pipe):
    module.prepare()
    while True:
        try:
            sys.path[:], args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            outcome = True, module.answer(*pickle.loads(args))
        except Exception:
            outcome = False, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(outcome))


if __name__ == "__main__":
    _serve(import_module(sys.argv[1]), Connection(int(sys.argv[2])))
