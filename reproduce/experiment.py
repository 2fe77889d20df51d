"""The runs of one table: parallel or sequential, resumable, with progress output, and checked at the end."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import results
import torch

import variable_batch_size as vbs

Row = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """A table from the literature.

    Attributes:
        name: the name of its files.
        about: the description of the program.
        runs: the training functions by name. Each is called with the options and its own folder, and returns a row of
            the result, with its "curve" if there is one, or several as "rows". After an interruption it is called
            again, and resumes from the files in its folder.
        judge: computes the claims with their tolerances from all rows.
        draw: makes the plot from the rows and the curves of all runs; None for no plot.
    """

    name: str
    about: str
    runs: Callable[[argparse.Namespace], Mapping[str, Callable[[argparse.Namespace, Path], Row]]]
    judge: Callable[[argparse.Namespace, dict[str, Row]], list[results.Claim]]
    draw: Callable[[dict[str, Row], list[Row], Path], None] | None = None


def parser_of(experiment: Experiment) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=experiment.about, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a version that takes seconds, to try the program")
    parser.add_argument("--directory", type=Path, help="of the runs (default: runs/NAME)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--jobs", type=int, default=1, help="number of parallel runs, as processes that share the device"
    )
    parser.add_argument("--only", nargs="+", metavar="RUN", help="only these runs")
    parser.add_argument("--commit", action="store_true", help="write the result into reproduce/results and docs")
    parser.add_argument("--draw", action="store_true", help="only make the plot from reproduce/results")
    return parser


def main(experiment: Experiment, parser: argparse.ArgumentParser) -> int:
    """Make the missing runs, and print the results next to the published numbers.

    Returns:
        0 if all results are within their tolerance, 1 if not, :data:`vbs.EXIT_STOPPED` if runs were stopped.
    """
    options = parser.parse_args()
    if options.draw:
        return _draw_committed(experiment)
    options.directory = options.directory or Path("runs") / (experiment.name + "-small" * options.small)
    runs = experiment.runs(options)
    unknown = set(options.only or ()) - set(runs)
    if unknown:
        parser.error(f"--only: no run is named {', '.join(sorted(unknown))}; there are {', '.join(runs)}")
    names = [name for name in runs if options.only is None or name in options.only]
    waiting = [name for name in names if not _result_of(options.directory / name).exists()]
    is_child = len(names) == 1 and os.environ.get("REPRODUCE_CHILD") == "1"
    if is_child:
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # a terminal sends SIGINT to all processes; the parent forwards SIGTERM
    if options.jobs > 1 and not is_child:
        status = _run_at_once(waiting, options.jobs)
    else:
        for name in waiting:
            _run(name, runs[name], options)
        status = 0
    if status or is_child:
        return status
    rows = {name: json.loads(_result_of(options.directory / name).read_text()) for name in names}
    return _report(experiment, options, rows, is_whole=len(names) == len(runs))


def _result_of(folder: Path) -> Path:
    return folder / "result.json"


def _run(name: str, train: Callable[[argparse.Namespace, Path], Row], options: argparse.Namespace) -> None:
    folder = options.directory / name
    folder.mkdir(parents=True, exist_ok=True)
    row = train(options, folder)
    temporary = folder / "result.tmp"
    temporary.write_text(json.dumps({"run": name, **row}))
    os.replace(temporary, _result_of(folder))
    print(f"{name:24}done: " + ", ".join(f"{key} {results.shown(value)}" for key, value in row.items()), flush=True)


def _run_at_once(names: Sequence[str], jobs: int) -> int:
    """Each run as a process; SIGTERM and Ctrl-C are forwarded, and runs then save and stop."""
    waiting, running, failed, is_stopping = list(names), {}, [], False

    def stop(*_: Any) -> None:
        nonlocal is_stopping
        is_stopping = True
        for process in running.values():
            process.terminate()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while running or (waiting and not is_stopping):
            while waiting and len(running) < jobs and not is_stopping:
                name = waiting.pop(0)
                command = [sys.executable, *sys.argv, "--only", name]
                running[name] = subprocess.Popen(command, env={**os.environ, "REPRODUCE_CHILD": "1"})
            time.sleep(0.2)
            for name, process in list(running.items()):
                if process.poll() is not None:
                    del running[name]
                    failed += [name] if process.returncode else []
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if is_stopping:
        print("stopped: the same command resumes", flush=True)
        return vbs.EXIT_STOPPED
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    return int(bool(failed))


class Progress:
    """A sink that prints the progress of a run, at most every 20 seconds.

    Args:
        name: the name of the run.
        key: the key of the records that measures progress.
        goal: its final value.
    """

    def __init__(self, name: str, key: str, goal: float, *, every_seconds: float = 20.0) -> None:
        self._name, self._key, self._goal, self._every = name, key, goal, every_seconds
        self._printed_at = time.monotonic()

    def __call__(self, record: Mapping[str, Any]) -> None:
        if time.monotonic() - self._printed_at < self._every or "loss" not in record:
            return
        self._printed_at = time.monotonic()
        done = record[self._key]
        print(
            f"{self._name:24}{self._key} {done:>10,.0f} of {self._goal:,.0f}, {done / self._goal:4.0%}  "
            f"loss {record['loss']:.3f}  {record['samples_per_second']:,.0f} samples/s",
            flush=True,
        )


def curve_of(folder: Path, *keys: str) -> list[Row]:
    """The records in ``records.jsonl`` of the run's folder that have all of these keys."""
    path = folder / "records.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{key: record[key] for key in keys} for record in records if all(key in record for key in keys)]


def _report(experiment: Experiment, options: argparse.Namespace, rows: dict[str, Row], *, is_whole: bool) -> int:
    if not is_whole:
        return 0
    claims = experiment.judge(options, rows)
    print("\n" + results.side_by_side(claims), flush=True)
    curves = [{"run": name, **point} for name, row in rows.items() for point in row.get("curve", [])]
    table = [line for row in rows.values() for line in row.get("rows", [row])]
    results.write(options.directory / f"{experiment.name}.csv", table, claims)
    results.write_curves(options.directory / f"{experiment.name}_curves.csv", curves)
    if options.commit and not options.small:
        results.write(results.csv_of(experiment.name), table, claims)
        results.write_curves(results.curves_of(experiment.name), curves)
        _draw_committed(experiment)
    return 0 if all(claim.holds for claim in claims) else 1


def _draw_committed(experiment: Experiment) -> int:
    if experiment.draw is not None:
        rows = {row["run"]: row for row in results.read(results.csv_of(experiment.name))}
        curves = results.read(results.curves_of(experiment.name))
        try:
            experiment.draw(rows, curves, results.picture_of(experiment.name))
        except ModuleNotFoundError as error:
            print(f"no plot: {error}; --draw makes it from the result if matplotlib is installed", flush=True)
    return 0
