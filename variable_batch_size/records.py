"""Records that are lines of JSON: read with the place of the first that is none."""

from __future__ import annotations

import json
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
