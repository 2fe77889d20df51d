"""A run that is made in a temporary folder, on whatever machine, and comes back as an archive with its outcome."""

from __future__ import annotations

import io
import logging
import shutil
import signal
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from variable_batch_size.comparison.experiment import Outcome, Run, Settings
from variable_batch_size.comparison.results import Results
from variable_batch_size.comparison.train import train
from variable_batch_size.comparison.workers import outcome_of
from variable_batch_size.comparison.workload import source_of

_one_at_a_time = threading.Lock()  # a process has one set of random generators, and may work in several threads


class Made(NamedTuple):
    """What comes back of a run.

    Attributes:
        outcome: how it ended.
        archive: a zip file of its directory.
    """

    outcome: Outcome
    archive: bytes


def needs_of(run: Run, results: Results) -> dict[str, bytes]:
    """The files of an experiment that one of its runs reads, by their place in its directory."""
    paths = [results.experiment_file, results.trace_file(run.trace)]
    return {str(path.relative_to(results.directory)): path.read_bytes() for path in paths if path.exists()}


def make(settings: Settings, run: Run, needs: Mapping[str, bytes], options: Mapping[str, Any]) -> Made:
    """Make a run in a temporary folder.

    Args:
        settings: of the experiment.
        run: which of its runs.
        needs: the files that it reads.
        options: of :func:`~variable_batch_size.comparison.train.train`.
    """
    with tempfile.TemporaryDirectory() as folder, _one_at_a_time, _undisturbed():
        results = Results(Path(folder))
        for name, content in needs.items():
            (results.directory / name).parent.mkdir(parents=True, exist_ok=True)
            (results.directory / name).write_bytes(content)
        outcome = outcome_of((_train, (settings, run, results.directory), dict(options)))
        return Made(outcome, _packed(results.run_directory(run)))


def unpack(made: Made, run: Run, results: Results) -> None:
    """Put the files of a run where they are as if it had been made there."""
    directory = results.run_directory(run)
    shutil.rmtree(directory, ignore_errors=True)
    with zipfile.ZipFile(io.BytesIO(made.archive)) as archive:
        archive.extractall(directory)


def _train(settings: Settings, run: Run, directory: Path, **options: Any) -> Outcome:
    if source_of(settings.workload) != settings.source:
        raise ValueError(f"the file of {settings.workload} is another one here: give all workers the same")
    return train(settings, run, directory, **options)


def _packed(directory: Path) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(directory.rglob("*")):
            archive.write(path, path.relative_to(directory))
    return packed.getvalue()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Within, an interruption is left to whoever asked for the run, and what the run has to say is in its outcome."""
    logger = logging.getLogger("variable_batch_size")
    is_main, level = threading.current_thread() is threading.main_thread(), logger.level
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        if is_main:
            signal.signal(signal.SIGINT, before)
