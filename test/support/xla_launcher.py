"""A process that has imported torch_xla, and launches functions on virtual XLA cores in processes that it forks.

A launch by itself imports torch_xla each time, which takes 10 s. The tests' own process cannot be forked for this:
after a first backward pass, autograd knows no further device.
"""

import multiprocessing
import os
import pickle
import subprocess
import sys
import traceback
from importlib import import_module
from multiprocessing.connection import Connection


class XlaLauncher:
    """Runs functions like ``vbs.launch(…, backend="xla")``."""

    def __init__(self):
        self._pipe, other = multiprocessing.Pipe()
        with other:
            # not a child of multiprocessing, whose children are counted elsewhere
            self._process = subprocess.Popen([sys.executable, __file__, str(other.fileno())], pass_fds=[other.fileno()])

    def run(self, function, args, *, is_optimized=False, **options):
        """The results of all cores; raises if one of them fails. Optimizing the programs takes longer than most run."""
        flags = {"XLA_FLAGS": f"--xla_backend_optimization_level={3 if is_optimized else 0}"}
        self._pipe.send_bytes(pickle.dumps((sys.path, pickle.dumps((function, args)), flags, options)))
        is_good, result = pickle.loads(self._pipe.recv_bytes())
        if not is_good:
            raise RuntimeError(result)
        return result

    def close(self):
        """End the process; forks of this one may hold the pipe open."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()


def serve(pipe):
    """Launch one function after another, until the other end is closed."""
    from variable_batch_size.cores import launch

    os.environ |= launch._xla_processes(cores=1, spmd=False)[0].environment  # some of it is read on import
    for name in ("torch._dynamo", "torch_xla.distributed.xla_multiprocessing", "torch_xla.runtime"):
        import_module(name)
    launch._START_METHOD = "fork"
    while True:
        try:
            sys.path[:], work, flags, options = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            function, args = pickle.loads(work)
            with launch.environment(flags):
                outcome = True, launch.launch(function, args, backend="xla", **options)
        except BaseException:
            outcome = False, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(outcome))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
