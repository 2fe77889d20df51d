"""What simulated policies came to, as a table: for a terminal, a CSV file and a page."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from variable_batch_size.planning.simulate import Simulation

COLUMNS = ("policy", "hours", "device-hours", "cost", "updates", "samples", "progress", "restarts", "batch sizes")


class Table(NamedTuple):
    """The cells of a table, as text."""

    head: tuple[str, ...]
    rows: list[list[str]]


def simulation_table(simulations: Mapping[str, Simulation], *, price: float | None) -> Table:
    """A row for each policy, the fastest first; a cost where there is a price for a device-hour."""
    ranked = sorted(simulations.items(), key=lambda item: item[1].seconds)
    is_shown = [column != "cost" or price is not None for column in COLUMNS]
    rows = [_cells(name, run, price or 0.0) for name, run in ranked]
    return Table(*(_chosen(COLUMNS, is_shown), [list(_chosen(row, is_shown)) for row in rows]))


def _chosen(cells: Sequence[str], is_shown: Sequence[bool]) -> tuple[str, ...]:
    return tuple(cell for cell, is_it in zip(cells, is_shown, strict=True) if is_it)


def _cells(name: str, run: Simulation, price: float) -> list[str]:
    least, most = int(run.trace.sizes.min()), int(run.trace.sizes.max())
    return [
        name,
        f"{run.hours:,.4g}",
        f"{run.device_hours:,.4g}",
        f"{run.cost(price):,.2f}",
        f"{run.updates:,}",
        f"{run.samples:,}",
        f"{run.progress:,.0f}",
        f"{run.restarts:,}",
        f"{least:,}" if least == most else f"{least:,} to {most:,}",
    ]


def as_text(table: Table) -> str:
    """Columns for a terminal, names on the left."""
    lines = [table.head, *table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )


def as_csv(table: Table) -> str:
    """The same for a spreadsheet."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.head)
    # a name keeps the commas between its settings, a number loses those between its digits
    writer.writerows([name, *(cell.replace(",", "") for cell in cells)] for name, *cells in table.rows)
    return text.getvalue()
