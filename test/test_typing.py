"""mypy finds no error in the package, whose wheel contains every public name, nor in a user's script."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import variable_batch_size

ROOT = Path(__file__).parent.parent
SOURCES = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")
WITHOUT_TYPES = re.findall(
    r"^\[mypy-.+\]\nignore_missing_imports = true$", (ROOT / "setup.cfg").read_text(), re.MULTILINE
)

# backward() of torch has no types
RIGHT = """
# mypy: untyped-calls-exclude=torch
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy

import variable_batch_size as vbs


def train(
    train_dataset: torch.utils.data.TensorDataset, model: nn.Module, trace: vbs.traces.TraceLike, epochs: int
) -> int:
    train_sampler = vbs.CustomSampler(
        dataset_size=len(train_dataset), trace=trace, num_replicas=2, rank=0, minibatch_size=32
    )
    train_loader = torch.utils.data.DataLoader(train_dataset, batch_sampler=train_sampler)
    internal_optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = vbs.LinearRuleOptimizer(internal_optimizer, train_sampler, ref_batchsize=128, log_steps=10)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=30)
    num_updates = 0
    for epoch in range(epochs):
        train_sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for data, target in train_loader:
            cross_entropy(model(data), target).backward()
            has_updated: bool = optimizer.step()
            num_updates += has_updated
            loss: torch.Tensor = optimizer.step(lambda: model(data).sum())
            assert loss is not None
        scheduler.step()
    return num_updates


def train_with_each_trace(dataset: torch.utils.data.TensorDataset, frame: pd.DataFrame) -> None:
    model = nn.Linear(2, 2)
    train(dataset, model, "trace.csv", 1)
    train(dataset, model, Path("trace.csv"), 1)
    train(dataset, model, [64, 96], 1)
    train(dataset, model, (64, 96), 1)
    train(dataset, model, range(32, 320, 32), 1)
    train(dataset, model, np.array([64, 96]), 1)
    train(dataset, model, frame["batchsize"], 1)
    train(dataset, model, 64, 1)
    train(dataset, model, np.int64(64), 1)
    train(dataset, model, vbs.traces.linear_ramp(32, 256, num_steps=100, minibatch_size=32), 1)


def train_on_a_stream(samples: torch.utils.data.IterableDataset[torch.Tensor], model: nn.Module) -> None:
    stream = vbs.Stream(samples, trace="trace.csv", minibatch_size=32, on_end="hold", collate_fn=torch.stack)
    loader = torch.utils.data.DataLoader(stream, batch_size=None, num_workers=2)
    inner = optim.SGD(model.parameters(), lr=0.1)
    optimizer: vbs.CustomOptimizer = vbs.LinearRuleOptimizer(inner, stream, ref_batchsize=128)
    optimizer = vbs.CustomOptimizer(inner, stream, rule=vbs.rules.RootRule(), ref_batchsize=128)
    for data in loader:
        model(data).sum().backward()
        optimizer.step()
"""

ABOVE_WRONG = """
from torch import nn, optim

import variable_batch_size as vbs

