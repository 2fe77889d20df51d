"""The directory of an experiment: what it holds and what may be added to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from variable_batch_size.comparison.experiment import POLICY, REFERENCE, Outcome, Run, Settings
from variable_batch_size.files import write, write_text
from variable_batch_size.policies.builtin import parse_policy
from variable_batch_size.policies.policy import Policy
from variable_batch_size.traces.trace import Trace


class Results:
    """The directory of an experiment.

    - ``experiment.json``: the settings, and what is needed to reproduce them;
    - ``traces/NAME.csv``: the traces, as they were used;
    - ``runs/TRACE/RULE/seed-N/``: of each run ``run.json``, ``steps.jsonl`` and TensorBoard's files;
    - ``results.csv``, ``timings.csv`` and ``report.html``, made of the above; and an empty ``.lock``.
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

    def trace(self, name: str) -> Path | Policy:
        """What a run is given as its trace: a file, or a new policy."""
        if not name.startswith(POLICY):
            return self.trace_file(name)
        return parse_policy(self.read_experiment()["traces"][name].removeprefix(POLICY))

    def run_directory(self, run: Run) -> Path:
        return self.directory / "runs" / run.trace / run.rule / f"seed-{run.seed}"

    def read_experiment(self) -> dict[str, Any]:
        """What :meth:`write_experiment` wrote."""
        if not self.experiment_file.exists():
            raise ValueError(f"{self.directory} holds no results of vbs compare: there is no {self.experiment_file}")
        return dict(json.loads(self.experiment_file.read_text(encoding="utf-8")))

    def settings(self) -> Settings:
        found = self.read_experiment()["settings"]
        known = {field.name for field in fields(Settings)}  # an older version may not have noted all
        return Settings(**{name: value for name, value in found.items() if name in known})

    def write_experiment(
        self,
        settings: Settings,
        origin: Mapping[str, Any],
        traces: Mapping[str, Trace | str],
        runs: Iterable[Run],
    ) -> None:
        """Set down settings, traces and planned runs beside those that are there; refuse what does not go with them.

        Args:
            settings: of all runs.
            origin: what else is needed to reproduce them: the command, versions, the commit.
            traces: by name; of policies, with their settings.
            runs: that are planned.
        """
        old: dict[str, Any] = {"traces": {}, "origins": [], "runs": []}
        if self.experiment_file.exists():
            self._refuse_other_settings(settings)
            old = self.read_experiment()
        hashes = {name: trace if isinstance(trace, str) else trace_hash(trace) for name, trace in traces.items()}
        for name, trace in traces.items():
            if not isinstance(trace, str):
                self._write_trace(name, trace)
            elif old["traces"].get(name, trace) != trace:
                raise ValueError(
                    f"{self.directory} holds results of {old['traces'][name]} as {name}: choose another --out"
                )
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


def trace_hash(trace: Trace) -> str:
    """The SHA-256 of the batch sizes, as 64-bit integers with the lowest byte first."""
    return hashlib.sha256(trace.sizes.astype("<i8").tobytes()).hexdigest()
