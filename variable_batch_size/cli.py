"""The command ``vbs``: plan, make, convert and show traces."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from variable_batch_size.convert import ROUNDING, WHEN_EMPTY, convert_recording, step_seconds
from variable_batch_size.generate import (
    constant_trace,
    doubling_ramp,
    growth_for_decay,
    linear_ramp,
    seesaw,
    spot_market,
)
from variable_batch_size.plan import RULES, Plan
from variable_batch_size.plot import check_suffix, plot_plan
from variable_batch_size.recording import FORMATS, TIME_UNITS, Recording
from variable_batch_size.report import conversion_report, plan_report, trace_report
from variable_batch_size.schedule import ON_END, Schedule
from variable_batch_size.stages import UNITS, Stages, parse_count
from variable_batch_size.trace import Trace
from variable_batch_size.version import __version__

_NOTES = """\
Counts may end in K, M or B (thousand, million, billion).
Exit codes: 0 all is well; 1 a file or a number is refused, and standard error says where and why; 2 the command
itself is not understood.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default those of the process, and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vbs",
        description="Traces of a variable batch size: make, convert, check and see them before renting a machine.",
        epilog=_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"variable_batch_size {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_plan(commands)
    _add_show(commands)
    _add_make(commands)
    _add_convert(commands)
    return parser


# ---------------------------------------------------------------------------------------------------------------- plan


def _add_plan(commands: Any) -> None:
    parser = _add_command(commands, "plan", _plan, "check a trace and say what a run with it will do")
    parser.add_argument("trace", metavar="TRACE", help="a trace file, or a number for that batch size for ever")
    parser.add_argument("--dataset-size", type=_count, required=True, metavar="N", help="samples in the data set")
    _add_minibatch_size(parser)
    parser.add_argument("--cores", type=_count, required=True, metavar="C", help="cores that share the work")
    parser.add_argument("--epochs", type=_count, metavar="E", help="epochs to train (default: all the trace holds)")
    parser.add_argument(
        "--on-end", choices=ON_END, default="stop", help="what follows the last row of the trace (default: stop)"
    )
    parser.add_argument(
        "--rule",
        action="append",
        choices=RULES,
        help="a learning-rate rule to show; may be given more than once (default: all)",
    )
    parser.add_argument(
        "--ref-batchsize",
        type=_count,
        metavar="B0",
        help="batch size at which the learning rate is right (default: that of the first step)",
    )
    parser.add_argument(
        "--checkpoint-every", type=_count, metavar="K", help="also show the position after every K steps"
    )
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON")
    parser.add_argument("--plot", metavar="FILE", help="also draw the plan, as a .png or .svg file (needs matplotlib)")


def _plan(options: argparse.Namespace) -> None:
    if options.plot is not None:
        check_suffix(options.plot)
    trace = _trace(options.trace)
    schedule = Schedule(
        trace,
        dataset_size=options.dataset_size,
        minibatch_size=options.minibatch_size,
        num_replicas=options.cores,
        on_end=options.on_end,
    )
    plan = Plan.of(
        schedule,
        num_epochs=options.epochs,
        rules={name: RULES[name] for name in options.rule or RULES},
        ref_batchsize=options.ref_batchsize,
        checkpoint_every=options.checkpoint_every,
    )
    if options.plot is not None:
        plot_plan(plan, schedule, options.plot)
    if options.json:
        _print(json.dumps(plan.as_dict()))
    else:
        _print_origin(trace)
        _print(plan_report(plan))


# ---------------------------------------------------------------------------------------------------------------- show


def _add_show(commands: Any) -> None:
    parser = _add_command(commands, "show", _show, "draw a trace in the terminal")
    parser.add_argument("trace", metavar="TRACE", help="a trace file")
    _add_width(parser)


def _show(options: argparse.Namespace) -> None:
    trace = Trace.read(options.trace)
    _print_origin(trace)
    _print_trace(trace, options.width)


# ---------------------------------------------------------------------------------------------------------------- make


