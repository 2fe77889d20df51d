"""Experiment: which runs a comparison is made of, and where each leaves what it found."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from variable_batch_size.files import write, write_text
from variable_batch_size.generate import spot_market
from variable_batch_size.trace import Trace

REFERENCE = "reference"
"""The name of the yardstick's trace: always the reference batch size."""

UNTIL = ("samples", "progress")

DONE, DIVERGED, FAILED = "done", "diverged", "failed"

RULES = ("linear", "root", "constant", "linear_momentum", "adascale", "adam", "adamscale")

MEASURING_RULES = ("adascale", "adamscale")
"""Rules whose progress can end a run."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all runs of an experiment have in common.

    Args:
        workload: its name.
        source: the SHA-256 of the file of a user's workload; None for others.
        optimizer: of the workload, in words.
        train_size: samples of the training data.
        test_size: samples of the test data.
        metric_name: of the workload.
        unit: of the metric.
        is_higher_better: as to the metric.
        device: ``cpu``, ``cuda`` or ``xla``.
        cores: how many of them share a run.
        threads: of the CPU for each core.
        minibatch_size: samples that one core runs at once.
        ref_batchsize: batch size of the yardstick.
        lr: learning rate at that batch size; that of the workload if None.
        num_samples: how many samples the yardstick trains on, and all other runs where `until` is ``samples``.
        until: when runs end: after as many ``samples``, or after as much ``progress``, as the yardstick.
        on_end: what follows the last row of a trace.
        num_tests: how often the model is tested within `num_samples`.
        log_steps: steps from one record to the next; about 500 records for each run if None.
    """

    workload: str
    source: str | None
    optimizer: str
    train_size: int
    test_size: int
    metric_name: str
    unit: str
    is_higher_better: bool
    device: str
    cores: int
    threads: int
    minibatch_size: int
    ref_batchsize: int
    lr: float | None
    num_samples: int
    until: str
    on_end: str
    num_tests: int
    log_steps: int | None

    @property
    def progress_goal(self) -> int:
        """The updates of the yardstick."""
        return math.ceil(self.num_samples / self.ref_batchsize)


