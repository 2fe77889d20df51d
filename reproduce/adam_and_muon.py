"""Which rule for AdamW, Muon and Lion? The best learning rate at each batch size, and what each rule loses against it.

python reproduce/adam_and_muon.py                  # a GPU: about 15 minutes
python reproduce/adam_and_muon.py --seconds 540    # the same in parts: stops after that time, and resumes

A GPT of 0.9 million parameters on the bytes of Python's standard library, which is another text in each version, with
two numbers of samples. For each optimizer, number of samples and batch size, a grid of learning rates in factors of 2
is extended until the best one is inside it; that one and its neighbours have three seeds. The tuned learning rate of
the reference batch size is then what each rule starts from. tables.md in the directory has all tables; results.jsonl
has the runs, and is all that must be kept to resume. Fixed betas are those of the reference batch size.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import adam_and_muon_tables as tables
import experiment
import results
import torch
from lanes import Lane, Lanes, Row, Size, Text, text_of_library

import variable_batch_size as vbs

# -------------------------------------------------------------------------------------------------- optimizers
SETTINGS: Mapping[str, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "decoupled_weight_decay": True},
    # ten times the weight decay at a tenth of the learning rate, as its authors do (Chen et al. 2023)
    "lion": {"betas": (0.9, 0.99), "weight_decay": 1.0},
    # updates as large as AdamW's; betas and eps are those of AdamW for embeddings and head (Liu et al. 2025)
    "muon": {"momentum": 0.95, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8},
}
RULES = {
    "adamw": ("constant", "root", "linear", "adam", "adam:half-life", "surge", "adamscale", "timescale"),
    "muon": ("constant", "root", "linear", "muon", "surge"),
    "lion": ("constant", "root", "linear", "surge"),
}
NEAR = 0.1  # nats: a rule whose first seed loses more than that gets no others
SECONDS_TO_COMPILE = 60.0  # at most, for each shape


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        size: of the model.
        samples: of the two lengths, in windows.
        batchsizes: of each length.
        reference: the batch size at which rules start.
        minibatch_size: in windows; smaller batch sizes are one minibatch, and measure no noise.
        num_lanes: runs at once.
        first_lr: the middle of the first grids.
        text_bytes, test_windows: of the text, and windows of its held-out part for the loss.
        block_size: of the text, for the held-out part.
    """

    size: Size
    samples: Mapping[str, int]
    batchsizes: Mapping[str, tuple[int, ...]]
    reference: int
    minibatch_size: int
    num_lanes: int
    first_lr: Mapping[str, float]
    text_bytes: int
    test_windows: int
    block_size: int


FULL = Scale(
    size=Size(width=128, heads=2, layers=4, context=256),
    samples={"short": 1 << 15, "long": 1 << 17},
    batchsizes={"short": (4, 16, 64, 256), "long": (16, 64, 256, 1024)},  # 8,192, 2,048, 512, 128 updates in both
    reference=16,
    minibatch_size=8,
    num_lanes=16,
    first_lr={"adamw": 2.0**-8, "lion": 2.0**-11, "muon": 2.0**-7},
    text_bytes=24_000_000,
    test_windows=1024,
    block_size=1 << 14,
)
SMALL = Scale(
    size=Size(width=8, heads=2, layers=1, context=8),
    samples={"short": 32, "long": 64},
    batchsizes={"short": (1, 4), "long": (4, 16)},
    reference=4,
    minibatch_size=2,
    num_lanes=16,
    first_lr={"adamw": 2.0**-4, "lion": 2.0**-3, "muon": 2.0**-3},
    text_bytes=50_000,
    test_windows=64,
    block_size=1 << 8,
)


class HalfLives(vbs.rules.Rule):
    """Constant learning rate, and betas with constant half-lives in samples: both, or only that of the squares."""

    def __init__(self, *, both: bool) -> None:
        self.both = both

    def factor(self, step: vbs.rules.Step) -> float:
        return 1.0

    def settings(self, group: Mapping[str, Any], step: vbs.rules.Step, factor: float) -> dict[str, Any]:
        rule = vbs.rules.AdamRule(form="half-life")
        first, second = rule.settings(group, step, rule.factor(step))["betas"]
        return {"betas": (first if self.both else group["betas"][0], second)}


class Timescale(vbs.rules.Rule):
    """Constant learning rate, weight decay · S (Wang and Aitchison 2024; Bergsma et al. 2025, "Power lines")."""

    def factor(self, step: vbs.rules.Step) -> float:
        return 1.0

    def settings(self, group: Mapping[str, Any], step: vbs.rules.Step, factor: float) -> dict[str, Any]:
        return {"weight_decay": group["weight_decay"] * step.scale}


