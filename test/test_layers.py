"""The architecture: which module may import which. Changing this table is a decision made in the open."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import variable_batch_size

PACKAGE = Path(variable_batch_size.__file__).parent

LAYERS = {
    "version": set(),
    "trace": set(),
    "permutation": set(),
    "schedule": {"trace"},
    "noise": set(),
    "rules": {"noise"},
    "communication": set(),
    "gradients": {"communication"},
    "buffers": {"communication"},
    "sampler": {"trace", "schedule", "permutation", "communication"},
    "optimizer": {"noise", "rules", "communication", "gradients", "buffers", "sampler", "schedule"},
    "progress": {"optimizer"},
    "stopping": set(),
    "launcher": {"schedule", "stopping"},
    "metrics": {"communication"},
    "sinks": set(),
    "logs": {"schedule", "communication", "optimizer"},
    "files": set(),
    "storage": {"files"},
    "randomness": set(),
    "executed": {"trace", "schedule", "files"},
    "checkpoint": {
        "schedule",
        "communication",
        "sampler",
        "optimizer",
        "stopping",
        "randomness",
        "storage",
        "executed",
    },
    "stages": {"trace", "schedule"},
    "generate": {"trace", "schedule", "stages"},
    "recording": set(),
    "convert": {"trace", "stages", "recording"},
    "plan": {"schedule", "rules", "noise", "stages"},
    "sparkline": set(),
    "report": {"trace", "convert", "plan", "sparkline"},
    "plot": {"schedule", "plan"},
    "comparison.experiment": {"trace", "generate"},
    "comparison.directory": {"trace", "files", "comparison.experiment"},
    "comparison.tables": {"files", "comparison.directory"},
    "comparison.groups": {"comparison.directory", "comparison.experiment"},
    "comparison.verdict": {"comparison.directory", "comparison.experiment", "comparison.groups"},
    "comparison.curves": {"comparison.directory", "comparison.experiment", "comparison.groups"},
    "comparison.picture": {
        "plot",
        "comparison.curves",
        "comparison.directory",
        "comparison.experiment",
        "comparison.groups",
    },
    "comparison.page": {
        "files",
        "comparison.curves",
        "comparison.directory",
        "comparison.experiment",
        "comparison.groups",
        "comparison.verdict",
    },
    "comparison.builtin_workloads": set(),
    "comparison.workload": {"schedule", "comparison.builtin_workloads"},
    "comparison.train": {
        "trace",
        "sampler",
        "buffers",
        "optimizer",
        "launcher",
        "metrics",
        "logs",
        "sinks",
        "comparison.directory",
        "comparison.experiment",
        "comparison.workload",
    },
    "comparison.workers": {"launcher", "comparison.experiment"},
    "comparison.compare": {
        "trace",
        "comparison.directory",
        "comparison.experiment",
        "comparison.page",
        "comparison.tables",
        "comparison.train",
        "comparison.verdict",
        "comparison.workers",
    },
    "command.main": {"version"},
    "command.options": {"trace", "stages", "report"},
    "command.plan": {"command.options", "trace", "schedule", "plan", "report", "plot"},
    "command.show": {"command.options", "trace"},
    "command.make": {"command.options", "trace", "stages", "generate"},
    "command.convert": {"command.options", "trace", "stages", "recording", "convert", "report"},
    "command.report": {
        "command.options",
        "comparison.directory",
        "comparison.page",
        "comparison.picture",
        "comparison.tables",
        "comparison.verdict",
    },
    "command.compare": {
        "trace",
        "schedule",
        "command.options",
        "command.report",
        "comparison.directory",
        "comparison.experiment",
        "comparison.workload",
        "comparison.train",
        "comparison.compare",
    },
    "__main__": {"command.main"},
}

WITH_TORCH = {"communication", "gradients", "buffers", "sampler", "optimizer", "progress", "launcher"} | {
    "metrics",
    "logs",
    "storage",
    "randomness",
    "checkpoint",
    "comparison.builtin_workloads",
    "comparison.workload",
    "comparison.train",
}


def imports_of(module):
    tree = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_the_table_names_every_module():
    paths = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.stem != "__init__"}
    assert {".".join(path.with_suffix("").parts) for path in paths} == set(LAYERS)


@pytest.mark.parametrize("module", LAYERS)
def test_imports_point_down_only(module):
    own = {name.removeprefix("variable_batch_size.") for name in imports_of(module) if "variable_batch_size" in name}
    assert own == LAYERS[module]


def test_the_table_has_no_circle():
    done = set()
    while done != set(LAYERS):
        ready = {module for module, below in LAYERS.items() if module not in done and below <= done}
        assert ready, f"a circle among {set(LAYERS) - done}"
        done |= ready


@pytest.mark.parametrize("module", sorted(set(LAYERS) - WITH_TORCH))
def test_pure_modules_do_not_know_torch(module):
    assert not {name for name in imports_of(module) if name.split(".")[0] in ("torch", "torch_xla")}


def loaded_by(statement):
    code = f"import sys\n{statement}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_importing_the_package_loads_nothing_heavy_and_prints_nothing():
    loaded = loaded_by("import variable_batch_size")
    assert not {"torch", "torch_xla", "pandas", "numpy", "tqdm"} & set(loaded)


def test_using_every_public_name_loads_neither_torch_xla_nor_pandas():
    loaded = loaded_by("from variable_batch_size import *")
    assert "torch" in loaded
    assert not {"torch_xla", "pandas", "tensorboardX", "matplotlib"} & set(loaded)


def test_every_public_name_has_a_docstring_and_is_listed():
    for name in variable_batch_size.__all__:
        value = getattr(variable_batch_size, name)
        assert name == "__version__" or value.__doc__
    assert set(dir(variable_batch_size)) == set(variable_batch_size.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        variable_batch_size.nothing  # noqa: B018
