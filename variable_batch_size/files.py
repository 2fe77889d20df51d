"""Atomic local file writes, JSON, the lines of tables and of JSON records, and the names of the files of a run."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

TEMPORARY = ".tmp"  # suffix of a file that is being written
# in the directory of a run
LOG, EXECUTED, DECISIONS, RUN = "log.jsonl", "executed.csv", "decisions.jsonl", "run.json"


def numbered_lines(path: str | os.PathLike[str]) -> list[tuple[int, str]]:
    """The lines of a table, with their numbers from 1, without blank lines and ``#`` comments."""
    lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]


def read_records(path: Path) -> list[dict[str, Any]]:
    """The JSON records in the lines of a file; ValueError with the first line that is not a record."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{number}: expected a JSON record, got {line[:40]!r}")
        records.append(record)
    return records


def write(path: Path, fill: Callable[[Path], Any]) -> None:
    """Let `fill` write a temporary file, and rename it when it is on disk: a reader never sees a partial file."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        fill(temporary)
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)  # the new name


def write_text(path: Path, text: str) -> None:
    """Like :func:`write`, for a text."""
    write(path, lambda temporary: temporary.write_text(text, encoding="utf-8", newline=""))


def write_json(path: Path, value: Any, *, indent: int | None = None) -> None:
    """Like :func:`write`, for a value as JSON; its directory is created if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(value, indent=indent) + "\n")


def read_json(path: Path) -> Any:
    """The value in a file of JSON."""
    return json.loads(path.read_text(encoding="utf-8"))


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
