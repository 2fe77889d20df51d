"""The documents of the repository, their code blocks, and how to run them."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import traceback
import warnings
from importlib import import_module
from pathlib import Path

import forked
from xla_launcher import QUICKLY

from variable_batch_size.lab.command.main import main

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(document):
    return str(document.relative_to(ROOT))


def blocks(document, language):
    """The code blocks of a language in a document, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def output_of(command, folder):
    """The output of a command in a terminal of 80 columns; a single ``vbs`` does not start an interpreter."""
    environment = {"COLUMNS": "80", "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    if command.startswith("vbs ") and not set(command) & set("|&;<>$`\n"):
        return forked.run(_vbs, shlex.split(command)[1:], folder=folder, environment=environment).stdout
    python = shlex.quote(sys.executable)
    functions = f'vbs() {{ {python} -m variable_batch_size "$@"; }}; python() {{ {python} "$@"; }}; '
    shell = ["bash", "-c", functions + command]
    environment = {**os.environ, **environment}
    done = subprocess.run(
        shell, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    )
    return done.stdout


def _vbs(arguments):
    sys.stderr = sys.stdout
    sys.exit(main(arguments))


def commands_of(block):
    """The commands of a console block, each with the output below it."""
    for shown in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = shown.partition("\n")
        yield command, output


def run_as_scripts(sources, folder):
    """Run Python blocks as scripts; returns the traceback of each failed one by name.

    All in one process, which has imported torch and the frameworks; importing takes many seconds.
    """
    paths = [folder / f"{name}.py" for name in sources]
    for path, source in zip(paths, sources.values(), strict=True):
        path.write_text(source, encoding="utf-8")
    report = folder / "failures.json"
    # frameworks use XLA whenever torch_xla is installed, and download models
    frameworks = {"USE_TORCH_XLA": "0", "HF_HUB_OFFLINE": "1", "KERAS_BACKEND": "torch"}
    environment = {**frameworks, "XLA_FLAGS": QUICKLY, "PYTHONPATH": str(ROOT)}
    done = forked.run(_run_each, paths, report, folder=folder, environment=environment)
    assert done.returncode == 0, done.stderr
    failures = json.loads(report.read_text(encoding="utf-8"))
    return {Path(path).stem: failure for path, failure in failures.items()}


def _run_each(paths, report):
    import_module("lightning_runs")  # Lightning then imports no torch_xla
    warnings.simplefilter("error")
    # from Keras, when it converts a tensor to an array
    warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
    failures = {}
    for path in paths:
        try:
            runpy.run_path(str(path), run_name="__main__")
        except BaseException:
            failures[str(path)] = traceback.format_exc()
    report.write_text(json.dumps(failures), encoding="utf-8")
