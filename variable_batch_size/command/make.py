"""``vbs make``: makes a trace."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from variable_batch_size.command.options import (
    add_minibatch_size,
    add_out,
    add_samples_per_device,
    add_tokens_per_sample,
    count,
    print_trace,
    write_trace,
)
from variable_batch_size.traces.generators import (
    constant_trace,
    doubling_ramp,
    growth_for_decay,
    linear_ramp,
    rampup,
    seesaw,
    spot_market,
)
from variable_batch_size.traces.stages import CHANGES, UNITS, Stages
from variable_batch_size.traces.trace import Trace


def add_options(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="kinds of traces", metavar="KIND", required=True)
    _add_constant(kinds)
    _add_linear(kinds)
    _add_doubling(kinds)
    _add_rampup(kinds)
    _add_stages(kinds)
    _add_decay(kinds)
    _add_seesaw(kinds)
    _add_spot(kinds)


def run(options: argparse.Namespace) -> None:
    trace = options.make(options)
    write_trace(trace, options)
    print_trace(trace, options.width)


def _add_kind(kinds: Any, name: str, help: str, make: Callable[[argparse.Namespace], Trace]) -> argparse.ArgumentParser:
    kind: argparse.ArgumentParser = kinds.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
    kind.set_defaults(make=make)
    add_out(kind)
    return kind


def _add_constant(kinds: Any) -> None:
    def make(options: argparse.Namespace) -> Trace:
        return constant_trace(options.size, num_steps=options.steps)

    kind = _add_kind(kinds, "constant", "the same batch size in every step", make)
    kind.add_argument("size", type=count, metavar="SIZE", help="the batch size")
    kind.add_argument("--steps", type=count, required=True, metavar="N", help="steps of the trace")


def _add_linear(kinds: Any) -> None:
    def make(options: argparse.Namespace) -> Trace:
        return linear_ramp(options.start, options.end, num_steps=options.steps, minibatch_size=options.minibatch_size)

    kind = _add_kind(kinds, "linear", "from one batch size to another on a straight line, up or down", make)
    kind.add_argument("start", type=count, metavar="START", help="the first batch size")
    kind.add_argument("end", type=count, metavar="END", help="the last batch size")
    kind.add_argument("--steps", type=count, required=True, metavar="N", help="steps of the trace")
    add_minibatch_size(kind)


def _add_doubling(kinds: Any) -> None:
    def make(options: argparse.Namespace) -> Trace:
        return doubling_ramp(
            options.start,
            options.end,
            every=options.every,
            num_steps=options.steps,
            minibatch_size=options.minibatch_size,
        )

    kind = _add_kind(kinds, "doubling", "from one batch size to another by doubling, or halving", make)
    kind.add_argument("start", type=count, metavar="START", help="the first batch size")
    kind.add_argument("end", type=count, metavar="END", help="the last batch size")
    kind.add_argument("--every", type=count, required=True, metavar="K", help="steps between two changes")
    kind.add_argument("--steps", type=count, metavar="N", help="steps of the trace (default: K for each batch size)")
    add_minibatch_size(kind)


def _add_rampup(kinds: Any) -> None:
    def make(options: argparse.Namespace) -> Trace:
        return rampup(
            options.start,
            options.increment,
            options.ramp_samples,
            final=options.final,
            num_samples=options.samples,
        )

    help = "from one batch size to another by equal increments over samples, as Megatron-LM's --rampup-batch-size"
    kind = _add_kind(kinds, "rampup", help, make)
    kind.add_argument("start", type=count, metavar="START", help="the first batch size")
    kind.add_argument("increment", type=count, metavar="INCREMENT", help="by how much it grows at once")
    kind.add_argument("ramp_samples", type=count, metavar="SAMPLES", help="samples over which it grows")
    kind.add_argument("--final", type=count, required=True, metavar="B", help="the last batch size")
    kind.add_argument(
        "--samples",
        type=count,
        metavar="N",
        help="samples of the whole training (default: up to the first step of the last batch size)",
    )


def _add_stages(kinds: Any) -> None:
    def make(options: argparse.Namespace) -> Trace:
        stages = Stages.parse(
            options.stages, until=options.until, unit=options.unit, tokens_per_sample=options.tokens_per_sample
        )
        return stages.trace(change=options.change)

    kind = _add_kind(kinds, "stages", "batch sizes from given steps, samples or tokens on", make)
    kind.add_argument("stages", metavar="STAGES", help="start:size pairs, such as '0:768 250K:1536 500K:3072'")
    kind.add_argument("--unit", choices=UNITS, required=True, help="what starts and end count")
    kind.add_argument("--until", type=count, required=True, metavar="END", help="where the last stage ends")
    add_tokens_per_sample(kind, "with --unit tokens")
    kind.add_argument(
        "--change",
        choices=CHANGES,
        default="nearest",
        help="the step at which a stage begins: that nearest to its start (default), or the first one after it, as "
        "with Megatron-LM's --step-batch-size-schedule",
    )


def _add_decay(kinds: Any) -> None:
    def make(options: argparse.Namespace) -> Trace:
        return growth_for_decay(
            options.start,
            factor=options.factor,
            at_epochs=options.at,
            num_epochs=options.epochs,
            dataset_size=options.dataset_size,
            minibatch_size=options.minibatch_size,
            cap=options.cap,
        )

    help = "multiply the batch size where a schedule would divide the learning rate (Smith et al. 2018)"
    kind = _add_kind(kinds, "decay", help, make)
    kind.add_argument("start", type=count, metavar="START", help="the first batch size")
    kind.add_argument("--factor", type=float, required=True, metavar="F", help="what each change multiplies by")
    kind.add_argument(
        "--at", type=count, nargs="+", required=True, metavar="EPOCH", help="after how many epochs the changes come"
    )
    kind.add_argument("--epochs", type=count, required=True, metavar="E", help="epochs to train")
    kind.add_argument("--dataset-size", type=count, required=True, metavar="N", help="samples in the data set")
    kind.add_argument("--cap", type=count, metavar="B", help="the largest batch size (default: no bound)")
    add_minibatch_size(kind)


def _add_seesaw(kinds: Any) -> None:
    def make(options: argparse.Namespace) -> Trace:
        return seesaw(
            options.start,
            num_samples=options.samples,
            minibatch_size=options.minibatch_size,
            factor=options.factor,
            cap=options.cap,
        )

    help = "grow as a cosine schedule of the learning rate falls (Meterez et al. 2025)"
    kind = _add_kind(kinds, "seesaw", help, make)
    kind.add_argument("start", type=count, metavar="START", help="the first batch size")
    kind.add_argument("--samples", type=count, required=True, metavar="N", help="samples of the whole training")
    kind.add_argument(
        "--factor", type=float, metavar="F", help="what each change multiplies by (default: the limit of small ones)"
    )
    kind.add_argument("--cap", type=count, metavar="B", help="the largest batch size (default: no bound)")
    add_minibatch_size(kind)


def _add_spot(kinds: Any) -> None:
    def make(options: argparse.Namespace) -> Trace:
        return spot_market(
            num_devices=options.devices,
            at_least=options.at_least,
            arrive=options.arrive,
            leave=options.leave,
            samples_per_device=options.samples_per_device,
            num_steps=options.steps,
            seed=options.seed,
        )

    kind = _add_kind(kinds, "spot", "a spot market, where devices come and go", make)
    kind.add_argument("--devices", type=count, required=True, metavar="D", help="the most that are ever there")
    kind.add_argument("--at-least", type=count, required=True, metavar="D", help="how many of them never leave")
    kind.add_argument(
        "--arrive", type=float, required=True, metavar="P", help="probability per step that a missing one comes back"
    )
    kind.add_argument("--leave", type=float, required=True, metavar="P", help="probability per step that one leaves")
    add_samples_per_device(kind)
    kind.add_argument("--steps", type=count, required=True, metavar="N", help="steps of the trace")
    kind.add_argument("--seed", type=count, required=True, metavar="S", help="chooses the market")
