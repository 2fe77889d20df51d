"""``vbs convert``: makes a trace of recorded devices, or stages of a trace."""

from __future__ import annotations

import argparse
import sys

from variable_batch_size.command.options import (
    add_minibatch_size,
    add_out,
    add_recording,
    add_samples_per_device,
    add_tokens_per_sample,
    print_text,
    print_trace,
    recording_options,
    write_trace,
)
from variable_batch_size.planning.reports import conversion_report
from variable_batch_size.traces.convert import ROUNDING, WHEN_EMPTY, convert_recording, step_seconds
from variable_batch_size.traces.recording import Recording
from variable_batch_size.traces.stages import UNITS, Stages
from variable_batch_size.traces.trace import Trace


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a recording; with --to stages a trace")
    parser.add_argument("--to", choices=("trace", "stages"), default="trace", help="what to make (default: trace)")
    recording = parser.add_argument_group(
        "the recording", "A CSV file of times and counts, rows milliseconds,add|remove,node, or JSON counts with a gap."
    )
    add_recording(recording)
    trace = parser.add_argument_group("the trace")
    add_samples_per_device(trace, is_required=False)
    add_minibatch_size(trace, is_required=False)
    trace.add_argument("--when-empty", choices=WHEN_EMPTY, help="what to do while there is no device")
    trace.add_argument("--round", choices=ROUNDING, help="how to round to whole minibatches")
    trace.add_argument("--seconds-per-step", type=float, metavar="T", help="how long a step takes; or else")
    trace.add_argument("--seconds-per-minibatch", type=float, metavar="T", help="how long a minibatch takes, and")
    trace.add_argument("--seconds-per-allreduce", type=float, metavar="T", help="how long an all-reduce takes")
    add_out(trace)
    stages = parser.add_argument_group("the stages")
    stages.add_argument("--unit", choices=UNITS, default="steps", help="what starts count (default: steps)")
    add_tokens_per_sample(stages, "with --unit tokens")
    parser.set_defaults(refuse=parser.error)


def run(options: argparse.Namespace) -> None:
    if options.to == "stages":
        stages = Stages.of(Trace.read(options.file), unit=options.unit, tokens_per_sample=options.tokens_per_sample)
        print_text(str(stages))
        tokens = f" --tokens-per-sample {stages.tokens_per_sample}" if stages.tokens_per_sample else ""
        sys.stderr.write(f"to make it again: vbs make stages … --unit {stages.unit}{tokens} --until {stages.until}\n")
        return
    _require(options, "samples_per_device", "minibatch_size", "when_empty", "round")
    seconds_per_step = _seconds_per_step(options)
    conversion = convert_recording(
        Recording.read(options.file, **recording_options(options)),
        samples_per_device=options.samples_per_device,
        minibatch_size=options.minibatch_size,
        seconds_per_step=seconds_per_step,
        when_empty=options.when_empty,
        rounding=options.round,
    )
    write_trace(conversion.trace, options)
    print_text(conversion_report(conversion))
    print_trace(conversion.trace, options.width)


def _seconds_per_step(options: argparse.Namespace) -> float:
    if options.seconds_per_step is None:
        _require(options, "seconds_per_minibatch", "seconds_per_allreduce", instead="--seconds-per-step")
        return step_seconds(
            samples_per_device=options.samples_per_device,
            minibatch_size=options.minibatch_size,
            seconds_per_minibatch=options.seconds_per_minibatch,
            seconds_per_allreduce=options.seconds_per_allreduce,
        )
    if options.seconds_per_minibatch is not None or options.seconds_per_allreduce is not None:
        options.refuse("--seconds-per-step is instead of --seconds-per-minibatch and --seconds-per-allreduce")
    return float(options.seconds_per_step)


def _require(options: argparse.Namespace, *names: str, instead: str | None = None) -> None:
    missing = ["--" + name.replace("_", "-") for name in names if getattr(options, name) is None]
    if missing:
        without = f" (or {instead})" if instead else ""
        options.refuse(f"the following arguments are required: {', '.join(missing)}{without}")
