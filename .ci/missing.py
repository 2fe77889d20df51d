"""Says which packages this environment lacks, by the requirements in setup.cfg: python .ci/missing.py demo test"""

import configparser
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SETUP = Path(__file__).parent.parent / "setup.cfg"


def missing_packages(extras: list[str]) -> list[str]:
    setup = configparser.ConfigParser()
    setup.read(SETUP)
    lists = [setup["options"]["install_requires"], *(setup["options.extras_require"][extra] for extra in extras)]
    requirements = [line for text in lists for line in text.split("\n") if line]
    return [requirement for requirement in requirements if not _is_there(re.split(r"[\[<>=!~; ]", requirement)[0])]


def _is_there(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    missing = missing_packages(sys.argv[1:])
    if missing:
        packages = " ".join(f"'{requirement}'" for requirement in missing)
        sys.exit(
            f"{sys.prefix} has no {', '.join(missing)}. To use it all the same:\n"
            f"  {sys.executable} -m pip install {packages}\n"
            "To have an environment set up for you, leave out VENV."
        )
