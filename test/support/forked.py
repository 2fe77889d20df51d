"""Programs in a process forked from this one, which has imported torch and the frameworks; importing takes seconds."""

import logging
import multiprocessing
import os
import random
import runpy
import signal
import sys
import tempfile
import warnings
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from unittest.mock import patch

import numpy as np
import torch
from torch.distributed import run as torchrun_program
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

launching = import_module("variable_batch_size.cores.launch")


def run(function, *args, folder, environment=None):
    """Call a function in another process like the main function of a program; returns its exit code and output.

    Args:
        function: what to call; it may end with ``sys.exit``.
        args: its arguments.
        folder: the working directory.
        environment: variables in addition to those of this process.
    """
    return Program(function, *args, folder=folder, environment=environment).finish()


class Program:
    """A function called in this way while this process continues; `finish` waits for its end.

    Args:
        function, args, folder, environment: as for `run`.
        ignores_sigint: whether it is started like a background program of a shell.
        spawns: whether `vbs.launch` in it starts new interpreters, as for users.
    """

    def __init__(self, function, *args, folder, environment=None, ignores_sigint=False, spawns=False):
        self._function = function
        self._files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115 (`finish` closes them)
        on_sigint = signal.SIG_IGN if ignores_sigint else signal.default_int_handler
        numbers = [file.fileno() for file in self._files]
        self._process = multiprocessing.get_context("fork").Process(
            target=_run, args=(function, args, folder, environment or {}, numbers, on_sigint, spawns)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking a process with threads is intended
            self._process.start()
        self.pid = self._process.pid

    def poll(self):
        """The exit code, or None while it runs."""
        return self._process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def finish(self):
        self._process.join()
        texts = []
        for file in self._files:
            with file:
                file.seek(0)
                texts.append(file.read())
        return CompletedProcess(self._function, self._process.exitcode, *texts)


def run_script(path, *arguments, folder, environment=None):
    """Run a file as a script with these arguments."""
    return start_script(path, *arguments, folder=folder, environment=environment).finish()


def start_script(path, *arguments, folder, environment=None, spawns=False):
    """Start a file as a script with these arguments; returns a `Program`."""
    return Program(run_script_here, path, *arguments, folder=folder, environment=environment, spawns=spawns)


class Leader:
    """A function called in a forked process that leads its own session, with the interface of `subprocess`.

    Args:
        function, args: as for `run`.
        environment: variables in addition to those of this process.
        output: the number of a file for its output, if that is not the one of this process.
    """

    def __init__(self, function, *args, environment, output=None):
        arguments = (function, args, environment, output)
        self._process = multiprocessing.get_context("fork").Process(target=_lead, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    def poll(self):
        return self._process.exitcode

    def wait(self, seconds=None):
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise TimeoutExpired("a forked process", seconds)
        return self._process.exitcode

    def send_signal(self, number):
        if self._process.is_alive():
            os.kill(self.pid, number)


def _lead(function, args, environment, output):
    os.setsid()
    os.environ.update(environment)
    if output is not None:
        os.dup2(output, 1)
        os.dup2(output, 2)
    _print_to_files()
    as_in_a_new_process()
    with launches():
        function(*args)


def torchrun(flags, path, *arguments):
    """Call torchrun's main function, whose agent forks its processes where it would start an interpreter for each."""

    def fork(args, env, stdout, stderr, start_new_session):
        _, unbuffered, script, *texts = args
        assert (unbuffered, stdout, stderr, start_new_session) == ("-u", None, None, True)
        return Leader(run_script_here, script, *texts, environment=env)

    with patch.object(subprocess_handler, "Popen", fork):
        torchrun_program.main([*flags, str(path), *map(str, arguments)])


def _run(function, args, folder, environment, files, on_sigint, spawns):
    for own, standard in zip(files, (1, 2), strict=True):
        os.dup2(own, standard)
    _print_to_files()
    os.environ.update(environment)
    os.chdir(folder)
    _reset_signals_and_messages()
    signal.signal(signal.SIGINT, on_sigint)
    with nullcontext() if spawns else launches():
        function(*args)


def _print_to_files():
    """Print to the standard files, where tests have replaced them."""
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))


def run_script_here(path, *arguments):
    """Run a file as a script in this process."""
    path = str(path)
    sys.argv = [path, *map(str, arguments)]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


@contextmanager
def launches():
    """In this context, `vbs.launch` forks torch.distributed processes, which need not import torch, and spawns XLA's.

    They start like spawned ones, and import the script that calls ``launch`` again, if there is one.
    """
    start, store = launching._start, launching._store_process

    def begin(main, *args):
        as_in_a_new_process()
        script = sys.modules["__main__"]
        if script.__spec__ is None and hasattr(script, "__file__"):
            with patch.object(launching, "run_processes", _refuse):
                vars(script).update(runpy.run_path(script.__file__, run_name="__mp_main__"))
        main(*args)

    def fork(processes, work, started):
        if any(process.main not in (launching._distributed_main, launching._live_main) for process in processes):
            start(processes, work, started)
            return
        with _forking():
            start([one._replace(main=begin, args=(one.main, *one.args)) for one in processes], work, started)

    @contextmanager
    def fork_store():
        with ExitStack() as stack:
            with _forking():
                address = stack.enter_context(store())
            yield address

    with patch.object(launching, "_start", fork), patch.object(launching, "_store_process", fork_store):
        yield


@contextmanager
def _forking():
    with patch.object(launching, "_START_METHOD", "fork"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking a process with threads is intended
        yield


def _refuse(processes, work):
    raise RuntimeError("a script must call launch under `if __name__ == '__main__':`")


def as_in_a_new_process():
    """Reset inherited state that a new process would not have."""
    _reset_signals_and_messages()
    random.seed()
    np.random.seed()
    torch.seed()


def _reset_signals_and_messages():
    warnings.resetwarnings()  # warnings are errors in tests
    logging.getLogger().handlers.clear()  # those of the tests
    logging.getLogger().setLevel(logging.WARNING)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # torchrun's agent handles them
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
