"""Plants faults in what decides numbers and files, one at a time, and shows those that no test notices.

python test/mutants.py --only rules/noise.py data/cursor.py

The faults are those of mutmut (https://mutmut.readthedocs.io): another operator, another number, an argument left out,
a branch always taken. Each is planted in a copy of the package, and a fork of this process, which has torch loaded,
runs the tests that run the faulty line, the fastest first, until one fails. What was noticed is remembered under
`build/`, so that the program may be stopped and called again; what was not noticed is tried again.
`equivalent_mutants.txt` names faults that are none.
"""

import argparse
import compileall
import difflib
import gc
import hashlib
import importlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import libcst as cst
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import integers
from libcst.metadata import MetadataWrapper
from mutmut.mutation.file_mutation import MutationVisitor, deep_replace
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode
from tests_of_lines import Tests, lines_run_with

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build" / "mutants"
PACKAGE = "variable_batch_size"
RESULTS = PLACE / "results.json"
EQUIVALENT = Path(__file__).parent / "equivalent_mutants.txt"

OF_RULES = [f"test/rules/test_{name}.py" for name in ("rule", "adam", "adascale_rule", "surge", "noise", "registry")]
OF_RULES += [f"test/training/test_{name}.py" for name in ("settings", "factors", "adascale")]
OF_TRAINING = [f"test/training/test_{name}.py" for name in ("state", "optimizer", "adascale", "gradients")]
OF_GRADIENTS = [f"test/training/test_{name}.py" for name in ("gradients_over_cores", "flat_memory", "weights")]
OF_GRADIENTS += OF_TRAINING
OF_EXACT = [f"test/training/test_exact_{name}.py" for name in ("units", "gradients", "training")]
OF_RUNS = [f"test/runs/test_{name}.py" for name in ("going_on", "checkpoint", "fork", "metrics")]
OF_SCHEDULES = [f"test/schedules/test_{name}.py" for name in ("schedule", "past", "live")]
OF_SETTINGS = ["test/training/test_settings.py", "test/training/test_together.py"]
OF_OPTIMIZER = [*OF_TRAINING, *(f"test/training/test_{name}.py" for name in ("weights", "closures", "minibatch_seeds"))]
OF_OPTIMIZER += [f"test/training/test_{name}.py" for name in ("deciding", "together", "buffers", "sameness")]
OF_OPTIMIZER += [f"test/training/test_{name}.py" for name in ("scheduled", "process_group", "unsupported")]
OF_OPTIMIZER += ["test/training/test_sharded_gradients.py", "test/promises/test_sharded_models_train_as_plain_ones.py"]
TESTS = {
    "rules/noise.py": ["test/rules/test_noise.py", "test/rules/test_noise_meter.py", *OF_RULES],
    "rules/transition.py": OF_RULES,
    "rules/adam.py": ["test/rules/test_adam.py", *OF_RULES],
    "rules/adascale.py": ["test/rules/test_adascale_rule.py", *OF_RULES],
    "rules/scaling.py": OF_RULES,
    "rules/rule.py": OF_RULES,
    "rules/registry.py": ["test/rules/test_registry.py", *OF_RULES],
    "rules/per_optimizer.py": ["test/rules/test_each.py", *OF_SETTINGS],
    "data/cursor.py": ["test/training/test_position.py", *OF_TRAINING, "test/training/test_deciding.py"],
    "optim/optimizer.py": ["test/training/test_factors.py", "test/training/test_scheduled.py", *OF_OPTIMIZER],
    "optim/hyperparameters.py": [*OF_SETTINGS, *OF_TRAINING],
    "optim/buffers.py": ["test/training/test_buffers.py", *OF_TRAINING],
    "optim/token_weights.py": ["test/training/test_weights.py", *OF_GRADIENTS],
    "optim/lr_scheduler.py": ["test/training/test_progress.py"],
    "optim/gradients/accumulator.py": OF_GRADIENTS,
    "optim/gradients/buckets.py": OF_GRADIENTS,
    "optim/gradients/gradient_buckets.py": OF_GRADIENTS,
    "optim/gradients/norms.py": OF_GRADIENTS,
    "optim/gradients/fixed_point.py": OF_EXACT,
    "runs/state_file.py": ["test/runs/test_storage.py", "test/runs/test_checkpoint.py"],
    "runs/checkpoint.py": OF_RUNS,
    "schedules/batch_sizes.py": ["test/schedules/test_batch_sizes.py", *OF_SCHEDULES],
    "schedules/schedule.py": OF_SCHEDULES,
}
"""Where the tests of each file are."""

SLOW = ["at_scale_16", "unbiased", "compiled", "frozen_when_it_is_added"]
NOT_SLOW = ["-m", "not xla", "-k", " and ".join(f"not {name}" for name in SLOW)]
USED_BY_TESTS = ["torch._dynamo", "pandas", "sklearn.datasets"]  # loaded once, not in every fork
NOTICED, SURVIVED = "noticed", "survived"


class Visitor(MutationVisitor):
    """Also looks into decorated functions, which need no care where a whole file is replaced."""

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        return not isinstance(node, cst.FunctionDef) and super()._skip_node_and_children(node)


