"""The tutorial: every script runs, and its page shows the differences between them."""

import difflib
import re
import runpy
from itertools import pairwise

import forked
import pytest
from documents import ROOT, blocks

import variable_batch_size as vbs

SCRIPTS = sorted((ROOT / "examples" / "tutorial").glob("*.py"))


def difference(one, other):
    """What ``diff -U1`` prints below the names of the files."""
    lines = (path.read_text().splitlines(keepends=True) for path in (one, other))
    return "".join(list(difflib.unified_diff(*lines, n=1))[2:])


def test_the_page_shows_the_differences_between_the_scripts():
    assert blocks(ROOT / "docs" / "tutorial.md", "diff") == [difference(*pair) for pair in pairwise(SCRIPTS)]


def check(output, path):
    updates, accuracy = re.search(r"^(\d+) updates, accuracy (\S+)%$", output, re.MULTILINE).groups()
    assert int(updates) == (558 if path == SCRIPTS[0] else 318)
    assert float(accuracy) > 50  # of ten digits; 89 to 93


@pytest.mark.parametrize("path", SCRIPTS[:4], ids=lambda path: path.stem)
def test_each_script_runs_in_one_process(path, capsys):
    runpy.run_path(str(path))["main"]()
    check(capsys.readouterr().out, path)


def test_the_last_script_runs_on_two_cores_and_leaves_its_executed_trace(tmp_path):
    done = forked.run_script(SCRIPTS[-1], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    check(done.stdout, SCRIPTS[-1])
    assert list(vbs.Trace.read(tmp_path / "runs" / "digits" / "executed.csv"))[-1] == 64
