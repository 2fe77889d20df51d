"""The output of the Python block in docs/traces.md, and the command for the figure of docs/plan.md."""

import re
import shutil

import pytest
from documents import ROOT, blocks, output_of


@pytest.fixture
def folder(tmp_path):
    """A folder with the traces of the repository."""
    shutil.copytree(ROOT / "traces", tmp_path / "traces")
    return tmp_path


def test_the_python_block_prints_four_numbers(folder):
    block, _ = blocks(ROOT / "docs" / "traces.md", "python")
    (folder / "block.py").write_text(block)
    assert re.fullmatch(r"\d+ \d+ [\d.]+ [\d.]+\n", output_of("python -W error block.py", folder))


def test_plot_is_made_by_the_command_below_it(folder):
    (command,) = [line for block in blocks(ROOT / "docs" / "plan.md", "sh") for line in block.splitlines()]
    (folder / "docs").mkdir()
    output_of(command, folder)
    assert (folder / "docs" / "plan.png").exists()
    assert (ROOT / "docs" / "plan.png").exists()