inner = optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
sampler = vbs.CustomSampler(dataset_size=100, trace=64, minibatch_size=32)
"""

WRONG = {
    'vbs.CustomSampler(dataset_size=100, trace=64, minibatch_size=32, on_end="halt")': '"on_end"',
    "vbs.CustomSampler(dataset_size=100, trace=64.0, minibatch_size=32)": '"trace"',
    "vbs.CustomSampler(dataset_size=100, trace=None, minibatch_size=32)": '"trace"',
    "vbs.CustomSampler(dataset_size=100, trace=64)": '"minibatch_size"',
    'vbs.Schedule(vbs.Trace.of(64), dataset_size=100, minibatch_size=32, on_end="halt")': '"on_end"',
    'vbs.Stream(range(9), trace=64, minibatch_size=32, on_end="halt")': '"on_end"',
    "vbs.Stream(9, trace=64, minibatch_size=32)": '"Stream"',
    "vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=128, log_step=5)": '"log_step"',
    'vbs.RootRuleOptimizer(inner, sampler, ref_batchsize=128, log_steps="5")': '"log_steps"',
    "vbs.LinearRuleOptimiser(inner, sampler, ref_batchsize=128)": '"LinearRuleOptimiser"',
    'vbs.traces.Stages.parse("0:32 9:64", until=20, unit="epochs")': '"unit"',
    'vbs.traces.Recording.read("spot.csv", format="xml")': '"format"',
    'vbs.traces.Recording.read("spot.csv", time_unit="d")': '"time_unit"',
}


def build(directory):
    """A wheel of the package, built only from its sources."""
    for name in SOURCES:
        shutil.copy(ROOT / name, directory)
    package = Path(variable_batch_size.__file__).parent
    shutil.copytree(package, directory / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "wheels", "."]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (directory / "wheels").iterdir()
    return wheel


def install(wheel, directory):
    """The Python of an environment with the wheel and all non-editable packages of the running one."""
    venv.create(directory)
    packages = sysconfig.get_path("purelib", "posix_prefix", {"base": directory, "platbase": directory})
    zipfile.ZipFile(wheel).extractall(packages)
    Path(packages, "running.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return directory / "bin" / "python"


def run(command, directory):
    """Run the installed package, without the paths of the tests."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)


def check(python, scripts, directory, cache):
    """The output of mypy for scripts: script, line, severity and message."""
    for name, text in scripts.items():
        (directory / name).write_text(text)
    (directory / "mypy.ini").write_text("\n".join(["[mypy]", *WITHOUT_TYPES]))
    command = [python, "-m", "mypy", "--strict", "--warn-unreachable", "--config-file=mypy.ini", "--no-pretty"]
    done = run([*command, f"--cache-dir={cache}", *scripts], directory)
    assert not done.stderr, done.stderr
    return re.findall(r"^(\w+)\.py:(\d+): (error|note): (.*)$", done.stdout, re.MULTILINE)


def found_in(messages, script, kind):
    return [(int(line), text) for name, line, what, text in messages if (name, what) == (script, kind)]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return install(build(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="module")
def checked():
    """mypy on the package, with the settings and the cache of ``make lint``."""
    return subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def messages(python, checked, tmp_path_factory):
    """The output of mypy for all scripts in one run, because it spends most of its time on torch.

    With the options and the cache of the check of the package, it need not do this again.
    """
    cache = tmp_path_factory.mktemp("cache")
    shutil.copytree(ROOT / ".mypy_cache", cache, dirs_exist_ok=True)
    names = [f"reveal_type(vbs.{name})" for name in variable_batch_size.__all__]
    scripts = {
        "right.py": RIGHT,
        "wrong.py": ABOVE_WRONG + "\n".join(WRONG),
        "names.py": "\n".join(["import variable_batch_size as vbs", *names]),
    }
    return check(python, scripts, tmp_path_factory.mktemp("scripts"), cache)


def test_the_package_has_no_type_error(checked):
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_wheel_has_every_public_name(python, tmp_path):
    code = "import variable_batch_size as vbs; print(vbs.__file__); from variable_batch_size import *\n"
    code += "from importlib.resources import files; (files('variable_batch_size.lab.watch') / 'page.js').read_text()\n"
    code += "assert vbs.Trace.of('zoo:smith-cifar10')[0] == 128"
    done = run([python, "-W", "error", "-c", code], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(done.stdout.strip()).is_relative_to(python.parents[1])


def test_training_loop_is_well_typed_with_any_type_of_trace(messages):
    assert found_in(messages, "right", "error") == []


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_reported_where_it_is_made(messages, mistake):
    mistakes = ["", *ABOVE_WRONG.splitlines(), *WRONG]
    (message,) = [text for line, text in found_in(messages, "wrong", "error") if mistakes[line] == mistake]
    assert WRONG[mistake] in message


def test_every_public_name_has_a_type(messages):
    revealed = dict(zip(variable_batch_size.__all__, found_in(messages, "names", "note"), strict=True))
    assert [name for name, (_, text) in revealed.items() if text == 'Revealed type is "Any"'] == []
    assert found_in(messages, "names", "error") == []
