"""Mutation testing: inject one fault at a time, and print those that no test detects.

python tools/mutants.py --only rules/noise.py data/cursor.py

The mutants are those of mutmut (https://mutmut.readthedocs.io): another operator, another number, an omitted argument,
a branch that is always taken. Each is written to a copy of the package. A fork of this process, which has imported
torch, runs the tests that execute the changed line, the fastest first, until one fails. Killed mutants are saved under
`build/`, so the program can be stopped and resumed; survivors are tried again. `equivalent_mutants.txt` lists
equivalent mutants.
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

OF_RULES = [
    "test/rules/test_rule.py",
    "test/rules/test_adam.py",
    "test/rules/test_adascale.py",
    "test/rules/test_adascale_surge.py",
    "test/rules/test_noise.py",
    "test/rules/test_registry.py",
]
OF_RULES += [
    "test/optim/test_hyperparameters.py",
    "test/optim/test_optimizer_factors.py",
    "test/optim/test_optimizer_adascale.py",
]
OF_TRAINING = [
    "test/optim/test_optimizer_state.py",
    "test/optim/test_optimizer.py",
    "test/optim/test_optimizer_adascale.py",
    "test/optim/gradients/test_accumulator.py",
]
OF_GRADIENTS = [
    "test/optim/gradients/test_accumulator_over_cores.py",
    "test/optim/gradients/test_buckets.py",
    "test/optim/test_token_weights.py",
]
OF_GRADIENTS += OF_TRAINING
OF_EXACT = [
    "test/optim/gradients/test_fixed_point_scale.py",
    "test/optim/gradients/test_fixed_point.py",
    "test/optim/gradients/test_fixed_point_training.py",
]
OF_RUNS = [
    "test/runs/test_checkpoint_resumed.py",
    "test/runs/test_checkpoint.py",
    "test/runs/test_checkpoint_forked_runs.py",
    "test/runs/test_log_metrics.py",
]
OF_SCHEDULES = [
    "test/schedules/test_schedule_batch_sizes.py",
    "test/schedules/test_schedule.py",
    "test/schedules/test_schedule_history.py",
    "test/schedules/test_policy_schedule.py",
]
OF_SETTINGS = ["test/optim/test_hyperparameters.py", "test/optim/test_proxy.py"]
OF_OPTIMIZER = [
    *OF_TRAINING,
    "test/optim/test_token_weights.py",
    "test/optim/test_optimizer_closures.py",
    "test/optim/test_seeding.py",
]
OF_OPTIMIZER += [
    "test/optim/test_policy_driver.py",
    "test/optim/test_proxy.py",
    "test/optim/test_buffers.py",
    "test/optim/test_consistency.py",
]
OF_OPTIMIZER += [
    "test/optim/test_optimizer_reading.py",
    "test/optim/test_consistency_process_group.py",
    "test/optim/test_wrappers_unsupported.py",
]
OF_OPTIMIZER += ["test/optim/gradients/test_fsdp.py", "test/promises/test_sharded_models_train_as_plain_ones.py"]
TESTS = {
    "rules/noise.py": ["test/rules/test_noise.py", "test/rules/test_noise_meter.py", *OF_RULES],
    "rules/transition.py": OF_RULES,
    "rules/adam.py": ["test/rules/test_adam.py", *OF_RULES],
    "rules/adascale.py": ["test/rules/test_adascale.py", *OF_RULES],
    "rules/scaling.py": OF_RULES,
    "rules/rule.py": OF_RULES,
    "rules/registry.py": ["test/rules/test_registry.py", *OF_RULES],
    "rules/per_optimizer.py": ["test/rules/test_per_optimizer.py", *OF_SETTINGS],
    "data/cursor.py": ["test/data/test_cursor.py", *OF_TRAINING, "test/optim/test_policy_driver.py"],
    "optim/optimizer.py": [
        "test/optim/test_optimizer_factors.py",
        "test/optim/test_optimizer_reading.py",
        *OF_OPTIMIZER,
    ],
    "optim/steps.py": OF_OPTIMIZER,
    "optim/loop_checks.py": ["test/optim/test_optimizer_two_models.py", *OF_OPTIMIZER],
    "optim/hyperparameters.py": [*OF_SETTINGS, *OF_TRAINING],
    "optim/buffers.py": ["test/optim/test_buffers.py", *OF_TRAINING],
    "optim/token_weights.py": ["test/optim/test_token_weights.py", *OF_GRADIENTS],
    "optim/lr_scheduler.py": ["test/optim/test_lr_scheduler.py"],
    "optim/gradients/accumulator.py": OF_GRADIENTS,
    "optim/gradients/buckets.py": OF_GRADIENTS,
    "optim/gradients/gradient_buckets.py": OF_GRADIENTS,
    "optim/gradients/norms.py": OF_GRADIENTS,
    "optim/gradients/fixed_point.py": OF_EXACT,
    "runs/checksums.py": ["test/runs/test_checksums.py", "test/runs/test_checkpoint_damaged.py"],
    "runs/state_file.py": ["test/runs/test_state_file.py", "test/runs/test_checkpoint.py"],
    "runs/checkpoint.py": OF_RUNS,
    "schedules/schedule.py": OF_SCHEDULES,
}
"""The tests of each file."""

SLOW = ["at_scale_16", "unbiased", "compiled", "frozen_when_it_is_added"]
NOT_SLOW = ["-m", "not xla", "-k", " and ".join(f"not {name}" for name in SLOW)]
USED_BY_TESTS = ["torch._dynamo", "pandas", "sklearn.datasets"]  # imported once, not in every fork
NOTICED, SURVIVED = "noticed", "survived"


class Visitor(MutationVisitor):
    """Also visits decorated functions, which need no special handling if an entire file is replaced."""

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        return not isinstance(node, cst.FunctionDef) and super()._skip_node_and_children(node)


def mutants_of(source: str) -> list[str]:
    """The source with each possible fault."""
    wrapper = MetadataWrapper(cst.parse_module(source))
    visitor = Visitor(mutation_operators, IgnoredCode(set(), set(), set()))
    module = wrapper.visit(visitor)
    made = [deep_replace(module, found.original_node, found.mutated_node).code for found in visitor.mutations]
    return [mutant for mutant in dict.fromkeys(made) if mutant != source]


def change_in(source: str, mutant: str) -> str:
    """The lines that a fault removes, and their replacement."""
    lines = list(difflib.unified_diff(source.splitlines(), mutant.splitlines(), n=0, lineterm=""))[2:]
    return "\n".join(f"{line[0]} {line[1:].strip()}" for line in lines if line[0] in "+-")


def equivalents() -> set[tuple[str, str]]:
    """The files and changes that are listed as equivalent."""
    blocks = EQUIVALENT.read_text(encoding="utf-8").strip().split("\n\n")
    parts = [block.split("\n", 1) for block in blocks if not block.startswith("#")]
    return {(head.split(":")[0], change) for head, change in parts}


def is_equivalent(module: str, change: str, named: set[tuple[str, str]]) -> bool:
    """Whether a fault is listed as equivalent, or only relaxes the check of equal lengths."""
    before, after = (
        "".join(re.sub(r", *(strict=\w+)?\)", ")", line[2:]) for line in change.splitlines() if line[0] == sign)
        for sign in "-+"
    )
    return before == after or (module, change) in named


def prepare() -> None:
    """A compiled copy of the package and its tests, which this process and its children use."""
    for name in (PACKAGE, "test", "tools"):
        shutil.rmtree(PLACE / name, ignore_errors=True)
        shutil.copytree(ROOT / name, PLACE / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", PLACE)
    compileall.compile_dir(PLACE / PACKAGE, quiet=1)
    sys.dont_write_bytecode = True  # two mutants may have the same size and modification time
    sys.path.insert(0, str(PLACE))
    paths = os.pathsep.join([str(PLACE), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.update(PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=paths, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    os.chdir(PLACE)
    torch.set_num_threads(1)
    for name in USED_BY_TESTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise a garbage collection in a fork would copy all memory
    repeatable = {"derandomize": True, "database": None, "phases": [Phase.explicit, Phase.generate]}
    patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # a busy machine is not a fault
    settings.register_profile("mutants", **repeatable, **patient)
    settings.load_profile("mutants")
    given(integers())(lambda number: None)()  # imports what the first use of hypothesis would import


def try_all(module: str, results: dict[str, str], named: set[tuple[str, str]], deadline: float) -> list[str]:
    """Try the mutants of a file that were not killed yet, print a row, and return the surviving changes."""
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
    """Within this context, a file can be replaced by another source, to check whether a test detects it."""
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
