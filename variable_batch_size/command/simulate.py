"""``vbs simulate``: what policies would make of cores that come and go."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from variable_batch_size.command.options import (
    add_minibatch_size,
    add_recording,
    positive,
    print_text,
    recording_options,
)
from variable_batch_size.files import write_text
from variable_batch_size.planning.pictures import plot_simulations
from variable_batch_size.planning.profile import Profile
from variable_batch_size.planning.reports import Table, as_csv, as_text, simulation_page, simulation_table
from variable_batch_size.planning.simulate import Availability, NoiseCurve, Simulation, simulate
from variable_batch_size.policies.builtin import POLICIES, parse_policy
from variable_batch_size.traces.recording import Recording
from variable_batch_size.traces.trace import Trace


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "policies",
        nargs="+",
        metavar="POLICY",
        help=f"a number for always that batch size, or one of {', '.join(POLICIES)}, with settings as in "
        "autoscale:max_batch_size=4096,threshold=1.1",
    )
    parser.add_argument("--profile", required=True, metavar="FILE", help="seconds of minibatches, from vbs profile")
    parser.add_argument(
        "--noise", required=True, metavar="LOG", help="the log of a run with AdaScale, or one noise scale for all times"
    )
    cores = parser.add_mutually_exclusive_group(required=True)
    cores.add_argument("--cores", type=positive, metavar="C", help="always as many cores")
    cores.add_argument("--recording", metavar="FILE", help="recorded devices, as vbs convert reads them")
    cores.add_argument(
        "--market", metavar="TRACE", help="a trace whose rows are numbers of devices, as of vbs make spot"
    )
    parser.add_argument(
        "--seconds-per-row", type=float, default=60.0, metavar="T", help="of such a trace (default: 60)"
    )
    add_recording(parser.add_argument_group("the recording"))
    add_minibatch_size(parser)
    parser.add_argument("--ref-batchsize", type=positive, required=True, metavar="B0", help="that progress counts in")
    parser.add_argument(
        "--samples", type=positive, required=True, metavar="N", help="to train on, at B0; or as much worth"
    )
    parser.add_argument("--dataset-size", type=positive, metavar="N", help="bounds a step (default: no bound)")
    parser.add_argument("--restart-seconds", type=float, default=0.0, metavar="T", help="of each restart (default: 0)")
    parser.add_argument("--price", type=float, metavar="P", help="of a device for an hour (default: no costs)")
    parser.add_argument(
        "--extrapolate", action="store_true", help="also go beyond twice the cores and samples of the profile"
    )
    parser.add_argument("--out", metavar="DIR", help="for a page, a picture, the table and the traces (default: none)")


def run(options: argparse.Namespace) -> None:
    profile = Profile.read(options.profile, extrapolates=options.extrapolate)
    noise, availability = _noise(options.noise), _availability(options)
    capacity = options.dataset_size and options.dataset_size // options.minibatch_size * options.minibatch_size
    runs = {
        text: simulate(
            parse_policy(text),
            profile=profile,
            noise=noise,
            availability=availability,
            minibatch_size=options.minibatch_size,
            ref_batchsize=options.ref_batchsize,
            progress=options.samples / options.ref_batchsize,
            capacity=capacity,
            restart_seconds=options.restart_seconds,
        )
        for text in dict.fromkeys(options.policies)
    }
    table = simulation_table(runs, price=options.price)
    print_text(as_text(table))
    if options.out is not None:
        _write(Path(options.out), runs, table, availability, options)


def _noise(text: str) -> NoiseCurve:
    try:
        return NoiseCurve.constant(float(text))
    except ValueError:
        if not os.path.exists(text):
            raise ValueError(f"--noise must be the log of a run or a positive number, got {text!r}") from None
    return NoiseCurve.read(text)


def _availability(options: argparse.Namespace) -> Availability:
    given = recording_options(options)
    if options.recording is not None:
        return Availability.of_recording(Recording.read(options.recording, **given))
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for a --recording, got {value} without one")
    if options.cores is not None:
        return Availability.constant(options.cores)
    return Availability.of_market(Trace.read(options.market), seconds_per_row=options.seconds_per_row)


def _write(
    directory: Path, runs: dict[str, Simulation], table: Table, availability: Availability, options: argparse.Namespace
) -> None:
    (directory / "traces").mkdir(parents=True, exist_ok=True)
    for name, found in runs.items():
        path = directory / "traces" / f"{name.replace(':', '-').replace(',', '-')}.csv"
        found.trace.write(path, comment=f"decided by {name} in a simulation\nmade by: {options.command}")
    write_text(directory / "table.csv", as_csv(table))
    plot_simulations(runs, directory / "simulation.png")
    facts = {
        "cores": availability.name,
        "profile": options.profile,
        "noise": options.noise,
        "minibatch": f"{options.minibatch_size} samples",
        "ends after": f"{options.samples:,} samples at a batch size of {options.ref_batchsize}, or as much worth",
        "restart": f"{options.restart_seconds:g} s",
    }
    write_text(directory / "simulation.html", simulation_page(runs, table, facts=facts, command=options.command))
    print_text(f"{directory / 'simulation.html'}")
