"""Options and output shared by several commands of ``vbs``."""

import argparse
import os
import signal
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from variable_batch_size.checks import check_positive_number
from variable_batch_size.traces.recording import TIME_UNITS, Recording
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


def described(help: str) -> dict[str, Any]:
    """The help of a subcommand, for the list of subcommands and as a sentence for its own help."""
    return {"help": help, "description": f"{help[0].upper()}{help[1:]}."}


def add_training(parser: Any, devices: Sequence[str]) -> None:
    """The options of commands that train a workload many times."""
    add = parser.add_argument
    help = "concurrent runs (default: as many as the CPUs allow; 1 on other devices)"
    add("--jobs", type=positive, metavar="N", help=help)
    help = "returns a concurrent.futures.Executor that trains instead of this machine, for example on a cluster"
    add("--executor", metavar="FILE.py:FUNCTION", help=help)
    add("--datadir", metavar="DIR", help="the directory of mnist, with torchvision's files")
    add("--lr", type=float, help="learning rate at the reference batch size (default: the workload's)")
    help = "the reference batch size, for which the learning rate was chosen (default: the workload's)"
    add("--ref-batchsize", type=positive, metavar="B0", help=help)
    add_minibatch(parser, required=False)
    add("--device", choices=devices, default="cpu", help="what to train on (default: cpu)")
    add("--threads", type=positive, default=1, metavar="N", help="CPU threads of each core (default: 1)")


def check_training(options: argparse.Namespace, *, cores: int = 1) -> None:
    """Raise for wrong options of :func:`add_training`; without --jobs, set the number of jobs by the cores of each."""
    if options.lr is not None:
        check_positive_number(lr=options.lr)
    if options.executor and options.jobs:
        raise ValueError("--jobs has no effect with --executor, which determines the number of concurrent runs")
    default = (os.cpu_count() or 1) // (cores * options.threads) if options.device == "cpu" else 1
    options.jobs = options.jobs or max(1, default)


def check_seeds(options: argparse.Namespace) -> None:
    if options.seeds < 2:
        raise ValueError(f"--seeds must be at least 2, because a single seed gives no interval, got {options.seeds}")


@contextmanager
def interruptible(missing: str) -> Iterator[None]:
    """Within, SIGTERM is handled like Ctrl-C, which stops the worker processes and ends the command."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write(f"vbs: interrupted; the same command resumes with the {missing}\n")
        sys.exit(130)


def add_recording(parser: Any) -> None:
    add = parser.add_argument
    help = "the column or field of the times (default: the first named column, or the field 'time')"
    add("--time-column", metavar="NAME", help=help)
    add("--count-column", metavar="NAME", help="the column or field of the numbers of devices (default: the other one)")
    add("--time-unit", choices=TIME_UNITS, help="unit of times that are numbers (default: s)")


def read_recording(path: str, options: argparse.Namespace) -> Recording:
    """Read a recording with the options of :func:`add_recording`, which errors name instead of the arguments."""
    try:
        return Recording.read(path, **selected(options, *RECORDING))
    except ValueError as error:
        message = str(error)
        for name in RECORDING:
            message = message.replace(f"`{name}`", f"--{name.replace('_', '-')}")
        raise ValueError(message) from None


def add_plot(parser: Any, what: str) -> None:
    parser.add_argument("--plot", metavar="FILE", help=f"also draw {what}, as a .png or .svg file (needs matplotlib)")
    parser.add_argument("--open", action="store_true", help="open the picture; without --plot, it is a temporary file")


def draw_picture(options: argparse.Namespace, draw: Callable[[str], None]) -> None:
    """Draw a picture to the file of --plot, or to a temporary one for --open, and open it if asked."""
    if options.plot is None and not options.open:
        return
    path = options.plot or os.path.join(tempfile.mkdtemp(prefix="vbs-"), "picture.svg")
    draw(path)
    if options.open:
        sys.stderr.write(f"{path}\n")  # the output may be JSON
        webbrowser.open(Path(path).absolute().as_uri())


def selected(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Some options as keyword arguments."""
    return {name: getattr(options, name) for name in names}


def require(options: argparse.Namespace, *names: str, instead: str | None = None) -> None:
    """Refuse the command line if some options are missing; ``options.refuse`` is the ``error`` of its parser."""
    missing = ["--" + name.replace("_", "-") for name in names if getattr(options, name) is None]
    if missing:
        without = f" (or {instead})" if instead else ""
        options.refuse(f"the following arguments are required: {', '.join(missing)}{without}")


def print_text(text: str) -> None:
    """Print text, with question marks for characters that the terminal cannot show."""
    encoding = sys.stdout.encoding or "utf-8"  # None for a StringIO
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding) + "\n")