def mutants_of(source: str) -> list[str]:
    """The source with a fault in it, for each fault there is."""
    wrapper = MetadataWrapper(cst.parse_module(source))
    visitor = Visitor(mutation_operators, IgnoredCode(set(), set(), set()))
    module = wrapper.visit(visitor)
    made = [deep_replace(module, found.original_node, found.mutated_node).code for found in visitor.mutations]
    return [mutant for mutant in dict.fromkeys(made) if mutant != source]


def change_in(source: str, mutant: str) -> str:
    """The lines that a fault takes away, and those in their place."""
    lines = list(difflib.unified_diff(source.splitlines(), mutant.splitlines(), n=0, lineterm=""))[2:]
    return "\n".join(f"{line[0]} {line[1:].strip()}" for line in lines if line[0] in "+-")


def equivalents() -> set[tuple[str, str]]:
    """The files and changes that are named as no fault."""
    blocks = EQUIVALENT.read_text(encoding="utf-8").strip().split("\n\n")
    parts = [block.split("\n", 1) for block in blocks if not block.startswith("#")]
    return {(head.split(":")[0], change) for head, change in parts}


def is_equivalent(module: str, change: str, named: set[tuple[str, str]]) -> bool:
    """Whether a fault is named as none, or is only less strict about lengths that are equal."""
    before, after = (
        "".join(re.sub(r", *(strict=\w+)?\)", ")", line[2:]) for line in change.splitlines() if line[0] == sign)
        for sign in "-+"
    )
    return before == after or (module, change) in named


def prepare() -> None:
    """A copy of the package, compiled, and of its tests, which this process and those that it starts use."""
    for name in (PACKAGE, "test"):
        shutil.rmtree(PLACE / name, ignore_errors=True)
        shutil.copytree(ROOT / name, PLACE / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", PLACE)
    compileall.compile_dir(PLACE / PACKAGE, quiet=1)
    sys.dont_write_bytecode = True  # two faults may have the same size in the same second
    sys.path.insert(0, str(PLACE))
    paths = os.pathsep.join([str(PLACE), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.update(PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=paths, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    os.chdir(PLACE)
    torch.set_num_threads(1)
    for name in USED_BY_TESTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else a collection in a fork would copy all that is loaded
    repeatable = {"derandomize": True, "database": None, "phases": [Phase.explicit, Phase.generate]}
    patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # a busy machine is no fault
    settings.register_profile("mutants", **repeatable, **patient)
    settings.load_profile("mutants")
    given(integers())(lambda number: None)()  # loads what every first use of hypothesis would


def try_all(module: str, results: dict[str, str], named: set[tuple[str, str]], deadline: float) -> list[str]:
    """Try the faults of a file that no test has noticed yet, print their row, and return the changes that survive."""
    source = (PLACE / PACKAGE / module).read_text(encoding="utf-8")
    mutants = {hashlib.sha256(mutant.encode()).hexdigest()[:16]: mutant for mutant in mutants_of(source)}
    changes = {key: change_in(source, mutant) for key, mutant in mutants.items()}
    same = {key for key, change in changes.items() if is_equivalent(module, change, named)}
    left = [key for key in mutants if key not in same and results.get(key) != NOTICED]
    if left and time.monotonic() < deadline:
        with planting(module) as is_noticed:
            for key in left:
                if time.monotonic() < deadline:
                    results[key] = NOTICED if is_noticed(mutants[key]) else SURVIVED
                    RESULTS.write_text(json.dumps(results), encoding="utf-8")
    survivors = [key for key in left if results.get(key) == SURVIVED]
    untried = sum(key not in results for key in left)
    num_noticed = len(mutants) - len(same) - len(survivors) - untried
    row = [len(mutants), num_noticed, len(same), len(survivors), untried]
    print(f"| `{module}` | {' | '.join(map(str, row))} |", flush=True)
    return [f"{module}:\n{changes[key]}" for key in survivors]


@contextmanager
def planting(module: str) -> Iterator[Callable[[str], bool]]:
    """Within, a file may be replaced by another source, to see whether a test notices it."""
    path = PLACE / PACKAGE / module
    source = path.read_text(encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()
    tests = Tests(path, [*dict.fromkeys(TESTS[module]), *NOT_SLOW])

    def is_noticed(mutant: str) -> bool:
        path.write_text(mutant, encoding="utf-8")
        return tests.notice(lines_run_with(source, mutant))

    try:
        yield is_noticed
    finally:
        path.write_text(source, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=TESTS, default=list(TESTS), metavar="FILE", help="all by default")
    parser.add_argument("--minutes", type=float, default=1e6, help="after which no further fault is tried")
    flags = parser.parse_args()
    prepare()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    named, deadline = equivalents(), time.monotonic() + 60 * flags.minutes
    print("| file | faults | noticed | equivalent | survived | not tried |\n|---|---:|---:|---:|---:|---:|", flush=True)
    survivors = [survivor for module in flags.only for survivor in try_all(module, results, named, deadline)]
    print("", *survivors, sep="\n\n")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
