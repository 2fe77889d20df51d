"""Plants faults in what decides numbers, one at a time, and shows those that no test notices.

python test/mutants.py --at-most 50 rules/noise.py training/position.py

The faults are those of mutmut (https://mutmut.readthedocs.io): another operator, another number, an argument left out,
a branch always taken. What survives the quick tests, which run in a process that has torch loaded, is shown to the
tests that start processes; then to the reader.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import libcst as cst

ROOT = Path(__file__).parent.parent
PLACE = ROOT / "build" / "mutants"
PACKAGE = "variable_batch_size"
MODULES = [
    *(f"rules/{name}.py" for name in ("rule", "scaling", "adam", "noise", "adascale", "transition", "registry")),
    "schedules/batch_sizes.py",
    "schedules/schedule.py",
    *(f"training/{name}.py" for name in ("position", "factors", "settings", "adam_bias", "preconditioner")),
    *(f"training/{name}.py" for name in ("flat_memory", "gradients", "flat_gradients", "kept_gradients", "buffers")),
    *(f"training/{name}.py" for name in ("sameness", "scheduled", "optimizer")),
]
QUICK = ["test/rules", "test/schedules/test_schedule.py", "test/training"]
NOT_QUICK = [f"--ignore=test/training/test_{name}.py" for name in ("costs", "sampler", "sameness", "wrapped")]
NOT_QUICK += ["-p", "no:cacheprovider", "-p", "no:unraisableexception", "-p", "no:threadexception"]
NOT_QUICK += ["-k", "not idle_core and not at_scale_16 and not compiled and not unbiased"]
WITH_PROCESSES = ["test/training/test_sameness.py", "test/training/test_buffers.py", "test/promises"]
WITH_PROCESSES += ["-k", "not killed and not stopped and not compiled", "-m", "not xla"]

MUTMUT = "from mutmut.__main__ import cli; cli()"

IN_CONFTEST = """

import gc  # noqa: E402

import torch._dynamo  # noqa: E402
from hypothesis import Phase, settings  # noqa: E402

import variable_batch_size as vbs  # noqa: E402

settings.register_profile("mutants", derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])
settings.load_profile("mutants")
for name in vbs.__all__:  # loaded once, before any mutant
    getattr(vbs, name)
gc.disable()


def pytest_itemcollected(item):
    item._nodeid = item.nodeid  # which mutmut reads
"""


class WithoutDecorators(cst.CSTTransformer):
    """Writes ``@property def f`` as ``def f`` and ``f = property(f)``, as mutmut leaves decorated functions alone."""

    def leave_FunctionDef(self, original_node, updated_node):
        decorators = [decorator.decorator for decorator in updated_node.decorators]
        names = {decorator.value for decorator in decorators if isinstance(decorator, cst.Name)}
        if not decorators or names & {"abstractmethod", "classmethod", "staticmethod"}:
            return updated_node
        value = updated_node.name
        for decorator in reversed(decorators):
            value = cst.Call(decorator, [cst.Arg(value)])
        assignment = cst.Assign([cst.AssignTarget(updated_node.name)], value)
        return cst.FlattenSentinel([updated_node.with_changes(decorators=[]), cst.SimpleStatementLine([assignment])])


def prepare(modules: list[str]) -> None:
    """A copy of the package and its tests, with settings for mutmut."""
    shutil.rmtree(PLACE, ignore_errors=True)
    for name in (PACKAGE, "test"):
        shutil.copytree(ROOT / name, PLACE / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", PLACE)
    with (PLACE / "test" / "conftest.py").open("a") as file:
        file.write(IN_CONFTEST)
    for module in modules:
        path = PLACE / PACKAGE / module
        path.write_text(cst.parse_module(path.read_text()).visit(WithoutDecorators()).code)
    settings = {
        "source_paths": [PACKAGE],
        "only_mutate": [f"{PACKAGE}/{module}" for module in modules],
        "pytest_add_cli_args": NOT_QUICK,
        "pytest_add_cli_args_test_selection": QUICK,
        "process_isolation": "forkserver",  # torch has threads
        "timeout_constant": 5.0,
        "timeout_multiplier": 2.0,
    }
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items()]
    (PLACE / "pyproject.toml").write_text("[tool.mutmut]\n" + "".join(lines))


def mutmut(*arguments: str, **how) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", MUTMUT, *arguments], cwd=PLACE, check=True, **how)


def verdicts_on(module: str) -> dict[str, int | None]:
    """The exit code of the tests for each mutant of a module; 33 if there are none, None if they have not run."""
    path = PLACE / "mutants" / PACKAGE / f"{module}.meta"
    return json.loads(path.read_text())["exit_code_by_key"]


def drawn(module: str, at_most: int) -> list[str]:
    names = sorted(verdicts_on(module))
    return random.Random(0).sample(names, min(at_most, len(names)))


def is_noticed_by_processes(name: str) -> bool:
    environment = {**os.environ, "MUTANT_UNDER_TEST": name, "PYTHONPATH": str(PLACE / "mutants")}
    command = [sys.executable, "-m", "pytest", "-x", "-q", *WITH_PROCESSES]
    try:
        return subprocess.run(
            command, cwd=PLACE / "mutants", env=environment, capture_output=True, timeout=600
        ).returncode
    except subprocess.TimeoutExpired:
        return True


def difference(name: str) -> str:
    shown = mutmut("show", name, capture_output=True, text=True).stdout
    return "\n".join(line for line in shown.splitlines() if line[:1] in "+-" and line[:3] not in ("---", "+++"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", default=MODULES, help="all by default")
    parser.add_argument("--at-most", type=int, default=10**6, help="mutants of a module, drawn at random")
    flags = parser.parse_args()
    prepare(flags.modules)
    # with the name of no mutant, so that they are made and the tests of each are found
    subprocess.run([sys.executable, "-c", MUTMUT, "run", "--max-children", "1", "none"], cwd=PLACE)
    chosen = {module: drawn(module, flags.at_most) for module in flags.modules}
    mutmut("run", "--max-children", "1", *(name for names in chosen.values() for name in names))
    print(f"{'module':32} mutants  of  noticed")
    for module, names in chosen.items():
        codes = verdicts_on(module)
        survivors = [name for name in names if codes[name] in (0, 33) and not is_noticed_by_processes(name)]
        print(f"{module:32} {len(names):7} {len(codes):4} {len(names) - len(survivors):7}", flush=True)
        for name in survivors:
            print(f"    {name}\n{difference(name)}", flush=True)


if __name__ == "__main__":
    main()