def rule_of(name: str) -> vbs.rules.Rule:
    if name in tables.ARMS:
        return HalfLives(both=name == "half-lives")
    return Timescale() if name == "timescale" else vbs.rules.make_rule(name)


class Job(NamedTuple):
    """A run; the learning rate is that of the reference batch size."""

    optimizer: str
    rule: str
    length: str
    batchsize: int
    lr: float
    seed: int

    def plain(self, scale: Scale) -> Job:
        """The same run as one of the grid, if the rule changes only the learning rate, and by a factor known before."""
        if self.rule not in ("root", "linear"):
            return self
        size = self.batchsize
        factor = rule_of(self.rule).factor(vbs.rules.Step(size, size, scale.reference))
        return self._replace(rule="constant", lr=self.lr * factor)

    def minibatch_size(self, scale: Scale) -> int:
        return min(scale.minibatch_size, self.batchsize)

    def lane(self, scale: Scale) -> Lane:
        settings = {**SETTINGS[self.optimizer], "lr": self.lr}
        return Lane(self.optimizer, settings, rule_of(self.rule), self.batchsize, scale.reference, self.seed)


# ------------------------------------------------------------------------------------------------------ the plan
def wanted(rows: Sequence[Row], scale: Scale, seeds: Sequence[int]) -> list[Job]:
    """The runs that are missing, as far as they are known, the most important first."""
    plan = Plan(tables.Found(rows, scale.reference, seeds), scale, seeds)
    done = {Job(*(row[field] for field in Job._fields)) for row in rows}
    jobs = [job.plain(scale) for job in plan.jobs()]
    return [job for job in dict.fromkeys(jobs) if job not in done]


class Plan:
    """What to run, given the runs so far."""

    def __init__(self, found: tables.Found, scale: Scale, seeds: Sequence[int]) -> None:
        self._found, self._scale, self._seeds = found, scale, seeds

    def jobs(self) -> Iterator[Job]:
        for length, groups in (("short", [("adamw", "muon", "lion")]), ("long", [("adamw", "muon"), ("lion",)])):
            for optimizers in groups:
                for part in (self._grids, self._repeats):
                    for optimizer in optimizers:
                        yield from part(optimizer, "constant", length)
                for optimizer in optimizers:
                    yield from self._rules(optimizer, length)
            for arm in tables.ARMS:
                yield from self._grids("adamw", arm, length)
                yield from self._repeats("adamw", arm, length)

    def _cells(self, optimizer: str, rule: str, length: str) -> Iterator[tables.Cell]:
        """Of an arm; at the reference batch size, all arms are the same."""
        for size in self._scale.batchsizes[length]:
            if rule == "constant" or size != self._scale.reference:
                yield tables.Cell(optimizer, rule, length, size)

    def _grids(self, optimizer: str, rule: str, length: str) -> Iterator[Job]:
        """With the first seed, until the best learning rate has neighbours on both sides."""
        for cell in self._cells(optimizer, rule, length):
            losses = self._found.of_seed(cell, self._seeds[0])
            grid = self._first_grid(cell)
            if grid and grid <= losses.keys():
                best = min(losses, key=losses.__getitem__)
                grid = {best / 2, best * 2}
                grid |= {best * factor**2 for factor in (0.5, 2.0) if best * factor not in losses}
            yield from (Job(*cell, lr, self._seeds[0]) for lr in sorted(grid - losses.keys()))

    def _first_grid(self, cell: tables.Cell) -> set[float]:
        """Five learning rates, or three around the best one of fixed betas or of the short runs; none before that."""
        if (cell.rule, cell.length) == ("constant", "short"):
            return {self._scale.first_lr[cell.optimizer] * 2.0**power for power in range(-2, 3)}
        like = cell._replace(rule="constant")
        if cell.rule == "constant":
            like = cell._replace(length="short", batchsize=min(cell.batchsize, self._scale.batchsizes["short"][-1]))
        best = self._found.best(like)
        return set() if best is None else {best / 2, best, best * 2}

    def _repeats(self, optimizer: str, rule: str, length: str) -> Iterator[Job]:
        """All seeds at the best learning rate and its neighbours."""
        for cell in self._cells(optimizer, rule, length):
            best = self._found.best(cell)
            if best is not None:
                for lr in (best, best / 2, best * 2):
                    yield from (Job(*cell, lr, seed) for seed in self._seeds)

    def _rules(self, optimizer: str, length: str) -> Iterator[Job]:
        """From the tuned reference; also from one that is too low, to the next batch size."""
        reference = self._found.tuned(tables.Cell(optimizer, "constant", length, self._scale.reference))
        if reference is None:
            return
        cells = [cell for cell in self._cells(optimizer, "constant", length) if cell[3] != self._scale.reference]
        for rule, cell in product(RULES[optimizer], cells):
            yield from self._regret(cell, rule, reference)
        larger = [cell for cell in cells if cell.batchsize > self._scale.reference]
        for rule, cell in product(tables.PLAIN, larger[:1]):
            yield from self._regret(cell, rule, reference / tables.UNTUNED)

    def _regret(self, cell: tables.Cell, rule: str, lr: float) -> Iterator[Job]:
        """With all seeds where the first one is not far from the best."""
        job = Job(cell.optimizer, rule, cell.length, cell.batchsize, lr, self._seeds[0])
        if self._is_possible(job):
            plain = job.plain(self._scale)
            loss = self._found.loss(tables.Cell(*plain[:4]), plain.lr, self._seeds[0])
            best = self._found.best_loss(cell)
            is_far = loss is not None and best is not None and loss - best >= NEAR
            yield from (job._replace(seed=seed) for seed in self._seeds[: 1 if is_far else None])

    def _is_possible(self, job: Job) -> bool:
        """Whether a rule that measures noise can: with one minibatch in a step, it cannot."""
        has_several = job.batchsize > job.minibatch_size(self._scale)
        return has_several or not rule_of(job.rule).measures_noise


