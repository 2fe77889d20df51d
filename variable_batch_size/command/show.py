"""``vbs show``: draws a trace in the terminal, with the decisions that it was made of."""

from __future__ import annotations

import argparse
from pathlib import Path

from variable_batch_size.command.options import add_width, print_text, print_trace
from variable_batch_size.files import read_records
from variable_batch_size.planning.pictures import plot_decisions
from variable_batch_size.planning.reports import decisions_report
from variable_batch_size.traces.trace import Trace

EXECUTED, DECISIONS = "executed.csv", "decisions.jsonl"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", metavar="TRACE", help=f"a trace file; beside an {EXECUTED} of a policy, {DECISIONS} is shown too"
    )
    parser.add_argument("--plot", metavar="FILE", help="also draw both, as a .png or .svg file (needs matplotlib)")
    add_width(parser)


def run(options: argparse.Namespace) -> None:
    trace = Trace.read(options.trace)
    if trace.comment:
        print_text(trace.comment)
    print_trace(trace, options.width)
    decisions = Path(options.trace).with_name(DECISIONS)
    if Path(options.trace).name != EXECUTED:  # whatever lies beside it has decided another one
        if options.plot is not None:
            raise ValueError(f"--plot draws an {EXECUTED} of a policy, got {options.trace}; vbs plan draws a trace")
        return
    if options.plot is not None and not decisions.exists():
        raise ValueError(f"--plot draws the decisions of a policy, and there is no {decisions}; vbs plan draws a trace")
    if decisions.exists():
        records = read_records(decisions)
        print_text(decisions_report(records))
        if options.plot is not None:
            plot_decisions(trace, records, options.plot)
