"""Every example runs: the docstrings of pure modules, and the code blocks of the README and the pages."""

import configparser
import csv
import doctest
import importlib
import inspect
import re
import runpy
import shlex
import shutil
from statistics import mean

import forked
import pytest
from documents import DOCUMENTS, ROOT, blocks, commands_of, name_of, output_of, run_as_scripts

import variable_batch_size as vbs
from variable_batch_size.lab.command.main import main, module_of
from variable_batch_size.optim.optimizer import Options

README = ROOT / "README.md"
FRONT_PAGE = ROOT / "docs" / "index.md"
PAGES = [document for document in DOCUMENTS if document.is_relative_to(ROOT / "docs")]

WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "variable_batch_size").rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_in_docstrings_run(module):
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted > 0
    assert results.failed == 0


def documents_with(language):
    found = [document for document in DOCUMENTS if blocks(document, language)]
    return pytest.mark.parametrize("document", found, ids=name_of)


def folder_with_traces(folder):
    """A folder with the traces of the repository."""
    shutil.copytree(ROOT / "traces", folder / "traces")
    return folder


@pytest.fixture
def folder(tmp_path):
    return folder_with_traces(tmp_path)


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """The tracebacks of all failed Python blocks, by document and number."""
    sources = {
        f"{name_of(document).replace('/', '_')}_{number}": block
        for document in DOCUMENTS
        for number, block in enumerate(blocks(document, "python"), start=1)
    }
    return run_as_scripts(sources, folder_with_traces(tmp_path_factory.mktemp("blocks")))


@documents_with("python")
def test_the_python_blocks_run_as_scripts(document, failures):
    own = [text for name, text in failures.items() if name.startswith(name_of(document).replace("/", "_"))]
    assert not own, "\n".join(own)


@documents_with("console")
def test_commands_print_the_documented_output(document, folder):
    for block in blocks(document, "console"):
        for command, output in commands_of(block):
            assert output_of(command, folder) == output


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_block_has_a_known_language_or_none(document):
    assert set(languages_of(document)) <= {"python", "console", "diff", "sh", "toml", ""}, (
        "a language that no test knows"
    )


def test_the_readme_is_a_front_page():
    text = README.read_text(encoding="utf-8")
    assert text.count("\n") <= 150
    assert "make demo" in text
    assert "make test" in text
    assert any("optimizer.step()" in block and "vbs.DataLoader" in block for block in blocks(README, "python"))


def sides(diff):
    """The scripts before and after a diff."""
    lines = diff.splitlines()
    return ["\n".join(line[1:] for line in lines if line[:1] != sign) for sign in "+-"]


def test_the_loop_of_the_front_page_runs_before_and_after_its_diff(folder):
    (diff,) = blocks(FRONT_PAGE, "diff")
    before, after = sides(diff)
    updates = re.search(r"updates: (\d+) times instead of (\d+)", FRONT_PAGE.read_text(encoding="utf-8"))
    assert not run_as_scripts(
        {
            "before": f"{before}\nassert (epoch + 1) * len(loader) == {updates[2]}\n",
            "after": f"{after}\nassert optimizer.steps_done == {updates[1]}\n",
        },
        folder,
    )
    assert "import variable_batch_size" not in before
    assert "zero_grad" in before


NUM_SEEDS = 10  # of the figure of the front page


def runs_of(path):
    """The runs of examples/growing_batch.py by trace and seed: updates, and the accuracy in percent."""
    with path.open(encoding="utf-8") as file:
        rows = csv.DictReader(file)
        return {(row["trace"], int(row["seed"])): (int(row["updates"]), float(row["accuracy"])) for row in rows}


def test_figure_and_text_of_the_front_page_match_its_runs():
    runs = runs_of(ROOT / "docs" / "growing.csv")
    shown = {}
    for trace in ("constant", "growing"):
        updates, accuracies = zip(*(runs[trace, seed] for seed in range(NUM_SEEDS)), strict=True)
        assert len(set(updates)) == 1
        shown[trace] = (f"{updates[0]:,}", f"{mean(accuracies):.1f} %")
    assert len(runs) == 2 * NUM_SEEDS
    for name in ("growing.svg", "growing-dark.svg"):
        figure = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert f"mean of {NUM_SEEDS} seeds" in figure
        for trace, (updates, accuracy) in shown.items():
            assert f"{trace}: {updates} updates, {accuracy}" in figure
    for document in (FRONT_PAGE, README):
        text = " ".join(document.read_text(encoding="utf-8").split())
        assert f"mean of {NUM_SEEDS} seeds" in text
        assert f"{shown['growing'][0]} updates reach {shown['growing'][1]}" in text
        assert f"as do {shown['constant'][0]} updates at a constant" in text
    assert shown["growing"][1] == shown["constant"][1]


