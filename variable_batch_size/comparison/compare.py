"""compare: makes all runs of an experiment that have not been made, and the tables and the page of them."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from variable_batch_size.comparison import executors
from variable_batch_size.comparison.executors import OnExecutor, Workers
from variable_batch_size.comparison.experiment import (
    DIVERGED,
    DONE,
    FAILED,
    MEASURING_RULES,
    REFERENCE,
    Outcome,
    Run,
    Settings,
    runs_of,
)
from variable_batch_size.comparison.report.page import write_page, write_tables
from variable_batch_size.comparison.report.summary import number
from variable_batch_size.comparison.results import Results
from variable_batch_size.comparison.train import train
from variable_batch_size.traces.trace import Trace


def compare(
    settings: Settings,
    *,
    traces: Mapping[str, Trace | str],
    rules: Sequence[str],
    num_seeds: int,
    directory: Path,
    jobs: int,
    datadir: str | None = None,
    origin: Mapping[str, Any],
    make_executor: Callable[[], Executor] | None = None,
) -> None:
    """Make every combination of traces, rules and seeds, and the yardstick of each seed, and write what they gave.

    Runs that have ended, well or diverged, are not made again; those that failed are. Results are written also when
    this is interrupted.

    Args:
        settings: that all runs have in common.
        traces: by name; of a policy, the text that it is parsed of.
        rules: their names.
        num_seeds: seeds from 0 on.
        directory: for the results.
        jobs: how many runs at once.
        datadir: where the workload finds its data.
        origin: what else belongs into experiment.json, to reproduce it.
        make_executor: makes what the runs are given to, all at once; processes of this machine make them if None.
    """
    results = Results(directory)
    runs = runs_of(list(traces), rules, num_seeds)
    with _alone_in(directory):
        results.write_experiment(settings, origin, traces, runs)
        makers = Workers(jobs, environments=_environments(settings, jobs))
        _make(runs, results, settings, rules, OnExecutor(make_executor, results) if make_executor else makers, datadir)


def _environments(settings: Settings, jobs: int) -> list[dict[str, str]]:
    return executors.environments(jobs, settings.cores) if settings.device == "cuda" else []


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Within, no other process compares into this directory."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another vbs compare is at work in {directory}") from None
        yield


def _make(
    runs: Sequence[Run],
    results: Results,
    settings: Settings,
    rules: Sequence[str],
    makers: Workers | OnExecutor,
    datadir: str | None,
) -> None:
    """Make the runs that have not ended, and then, or when interrupted, the tables and the page."""
    plan = {run: _leader(run, settings, rules) for run in runs if not _has_ended(results.read(run))}
    with tqdm(total=len(runs), initial=len(runs) - len(plan), unit="run", dynamic_ncols=True) as bar:
        try:
            with makers as workers:
                for run, outcome in _outcomes(workers, plan, results, settings, datadir):
                    results.write(run, outcome)
                    bar.update()
                    bar.write(f"{run}: {_in_words(settings, outcome)}", file=sys.stderr)
        finally:
            write_tables(results)
            write_page(results)


def _has_ended(outcome: Outcome | None) -> bool:
    return outcome is not None and outcome.status in (DONE, DIVERGED)


def _outcomes(
    workers: Workers | OnExecutor,
    plan: Mapping[Run, Run | None],
    results: Results,
    settings: Settings,
    datadir: str | None,
) -> Iterator[tuple[Run, Outcome]]:
    """Make runs, each after the one it waits for, and give each as it ends."""
    to_do, unfinished = list(plan), set(plan)
    while unfinished:
        run = next((run for run in to_do if plan[run] not in unfinished), None)
        outcome: Outcome | None
        if run is None or workers.is_full:
            run, outcome = workers.next_outcome()
        else:
            to_do.remove(run)
            outcome = _start(workers, run, plan[run], results, settings, datadir)
        if outcome is not None:
            unfinished.remove(run)
            yield run, outcome


def _start(
    workers: Workers | OnExecutor,
    run: Run,
    leader: Run | None,
    results: Results,
    settings: Settings,
    datadir: str | None,
) -> Outcome | None:
    """Start a run; or return at once how it ended, where the one whose updates it was to make has failed."""
    updates = None
    if leader is not None:
        found = results.read(leader)
        if found is None or found.status == FAILED:
            return Outcome(status=FAILED, reason=f"it was to make as many updates as ({leader}), which failed")
        # where that diverged, as many as the yardstick
        updates = found.updates if found.status == DONE else settings.progress_goal
    options = {"datadir": datadir, "updates": updates}
    workers.start(run, (train, (settings, run, results.directory), options))
    return None


def _leader(run: Run, settings: Settings, rules: Sequence[str]) -> Run | None:
    """The run whose number of updates another makes, too: that of AdaScale, where runs end by its progress."""
    if settings.until != "progress" or run.trace == REFERENCE or run.rule in MEASURING_RULES:
        return None
    return Run(run.trace, next(rule for rule in MEASURING_RULES if rule in rules), run.seed)


def _in_words(settings: Settings, outcome: Outcome) -> str:
    if outcome.status != DONE or outcome.final_metric is None:
        return f"{outcome.status}, {outcome.reason}"
    return (
        f"{settings.metric_name} {number(outcome.final_metric)}{settings.unit} after {outcome.updates:,} updates, "
        f"{outcome.samples:,} samples, {outcome.seconds:.1f} s"
    )
