"""Print the packages of setup.cfg that this environment lacks: python .ci/missing.py demo test"""

import configparser
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SETUP = Path(__file__).parent.parent / "setup.cfg"


def missing_packages(extras: list[str]) -> dict[str, str]:
    """Each missing requirement, with its extra and the installed version."""
    setup = configparser.ConfigParser()
    setup.read(SETUP)
    lists = {"": setup["options"]["install_requires"]}
    lists |= {f"extra {extra}": setup["options.extras_require"][extra] for extra in extras}
    missing: dict[str, str] = {}
    for origin, text in lists.items():
        for requirement in _requirements(text):
            found = _version_of(re.split(r"[\[<>=!~]", requirement)[0])
            if found is None or not _satisfies(found, requirement):
                remarks = [origin, f"{found} is installed" if found else ""]
                missing.setdefault(requirement, ", ".join(filter(None, remarks)))
    return missing


def _requirements(text: str) -> list[str]:
    """Those of the lines that apply to this Python; conditions in setup.cfg are of the form python_version < "3.11"."""
    found = []
    for line in text.strip().splitlines():
        requirement, _, condition = line.partition(";")
        if not condition or sys.version_info < _numbers(condition.split('"')[1]):
            found.append(requirement.strip())
    return found


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _satisfies(found: str, requirement: str) -> bool:
    """Whether a version is in the range of a requirement; ranges in setup.cfg are made of >=, < and == with a star."""
    for operator, bound in re.findall(r"(>=|<|==)([\d.]*\d)", requirement):
        wanted = _numbers(bound)
        numbers = _numbers(found)
        is_in = {">=": numbers >= wanted, "<": numbers < wanted, "==": numbers[: len(wanted)] == wanted}
        if not is_in[operator]:
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.match(r"[\d.]*\d", text).group().split("."))


if __name__ == "__main__":
    missing = missing_packages(sys.argv[1:])
    if missing:
        named = ", ".join(
            f"{requirement} ({remark})" if remark else requirement for requirement, remark in missing.items()
        )
        packages = " ".join(f"'{requirement}'" for requirement in missing)
        sys.exit(
            f"{sys.prefix} has no {named}. To use it all the same:\n"
            f"  {sys.executable} -m pip install {packages}\n"
            "To have an environment set up for you, leave out VENV."
        )
