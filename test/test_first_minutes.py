"""The first minutes with a clone: what make says before it installs, and what the demo shows."""

import re
import subprocess
import sys
import venv
from importlib.util import find_spec

import pytest
from documents import ROOT

HAS_XLA = find_spec("torch_xla") is not None


def make(*arguments):
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def demo():
    """What the demo prints, and the rows of the table in it."""
    done = make("demo", f"VENV={sys.prefix}")
    assert done.returncode == 0, done.stderr
    return done.stdout, dict(re.findall(r"^(\S.*?) {2,}(.+)$", done.stdout, re.MULTILINE))


def test_the_demo_installs_nothing_and_says_what_its_cores_are(demo):
    said, _ = demo
    assert "pip" not in said
    assert ("4 virtual XLA cores" in said) == HAS_XLA
    assert ("4 gloo processes" in said) != HAS_XLA


def test_the_demo_shows_what_happened(demo):
    _, table = demo
    # 20 · 32 + 20 · 64 + 30 · 128 + 20 · 256 + 20 · 16 + 20 · 192 + 20 · 48 + 30 · 128, in minibatches of 16 on 4 cores
    assert table["steps"] == "180"
    assert table["samples"] == "19,840"
    assert table["distinct batch sizes"] == "7, from 16 to 256"
    assert table["idle share"] == f"{(20 * 2 + 20 * 3 + 20 * 1) / (4 * 180):.1%} of cores × steps"
    assert float(table["test accuracy"].rstrip("%")) > 90  # 98.3 to 99.2 % with ten seeds
    assert ("XLA graphs compiled" in table) == HAS_XLA


def test_an_environment_that_lacks_packages_is_left_alone_and_they_are_named(tmp_path):
    venv.create(tmp_path, with_pip=False)
    done = make("demo", f"VENV={tmp_path}")
    assert done.returncode != 0
    assert re.search(r"has no torch>=2.4, numpy, .*scikit-learn", done.stderr)
    assert f"{tmp_path}/bin/python -m pip install 'torch>=2.4'" in done.stderr
    assert not (tmp_path / ".installed").exists()


@pytest.mark.parametrize(
    ("goal", "package"), [("demo", "scikit-learn"), ("docs", "mkdocs-material"), ("lint", "pytest")]
)
def test_each_goal_asks_for_what_it_needs(goal, package, tmp_path):
    venv.create(tmp_path, with_pip=False)
    assert package in make(goal, f"VENV={tmp_path}").stderr


def test_before_anything_is_installed_it_says_how_large_that_is_and_how_to_do_without(tmp_path):
    said = make("--dry-run", "demo", f"VENV={tmp_path}/new").stdout
    assert re.search(r"about [\d.]+ GB and .*minutes", said)
    assert said.index("about") < said.index("pip install")
    assert "make demo VENV=/path/to/venv" in said
