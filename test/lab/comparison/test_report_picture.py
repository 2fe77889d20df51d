"""The curves of a comparison as a plot."""

import pytest
from outcomes import RECORDS, ended, write_results

from variable_batch_size.lab.command.main import main
from variable_batch_size.lab.comparison.experiment import Run


@pytest.mark.parametrize("records", [RECORDS, RECORDS[-1:]], ids=["steps and tests", "tests only"])
def test_report_plots_the_recorded_values(tmp_path, records):
    runs = [Run("reference", "constant", 0), *(Run(t, r, 0) for t in ("ramp", "spot") for r in ("linear", "root"))]
    write_results(tmp_path, {run: ended(98.0) for run in runs}, records=records)
    assert main(["report", str(tmp_path), "--plot", str(tmp_path / "curves.svg")]) == 0
    text = (tmp_path / "curves.svg").read_text()
    labels = (
        "ramp",
        "spot",
        "batch size",
        "training loss",
        "test accuracy %",
        "samples",
        "always 16",
        "linear",
        "root",
    )
    assert [label for label in labels if f"<!-- {label} -->" not in text] == []


def test_plot_needs_a_run_on_a_trace(tmp_path, capsys):
    write_results(tmp_path, {Run("reference", "constant", 0): ended(98.0)})
    assert main(["report", str(tmp_path), "--plot", str(tmp_path / "curves.png")]) == 1
    assert f"no run on a trace has ended in {tmp_path}" in capsys.readouterr().err