@dataclass(frozen=True, order=True)
class Run:
    """One run of an experiment: a rule on a trace from a seed, which stands for the order of data and the weights."""

    trace: str
    rule: str
    seed: int

    def __str__(self) -> str:
        return f"{self.trace}, {self.rule}, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Args:
        status: ``done``, ``diverged`` or ``failed``.
        reason: why it did not end well.
        updates: steps that were done.
        samples: that were trained on.
        progress: the sum of the factors of the learning rate, which with AdaScale are gains.
        final_loss: the mean test loss at the end.
        final_metric: the metric at the end.
        best_metric: the best it was at any test.
        seconds: by the clock.
    """

    status: str
    reason: str = ""
    updates: int | None = None
    samples: int | None = None
    progress: float | None = None
    final_loss: float | None = None
    final_metric: float | None = None
    best_metric: float | None = None
    seconds: float | None = None


class Results:
    """The directory of an experiment.

    - ``experiment.json``: the settings, and what is needed to reproduce them;
    - ``traces/NAME.csv``: the traces, as they were used;
    - ``runs/TRACE/RULE/seed-N/``: of each run ``run.json``, ``steps.jsonl`` and TensorBoard's files;
    - ``results.csv``, ``timings.csv`` and ``report.html``, made of the above.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def experiment_file(self) -> Path:
        return self.directory / "experiment.json"

    @property
    def page_file(self) -> Path:
        return self.directory / "report.html"

    def trace_file(self, name: str) -> Path:
        return self.directory / "traces" / f"{name}.csv"

    def run_directory(self, run: Run) -> Path:
        return self.directory / "runs" / run.trace / run.rule / f"seed-{run.seed}"

    def read_experiment(self) -> dict[str, Any]:
        """What :meth:`write_experiment` wrote."""
        if not self.experiment_file.exists():
            raise ValueError(f"{self.directory} holds no results of vbs compare: there is no {self.experiment_file}")
        return dict(json.loads(self.experiment_file.read_text(encoding="utf-8")))

    def settings(self) -> Settings:
        found = self.read_experiment()["settings"]
        return Settings(**{field.name: found[field.name] for field in fields(Settings)})

    def write_experiment(
        self, settings: Settings, origin: Mapping[str, Any], traces: Mapping[str, Trace], runs: Iterable[Run]
    ) -> None:
        """Set down settings, traces and planned runs beside those that are there; refuse what does not go with them.

        Args:
            settings: of all runs.
            origin: what else is needed to reproduce them: the command, versions, the commit.
            traces: by name.
            runs: that are planned.
        """
        old: dict[str, Any] = {"traces": {}, "origins": [], "runs": []}
        if self.experiment_file.exists():
            self._refuse_other_settings(settings)
            old = self.read_experiment()
        hashes = {name: trace_hash(trace) for name, trace in traces.items()}
        for name, trace in traces.items():
            self._write_trace(name, trace)
        planned = sorted({*self._planned(old), *runs}, key=_order)
        experiment = {
            "settings": asdict(settings),
            "traces": {**old["traces"], **hashes},
            "origins": [*old["origins"], *([origin] if origin not in old["origins"] else [])],
            "runs": [[run.trace, run.rule, run.seed] for run in planned],
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        write_text(self.experiment_file, json.dumps(experiment, indent=2) + "\n")

    def _write_trace(self, name: str, trace: Trace) -> None:
        path = self.trace_file(name)
        if path.exists():
            if Trace.read(path) != trace:
                raise ValueError(f"{path} is another trace than {trace.name}: choose another --out")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, lambda temporary: trace.write(temporary, comment=trace.comment or None))

    def _planned(self, experiment: Mapping[str, Any]) -> list[Run]:
        return [Run(*run) for run in experiment["runs"]]

    def planned(self) -> list[Run]:
        """All runs of the experiment, whether they have ended or not."""
        return self._planned(self.read_experiment())

    def _refuse_other_settings(self, settings: Settings) -> None:
        old = self.settings()
        for field in fields(Settings):
            there, here = getattr(old, field.name), getattr(settings, field.name)
            if there != here:
                raise ValueError(
                    f"{self.directory} holds results with another {field.name}, {there} there and {here} here: "
                    "choose another --out"
                )

    def read(self, run: Run) -> Outcome | None:
        """How a run ended; None if it has not, or if what says so cannot be read."""
        path = self.run_directory(run) / "run.json"
        try:
            return Outcome(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, run: Run, outcome: Outcome) -> None:
        """Set down how a run ended."""
        self.run_directory(run).mkdir(parents=True, exist_ok=True)
        write_text(self.run_directory(run) / "run.json", json.dumps(asdict(outcome)) + "\n")

    def runs(self) -> Iterator[tuple[Run, Outcome]]:
        """All runs that have ended, in order."""
        for run in self.planned():
            outcome = self.read(run)
            if outcome is not None:
                yield run, outcome


def _order(run: Run) -> tuple[bool, Run]:
    """The yardstick first, then by trace, rule and seed."""
    return run.trace != REFERENCE, run


def runs_of(traces: Sequence[str], rules: Sequence[str], num_seeds: int) -> list[Run]:
    """All runs of an experiment: the yardstick, then every combination."""
    seeds = range(num_seeds)
    return [Run(REFERENCE, "constant", seed) for seed in seeds] + [
        Run(trace, rule, seed) for trace in traces for rule in rules for seed in seeds
    ]


def default_traces(ref_batchsize: int, num_samples: int, dataset_size: int) -> dict[str, Trace]:
    """Two traces that fit a workload: a ramp and a spot market, from the reference batch size to 16 times that.

    The ramp doubles its batch size after each fifth of the samples. In the market up to 16 devices of the reference
    batch size come and go.
    """
    most = max(1, min(16, dataset_size // ref_batchsize))
    sizes = [ref_batchsize * min(2**stage, most) for stage in range(5)]
    ramp = np.repeat(sizes, [math.ceil(num_samples / len(sizes) / size) for size in sizes])
    market = spot_market(
        num_devices=most,
        samples_per_device=ref_batchsize,
        num_steps=math.ceil(num_samples / ref_batchsize),
        at_least=1,
        leave=0.03,
        arrive=0.03,
        seed=0,
    )
    is_needed = market.sizes.cumsum() - market.sizes < num_samples
    return {"ramp": Trace.from_sequence(ramp), "spot": Trace.from_sequence(market.sizes[is_needed])}


def trace_hash(trace: Trace) -> str:
    """The SHA-256 of the batch sizes, as 64-bit integers with the lowest byte first."""
    return hashlib.sha256(trace.sizes.astype("<i8").tobytes()).hexdigest()
