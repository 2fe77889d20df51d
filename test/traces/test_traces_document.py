"""docs/traces.md: its commands print what it says."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "traces.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def output_of(command, folder):
    """What a terminal of 80 columns shows after a command."""
    python = shlex.quote(sys.executable)
    functions = f'vbs() {{ {python} -m variable_batch_size "$@"; }}; python() {{ {python} "$@"; }}; '
    environment = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    shell = ["bash", "-c", functions + command]
    done = subprocess.run(
        shell, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    )
    return done.stdout


@pytest.fixture
def folder(tmp_path):
    """A folder with the traces, as the top of the repository is one."""
    shutil.copytree(ROOT / "traces", tmp_path / "traces")
    return tmp_path


@pytest.mark.parametrize("block", blocks("console"))
def test_the_commands_print_what_the_document_says(block, folder):
    for shown in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = shown.partition("\n")
        assert output_of(command, folder) == output


@pytest.mark.parametrize("block", blocks("python"))
def test_the_python_blocks_run(block, folder):
    (folder / "block.py").write_text(block)
    assert re.fullmatch(r"\d+ \d+ [\d.]+ [\d.]+\n", output_of("python -W error block.py", folder))


def test_the_picture_is_made_by_the_command_below_it(folder):
    (command,) = [line for block in blocks("sh") for line in block.splitlines()]
    (folder / "docs").mkdir()
    output_of(command, folder)
    assert (folder / "docs" / "plan.png").exists()
    assert (ROOT / "docs" / "plan.png").exists()
