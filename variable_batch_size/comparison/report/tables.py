"""results.csv, a line for each run; and the seconds beside it, in timings.csv."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import asdict

from variable_batch_size.comparison.results import Results
from variable_batch_size.files import write_text

COLUMNS = (
    "trace",
    "rule",
    "seed",
    "status",
    "updates",
    "samples",
    "progress",
    "final_loss",
    "final_metric",
    "best_metric",
    "reason",
)
"""Of results.csv: nothing that depends on how fast a machine is, so that the same experiment gives the same file."""


def write_tables(results: Results) -> None:
    """Write results.csv, and timings.csv with the seconds that each run took."""
    rows = [{**asdict(run), **asdict(outcome)} for run, outcome in results.runs()]
    write_text(results.directory / "results.csv", _csv(COLUMNS, rows))
    write_text(results.directory / "timings.csv", _csv(("trace", "rule", "seed", "seconds"), rows))


def _csv(columns: Iterable[str], rows: Iterable[dict[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
