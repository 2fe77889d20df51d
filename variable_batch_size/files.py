"""Files that are whole or not there, whatever happens while they are written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
