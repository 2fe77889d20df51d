"""``vbs make``, ``vbs convert``, ``vbs show`` and ``vbs traces``: make, convert, draw and list traces."""

import argparse
import inspect
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from variable_batch_size.files import DECISIONS, EXECUTED, read_records, write
from variable_batch_size.lab.command.options import (
    add_minibatch,
    add_plot,
    add_recording,
    count,
    described,
    draw_picture,
    print_text,
    read_recording,
    require,
    selected,
)
from variable_batch_size.lab.planning.figures import check_suffix, plot_decisions, plot_traces
from variable_batch_size.lab.planning.reports import conversion_report, decisions_report, duration, trace_report
from variable_batch_size.traces import generators, zoo
from variable_batch_size.traces.recording import ROUNDING, WHEN_EMPTY, Recording, convert_recording, step_seconds
from variable_batch_size.traces.trace import CHANGES, UNITS, Change, Stages, Trace, Unit


def _stages(
    stages: str, *, unit: Unit, until: int, tokens_per_sample: int | None = None, change: Change = "nearest"
) -> Trace:
    return Stages.parse(stages, until=until, unit=unit, tokens_per_sample=tokens_per_sample).trace(change=change)


_KINDS: dict[str, tuple[Callable[..., Trace], str]] = {
    "constant": (generators.constant_trace, "the same batch size in every step"),
    "linear": (generators.linear_ramp, "from one batch size to another on a straight line, up or down"),
    "doubling": (generators.doubling_ramp, "from one batch size to another by doubling or halving"),
    "rampup": (generators.rampup, "by equal increments over samples, as Megatron-LM's --rampup-batch-size"),
    "decay": (generators.growth_for_decay, "grow where a schedule would divide the learning rate (Smith et al. 2018)"),
    "seesaw": (generators.seesaw, "grow as a cosine schedule of the learning rate falls (Meterez et al. 2025)"),
    "spot": (generators.spot_market, "a spot market, where devices come and go"),
    "stages": (_stages, "batch sizes that start at given steps, samples or tokens"),
}
_ARGUMENTS = {  # option, placeholder and help of the arguments of the functions above
    "batch_size": ("", "SIZE", "the batch size"),
    "start": ("", "START", "the first batch size"),
    "end": ("", "END", "the last batch size"),
    "increment": ("", "INCREMENT", "by which the batch size grows"),
    "length": ("", "LENGTH", "samples, or tokens, over which it grows"),
    "num_steps": ("--steps", "N", "steps of the trace"),
    "num_samples": ("--samples", "N", "samples of the whole training"),
    "num_epochs": ("--epochs", "E", "epochs to train"),
    "dataset_size": ("--dataset-size", "N", "samples in the data set"),
    "minibatch_size": ("--minibatch-size", "M", "samples per forward and backward pass of one core"),
    "every": ("--every", "K", "steps between two changes"),
    "final": ("--final", "B", "the last batch size"),
    "factor": ("--factor", "F", "factor of each change"),
    "at_epochs": ("--at", "EPOCH", "numbers of epochs after which the batch size changes"),
    "cap": ("--cap", "B", "the largest batch size"),
    "num_devices": ("--devices", "D", "the largest number of devices"),
    "at_least": ("--at-least", "D", "the number of devices that never leave"),
    "arrive": ("--arrive", "P", "probability per step that a missing device comes back"),
    "leave": ("--leave", "P", "probability per step that a device leaves"),
    "samples_per_device": ("--samples-per-device", "N", "what each device adds to the batch size"),
    "seed": ("--seed", "S", "seed of the random generator"),
    "stages": ("", "STAGES", "start:size pairs, such as '0:768 250K:1536 500K:3072'"),
    "unit": ("--unit", None, "unit of positions and lengths"),
    "until": ("--until", "END", "the end of the trace"),
    "tokens_per_sample": ("--tokens-per-sample", "T", "with --unit tokens: the tokens of a sample"),
    "change": ("--change", None, "begin a stage at the nearest step, or at the first one after, as Megatron-LM does"),
}
_CHOICES = {"unit": UNITS, "change": CHANGES}
_DEFAULTS = {  # what it means to omit an option
    "unit": "samples",
    "until": "up to the first step of the last batch size",
    "num_steps": "K for each batch size",
    "num_samples": "up to the first step of the last batch size",
    "cap": "no bound",
    "factor": "the limit of small factors",
    "tokens_per_sample": "tokens are not counted",
    "change": "nearest",
}


