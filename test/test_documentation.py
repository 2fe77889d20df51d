"""Every example runs: the docstrings of pure modules and the README's blocks."""

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

WITH_EXAMPLES = [
    "traces.limits",
    "traces.trace",
    "schedules.batch_sizes",
    "schedules.permutation",
    "schedules.schedule",
    "rules.rule",
    "training.sampler",
    "traces.stages",
    "traces.ramps",
    "traces.growth",
    "traces.market",
    "traces.recording",
    "traces.recording_tables",
    "traces.convert",
    "planning.plan",
    "planning.sparkline",
    "planning.reports",
    "comparison.report.estimates",
    "comparison.report.numbers",
]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_in_docstrings_run(module):
    results = doctest.testmod(importlib.import_module(f"variable_batch_size.{module}"))
    assert results.attempted > 0
    assert results.failed == 0


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_the_python_blocks_of_the_readme_run_as_scripts(number, tmp_path):
    script = tmp_path / f"block_{number}.py"
    script.write_text(blocks("python")[number])
    subprocess.run([sys.executable, "-W", "error", str(script)], check=True, cwd=ROOT)


def test_the_readme_has_the_two_commands_and_the_loop():
    assert "make demo" in README
    assert "make test" in README
    assert any("optimizer.step()" in block and "CustomSampler" in block for block in blocks("python"))


def test_every_file_the_readme_names_is_there():
    for name in re.findall(r"`([a-z_]+/[A-Za-z_./]+\.(?:py|csv|md|sh))`", README):
        assert (ROOT / name).exists(), name
