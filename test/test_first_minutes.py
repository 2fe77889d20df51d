"""The first minutes with a clone: the output of make before it installs, and the demo."""

import os
import platform
import re
import subprocess
import sys
import textwrap
import venv
from importlib.util import find_spec

import forked
import pytest
from documents import ROOT
from xla_launcher import QUICKLY

STAMPS = (".demo", ".test")  # installed sets of packages
HAS_XLA = find_spec("torch_xla") is not None


def make(*arguments):
    """As from a shell, although ``make test`` runs this: make would inherit options and print folders."""
    inherited = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def table_of(said):
    return dict(re.findall(r"^(\S.*?) {2,}(.+)$", said, re.MULTILINE))


@pytest.fixture
def quick_compilation(monkeypatch):
    """XLA compiles the programs of the demo without optimizing them."""
    monkeypatch.setenv("XLA_FLAGS", QUICKLY)


@pytest.mark.usefixtures("quick_compilation")
def test_make_demo_installs_nothing_and_shows_the_results_of_four_cores():
    done = make("demo", f"VENV={sys.prefix}")
    assert done.returncode == 0, done.stderr
    assert "pip" not in done.stdout
    assert ("on 4 virtual XLA cores;" in done.stdout) == HAS_XLA
    assert ("on 4 gloo processes" in done.stdout) != HAS_XLA
    table = table_of(done.stdout)
    # 20 · 32 + 20 · 64 + 30 · 128 + 20 · 256 + 20 · 16 + 20 · 192 + 20 · 48 + 30 · 128, in minibatches of 16 on 4 cores
    assert table["steps"] == "180"
    assert table["samples"] == "19,840"
    assert table["distinct batch sizes"] == "7, from 16 to 256"
    assert table["idle share"] == f"{(20 * 2 + 20 * 3 + 20 * 1) / (4 * 180):.1%} of cores × steps"
    assert float(table["test accuracy"].rstrip("%")) > 90  # 98.3 to 99.2 % with ten seeds
    assert ("XLA graphs compiled" in table) == HAS_XLA


@pytest.mark.long
@pytest.mark.usefixtures("quick_compilation")
def test_make_demo_starts_the_requested_number_of_cores():
    done = make("demo", f"VENV={sys.prefix}", "CORES=1")
    assert done.returncode == 0, done.stderr
    assert ("on 1 virtual XLA core;" in done.stdout) == HAS_XLA
    assert ("on 1 gloo process " in done.stdout) != HAS_XLA
    assert table_of(done.stdout)["steps"] == "180"


@pytest.mark.parametrize("cores", ["", "1"])  # without a number, the demo decides
def test_make_demo_passes_the_number_of_cores_to_the_demo(cores):
    said = make("--dry-run", "demo", f"CORES={cores}").stdout
    assert said.splitlines()[-1].split()[1:] == ["examples/demo.py", *cores.split()]


def test_the_demo_launches_the_requested_number_of_cores():
    done = forked.run_script(ROOT / "examples" / "demo.py", "0", folder=ROOT)  # it starts no cores
    assert done.returncode == 1
    assert "ValueError: `cores` must be a positive integer, got 0" in done.stderr


def test_environment_without_packages_is_not_modified_and_they_are_named(tmp_path):
    venv.create(tmp_path, with_pip=False)
    done = make("demo", f"VENV={tmp_path}")
    assert done.returncode != 0
    assert re.search(r"has no torch>=2.4, numpy, .*scikit-learn \(extra demo\)\. To use it", done.stderr)
    assert f"{tmp_path}/bin/python -m pip install 'torch>=2.4'" in done.stderr
    assert not any((tmp_path / stamp).exists() for stamp in STAMPS)


def add_package(environment, name, version):
    """Add the metadata of an installed package."""
    (packages,) = environment.glob("lib/python*/site-packages")
    about = packages / f"{name}-{version}.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_only_missing_and_too_old_packages_are_named(tmp_path):
    venv.create(tmp_path, with_pip=False)
    for name in ("numpy", "pandas", "fsspec", "tqdm", "typing_extensions"):
        add_package(tmp_path, name, "1.0")
    add_package(tmp_path, "lazy_loader", "0.10")  # 0.10 is newer than 0.4
    add_package(tmp_path, "torch", "2.3.1+cpu")
    said = make("demo", f"VENV={tmp_path}").stderr
    assert "has no torch>=2.4 (2.3.1+cpu is installed), scikit-learn (extra demo). To use it all the same:" in said
    assert f"{tmp_path}/bin/python -m pip install 'torch>=2.4' 'scikit-learn'\n" in said