# ------------------------------------------------------------------------------------------------------ running
class Program(NamedTuple):
    """What one batched model can train at once."""

    is_muon: bool
    length: str
    minibatch_size: int

    @classmethod
    def of(cls, job: Job, scale: Scale) -> Program:
        return cls(job.optimizer == "muon", job.length, job.minibatch_size(scale))

    def num_minibatches(self, scale: Scale) -> int:
        return scale.samples[self.length] // self.minibatch_size


class Trainer:
    """Trains wanted runs in groups."""

    def __init__(self, options: argparse.Namespace, scale: Scale) -> None:
        self._scale = scale
        self._is_compiled = options.device != "cpu"
        device = torch.device(options.device)
        text = options.text.read_bytes()[: scale.text_bytes] if options.text else text_of_library(scale.text_bytes)
        self.text_crc32 = f"{zlib.crc32(text):08x}"
        self._text = Text(text, device, block_size=scale.block_size)
        self._made: dict[tuple[bool, int], Lanes] = {}  # by optimizer and minibatch size
        self._seconds: dict[tuple[bool, int], float] = {}  # per minibatch of all lanes

    def choose(self, jobs: Sequence[Job], seconds_left: float) -> tuple[Program, list[Job]] | None:
        """The first program with enough runs to be worth it, and its first runs; None if there is no time for any."""
        counts = Counter(Program.of(job, self._scale) for job in jobs)
        fitting = [one for one in counts if self._seconds_of(one) < seconds_left]
        if not fitting:
            return None
        full = {one: min(1.0, counts[one] / self._scale.num_lanes) for one in fitting}
        program = next((one for one in fitting if full[one] >= 0.5), max(fitting, key=full.__getitem__))
        chosen = [job for job in jobs if Program.of(job, self._scale) == program]
        return program, chosen[: self._scale.num_lanes]

    def _seconds_of(self, program: Program) -> float:
        """An estimate with a margin; until something was measured, everything seems to fit."""
        key = program.is_muon, program.minibatch_size
        slowest = max(self._seconds.values(), default=0.0)
        seconds = 1.05 * self._seconds.get(key, 1.5 * slowest) * program.num_minibatches(self._scale)
        return seconds + (SECONDS_TO_COMPILE if self._seconds and key not in self._made and self._is_compiled else 0.0)

    def train(self, program: Program, jobs: Sequence[Job], *, stop_at: float) -> list[Row] | None:
        """The rows of the jobs; None if there was not enough time."""
        key, scale = (program.is_muon, program.minibatch_size), self._scale
        begun = time.monotonic()
        if key not in self._made:
            self._made[key] = Lanes(
                scale.size,
                self._text,
                num_lanes=scale.num_lanes,
                minibatch_size=program.minibatch_size,
                is_muon=program.is_muon,
                is_compiled=self._is_compiled,
                test_windows=scale.test_windows,
            )
        started = time.monotonic()
        samples = scale.samples[program.length]
        made = self._made[key].train([job.lane(scale) for job in jobs], num_samples=samples, stop_at=stop_at)
        if made is None:
            return None
        seconds = time.monotonic() - started
        self._seconds[key] = seconds / program.num_minibatches(scale)
        speed = scale.num_lanes * samples * scale.size.context / seconds / 1e6
        print(
            f"{'muon' if program.is_muon else 'adamw, lion':12}{program.length:6} minibatch {program.minibatch_size}: "
            f"{len(jobs):2} of {scale.num_lanes} lanes, {seconds:5.1f} s, {speed:5.2f} M bytes/s"
            f" (+ {started - begun:.0f} s to compile)",
            flush=True,
        )
        of_all = {"samples": samples, "seconds": round(seconds / len(jobs), 3), "text_crc32": self.text_crc32}
        return [{**job._asdict(), **of_all, **row} for job, row in zip(jobs, made, strict=True)]


