"""Rules, policies, traces and commands of another package: named like ours, and a broken one is a warning."""

import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

import variable_batch_size as vbs
from variable_batch_size import plugins
from variable_batch_size.lab.command.main import main

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
OURS = re.search(r"^```toml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[1].replace("my_package", "vbs_extras")
ENTRY_POINTS = re.sub(r' *#.*|"|project\.entry-points\.', "", OURS)
for group, bad in {
    "rules": "broken = vbs_extras.absent:Rule\nlinear = vbs_extras.rules:CubicRule",
    "traces": "lost = vbs_extras.traces",
    "commands": "wrong = vbs_extras.absent",
}.items():
    ENTRY_POINTS = ENTRY_POINTS.replace(f"[variable_batch_size.{group}]", f"[variable_batch_size.{group}]\n{bad}")
RULES = """
from variable_batch_size.rules import Rule

class CubicRule(Rule):
    def factor(self, step):
        return step.scale**3
"""
POLICIES = """
from variable_batch_size.policies import Policy

class Thrice(Policy):
    def decide(self, situation):
        return 3 * situation.ref_batchsize
"""
HELLO = '''"""``vbs hello``: greet the user."""
def add_hello(parser):
    parser.add_argument("name")
def run_hello(options):
    print(f"hello {options.name}")
'''


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    """A package with entry points, installed into a folder."""
    folder, info = tmp_path / "vbs_extras", tmp_path / "vbs_extras-1.0.dist-info"
    for path in (folder, info, folder / "traces"):
        path.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vbs-extras\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "__init__.py").write_text("")
    (folder / "rules.py").write_text(RULES)
    (folder / "policies.py").write_text(POLICIES)
    (folder / "hello.py").write_text(HELLO)
    (folder / "traces" / "stairs.csv").write_text("# Stairs\nstep,batchsize\n0,32\n1,64\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins.registered.cache_clear()
    yield tmp_path
    plugins.registered.cache_clear()
    for name in [name for name in sys.modules if name.startswith("vbs_extras")]:
        del sys.modules[name]


def optimizer_with(rule, trace):
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    return vbs.Optimizer(
        inner, vbs.CustomSampler(dataset_size=999, trace=trace, minibatch_size=32), rule=rule, ref_batchsize=32
    )


def test_a_rule_is_found_by_name():
    assert optimizer_with("cubic", [64]).factor() == 8
    assert "cubic" in vbs.rules.RULES
    assert vbs.rules.RULES["linear"] is vbs.rules.LinearRule  # ours come first


def test_a_policy_is_found_by_name():
    assert (
        vbs.policies.make_policy("thrice")
        .answer(vbs.policies.Situation(cores=1, minibatch_size=32, ref_batchsize=32))
        .batch_size
        == 96
    )


def test_a_trace_is_in_the_zoo(capsys):
    assert list(vbs.Trace.read("zoo:stairs").sizes) == [32, 64]
    with pytest.warns(UserWarning, match=r"vbs-extras has registered 'lost' for traces, but .* cannot be loaded"):
        assert main(["traces"]) == 0
    assert re.search(r"^stairs +2 steps, 32 to 64 samples +– +Stairs$", capsys.readouterr().out, re.MULTILINE)


def test_rules_can_be_planned_and_compared(capsys, tmp_path):
    options = ["--dataset-size", "320", "--minibatch-size", "32", "--cores", "1"]
    assert main(["plan", "zoo:stairs", *options, "--rule", "cubic"]) == 0
    assert "cubic" in capsys.readouterr().out
    sizes = [
        "--samples",
        "256",
        "--seeds",
        "1",
        "--rules",
        "linear,cubic",
        "--traces",
        "zoo:stairs",
        "--on-end",
        "hold",
    ]
    assert main(["compare", "--workload", "digits", *sizes, "--out", str(tmp_path / "out")]) == 0
    assert "cubic" in capsys.readouterr().out


def test_a_command_is_listed_and_runs(capsys):
    with (
        pytest.warns(
            UserWarning, match=r"vbs-extras has registered 'wrong' for commands, but vbs_extras.absent cannot"
        ),
        pytest.raises(SystemExit),
    ):
        main(["--help"])
    out = capsys.readouterr().out
    assert re.search(r"hello +greet the user", out) and "wrong" not in out
    assert "vbs_extras.hello" not in sys.modules
    assert main(["hello", "you"]) == 0
    assert capsys.readouterr().out == "hello you\n"


def test_a_broken_rule_is_a_warning_and_is_not_found():
    with (
        pytest.warns(UserWarning, match=r"vbs-extras has registered 'broken' for rules, but .* cannot be loaded"),
        pytest.raises(ValueError, match=r"`rule` must be one of .*'linear'.*, got 'broken'"),
    ):
        optimizer_with("broken", [64])


def test_names_are_found_without_an_import():
    assert "cubic" in list(vbs.rules.RULES)
    assert "vbs_extras" not in sys.modules


def test_our_own_commands_are_registered():
    assert {"cluster", "recommend", "tpu"} <= {
        found.name for found in entry_points(group="variable_batch_size.commands")
    }


def test_importing_the_package_reads_no_entry_points():
    code = "import variable_batch_size as v, variable_batch_size.plugins as p; v.rules.RULES['linear']\n"
    code += "print(p.registered.cache_info().misses)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "0\n"
