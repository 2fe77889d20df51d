"""Build a release, check its metadata, and try it in clean environments.

python tools/release.py --out DIRECTORY --repository https://example.org/owner/name
python tools/release.py --out DIRECTORY --try python3.10:2.4 --try python3.13:newest --sdist python3.11:2.9

The files are those of the last commit. With a repository, links and pictures of the README get absolute addresses at
the tag of this version, as an index has no other files. The wheel is installed by its name, from an index in the
directory; its dependencies come from the usual index. Needs git, and the network for packages.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)\s]+)\)")

TRIED = """
import tempfile, torch, variable_batch_size as vbs
from torch import nn

def train(directory, num_epochs):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(256, 4), torch.randint(0, 2, (256,)))
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    loader = vbs.DataLoader(data, trace="0:16 8:32 12:64", minibatch_size=8)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = vbs.Optimizer(inner, loader, rule="adascale", ref_batchsize=16, model=model)
    optimizer.attach(vbs.Checkpoint(directory, model=model, optimizer=optimizer))
    for _ in optimizer.epochs(num_epochs):
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return optimizer.steps_done, [p.detach() for p in model.parameters()]

with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
    train(one, 1)
    steps, resumed = train(one, 3)
    assert all(map(torch.equal, resumed, train(two, 3)[1]))
print(vbs.__version__, torch.__version__, steps, "steps")
"""


def run(*command: object, **options: object) -> str:
    """The output of a command; its error ends the program."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return str(done.stdout)


def absolute_links(text: str, repository: str, version: str) -> str:
    """The text of a README with the addresses of the repository, at the tag of a version, instead of relative links."""

    def absolute(found: re.Match[str]) -> str:
        is_picture, label, target = found.groups()
        kind = "raw" if is_picture else "blob"
        label = absolute_links(label, repository, version)
        return f"{is_picture}[{label}]({repository}/{kind}/v{version}/{target.removeprefix('./')})"

    return _LINK.sub(absolute, text)


def project_urls(repository: str, version: str) -> str:
    """The addresses of a project, for the [metadata] of setup.cfg."""
    addresses = {"Homepage": repository, "Documentation": f"{repository}/tree/v{version}/docs"}
    addresses |= {"Changelog": f"{repository}/blob/v{version}/CHANGELOG.md", "Issues": f"{repository}/issues"}
    return "project_urls =\n" + "".join(f"    {name} = {address}\n" for name, address in addresses.items())


def version_of(source: Path) -> str:
    found = re.search(r'__version__ = "(.+)"', (source / "variable_batch_size" / "version.py").read_text())
    assert found is not None
    return found[1]


def build(source: Path, out: Path, repository: str | None, python: Path) -> tuple[Path, Path]:
    """The wheel and the sdist of a source directory, checked with twine; its citation, with cffconvert."""
    if repository is not None:
        version, readme, setup = version_of(source), source / "README.md", source / "setup.cfg"
        readme.write_text(absolute_links(readme.read_text(), repository, version))
        setup.write_text(
            setup.read_text().replace("[metadata]\n", f"[metadata]\n{project_urls(repository, version)}", 1)
        )
    run(python, "-m", "pip", "install", "-q", "build", "twine", "cffconvert")
    run(python, "-m", "build", "--outdir", out, source)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    print(run(python, "-m", "twine", "check", "--strict", wheel, sdist).strip())
    print(run(python.parent / "cffconvert", "--validate", "-i", source / "CITATION.cff").strip())
    return wheel, sdist


def build_docs(directory: Path, python: Path) -> None:
    """Build the site into a directory of its version, and list it with the others there, the newest first."""
    version = version_of(ROOT)
    config = ROOT / ".release.yml"  # relative paths in the configuration are those of its own directory
    config.write_text("INHERIT: mkdocs.yml\nextra:\n  version:\n    provider: mike\n")
    try:
        build = ["-m", "mkdocs", "build", "--quiet", "-f", config, "-d", (directory / version).resolve()]
        run(python, *build, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    finally:
        config.unlink()
    found = [path.parent.name for path in directory.glob("*/index.html")]
    found.sort(key=lambda name: [int(part) for part in re.findall(r"\d+", name)], reverse=True)
    listed = [{"version": name, "title": name, "aliases": ["latest"] * (name == found[0])} for name in found]
    (directory / "versions.json").write_text(json.dumps(listed, indent=1) + "\n")
    newest = f'<meta http-equiv="refresh" content="0; url={found[0]}/index.html">'
    (directory / "index.html").write_text(f"<!doctype html>{newest}<title>variable_batch_size</title>\n")


def index(out: Path, *files: Path) -> str:
    """The address of a package index with these files."""
    page = out / "simple" / "variable-batch-size" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text("\n".join(f'<a href="{file.resolve().as_uri()}">{file.name}</a>' for file in files))
    return (out / "simple").resolve().as_uri()


def try_in(environment: Path, python: str, torch: str, address: str, *, is_sdist: bool) -> None:
    """Install from an index into a new environment, and train, resume and plan with it, away from the sources."""
    run(python, "-m", "venv", environment)
    own = environment / "bin" / "python"
    which = "torch" if torch == "newest" else f"torch=={torch}.*"
    options = ["--extra-index-url", address, *(("--no-binary", "variable-batch-size") if is_sdist else ())]
    run(own, "-m", "pip", "install", "-q", *options, which, "variable-batch-size")
    said = run(own, "-W", "error::DeprecationWarning:variable_batch_size", "-c", TRIED, cwd=environment).strip()
    planned = ["--dataset-size", "1000", "--minibatch-size", "16", "--cores", "4"]
    run(environment / "bin" / "vbs", "plan", "0:64 10:128", *planned, "--epochs", "2", cwd=environment)
    print(f"{'sdist' if is_sdist else 'wheel'}, {run(own, '--version').strip()}, torch {torch}: {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=textwrap.dedent(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="an empty or new directory")
    parser.add_argument("--repository", help="its address, for links")
    parser.add_argument("--docs", type=Path, help="a directory with the sites of all versions; needs the extra docs")
    for option in ("--try", "--sdist"):
        parser.add_argument(
            option, action="append", default=[], metavar="PYTHON:TORCH", help="torch 2.4, 2.9, newest …"
        )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if any(options.out.iterdir()):
        parser.error(f"`--out` must be empty, got {options.out}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = folder / "source"
        source.mkdir()
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(source)], input=archive, check=True)
        venv.create(folder / "tools", with_pip=True)
        if options.docs is not None:
            build_docs(options.docs, Path(sys.executable))
        files = build(source, options.out, options.repository, folder / "tools" / "bin" / "python")
        address = index(options.out, *files)
        pairs = [(one, False) for one in getattr(options, "try")] + [(one, True) for one in options.sdist]
        for number, (one, is_sdist) in enumerate(pairs):
            python, _, torch = one.rpartition(":")
            with tempfile.TemporaryDirectory(dir=folder) as environment:
                try_in(Path(environment) / str(number), python, torch, address, is_sdist=is_sdist)


if __name__ == "__main__":
    main()