def add_make(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="kinds of traces", metavar="KIND", required=True)
    for name, (make, help) in _KINDS.items():
        kind = kinds.add_parser(name, **described(help))
        kind.set_defaults(make=make)
        _add_out(kind)
        for argument, parameter in inspect.signature(make).parameters.items():
            _add_argument(kind, argument, parameter)


def _add_argument(parser: argparse.ArgumentParser, name: str, parameter: inspect.Parameter) -> None:
    """Add an argument of a function: as an option if it is keyword-only. An option without a default is required."""
    option, metavar, help = _ARGUMENTS[name]
    is_required, kind = parameter.default is parameter.empty, str(parameter.annotation)
    is_text = name in _CHOICES or parameter.annotation is str
    settings: dict[str, Any] = {"type": str if is_text else float if "float" in kind else count, "metavar": metavar}
    settings["choices"] = _CHOICES.get(name)
    if option:
        settings |= {"dest": name, "required": is_required, "default": None if is_required else parameter.default}
    if "Sequence" in kind:
        settings["nargs"] = "+"
    help += "" if is_required else f" (default: {_DEFAULTS[name]})"
    parser.add_argument(option or name, help=help, **settings)


def run_make(options: argparse.Namespace) -> None:
    trace = options.make(**selected(options, *inspect.signature(options.make).parameters))
    _write_trace(trace, options)
    _print_trace(trace)


def _add_out(parser: Any) -> None:
    parser.add_argument("--out", metavar="FILE", help="the trace file to write (default: only show the trace)")


def _write_trace(trace: Trace, options: argparse.Namespace) -> None:
    if options.out is not None:
        trace.write(options.out, comment=f"made by: {options.command}")


def _print_trace(trace: Trace) -> None:
    """Print a trace as sparklines, in ASCII if the terminal has no block characters."""
    is_ascii = "█".encode(sys.stdout.encoding or "utf-8", errors="replace") == b"?"
    print_text(trace_report(trace, width=max(shutil.get_terminal_size().columns, 24), is_ascii=is_ascii))


def add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a recording; with --to stages a trace")
    parser.add_argument("--to", choices=("trace", "stages"), default="trace", help="what to make (default: trace)")
    text = "A CSV file of times and counts, rows milliseconds,add|remove,node, JSON records, or JSON counts with a gap."
    add_recording(parser.add_argument_group("the recording", text))
    trace = parser.add_argument_group("the trace")
    add = trace.add_argument
    add("--samples-per-device", type=count, metavar="N", help="what each device adds to the batch size")
    add_minibatch(trace, required=False)
    add("--when-empty", choices=WHEN_EMPTY, help="what to do while there is no device")
    add("--round", choices=ROUNDING, help="how to round to whole minibatches")
    add("--seconds-per-step", type=float, metavar="T", help="how long a step takes; or instead:")
    add("--seconds-per-minibatch", type=float, metavar="T", help="how long a minibatch takes, and")
    add("--seconds-per-allreduce", type=float, metavar="T", help="how long an all-reduce takes")
    _add_out(trace)
    add = parser.add_argument_group("the stages").add_argument
    add("--unit", choices=UNITS, default="steps", help="of the starts (default: steps)")
    add("--tokens-per-sample", type=count, metavar="T", help="with --unit tokens: the tokens of a sample")
    parser.set_defaults(refuse=parser.error)


