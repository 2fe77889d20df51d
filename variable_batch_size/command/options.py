"""Options and output that several commands of ``vbs`` share."""

from __future__ import annotations

import argparse
import shutil
import sys
from typing import Any

from variable_batch_size.planning.reports import trace_report
from variable_batch_size.traces.recording import FORMATS, TIME_UNITS
from variable_batch_size.traces.stages import parse_count
from variable_batch_size.traces.trace import Trace

_NARROWEST = 24


def count(text: str) -> int:
    """The type of an option that is a count, such as 96 or 250K."""
    try:
        return parse_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    """The type of an option that is a count of at least 1."""
    if not count(text):
        raise argparse.ArgumentTypeError("expected at least 1, got 0")
    return count(text)


def add_minibatch_size(parser: Any, *, is_required: bool = True) -> None:
    parser.add_argument(
        "--minibatch-size", type=count, required=is_required, metavar="M", help="samples that a core runs at once"
    )


def add_samples_per_device(parser: Any, *, is_required: bool = True) -> None:
    parser.add_argument(
        "--samples-per-device", type=count, required=is_required, metavar="N", help="what each adds to the batch size"
    )


def add_recording(parser: Any) -> None:
    parser.add_argument("--format", choices=FORMATS, help="how it is written (default: told from its content)")
    parser.add_argument("--time-column", metavar="NAME", help="CSV: the times (default: the first named column)")
    parser.add_argument("--count-column", metavar="NAME", help="CSV: numbers of devices (default: the other one)")
    parser.add_argument("--time-unit", choices=TIME_UNITS, help="CSV: of times that are numbers (default: s)")


def recording_options(options: argparse.Namespace) -> dict[str, Any]:
    """What the options of :func:`add_recording` say, as :meth:`Recording.read` takes it."""
    return {name: getattr(options, name) for name in ("format", "time_column", "count_column", "time_unit")}


def add_tokens_per_sample(parser: Any, help: str) -> None:
    parser.add_argument("--tokens-per-sample", type=count, metavar="T", help=f"{help}: the tokens of a sample")


def add_out(parser: Any) -> None:
    parser.add_argument(
        "--out", metavar="FILE", help="the trace file to write (default: none, the trace is only shown)"
    )
    add_width(parser)


def add_width(parser: Any) -> None:
    parser.add_argument("--width", type=count, metavar="W", help="characters in a line (default: the terminal's)")


def write_trace(trace: Trace, options: argparse.Namespace) -> None:
    """Write a trace to where the options say, with the command that made it on top."""
    if options.out is not None:
        trace.write(options.out, comment=f"made by: {options.command}")


def print_trace(trace: Trace, width: int | None) -> None:
    """Print a trace as sparklines, which need not be Unicode's where the terminal has none."""
    width = width or shutil.get_terminal_size().columns
    try:
        "█".encode(_encoding())
        is_ascii = False
    except UnicodeEncodeError:
        is_ascii = True
    print_text(trace_report(trace, width=max(width, _NARROWEST), is_ascii=is_ascii))


def print_text(text: str) -> None:
    """Print a text; characters that the terminal does not have become question marks."""
    sys.stdout.write(text.encode(_encoding(), errors="replace").decode(_encoding()) + "\n")


def _encoding() -> str:
    return sys.stdout.encoding or "utf-8"  # a StringIO in its place has none
