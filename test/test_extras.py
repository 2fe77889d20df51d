"""Optional packages: what needs a missing one raises where it is made, and names the extra to install."""

import importlib
import subprocess
import sys

import pytest

import variable_batch_size as vbs
from variable_batch_size.checks import check_extra, import_extra

INTEGRATIONS = {  # the module of each, with its framework and the extra that installs it
    **{f"integrations.{name}": (name, name) for name in ("accelerate", "keras", "lightning", "transformers")},
    "experimental.cluster.ray": ("ray", "cluster"),
}
IMPORT_ALL = f"""
import sys
sys.modules.update(dict.fromkeys({[framework for framework, _ in INTEGRATIONS.values()]}))
for name in {tuple(INTEGRATIONS)}:
    try:
        __import__(f"variable_batch_size.{{name}}")
    except ImportError as error:
        print(error)
"""


def how(extra):
    return f"pip install 'variable_batch_size[{extra}]', or in a clone pip install '.[{extra}]'"


def test_an_integration_names_its_missing_framework_and_the_extra():
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"variable_batch_size.{name} needs {needed}: {how(extra)}" for name, (needed, extra) in INTEGRATIONS.items()
    ]


def test_tensorboard_raises_when_it_is_made(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError) as raised:
        vbs.TensorBoard(tmp_path)
    assert str(raised.value) == f"vbs.TensorBoard needs tensorboardX: {how('tensorboard')}"


def test_a_missing_dependency_of_an_installed_package_is_not_hidden(monkeypatch, tmp_path):
    (tmp_path / "present.py").write_text("import something_that_it_needs")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError, match="No module named 'something_that_it_needs'"):
        import_extra("present", "a test needs present", "test")
    check_extra("a test needs", "test", "present")


def test_all_missing_packages_are_named_at_once():
    with pytest.raises(ImportError) as raised:
        check_extra("a test needs", "compare", "json", "missing_one", "missing_two")
    assert str(raised.value) == f"a test needs missing_one, missing_two: {how('compare')}"
