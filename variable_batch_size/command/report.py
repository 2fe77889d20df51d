"""``vbs report``: makes the page of a comparison anew, of the results that are there."""

from __future__ import annotations

import argparse
from pathlib import Path

from variable_batch_size.command.options import print_text
from variable_batch_size.comparison.report.page import write_page, write_tables
from variable_batch_size.comparison.report.picture import draw_picture
from variable_batch_size.comparison.report.summary import verdicts
from variable_batch_size.comparison.results import Results


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", metavar="DIR", help="where vbs compare has put its results")
    parser.add_argument("--plot", metavar="FILE", help="also draw the curves, as a .png or .svg file")


def run(options: argparse.Namespace) -> None:
    results = Results(Path(options.results))
    results.settings()  # refuses a directory that holds none
    write_tables(results)
    write_page(results)
    if options.plot is not None:
        draw_picture(results, options.plot)
    print_verdicts(results)


def print_verdicts(results: Results) -> None:
    """Print the verdict on each trace, and where the page is."""
    for name, text in verdicts(results).items():
        print_text(f"{name}: {text}")
    print_text(f"{results.page_file}")
