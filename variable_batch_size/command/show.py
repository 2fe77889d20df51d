"""``vbs show``: draws a trace in the terminal, with the decisions that it was made of."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from variable_batch_size.command.options import add_width, print_text, print_trace
from variable_batch_size.planning.reports import decisions_report
from variable_batch_size.traces.trace import Trace

DECISIONS = "decisions.jsonl"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", metavar="TRACE", help=f"a trace file; beside an executed.csv of a policy, {DECISIONS} is shown too"
    )
    add_width(parser)


def run(options: argparse.Namespace) -> None:
    trace = Trace.read(options.trace)
    if trace.comment:
        print_text(trace.comment)
    print_trace(trace, options.width)
    decisions = Path(options.trace).with_name(DECISIONS)
    if decisions.exists():
        lines = decisions.read_text(encoding="utf-8").splitlines()
        print_text(decisions_report([json.loads(line) for line in lines]))