def run_convert(options: argparse.Namespace) -> None:
    if options.to == "stages":
        stages = Stages.of(Trace.read(options.file), unit=options.unit, tokens_per_sample=options.tokens_per_sample)
        print_text(str(stages))
        tokens = f" --tokens-per-sample {stages.tokens_per_sample}" if stages.tokens_per_sample else ""
        sys.stderr.write(f"to make it again: vbs make stages … --unit {stages.unit}{tokens} --until {stages.until}\n")
        return
    require(options, "samples_per_device", "minibatch_size", "when_empty", "round")
    parts = ("seconds_per_minibatch", "seconds_per_allreduce")
    if options.seconds_per_step is None:
        require(options, *parts, instead="--seconds-per-step")
        seconds = step_seconds(**selected(options, "samples_per_device", "minibatch_size", *parts))
    elif any(getattr(options, name) is not None for name in parts):
        options.refuse("--seconds-per-step replaces --seconds-per-minibatch and --seconds-per-allreduce")
    else:
        seconds = options.seconds_per_step
    conversion = convert_recording(
        read_recording(options.file, options),
        seconds_per_step=seconds,
        rounding=options.round,
        **selected(options, "samples_per_device", "minibatch_size", "when_empty"),
    )
    _write_trace(conversion.trace, options)
    print_text(conversion_report(conversion))
    _print_trace(conversion.trace)


def add_show(parser: argparse.ArgumentParser) -> None:
    help = f"trace files, or zoo:NAME; for an {EXECUTED} of a policy, the {DECISIONS} next to it is also shown"
    parser.add_argument("traces", nargs="+", metavar="TRACE", help=help)
    add_plot(parser, "the traces, or one with its decisions")


def run_show(options: argparse.Namespace) -> None:
    if options.plot is not None:
        check_suffix(options.plot)
    traces = {name: Trace.read(name) for name in options.traces}
    decided: dict[str, list[dict[str, Any]]] = {}
    for number, (name, trace) in enumerate(traces.items()):
        if number:
            print_text("")
        if trace.comment:
            print_text(trace.comment)
        _print_trace(trace)
        decisions = Path(name).with_name(DECISIONS)
        if Path(name).name == EXECUTED and decisions.exists():  # next to another trace, they belong to a different one
            decided[name] = read_records(decisions)
            print_text(decisions_report(decided[name]))
    if len(traces) == len(decided) == 1:
        ((name, trace),) = traces.items()
        draw_picture(options, lambda path: plot_decisions(trace, decided[name], path))
    else:
        draw_picture(options, lambda path: plot_traces(traces, path))


def add_traces(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    get = actions.add_parser("get", help="write one to a file", description="Write one of these traces to a file.")
    get.add_argument("name", metavar="NAME", help="the name, as listed by vbs traces")
    get.add_argument("--out", metavar="FILE", help="the file to write (default: NAME.csv)")
    parser.set_defaults(name=None)


def run_traces(options: argparse.Namespace) -> None:
    if options.name is not None:
        found = zoo.entry(options.name.removeprefix(zoo.PREFIX))
        path = Path(options.out or f"{found.name}.csv")
        write(path, lambda temporary: temporary.write_bytes(found.content))
        print_text(f"{path}\n{found.title}\nsource: {found.source}\nlicence: {found.licence}")
        return
    found_ones = list(map(zoo.entry, zoo.names()))
    rows = [(found.name, _contents(found), _licence(found), found.title) for found in found_ones]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print_text("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _licence(found: zoo.Entry) -> str:
    """Its name alone; a schedule needs none."""
    return found.licence.partition(";")[0].partition(",")[0] if found.is_recording else "–"


def _contents(found: zoo.Entry) -> str:
    """The length and the largest number of a recording, or of a schedule."""
    where = f"{zoo.PREFIX}{found.name}"
    if found.is_recording:
        recording = Recording.read(where)
        return f"{duration(recording.seconds)}, up to {recording.counts.max():,} devices"
    sizes = Trace.read(where).sizes
    return f"{len(sizes):,} steps, {sizes.min():,} to {sizes.max():,} samples"
