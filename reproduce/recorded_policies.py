"""Policies on recorded times, gradient noise and spot machines, against an oracle that knows all of them.

Qiao et al. 2021, Pollux: the times of steps and the gradient noise of six workloads. Thorpe et al. 2023, Bamboo: the
number of spot instances during two days. The former are in reproduce/recorded/, the latter in the zoo of traces, with
their sources. Nothing is trained: `vbs.planning.simulate` replays the tables. All policies run with their default
settings.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import experiment
import results

import variable_batch_size as vbs
from variable_batch_size.lab.planning.simulate import Span
from variable_batch_size.policies.autoscale import Goodput

RECORDED = results.HERE / "recorded"
# reference batch size, the largest one recorded, and the minibatch sizes
WORKLOADS = {
    "bert": (12, 384, (12, 4)),
    "cifar10": (128, 4096, (129, 32)),
    "deepspeech2": (20, 640, (20, 10)),
    "imagenet": (200, 12_800, (200, 57)),
    "ncf": (256, 32_768, (257, 2051)),
    "yolov3": (8, 512, (8, 4)),
}
SMALL = ("bert",)
SHARES = (1, 2, 3, 4, 6, 8, 12, 16)  # minibatches per core
MULTIPLES = (1, 4, 16)  # of the reference batch size
ETA, COST = 0.5, 0.2  # of the norm test and of the critical batch size
MOST_OF_ORACLE, MOST_OF_SHARE = 1.05, 1.03


def availabilities() -> dict[str, vbs.planning.Availability]:
    """The number of cores over time, one core per machine."""
    recorded = {
        f"spot us-east-{zone}": vbs.planning.Availability.of_recording(
            vbs.traces.Recording.read(f"zoo:bamboo-g4dn-{zone}")
        )
        for zone in ("1c", "1d")
    }
    changing = vbs.planning.Availability([Span(16, 60.0), Span(15, 60.0)], name="16 and 15 cores")
    return {"16": vbs.planning.Availability.constant(16), "16, 15 every 60 s": changing, **recorded}


class Replay:
    """The recorded workload with minibatches of one size."""

    def __init__(self, name: str, minibatch_size: int) -> None:
        self.ref_batchsize, self.largest, _ = WORKLOADS[name]
        self.minibatch_size = minibatch_size
        self.profile = vbs.planning.Profile.read(RECORDED / f"{name}_times.csv")
        points = results.read(RECORDED / f"{name}_noise.csv")
        self.noise = vbs.planning.NoiseCurve(
            [point["progress"] for point in points],
            [self.ref_batchsize * point["grad_var"] / point["grad_sqr"] for point in points],
        )
        self.progress = points[-1]["progress"]

    def seconds(self, policy: Any, availability: vbs.planning.Availability) -> float:
        return vbs.planning.simulate(
            policy,
            profile=self.profile,
            noise=self.noise,
            availability=availability,
            minibatch_size=self.minibatch_size,
            ref_batchsize=self.ref_batchsize,
            progress=self.progress,
        ).seconds

    def best(self, situation: vbs.policies.Situation) -> float:
        """The batch size of the oracle: the largest goodput by the true times and noise."""
        size, cores = self.minibatch_size, situation.cores
        times = self.profile.times(cores=cores, minibatch_size=size)
        goodput = Goodput(
            cores=cores,
            minibatch_size=size,
            ref_batchsize=self.ref_batchsize,
            noise_scale=self.noise(situation.progress),
            **times._asdict(),
        )
        return size * goodput.best(range(-(-self.ref_batchsize // size), self.largest // size + 1))

    def policies(self) -> Iterator[tuple[str, Any]]:
        bounds: Any = {"min_batch_size": self.ref_batchsize, "max_batch_size": self.largest}
        yield "Autoscale", vbs.Autoscale(max_batch_size=self.largest)
        yield "CriticalBatch", vbs.policies.CriticalBatch(cost=COST, **bounds)
        yield "NormTest", vbs.policies.NormTest(eta=ETA, **bounds)
        for number in SHARES:
            if number * self.minibatch_size <= self.largest:
                yield f"share {number}", vbs.policies.PerCore(number * self.minibatch_size, **bounds)
        for size in (*(number * self.ref_batchsize for number in MULTIPLES), self.largest):
            yield f"fixed {size}", vbs.policies.FunctionPolicy(functools.partial(_fixed, size), **bounds)


def _fixed(size: int, situation: vbs.policies.Situation) -> int:
    return size


def replay(name: str, minibatch_size: int, options: argparse.Namespace, folder: Path) -> experiment.Row:
    """A row for each availability: the hours of the oracle, and those of each policy relative to them."""
    workload, rows = Replay(name, minibatch_size), []
    for where, availability in availabilities().items():
        oracle = workload.seconds(vbs.policies.FunctionPolicy(workload.best, lead=1), availability)
        found = {key: workload.seconds(policy, availability) / oracle for key, policy in workload.policies()}
        row: experiment.Row = {"run": f"{name} {minibatch_size}", "cores": where, "oracle_hours": oracle / 3600}
        row |= {key: found[key] for key in ("Autoscale", "CriticalBatch", "NormTest")}
        for kind in ("share", "fixed"):
            best = min((key for key in found if key.startswith(kind)), key=found.__getitem__)
            row |= {f"best_{kind}": best.removeprefix(f"{kind} "), f"of_best_{kind}": found[best]}
        row |= {key.replace(" ", "_"): value for key, value in found.items() if key.startswith("share")}
        rows.append(row)
    return {"rows": rows}


def runs(options: argparse.Namespace) -> dict[str, Callable[[argparse.Namespace, Path], experiment.Row]]:
    names = SMALL if options.small else tuple(WORKLOADS)
    return {
        f"{name}-{size}": functools.partial(replay, name, size)
        for name in names
        for size in WORKLOADS[name][2][: 1 if options.small else None]
    }


def judge(options: argparse.Namespace, rows: dict[str, experiment.Row]) -> list[results.Claim]:
    lines = [line for row in rows.values() for line in row["rows"]]
    print("\n" + table(lines), flush=True)
    claims = []
    for line in lines:
        of = f"{line['run']}, {line['cores']}"
        share = line["Autoscale"] / line["of_best_share"]
        claims.append(results.Claim(of, "Autoscale / oracle", "at most 1.05", line["Autoscale"], 0.98, MOST_OF_ORACLE))
        claims.append(results.Claim(of, "Autoscale / best share", "at most 1.03", share, 0.0, MOST_OF_SHARE))
    return claims


def table(lines: list[experiment.Row]) -> str:
    """Hours relative to the oracle."""
    header = ["workload", "cores", "oracle", "Autoscale", "CriticalBatch", "NormTest", "best share", "best fixed"]
    cells = [
        [
            line["run"],
            line["cores"],
            f"{line['oracle_hours']:.2f} h",
            *(f"{line[key]:.3f}" for key in ("Autoscale", "CriticalBatch", "NormTest")),
            *(f"{line[f'of_best_{kind}']:.3f} ({line[f'best_{kind}']})" for kind in ("share", "fixed")),
        ]
        for line in lines
    ]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [header, *cells])
    return "\n".join("  ".join(row).rstrip() for row in padded)


EXPERIMENT = experiment.Experiment("recorded_policies", __doc__, runs, judge)

if __name__ == "__main__":
    sys.exit(experiment.main(EXPERIMENT, experiment.parser_of(EXPERIMENT)))
