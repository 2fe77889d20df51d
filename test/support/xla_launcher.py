"""Launches functions on virtual XLA cores, in processes forked from one that has imported torch_xla.

A launch by itself imports torch_xla each time, which takes 10 s.
"""

import os
from importlib import import_module

from fresh_process import FreshProcess

AS_FOR_USERS = "--xla_backend_optimization_level=3"
# the generator of fused code, and splitting the little code over threads, take most of the time of a compilation
QUICKLY = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)


class XlaLauncher:
    """Runs functions like ``vbs.launch(…, backend="xla")``."""

    def __init__(self):
        self._process = None

    def run(self, function, args, *, is_optimized=False, **options):
        """The results of all cores; raises if one of them fails. Optimizing the programs takes longer than most run."""
        return self._ask(_launch, (function, args, options), is_optimized=is_optimized)

    def call(self, function, *args):
        """What a function returns in the process that launches, for functions that launch by themselves."""
        return self._ask(function, args)

    def _ask(self, function, args, *, is_optimized=False):
        if self._process is None:
            self._process = FreshProcess("xla_launcher")
        return self._process.ask(function, args, {"XLA_FLAGS": AS_FOR_USERS if is_optimized else QUICKLY})

    def close(self):
        """End the process that launches."""
        if self._process is not None:
            self._process.close()


def prepare():
    """Import torch_xla, in the process that launches."""
    from variable_batch_size.cores import launch

    os.environ |= launch._xla_processes(cores=1, spmd=False)[0].environment  # some of it is read on import
    for name in ("torch._dynamo", "torch_xla.distributed.xla_multiprocessing", "torch_xla.runtime"):
        import_module(name)
    launch._START_METHOD = "fork"


def answer(function, args, flags):
    """Call a function with these variables, in the process that launches."""
    from variable_batch_size.cores import launch

    with launch.environment(flags):
        return function(*args)


def _launch(function, args, options):
    from variable_batch_size.cores import launch

    return launch.launch(function, args, backend="xla", **options)
