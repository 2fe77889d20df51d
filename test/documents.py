"""The documents of the repository, the code blocks in them, and how those are run."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_RUN_EACH = "import runpy, sys\nfor path in sys.argv[1:]:\n    runpy.run_path(path, run_name='__main__')\n"


def name_of(document):
    return str(document.relative_to(ROOT))


def blocks(document, language):
    """The code blocks of a language in a document, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def output_of(command, folder):
    """What a terminal of 80 columns shows after a command."""
    python = shlex.quote(sys.executable)
    functions = f'vbs() {{ {python} -m variable_batch_size "$@"; }}; python() {{ {python} "$@"; }}; '
    environment = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    shell = ["bash", "-c", functions + command]
    done = subprocess.run(
        shell, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    )
    return done.stdout


def commands_of(block):
    """The commands of a console block, each with the output below it."""
    for shown in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = shown.partition("\n")
        yield command, output


def run_as_scripts(sources, folder):
    """Run Python blocks as scripts with names of their own, in one process, as importing torch takes seconds."""
    paths = [folder / f"block_{number}.py" for number in range(1, len(sources) + 1)]
    for path, source in zip(paths, sources, strict=True):
        path.write_text(source, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", _RUN_EACH, *map(str, paths)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