@pytest.mark.parametrize(
    ("goal", "package"),
    [
        ("demo", "scikit-learn (extra demo)"),
        ("docs", "mkdocs-material>=9,<10 (extra docs)"),
        ("lint", "mypy (extra test)"),
        ("check", "pytest (extra test)"),
    ],
)
def test_each_target_requires_its_packages(goal, package, tmp_path):
    venv.create(tmp_path, with_pip=False)
    assert package in make(goal, f"VENV={tmp_path}").stderr


@pytest.mark.parametrize("goal", ["demo", "test"])
def test_size_and_alternative_are_printed_before_installing(goal, tmp_path):
    said = make("--dry-run", goal, f"VENV={tmp_path}/new").stdout
    assert re.search(r"about [\d.]+ GB", said)
    assert said.index("about") < said.index("pip install")
    assert f"make {goal} VENV=/path/to/venv" in said


def installed(said):
    """The extras in each call of pip."""
    return [set(extras.split(",")) - {"xla"} for extras in re.findall(r"pip install .*'\.\[(.*)\]' 'torch==2\.9", said)]


def test_demo_installs_its_own_packages_and_tests_install_all(tmp_path):
    assert installed(make("--dry-run", "demo", f"VENV={tmp_path}/new").stdout) == [{"demo"}]
    assert installed(make("--dry-run", "test", f"VENV={tmp_path}/new").stdout) == [{"demo", "docs", "test"}]


@pytest.mark.parametrize(
    ("stamps", "for_demo", "for_tests"),
    [
        ([".demo"], [], [{"demo", "docs", "test"}]),
        (STAMPS, [], []),
    ],
)
def test_installed_packages_are_not_installed_again(stamps, for_demo, for_tests, tmp_path):
    venv.create(tmp_path, with_pip=False)
    for stamp in stamps:
        (tmp_path / stamp).write_text(f"{ROOT}\n")
    assert installed(make("--dry-run", "demo", f"VENV={tmp_path}").stdout) == for_demo
    assert installed(make("--dry-run", "lint", f"VENV={tmp_path}").stdout) == for_tests


def test_packages_are_installed_again_when_the_requirements_change(tmp_path):
    venv.create(tmp_path, with_pip=False)
    for stamp in STAMPS:
        (tmp_path / stamp).write_text(f"{ROOT}\n")
        os.utime(tmp_path / stamp, (0, 0))
    assert installed(make("--dry-run", "demo", f"VENV={tmp_path}").stdout) == [{"demo"}]
    assert installed(make("--dry-run", "test", f"VENV={tmp_path}").stdout) == [{"demo", "docs", "test"}]


def test_environment_of_another_clone_is_not_modified(tmp_path):
    venv.create(tmp_path, with_pip=False)
    for stamp in STAMPS:
        (tmp_path / stamp).write_text("/another/clone\n")
        os.utime(tmp_path / stamp, (0, 0))
    for goal in ("demo", "test"):
        assert installed(make("--dry-run", goal, f"VENV={tmp_path}").stdout) == []


SKIPPED = """
    import pytest

    pytestmark = pytest.mark.xla

    @pytest.mark.parametrize("number", range(5))
    def test_on_xla(number):
        pass

    @pytest.mark.long
    def test_for_hours():
        raise AssertionError
"""


def run_pytest(arguments):
    sys.exit(pytest.main(arguments))


def test_last_line_is_the_number_of_skipped_xla_tests_and_long_ones_are_left_to_make_soak(tmp_path):
    (tmp_path / "test_xla.py").write_text(textwrap.dedent(SKIPPED))
    conftest = (ROOT / "test" / "conftest.py").read_text()
    # as on a machine without a wheel, on any machine
    conftest = conftest.replace("import platform\n", "import platform\nplatform.machine = lambda: 'riscv64'\n")
    conftest = conftest.replace('find_spec("torch_xla")', "None")
    # importing these takes seconds, and nothing here uses them
    sampler = "from variable_batch_size.data.sampler import MinibatchSource\n"
    conftest = conftest.replace("import torch\n", "from unittest.mock import Mock\n").replace(
        sampler, "torch = MinibatchSource = Mock()\n"
    )
    conftest = conftest.replace('import_module("torch._dynamo")', "pass")
    (tmp_path / "conftest.py").write_text(conftest)
    command = ["-c", str(ROOT / "setup.cfg"), "--rootdir", str(tmp_path), "-n", "1", str(tmp_path)]
    done = forked.run(run_pytest, command, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = "5 XLA tests did not run: torch_xla has no wheel for this processor (Linux on riscv64)"
    assert done.stdout.splitlines()[-1] == expected.replace("Linux", platform.system())
    assert "-m long" in make("--dry-run", "soak").stdout
