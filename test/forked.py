"""Programs in a process forked from this one, which has imported torch and the frameworks: that takes seconds."""

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from subprocess import CompletedProcess


def run(function, *args, folder, environment=None):
    """Call a function in another process, as the main function of a program: its exit code and what it has printed.

    Args:
        function: what to call; it may end with ``sys.exit``.
        args: its arguments.
        folder: the working directory.
        environment: variables besides those of this process.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        files = (output.fileno(), errors.fileno())
        process = multiprocessing.get_context("fork").Process(
            target=_run, args=(function, args, folder, environment or {}, files)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that this process may have threads
            process.start()
        process.join()
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read())
        return CompletedProcess(function, process.exitcode, *texts)


def run_script(path, *arguments, folder, environment=None):
    """Run a file as a script with these arguments."""
    return run(
        _run_script, str(path), [str(argument) for argument in arguments], folder=folder, environment=environment
    )


def _run(function, args, folder, environment, files):
    for own, standard in zip(files, (1, 2), strict=True):
        os.dup2(own, standard)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
    os.environ.update(environment)
    os.chdir(folder)
    warnings.resetwarnings()  # which are errors where tests run
    for number, handler in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        signal.signal(number, handler)
    function(*args)


def _run_script(path, arguments):
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")
