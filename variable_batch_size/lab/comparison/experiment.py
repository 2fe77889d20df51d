"""An experiment: its settings, its runs, their outcomes, and the directory of its results."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from variable_batch_size.files import read_json, write_json
from variable_batch_size.policies.builtin import parse_policy
from variable_batch_size.policies.policy import Policy
from variable_batch_size.rules.registry import RULES
from variable_batch_size.schedules.schedule import OnEnd
from variable_batch_size.traces.generators import spot_market
from variable_batch_size.traces.trace import Trace

REFERENCE = "reference"  # the name of the yardstick's trace: always the reference batch size
POLICY = "policy:"  # prefix of the names of traces that are decided by a policy
UNTIL = ("samples", "progress")
DONE, DIVERGED, FAILED = "done", "diverged", "failed"
ENDED = (DONE, DIVERGED)
DEVICES = ("cpu", "cuda", "xla")


def measures_noise(rule: str) -> bool:
    """Whether a rule, by its name, measures noise: its progress may then determine the end of a run."""
    return RULES[rule.partition(":")[0]].measures_noise


@dataclass(frozen=True, order=True)
class Run:
    """One run of an experiment: a rule on a trace, with a seed for the order of the data and the initial weights."""

    trace: str
    rule: str
    seed: int

    def __str__(self) -> str:
        return f"{self.trace}, {self.rule}, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    workload: str
    source: str | None  # the SHA-256 of the file of a user's workload
    optimizer: str  # description of the workload's optimizer
    train_size: int
    test_size: int
    metric_name: str
    unit: str
    is_higher_better: bool
    device: str
    cores: int
    threads: int  # CPU threads of each core
    minibatch_size: int
    ref_batchsize: int
    lr: float | None  # at `ref_batchsize`; None for the workload's own
    num_samples: int  # of the yardstick, and of all other runs if `until` is "samples"
    until: str  # end runs after as many "samples", or as much "progress", as the yardstick
    on_end: OnEnd
    num_tests: int  # evaluations within `num_samples`
    log_steps: int | None  # steps between log records; None for about 500 records per run
    exact: bool = False

    @property
    def progress_goal(self) -> int:
        """The number of updates of the yardstick."""
        return math.ceil(self.num_samples / self.ref_batchsize)

    def leader(self, run: Run, rules: Sequence[str]) -> Run | None:
        """The run that determines another run's number of updates: that of AdaScale, if its progress ends the runs."""
        if self.until != "progress" or run.trace == REFERENCE or measures_noise(run.rule):
            return None
        return Run(run.trace, next(filter(measures_noise, rules)), run.seed)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    status: str
    reason: str = ""  # why it diverged or failed
    updates: int | None = None
    samples: int | None = None
    progress: float | None = None  # the sum of the learning-rate factors, which are gains with AdaScale
    final_loss: float | None = None
    final_metric: float | None = None
    best_metric: float | None = None
    seconds: float | None = None


def runs_of(traces: Sequence[str], rules: Sequence[str], num_seeds: int) -> list[Run]:
    """All runs of an experiment: the yardstick, then every combination."""
    arms = [(REFERENCE, "constant"), *((trace, rule) for trace in traces for rule in rules)]
    return [Run(trace, rule, seed) for trace, rule in arms for seed in range(num_seeds)]


