"""The command ``vbs``: finds a subcommand and runs it. Its module is imported only when it is used."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from variable_batch_size.plugins import load, registered, summary
from variable_batch_size.stability import NOTE
from variable_batch_size.version import __version__

COMMANDS = {  # the module of each, with the functions add_COMMAND(parser) and run_COMMAND(options), and what it does
    "plan": ("planning", "check a trace and predict what a run with it will do"),
    "show": ("traces", "draw a trace in the terminal"),
    "traces": ("traces", "list the traces that come with the package, recorded and published ones, or write one"),
    "make": (
        "traces",
        "make a trace: constant, a ramp, stages, growth instead of a learning-rate decay, a spot market",
    ),
    "convert": ("traces", "convert recorded devices to a trace, or a trace to stages"),
    "compare": (
        "compare",
        "train with several learning-rate rules on several traces, and write a page with the results",
    ),
    "report": ("compare", "write that page again from existing results"),
    "profile": ("planning", "measure how long minibatches take on several numbers of cores"),
    "advise": ("planning", "measure times and noise, and recommend a number of cores and a batch size"),
    "fit": ("planning", "fit a throughput model to such a profile, to predict other numbers of cores"),
    "cbs": ("planning", "search for the critical batch size with short branches of a run"),
    "watch": ("watch", "show the curves of runs on a page, while they train"),
    "simulate": ("planning", "predict the decisions of policies when cores come and go, before renting them"),
}
NOTES = """\
Counts may end in K, M, B or T (thousand, million, billion, trillion).
Exit codes: 0 success; 1 a file or value was rejected or a run failed, with the reason on standard error;
2 invalid command line; 130 a comparison or recommendation was interrupted.
Options and written files stay as they are within a minor version, except those of experimental commands.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default those of the process, and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser(arguments).parse_args(arguments)
    options.command = shlex.join(["vbs", *arguments])
    try:
        options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader, such as head, has closed the pipe; without this Python reports the error again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, ImportError) as error:
        sys.stderr.write(f"vbs: {error}\n")
        return 1
    return 0


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """All commands, with the options of the requested one only, so that no other module is imported."""
    format: Any = {"epilog": NOTES, "formatter_class": argparse.RawDescriptionHelpFormatter}
    description = "Make, convert, check and view traces of a variable batch size before renting a machine."
    parser = argparse.ArgumentParser(prog="vbs", description=description, **format)
    parser.add_argument("--version", action="version", version=f"variable_batch_size {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    requested = arguments[0] if arguments else ""
    others = () if requested in COMMANDS else registered("commands")
    for name in [*COMMANDS, *([requested] if requested in others else others)]:
        if (help := _help_of(name)) is None:
            continue
        description = f"{help[0].upper()}{help[1:]}."
        if name not in COMMANDS and registered("commands")[name].module.startswith("variable_batch_size.experimental."):
            help, description = f"experimental: {help}", f"{description} {NOTE}"
        command = commands.add_parser(name, help=help, description=description, **format)
        if name == requested:
            module = module_of(name)
            getattr(module, f"add_{name}")(command)
            command.set_defaults(run=getattr(module, f"run_{name}"))
    return parser


def module_of(name: str) -> Any:
    """The module of a command, which is imported; None for a broken one of another package."""
    if name in COMMANDS:
        return import_module(f"variable_batch_size.lab.command.{COMMANDS[name][0]}")
    return load("commands", name)


def _help_of(name: str) -> str | None:
    """What a command does, without importing its module; None for a broken one of another package."""
    if name in COMMANDS:
        return COMMANDS[name][1]
    return summary("commands", name)