@pytest.mark.parametrize("num_seeds", [1, pytest.param(NUM_SEEDS, marks=pytest.mark.long)])
def test_the_command_on_the_front_page_makes_the_runs_of_its_figure(num_seeds, tmp_path):
    (command,) = re.findall(r"`(python examples/growing_batch\.py .+)`", FRONT_PAGE.read_text(encoding="utf-8"))
    (tmp_path / "docs").mkdir()
    _, script, *arguments = shlex.split(command)
    done = forked.run_script(ROOT / script, *arguments, "--seeds", num_seeds, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert re.findall(r"^(\w+) +([\d,]+) updates", printed, re.MULTILINE) == [("constant", "1,920"), ("growing", "380")]
    made, expected = runs_of(tmp_path / "docs" / "growing.csv"), runs_of(ROOT / "docs" / "growing.csv")
    assert len(made) == 2 * num_seeds
    for run, (updates, accuracy) in made.items():
        assert updates == expected[run][0]
        assert accuracy == pytest.approx(expected[run][1], abs=1)  # 5 of 517 images: another CPU rounds differently
    for name in ("growing.svg", "growing-dark.svg"):
        assert f"mean of {num_seeds} seeds" in (tmp_path / "docs" / name).read_text(encoding="utf-8")


def test_each_seed_of_the_front_page_figure_is_a_different_run(monkeypatch):
    train = runpy.run_path(str(ROOT / "examples" / "growing_batch.py"))["train"]
    monkeypatch.setitem(train.__globals__, "NUM_EPOCHS", 1)
    assert len({train(16, seed)[-1].accuracy for seed in (0, 1, 2)}) > 1


def test_readme_and_rules_page_list_every_rule():
    for document in (README, ROOT / "docs" / "rules.md"):
        rows = re.findall(r'^\| `"(\w+)', document.read_text(encoding="utf-8"), re.MULTILINE)
        assert sorted(rows) == sorted(vbs.rules.RULES)


def rows_of(page, heading):
    """What the first columns of the tables below a heading name in code."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)", cell)}


def test_the_policies_page_lists_every_policy():
    classes = {policy.__name__ for policy in vbs.policies.POLICIES.values()}
    assert {name for name in rows_of("policies.md", "Available policies") if name[0].isupper()} == classes


def test_the_options_page_lists_every_option_which_all_optimizers_accept():
    arguments = inspect.signature(vbs.Optimizer).parameters.keys()
    assert rows_of("options.md", "Options") == arguments
    assert arguments - {"inner", "sampler", "rule", "ref_batchsize"} == Options.__annotations__.keys()


def test_the_rules_page_names_the_optimizer_of_every_rule():
    text = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    optimizers = {name for name in vbs.__all__ if name.endswith("Optimizer")} - {"Optimizer", "CustomOptimizer"}
    assert set(re.findall(r"(\w+Optimizer)`", text)) == optimizers
    assert len(optimizers) == 8
    assert "Eight rules also have an optimizer of their own" in text


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_file_named_in_a_document_exists(document):
    text = document.read_text(encoding="utf-8")
    for name in re.findall(r"`([A-Za-z_.]+/[A-Za-z_./-]+\.(?:py|csv|md|sh|cff))`", text):
        assert (ROOT / name).exists() or (ROOT / "variable_batch_size" / name).exists(), name
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (document.parent / link).exists(), link


# pages whose first block is not Python or a command with its output, with where else it is run
FIRST_BLOCK_RUNS_IN = {
    "docs/clusters.md": "test/lab/comparison/test_compare_executors.py",
    "docs/comparing.md": "test/lab/comparison/test_compare.py",
    "docs/extending.md": "test/test_plugins.py",  # the entry points
    "docs/frameworks/ray.md": "test/test_ray_train.py",
    "docs/getting-started.md": "test/test_first_minutes.py",  # make demo
    "docs/forecast.md": "test/lab/planning/test_forecast.py",
    "docs/house.md": "test/test_documentation.py",  # the folders
    "docs/index.md": "test/test_documentation.py",  # pip; the block after it is the diff
    "docs/language-models.md": "test/test_language_model.py",
    "docs/nanogpt.md": "test/test_language_model.py",
    "docs/recommend.md": "test/experimental/recommend/test_command_recommend.py",
    "docs/simulate.md": "test/lab/command/test_planning_simulations.py",
    "docs/spot.md": "test/test_documentation.py",  # the shell loop
    "docs/tpus.md": "test/experimental/tpu/test_tpu_compiler.py",  # an environment of its own
    "docs/traces.md": "test/test_documentation.py",  # the file
    "docs/tutorial.md": "test/test_tutorial.py",  # pip; then the differences
    "docs/versions.md": "test/test_release.py",  # pip
    "docs/watch.md": "test/lab/command/test_watch_command.py",
}


def languages_of(page):
    return re.findall(r"^```(\S*)\n.*?^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_first_block_of_every_page_runs_here_or_in_a_named_test():
    first = {name_of(page): languages_of(page)[0] for page in PAGES if languages_of(page)}
    others = {name for name, language in first.items() if language not in ("python", "console")}
    assert others == set(FIRST_BLOCK_RUNS_IN)
    assert all((ROOT / test).exists() for test in FIRST_BLOCK_RUNS_IN.values())


def test_the_shell_loop_restarts_a_run_until_it_is_complete(tmp_path):
    loop = blocks(ROOT / "docs" / "spot.md", "sh")[0]
    source = "import pathlib, sys\nstarts = pathlib.Path('starts')\nstarts.open('a').write('x')\n"
    (tmp_path / "train.py").write_text(f"{source}sys.exit(0 if len(starts.read_text()) == 3 else {vbs.EXIT_STOPPED})\n")
    assert output_of(loop, tmp_path) == ""
    assert (tmp_path / "starts").read_text() == "xxx"


def test_the_file_on_the_page_about_traces_is_a_trace(tmp_path):
    (tmp_path / "trace.csv").write_text(blocks(ROOT / "docs" / "traces.md", "")[0])
    assert list(vbs.Trace.read(tmp_path / "trace.csv").sizes) == [64, 96, 32]


def test_the_code_layout_lists_every_folder():
    listed = re.findall(r"^ {2,4}(\w+)/ ", blocks(ROOT / "docs" / "house.md", "")[0], re.MULTILINE)
    package = ROOT / "variable_batch_size"
    folders = [
        *package.glob("*/__init__.py"),
        *package.glob("lab/*/__init__.py"),
        *package.glob("experimental/*/__init__.py"),
    ]
    assert sorted(listed) == sorted(path.parent.name for path in folders)


def shown_vbs_commands():
    """The arguments of the vbs commands that pages show without their output."""
    for document in DOCUMENTS:
        for block in blocks(document, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("vbs "):
                    yield pytest.param(shlex.split(line, comments=True)[1:], id=f"{name_of(document)}: {line}")


@pytest.mark.parametrize("arguments", list(shown_vbs_commands()))
def test_a_command_without_output_has_valid_options(arguments, monkeypatch):
    name, ran = arguments[0], []
    monkeypatch.setattr(module_of(name), f"run_{name}", ran.append)
    assert main(arguments) == 0
    assert len(ran) == 1


SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg", encoding="utf-8")
INSTALLED = set(re.findall(r"^[\w-]+", SETUP["options"]["install_requires"], re.MULTILINE))
# the packages of each extra that users install
EXTRAS = {
    name: set(re.findall(r"^[\w-]+", packages, re.MULTILINE)) - INSTALLED
    for name, packages in SETUP["options.extras_require"].items()
    if name not in ("docs", "test")
}
SHOWS_HOW_TO_INSTALL = re.compile(
    r"^# .+\n\n(?:\[Install\]\((?:\.\./)?getting-started\.md#install\): `|```sh\n)"
    r"pip install (?:variable-batch-size|'variable-batch-size\[[a-z0-9,]+\]')(?:`| scikit-learn)?\n",
    re.MULTILINE,
)


@pytest.mark.parametrize("page", [page for page in PAGES if set(languages_of(page)) - {""}], ids=name_of)
def test_a_page_with_code_begins_with_how_to_install_what_it_needs(page):
    text = page.read_text(encoding="utf-8")
    assert SHOWS_HOW_TO_INSTALL.search(text)
    named = {extra for found in re.findall(r"variable-batch-size\[([a-z0-9,]+)\]", text) for extra in found.split(",")}
    assert named <= EXTRAS.keys()
    for block in blocks(page, "python"):
        for package in re.findall(r"^ *(?:from|import) (\w+)", block, re.MULTILINE):
            extras = {extra for extra, packages in EXTRAS.items() if package in packages}
            assert not extras or extras & named, f"{package} is in the extras {extras}"


def test_the_citation_has_the_version():
    assert f"\nversion: {vbs.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
