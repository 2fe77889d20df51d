"""The page of a simulation: its table and its picture in one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from variable_batch_size.planning.simulate import Simulation
from variable_batch_size.planning.simulation_picture import simulations_as_svg
from variable_batch_size.planning.simulation_tables import Table

_STYLE = """
body { margin: 0 auto; padding: 1rem; max-width: 70rem; font: 16px/1.5 system-ui, sans-serif; color: #1d232b; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.4rem 0.7rem; border-bottom: 1px solid #dfe3e8; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
pre { background: #f5f7f9; padding: 0.8rem; overflow-x: auto; font-size: 0.85rem; }
"""


def simulation_page(
    simulations: Mapping[str, Simulation], table: Table, *, facts: Mapping[str, str], command: str
) -> str:
    """The page as HTML.

    Args:
        simulations: the runs by the names of their policies.
        table: of them.
        facts: what they have in common, by name.
        command: that made the page.
    """
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in table.rows)
    told = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>\n" for name, value in facts.items())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Simulated policies</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Simulated policies</h1>
<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>
{rows}</tbody></table></div>
{simulations_as_svg(simulations)}
<h2>What they have in common</h2>
<div class="wide"><table><tbody>
{told}</tbody></table></div>
<pre>{escape(command)}</pre>
</body>
</html>
"""
