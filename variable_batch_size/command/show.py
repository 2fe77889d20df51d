"""``vbs show``: draws a trace in the terminal."""

from __future__ import annotations

import argparse

from variable_batch_size.command.options import add_width, print_text, print_trace
from variable_batch_size.traces.trace import Trace


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="a trace file")
    add_width(parser)


def run(options: argparse.Namespace) -> None:
    trace = Trace.read(options.trace)
    if trace.comment:
        print_text(trace.comment)
    print_trace(trace, options.width)
