"""Options and output shared by several commands of ``vbs``."""

import argparse
import sys
from typing import Any

from variable_batch_size.traces.recording import TIME_UNITS
from variable_batch_size.traces.trace import parse_count

RECORDING = ("time_column", "count_column", "time_unit")  # the options of add_recording, arguments of Recording.read


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


def add_minibatch(parser: Any, *, required: bool = True) -> None:
    help = "samples per forward and backward pass of one core"
    parser.add_argument("--minibatch-size", type=count, required=required, metavar="M", help=help)


def add_recording(parser: Any) -> None:
    add = parser.add_argument
    add("--time-column", metavar="NAME", help="CSV: the times (default: the first named column)")
    add("--count-column", metavar="NAME", help="CSV: numbers of devices (default: the other one)")
    add("--time-unit", choices=TIME_UNITS, help="CSV: of times that are numbers (default: s)")


def selected(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Some options as keyword arguments."""
    return {name: getattr(options, name) for name in names}


def print_text(text: str) -> None:
    """Print text, with question marks for characters that the terminal cannot show."""
    encoding = sys.stdout.encoding or "utf-8"  # None for a StringIO
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding) + "\n")
