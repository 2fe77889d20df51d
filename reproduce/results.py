"""Results next to published numbers: claims with a tolerance, as a table and as CSV with the command and machine."""

from __future__ import annotations

import csv
import datetime
import io
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent


@dataclass(frozen=True)
class Claim:
    """One number of a table.

    Attributes:
        of: the run, or another subject of the number.
        what: the quantity, with its unit.
        published: the published value; a sentence if the source has no number.
        ours: our result.
        least, most: the tolerance.
        is_judged: whether the tolerance is checked; False for values that are only shown.
    """

    of: str
    what: str
    published: float | str
    ours: float
    least: float
    most: float
    is_judged: bool = True

    @property
    def holds(self) -> bool:
        return not self.is_judged or self.least <= self.ours <= self.most

    @property
    def verdict(self) -> str:
        return "" if not self.is_judged else "holds" if self.holds else "DOES NOT HOLD"

    @property
    def allowed(self) -> str:
        return f"{shown(self.least)} … {shown(self.most)}" if self.is_judged else ""

    @classmethod
    def near(cls, of: str, what: str, published: float, ours: float, *, within: float) -> Claim:
        return cls(of, what, published, ours, published - within, published + within)


def shown(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return f"{len(value)} points"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def side_by_side(claims: Sequence[Claim]) -> str:
    header = ("run", "what", "published", "reproduced", "allowed", "")
    rows = [
        (
            claim.of,
            claim.what,
            shown(claim.published),
            shown(claim.ours),
            claim.allowed,
            claim.verdict,
        )
        for claim in claims
    ]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    return "\n".join(line.rstrip() for line in lines)


def machine() -> str:
    parts = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    parts += [f"{os.cpu_count()} CPU cores ({platform.machine()})"]
    return ", ".join([*parts, f"Python {platform.python_version()}", f"torch {torch.__version__}"])


def write(path: Path, rows: Sequence[dict[str, Any]], claims: Sequence[Claim]) -> None:
    """Write the rows as CSV, after comments with the command, the machine and the claims."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    text.write(f"# command: python {' '.join(_public(argument) for argument in sys.argv)}\n")
    text.write(f"# machine: {machine()}\n# date: {datetime.date.today().isoformat()}\n")
    for line in side_by_side(claims).splitlines():
        text.write(f"# {line}\n")
    _write_rows(text, [{key: value for key, value in row.items() if key != "curve"} for row in rows])
    path.write_text(text.getvalue(), encoding="utf-8")


def write_curves(path: Path, points: Sequence[dict[str, Any]]) -> None:
    if points:
        text = io.StringIO()
        _write_rows(text, points)
        path.write_text(text.getvalue(), encoding="utf-8")


def _write_rows(text: io.StringIO, rows: Sequence[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})


def _public(argument: str) -> str:
    """An argument without local paths: folders are reduced to their last component."""
    path = Path(argument)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name if path.is_absolute() else argument


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV file, with numbers parsed."""
    if not path.exists():
        return []
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(lines)]


def _number(text: str) -> Any:
    try:
        return float(text) if "." in text or "e" in text or text in ("nan", "inf") else int(text)
    except ValueError:
        return text


def csv_of(name: str) -> Path:
    return HERE / "results" / f"{name}.csv"


def curves_of(name: str) -> Path:
    return HERE / "results" / f"{name}_curves.csv"


def picture_of(name: str) -> Path:
    return ROOT / "docs" / f"reproduced_{name}.png"