def runs(options: argparse.Namespace) -> dict[str, Any]:
    return {"lanes": _train}


def _train(options: argparse.Namespace, folder: Path) -> experiment.Row:
    """All runs that are wanted; stops with the exit code of a stopped run when the time is over."""
    scale = scale_of(options)
    stop_at = time.monotonic() + options.seconds
    path = options.directory / "results.jsonl"
    rows: list[Row] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if options.small:
        torch.set_num_threads(1)  # for tensors this small, threads cost more than they save
    trainer = None if options.finish else Trainer(options, scale)
    others = {row["text_crc32"] for row in rows if trainer and row["text_crc32"] != trainer.text_crc32}
    if others:
        raise ValueError(f"{path}: made with another text, of crc32 {', '.join(others)}: pass it as --text")
    while trainer and (jobs := wanted(rows, scale, options.seeds)):
        chosen = trainer.choose(jobs, stop_at - time.monotonic())
        made = chosen and trainer.train(*chosen, stop_at=stop_at)
        if not made:
            _write_tables(options, rows)
            print(
                f"stopped with {len(rows)} runs, at least {len(jobs)} are missing: the same command resumes", flush=True
            )
            raise SystemExit(vbs.EXIT_STOPPED)
        rows += made
        with path.open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in made))
    _write_tables(options, rows)
    named = [{"run": "-".join(map(str, Job(*(row[field] for field in Job._fields)))), **row} for row in rows]
    curve = [
        {**{field: row[field] for field in Job._fields}, "part": part, "variance": pair[0], "square_norm": pair[1]}
        for row in rows
        if (row["rule"], row["batchsize"]) == ("constant", scale.reference)
        for part, pair in enumerate(row["noise"])
    ]
    return {"rows": [{key: value for key, value in row.items() if key != "noise"} for row in named], "curve": curve}


def scale_of(options: argparse.Namespace) -> Scale:
    return SMALL if options.small else FULL


def _write_tables(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    text = tables.markdown(tables.Found(rows, scale_of(options).reference, options.seeds))
    (options.directory / "tables.md").write_text(text, encoding="utf-8")
    print(text, flush=True)


def judge(options: argparse.Namespace, rows: dict[str, experiment.Row]) -> list[results.Claim]:
    found = tables.Found(tables.with_noise(rows["lanes"]), scale_of(options).reference, options.seeds)
    if not options.small:
        return tables.claims(found)
    missing = len(wanted(rows["lanes"]["rows"], SMALL, options.seeds))
    edges = sum(found.tuned(cell) is None for cell in found.cells() if cell.rule in ("constant", *tables.ARMS))
    return [
        results.Claim.near("grids", "runs that are missing", 0, missing, within=0),
        results.Claim.near("grids", "best learning rates at an edge", 0, edges, within=0),
    ]


def draw(rows: dict[str, experiment.Row], curves: list[experiment.Row], path: Path) -> None:
    """The figure, after all tables on the terminal."""
    made = tables.with_noise({"rows": list(rows.values()), "curve": curves})
    found = tables.Found(made, FULL.reference, sorted({row["seed"] for row in made}))
    print(tables.markdown(found), flush=True)
    tables.draw(found, path)


EXPERIMENT = experiment.Experiment("adam_and_muon", __doc__, runs, judge, draw)

if __name__ == "__main__":
    parser = experiment.parser_of(EXPERIMENT)
    parser.set_defaults(seeds=[0, 1, 2])
    parser.add_argument("--text", type=Path, metavar="FILE", help="any text (default: Python's standard library)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after that time (default: never)")
    parser.add_argument("--finish", action="store_true", help="report the runs that are there, and make no others")
    sys.exit(experiment.main(EXPERIMENT, parser))