def _add_make(commands: Any) -> None:
    help = "make a trace: constant, ramps, stages, growth in place of a decay, a spot market"
    parser = commands.add_parser("make", help=help, description=help.capitalize() + ".")
    kinds = parser.add_subparsers(title="kinds of traces", metavar="KIND", required=True)

    kind = _add_kind(
        kinds,
        "constant",
        lambda options: constant_trace(options.size, num_steps=options.steps),
        "the same batch size in every step",
    )
    kind.add_argument("size", type=_count, metavar="SIZE", help="the batch size")
    kind.add_argument("--steps", type=_count, required=True, metavar="N", help="steps of the trace")

    kind = _add_kind(
        kinds,
        "linear",
        lambda options: linear_ramp(
            options.start, options.end, num_steps=options.steps, minibatch_size=options.minibatch_size
        ),
        "from one batch size to another on a straight line, up or down",
    )
    _add_ends(kind)
    kind.add_argument("--steps", type=_count, required=True, metavar="N", help="steps of the trace")
    _add_minibatch_size(kind)

    kind = _add_kind(
        kinds,
        "doubling",
        lambda options: doubling_ramp(
            options.start,
            options.end,
            every=options.every,
            num_steps=options.steps,
            minibatch_size=options.minibatch_size,
        ),
        "from one batch size to another by doubling, or halving",
    )
    _add_ends(kind)
    kind.add_argument("--every", type=_count, required=True, metavar="K", help="steps between two changes")
    kind.add_argument("--steps", type=_count, metavar="N", help="steps of the trace (default: K for each batch size)")
    _add_minibatch_size(kind)

    kind = _add_kind(
        kinds,
        "stages",
        lambda options: Stages.parse(options.stages, until=options.until, unit=options.unit).trace(),
        "batch sizes from given steps or samples on",
    )
    kind.add_argument("stages", metavar="STAGES", help="start:size pairs, such as '0:768 250K:1536 500K:3072'")
    kind.add_argument("--unit", choices=UNITS, required=True, help="what starts and end count")
    kind.add_argument("--until", type=_count, required=True, metavar="END", help="where the last stage ends")

    kind = _add_kind(
        kinds,
        "decay",
        lambda options: growth_for_decay(
            options.start,
            factor=options.factor,
            at_epochs=options.at,
            num_epochs=options.epochs,
            dataset_size=options.dataset_size,
            minibatch_size=options.minibatch_size,
            cap=options.cap,
        ),
        "multiply the batch size where a schedule would divide the learning rate (Smith et al. 2018)",
    )
    kind.add_argument("start", type=_count, metavar="START", help="the first batch size")
    kind.add_argument("--factor", type=float, required=True, metavar="F", help="what each change multiplies by")
    kind.add_argument(
        "--at", type=_count, nargs="+", required=True, metavar="EPOCH", help="after how many epochs the changes come"
    )
    kind.add_argument("--epochs", type=_count, required=True, metavar="E", help="epochs to train")
    kind.add_argument("--dataset-size", type=_count, required=True, metavar="N", help="samples in the data set")
    kind.add_argument("--cap", type=_count, metavar="B", help="the largest batch size")
    _add_minibatch_size(kind)

    kind = _add_kind(
        kinds,
        "seesaw",
        lambda options: seesaw(
            options.start,
            num_samples=options.samples,
            minibatch_size=options.minibatch_size,
            factor=options.factor,
            cap=options.cap,
        ),
        "grow as a cosine schedule of the learning rate falls (Meterez et al. 2025)",
    )
    kind.add_argument("start", type=_count, metavar="START", help="the first batch size")
    kind.add_argument("--samples", type=_count, required=True, metavar="N", help="samples of the whole training")
    kind.add_argument(
        "--factor", type=float, metavar="F", help="what each change multiplies by (default: the limit of small ones)"
    )
    kind.add_argument("--cap", type=_count, metavar="B", help="the largest batch size")
    _add_minibatch_size(kind)

    kind = _add_kind(
        kinds,
        "spot",
        lambda options: spot_market(
            num_devices=options.devices,
            at_least=options.at_least,
            arrive=options.arrive,
            leave=options.leave,
            samples_per_device=options.samples_per_device,
            num_steps=options.steps,
            seed=options.seed,
        ),
        "a spot market, where devices come and go",
    )
    kind.add_argument("--devices", type=_count, required=True, metavar="D", help="the most that are ever there")
    kind.add_argument("--at-least", type=_count, required=True, metavar="D", help="how many of them never leave")
    kind.add_argument(
        "--arrive", type=float, required=True, metavar="P", help="probability per step that a missing one comes back"
    )
    kind.add_argument("--leave", type=float, required=True, metavar="P", help="probability per step that one leaves")
    _add_samples_per_device(kind, is_required=True)
    kind.add_argument("--steps", type=_count, required=True, metavar="N", help="steps of the trace")
    kind.add_argument("--seed", type=_count, required=True, metavar="S", help="chooses the market")


def _add_kind(kinds: Any, name: str, make: Callable[[argparse.Namespace], Trace], help: str) -> argparse.ArgumentParser:
    parser = _add_command(kinds, name, _make, help)
    parser.set_defaults(make=make)
    _add_out(parser)
    return parser


def _make(options: argparse.Namespace) -> None:
    trace = options.make(options)
    _write(trace, options)
    _print_trace(trace, options.width)


# ------------------------------------------------------------------------------------------------------------- convert


