"""Atomic local file writes, and JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, each of which is a record of JSON; or a refusal that names the first that is none."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{number}: expected a record of JSON, got {line[:40]!r}")
        records.append(record)
    return records


TEMPORARY = ".tmp"
"""The end of the name of a file that is being written."""


def write(path: Path, fill: Callable[[Path], Any]) -> None:
    """Let `fill` write a file under a temporary name, and give it its name when it is safely on the disk.

    Whatever happens, there is the old file of that name, or none, or the whole new one.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        fill(temporary)
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)  # the name, too


def write_text(path: Path, text: str) -> None:
    """Write a text, in the same way."""
    write(path, lambda temporary: temporary.write_text(text, encoding="utf-8", newline=""))


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
