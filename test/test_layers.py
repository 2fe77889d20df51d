"""The architecture: which folder may import which. A change of this table needs discussion."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import variable_batch_size

PACKAGE = Path(variable_batch_size.__file__).parent

# the folders that each folder may import; the files next to the folders (FOR_ALL) may be used by all
FOR_ALL = {"checks", "files", "plugins", "stability", "urls", "version"}
LAYERS = {
    "rules": set(),
    "policies": set(),
    "traces": set(),
    "schedules": {"traces", "policies"},
    "cores": set(),
    "data": {"cores", "traces", "policies", "schedules"},
    "optim": {"cores", "rules", "policies", "schedules", "data"},
    "runs": {"cores", "traces", "policies", "schedules", "data", "optim"},
    "integrations": {"cores", "traces", "policies", "schedules", "data", "optim", "runs"},
}
# what is not of the library: it does not import them
LAYERS |= {
    "lab/planning": {"rules", "traces", "policies", "schedules"},
    "lab/comparison": {*LAYERS["runs"], "rules", "runs", "lab/planning"},
    "lab/watch": {"runs"},
    "lab/command": {"traces", "rules", "policies", "schedules", "lab/planning", "lab/comparison", "lab/watch"},
    "experimental/cluster": {"policies", "lab/planning", "lab/command"},
    "experimental/recommend": {
        "traces",
        "schedules",
        "rules",
        "optim",
        "lab/planning",
        "lab/comparison",
        "lab/command",
    },
    "experimental/tpu": {"cores", "optim", "lab/planning", "lab/comparison", "lab/command"},
}
TIERS = ("lab", "experimental")
FRAMEWORKS = {"lightning", "pytorch_lightning", "accelerate", "transformers", "keras", "ray", "deepspeed"}
NAMED = {"optim/wrappers.py": {"accelerate", "deepspeed"}}  # classes that it finds or refuses, and does not import
WITHOUT_TORCH = {"rules", "policies", "traces", "schedules", "lab/planning", "lab/watch", "lab/command", *FOR_ALL}
WITHOUT_TORCH |= {"experimental/cluster"}

MODULES = sorted(
    path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.stem not in ("__init__", "__main__")
)
by_module = pytest.mark.parametrize("module", MODULES, ids=str)


def room_of(module):
    return room_in(module.with_suffix("").parts)


def room_in(parts):
    """The folder of a module; in the lab and in what is experimental, the folder within."""
    return "/".join(parts[: 1 + (parts[0] in TIERS)])


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Source(NamedTuple):
    """What is in a file: names that it imports or has as text."""

    has_docstring: bool
    imports: list[str]
    texts: list[str]  # of the form of a module's name


@cache
def source_of(module):
    return source_in((PACKAGE / module).read_text())


def source_in(text):
    tree = ast.parse(text)
    found = Source(bool(ast.get_docstring(tree)), [], [])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.imports.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports are not used: the table would not see them"
            found.imports.extend([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.Constant) and re.fullmatch(r"\w+(\.\w+)+", str(node.value)):
            found.texts.append(str(node.value))
    return found


def own_imports_of(module):
    source = source_of(module)
    found = [name.split(".")[1:] for name in source.imports if name.startswith("variable_batch_size.")]
    texts = [text.split(".")[1:] for text in source.texts if text.startswith("variable_batch_size.")]
    return [*found, *(parts for parts in texts if room_in(parts) in LAYERS)]  # for import_module


def test_the_table_names_every_folder():
    assert {room_of(module) for module in MODULES} <= LAYERS.keys() | FOR_ALL


@pytest.mark.parametrize("folder", LAYERS)
def test_folders_import_only_what_the_table_allows(folder):
    found = {room_in(parts) for module in MODULES if room_of(module) == folder for parts in own_imports_of(module)}
    assert found - FOR_ALL - {folder} == LAYERS[folder]


def test_the_library_imports_neither_the_lab_nor_what_is_experimental():
    for folder, others in LAYERS.items():
        tier = folder.partition("/")[0]
        above = {"lab": {"experimental"}, "experimental": {"experimental"}}.get(tier, set(TIERS))
        assert not above & {other.partition("/")[0] for other in others}, folder


def test_table_has_no_cycle():
    _order_of(LAYERS)


@pytest.mark.parametrize("folder", LAYERS)
def test_files_of_a_folder_have_no_import_cycle(folder):
    modules = [module for module in MODULES if room_of(module) == folder]
    names = {".".join(module.with_suffix("").parts) for module in modules}
    below = {}
    for module in modules:
        found = {".".join(parts) for parts in own_imports_of(module)}
        below[".".join(module.with_suffix("").parts)] = found & names
    _order_of(below)


def _order_of(below):
    done = set()
    while done != set(below):
        ready = {name for name, others in below.items() if name not in done and others <= done}
        assert ready, f"a circle among {set(below) - done}"
        done |= ready


@by_module
def test_common_files_and_pure_folders_do_not_import_torch(module):
    if room_of(module) in WITHOUT_TORCH:
        assert not {name for name in source_of(module).imports if name.split(".")[0] in ("torch", "torch_xla")}
    if room_of(module) in FOR_ALL:
        assert {parts[0] for parts in own_imports_of(module)} <= FOR_ALL


@by_module
def test_frameworks_are_imported_only_by_their_integration(module):
    if room_of(module) != "integrations" and module.as_posix() != "experimental/cluster/ray.py":
        assert not {name.split(".")[0] for name in source_of(module).imports} & FRAMEWORKS
        named = {text.split(".")[0] for text in source_of(module).texts}
        assert named & FRAMEWORKS == NAMED.get(module.as_posix(), set())


@by_module
def test_every_file_has_a_docstring_in_its_first_line(module):
    assert source_of(module).has_docstring


# arguments and attributes of our own classes that are typed Any, so that no picture shows the arrow; to become fewer
OUR_OBJECTS = {"optimizer", "sampler", "cursor", "accumulator", "follower", "schedule", "run", "source", "step"}
TYPED_ANY: dict[str, set[str]] = {
    "data/sampler.py": {"follower"},
    "data/shares.py": {"source"},
    "integrations/transformers.py": {"optimizer"},
    "lab/comparison/compare.py": {"run"},
    "lab/comparison/train.py": {"sampler"},
    "optim/consistency.py": {"optimizer"},
    "optim/live_steps.py": {"optimizer"},
    "optim/open_step.py": {"optimizer", "schedule"},
    "optim/probe.py": {"step"},
    "optim/steps.py": {"optimizer"},
    "optim/wrappers.py": {"optimizer"},
    "policies/hints.py": {"run"},
    "experimental/recommend/branching.py": {"run"},
}
# private names of another module of ours, likewise; test_private_names.py has those of other libraries
OTHERS_PRIVATE: dict[str, set[str]] = {
    "data/sampler.py": {"_runs", "_follow", "_end_open_epoch"},
    "optim/live_steps.py": {"_wrappers", "_follow_reassigned", "_runs"},
    "optim/loop_checks.py": {"_runs", "_checks"},
    "optim/open_step.py": {"_runs"},
}


def typed_any_in(text):
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.arg) and node.annotation is not None:
            name, type_ = node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign):
            name, type_ = getattr(node.target, "attr", getattr(node.target, "id", "")), node.annotation
        else:
            continue
        if "Any" in ast.unparse(type_).split(" | "):
            found.add(name.strip("_"))
    return found & OUR_OBJECTS


@by_module
def test_no_object_of_ours_is_typed_any(module):
    assert typed_any_in((PACKAGE / module).read_text()) == TYPED_ANY.get(module.as_posix(), set())


def test_typed_any_sees_arguments_and_attributes():
    assert typed_any_in("def f(optimizer: Any, size: Any, *, run: Any | None): self._cursor: Any = 1") == {
        "optimizer",
        "run",
        "cursor",
    }


def private_names_in(text):
    """The private names that a module defines, and those that it uses of other objects."""
    defined, used = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, (ast.AnnAssign, ast.Name)) and not isinstance(getattr(node, "ctx", None), ast.Load):
            target = node.target if isinstance(node, ast.AnnAssign) else node
            defined.add(getattr(target, "attr", getattr(target, "id", "")))
        elif isinstance(node, ast.Attribute):
            of_itself = ast.unparse(node.value) in ("self", "cls", "super()")
            (defined if of_itself and isinstance(node.ctx, ast.Store) else set() if of_itself else used).add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("variable_batch_size."):
            used |= {alias.name for alias in node.names}
    private = re.compile(r"_(?!_)\w+")
    return {name for name in defined if private.match(name)}, {name for name in used if private.match(name)}


@cache
def all_private_names():
    return set().union(*(private_names_in((PACKAGE / module).read_text())[0] for module in MODULES))


OF_OTHER_LIBRARIES = {
    "_asdict",
    "_buffers",
    "_fields",
    "_metadata",
    "_optimizers",
    "_replace",
    "_schedulers",
    "_version",
}  # and of ours


@by_module
def test_no_private_name_of_another_module_is_used(module):
    defined, used = private_names_in((PACKAGE / module).read_text())
    found = (used & all_private_names()) - defined - OF_OTHER_LIBRARIES
    assert found == OTHERS_PRIVATE.get(module.as_posix(), set())


def test_private_names_are_seen_in_attributes_and_imports():
    text = "from variable_batch_size.files import _write\nself._own = other._runs\ndef _f(): ..."
    assert private_names_in(text) == ({"_own", "_f"}, {"_runs", "_write"})


TESTS = Path(__file__).parent
MIRRORED = sorted({path for folder in LAYERS for path in (TESTS / folder).rglob("test_*.py")})


@pytest.mark.parametrize("test", MIRRORED, ids=lambda path: path.relative_to(TESTS).as_posix())
def test_file_of_tests_is_named_after_a_module_of_its_folder(test):
    name = test.stem.removeprefix("test_")
    modules = {path.stem for path in (PACKAGE / test.parent.relative_to(TESTS)).glob("*.py")}
    assert any(name == module or name.startswith(f"{module}_") for module in modules)


def loaded_by(statement):
    code = f"import sys\n{statement}\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_importing_the_package_imports_no_large_package_and_prints_nothing():
    loaded = loaded_by("import variable_batch_size")
    assert not {"torch", "torch_xla", "pandas", "numpy", "tqdm"} & set(loaded)


def test_using_every_public_name_loads_neither_torch_xla_nor_pandas():
    loaded = loaded_by("from variable_batch_size import *")
    assert "torch" in loaded
    assert not {"torch_xla", "pandas", "tensorboardX", "matplotlib", *FRAMEWORKS} & set(loaded)
    assert not {"dask", "distributed", "loky", "s3fs"} & set(loaded)


SUBMODULES = ("planning", "policies", "rules", "traces")


@pytest.mark.parametrize("place", ["", *SUBMODULES])
def test_every_public_name_has_a_docstring_is_listed_and_is_on_a_page(place):
    module = getattr(variable_batch_size, place) if place else variable_batch_size
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (PACKAGE.parent / "docs").rglob("*.md"))
    for name in module.__all__:
        assert name == "__version__" or (getattr(module, name).__doc__ and re.search(rf"\b{name}\b", pages)), name
    assert set(dir(module)) == set(module.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        module.nothing  # noqa: B018