def _add_convert(commands: Any) -> None:
    parser = _add_command(commands, "convert", _convert, "make a trace of recorded devices, or stages of a trace")
    parser.add_argument("file", metavar="FILE", help="a recording; with --to stages a trace")
    parser.add_argument("--to", choices=("trace", "stages"), default="trace", help="what to make (default: trace)")
    recording = parser.add_argument_group("the recording")
    recording.add_argument("--format", choices=FORMATS, help="how it is written (default: told from its content)")
    recording.add_argument("--time-column", metavar="NAME", help="CSV: the times (default: the first named column)")
    recording.add_argument("--count-column", metavar="NAME", help="CSV: numbers of devices (default: the other one)")
    recording.add_argument(
        "--time-unit", choices=TIME_UNITS, default="s", help="CSV: of times that are numbers (default: s)"
    )
    trace = parser.add_argument_group("the trace")
    _add_samples_per_device(trace, is_required=False)
    _add_minibatch_size(trace, is_required=False)
    trace.add_argument("--when-empty", choices=WHEN_EMPTY, help="what to do while there is no device")
    trace.add_argument("--round", choices=ROUNDING, help="how to round to whole minibatches")
    trace.add_argument("--seconds-per-step", type=float, metavar="T", help="how long a step takes; or else")
    trace.add_argument("--seconds-per-minibatch", type=float, metavar="T", help="how long a minibatch takes, and")
    trace.add_argument("--seconds-per-allreduce", type=float, metavar="T", help="how long an all-reduce takes")
    _add_out(trace)
    stages = parser.add_argument_group("the stages")
    stages.add_argument("--unit", choices=UNITS, default="steps", help="what starts count (default: steps)")
    parser.set_defaults(parser=parser)


def _convert(options: argparse.Namespace) -> None:
    if options.to == "stages":
        _convert_to_stages(options)
    else:
        _convert_to_trace(options)


def _convert_to_stages(options: argparse.Namespace) -> None:
    stages = Stages.of(Trace.read(options.file), unit=options.unit)
    _print(str(stages))
    sys.stderr.write(f"until {stages.until} {stages.unit}: vbs make stages STAGES --unit … --until … makes it again\n")


def _convert_to_trace(options: argparse.Namespace) -> None:
    _require(options, "samples_per_device", "minibatch_size", "when_empty", "round")
    seconds_per_step = options.seconds_per_step
    if seconds_per_step is None:
        _require(options, "seconds_per_minibatch", "seconds_per_allreduce", instead="--seconds-per-step")
        seconds_per_step = step_seconds(
            samples_per_device=options.samples_per_device,
            minibatch_size=options.minibatch_size,
            seconds_per_minibatch=options.seconds_per_minibatch,
            seconds_per_allreduce=options.seconds_per_allreduce,
        )
    elif options.seconds_per_minibatch is not None or options.seconds_per_allreduce is not None:
        options.parser.error("--seconds-per-step is instead of --seconds-per-minibatch and --seconds-per-allreduce")
    recording = Recording.read(
        options.file,
        format=options.format,
        time_column=options.time_column,
        count_column=options.count_column,
        time_unit=options.time_unit,
    )
    conversion = convert_recording(
        recording,
        samples_per_device=options.samples_per_device,
        minibatch_size=options.minibatch_size,
        seconds_per_step=seconds_per_step,
        when_empty=options.when_empty,
        rounding=options.round,
    )
    _write(conversion.trace, options)
    _print(conversion_report(conversion))
    _print_trace(conversion.trace, options.width)


def _require(options: argparse.Namespace, *names: str, instead: str | None = None) -> None:
    missing = ["--" + name.replace("_", "-") for name in names if getattr(options, name) is None]
    if missing:
        without = f" (or {instead})" if instead else ""
        options.parser.error(f"the following arguments are required: {', '.join(missing)}{without}")


# ------------------------------------------------------------------------------------------------ what commands share


def _add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], None], help: str
) -> argparse.ArgumentParser:
    description = help[0].upper() + help[1:] + "."
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=description, epilog=_NOTES)
    parser.set_defaults(run=run)
    return parser


def _add_minibatch_size(parser: Any, *, is_required: bool = True) -> None:
    parser.add_argument(
        "--minibatch-size", type=_count, required=is_required, metavar="M", help="samples that a core runs at once"
    )


def _add_samples_per_device(parser: Any, *, is_required: bool) -> None:
    parser.add_argument(
        "--samples-per-device", type=_count, required=is_required, metavar="N", help="what each adds to the batch size"
    )


def _add_ends(parser: Any) -> None:
    parser.add_argument("start", type=_count, metavar="START", help="the first batch size")
    parser.add_argument("end", type=_count, metavar="END", help="the last batch size")


def _add_out(parser: Any) -> None:
    parser.add_argument(
        "--out", metavar="FILE", help="the trace file to write (default: none, the trace is only shown)"
    )
    _add_width(parser)


def _add_width(parser: Any) -> None:
    parser.add_argument("--width", type=_count, metavar="W", help="characters in a line (default: the terminal's)")


def _count(text: str) -> int:
    try:
        return parse_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _trace(text: str) -> Trace:
    return Trace.constant(int(text)) if text.isdecimal() and not Path(text).exists() else Trace.read(text)


def _write(trace: Trace, options: argparse.Namespace) -> None:
    if options.out is not None:
        trace.write(options.out, comment=f"made by: {options.command}")


def _print_origin(trace: Trace) -> None:
    if trace.comment:
        _print(trace.comment)


def _print_trace(trace: Trace, width: int | None) -> None:
    width = width or shutil.get_terminal_size().columns
    try:
        "█".encode(sys.stdout.encoding)
        is_ascii = False
    except UnicodeEncodeError:
        is_ascii = True
    _print(trace_report(trace, width=max(width, 24), is_ascii=is_ascii))


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
