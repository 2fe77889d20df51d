"""The command ``vbs``, whose parts are loaded when they are asked for."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module

from variable_batch_size.version import __version__

COMMANDS = {
    "plan": "check a trace and say what a run with it will do",
    "show": "draw a trace in the terminal",
    "make": "make a trace: constant, a ramp, stages, growth in place of a learning-rate decay, a spot market",
    "convert": "make a trace of recorded devices, or stages of a trace",
    "compare": "train with several learning-rate rules on several traces, and make a page of what came out",
    "report": "make that page anew, of results that are there",
    "profile": "measure how long minibatches take on some numbers of cores",
    "fit": "fit a model to such a profile, for numbers of cores that were not measured",
    "cbs": "look for the largest batch size that costs nothing, with short branches of a run",
    "simulate": "say what policies would make of cores that come and go, before they are rented",
}
"""What each command does. The file of that name beside this has its ``add_options(parser)`` and ``run(options)``."""

NOTES = """\
Counts may end in K, M, B or T (thousand, million, billion, trillion).
Exit codes: 0 all is well; 1 a file or a number is refused, or a run has failed, and standard error says where and why;
2 the command line is not understood; 130 a comparison was interrupted.
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
        # whoever reads, such as head, has seen enough; without this Python complains once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, ImportError) as error:
        sys.stderr.write(f"vbs: {error}\n")
        return 1
    return 0


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """All commands, but the options of only that which is asked for: the others would have to be loaded."""
    parser = argparse.ArgumentParser(
        prog="vbs",
        description="Traces of a variable batch size: make, convert, check and see them before renting a machine.",
        epilog=NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"variable_batch_size {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, help in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=help,
            description=help[0].upper() + help[1:] + ".",
            epilog=NOTES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in arguments[:1]:
            module = import_module(f"variable_batch_size.command.{name}")
            module.add_options(command)
            command.set_defaults(run=module.run)
    return parser