def default_traces(ref_batchsize: int, num_samples: int, dataset_size: int) -> dict[str, Trace]:
    """A ramp that doubles after each fifth of the samples, and a spot market, both from 1 to 16 times the reference."""
    most = max(1, min(16, dataset_size // ref_batchsize))
    sizes = [ref_batchsize * min(2**stage, most) for stage in range(5)]
    ramp = np.repeat(sizes, [math.ceil(num_samples / len(sizes) / size) for size in sizes])
    num_steps = math.ceil(num_samples / ref_batchsize)
    devices = {"num_devices": most, "samples_per_device": ref_batchsize, "at_least": 1}
    market = spot_market(**devices, leave=0.03, arrive=0.03, num_steps=num_steps, seed=0)
    is_needed = market.sizes.cumsum() - market.sizes < num_samples
    return {"ramp": Trace.from_sequence(ramp), "spot": Trace.from_sequence(market.sizes[is_needed])}


class Results:
    """The directory of an experiment.

    - ``experiment.json``: the settings, and how to reproduce them;
    - ``traces/NAME.csv``: the traces;
    - ``runs/TRACE/RULE/seed-N/``: ``run.json``, ``steps.jsonl`` and TensorBoard files of each run;
    - ``results.csv``, ``timings.csv`` and ``report.html``, made from the above; and an empty ``.lock``.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.experiment_file = directory / "experiment.json"
        self.page_file = directory / "report.html"

    def trace_file(self, name: str) -> Path:
        return self.directory / "traces" / f"{name}.csv"

    def trace(self, name: str) -> Path | Policy:
        """The trace argument of a run: a file, or a new policy."""
        if not name.startswith(POLICY):
            return self.trace_file(name)
        return parse_policy(self.read_experiment()["traces"][name].removeprefix(POLICY))

    def run_directory(self, run: Run) -> Path:
        return self.directory / "runs" / run.trace / run.rule / f"seed-{run.seed}"

    def read_experiment(self) -> dict[str, Any]:
        if not self.experiment_file.exists():
            raise ValueError(f"{self.directory} has no results of vbs compare: there is no {self.experiment_file}")
        return dict(read_json(self.experiment_file))

    def settings(self) -> Settings:
        found = self.read_experiment()["settings"]
        known = {field.name for field in fields(Settings)}  # files of older versions have fewer or other settings
        return Settings(**{name: value for name, value in found.items() if name in known})

    def planned(self) -> list[Run]:
        """All runs of the experiment, whether they have ended or not."""
        return [Run(*run) for run in self.read_experiment()["runs"]]

    def write_experiment(
        self, settings: Settings, origin: Mapping[str, Any], traces: Mapping[str, Trace | str], runs: Iterable[Run]
    ) -> None:
        """Add settings, traces, planned runs and their origin to existing ones; raises if they are not compatible."""
        old: dict[str, Any] = {"traces": {}, "origins": [], "runs": []}
        if self.experiment_file.exists():
            old = self.read_experiment()
            for name, there in asdict(self.settings()).items():
                if there != getattr(settings, name):
                    different = f"another {name}, {there} instead of {getattr(settings, name)}"
                    raise ValueError(f"{self.directory} has results with {different}: choose another --out")
        hashes = {name: trace if isinstance(trace, str) else trace_hash(trace) for name, trace in traces.items()}
        for name, trace in traces.items():
            path = self.trace_file(name)
            if isinstance(trace, str):
                if old["traces"].get(name, trace) != trace:
                    raise ValueError(f"{name} is {old['traces'][name]} in {self.directory}: choose another --out")
            elif not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                trace.write(path, comment=trace.comment)
            elif Trace.read(path) != trace:
                raise ValueError(f"{path} is a different trace from {trace.name}: choose another --out")
        # the yardstick first
        planned = sorted({*(Run(*run) for run in old["runs"]), *runs}, key=lambda run: (run.trace != REFERENCE, run))
        experiment = {
            "settings": asdict(settings),
            "traces": {**old["traces"], **hashes},
            "origins": [*old["origins"], *([origin] if origin not in old["origins"] else [])],
            "runs": [[run.trace, run.rule, run.seed] for run in planned],
        }
        write_json(self.experiment_file, experiment, indent=2)

    def read(self, run: Run) -> Outcome | None:
        """The outcome of a run; None if it has not ended, or if its file is damaged."""
        try:
            return Outcome(**read_json(self.run_directory(run) / "run.json"))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, run: Run, outcome: Outcome) -> None:
        write_json(self.run_directory(run) / "run.json", asdict(outcome))

    def runs(self) -> list[tuple[Run, Outcome]]:
        """All runs that have ended, in order."""
        return [(run, outcome) for run in self.planned() if (outcome := self.read(run)) is not None]


def trace_hash(trace: Trace) -> str:
    """The SHA-256 of the batch sizes as little-endian 64-bit integers."""
    return hashlib.sha256(trace.sizes.astype("<i8").tobytes()).hexdigest()
