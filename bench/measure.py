"""Time several sides of a comparison alternately in one process, so that other load affects all of them equally."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

Numbers = npt.NDArray[np.float64]


def print_machine() -> None:
    """Print the machine and the versions."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in _lines(cpuinfo) if line.startswith("model name")]
    print(f"{os.cpu_count()} cores, {names[0] if names else platform.processor()}, {platform.system()}")
    print(f"Python {platform.python_version()}, torch {torch.__version__}, ", end="")
    print(f"numpy {np.__version__}, pandas {_version_of('pandas')}\n")


def in_turn(sides: Mapping[str, Callable[[], float]], *, repeats: int, warmup: int = 1) -> dict[str, Numbers]:
    """Run all sides `repeats` times, in alternating order, and return the seconds that each returned."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(-warmup, repeats):
        for name in list(sides)[:: 1 if repeat % 2 else -1]:
            elapsed = sides[name]()
            if repeat >= 0:
                seconds[name].append(elapsed)
    return {name: np.array(values) for name, values in seconds.items()}


def spread(values: Numbers, *, scale: float = 1.0, digits: int = 2) -> str:
    """The median and, in parentheses, the quartiles of the values."""
    low, median, high = np.percentile(values, [25, 50, 75]) * scale
    return f"{median:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def print_comparison(seconds: Mapping[str, Numbers], *, peer: str) -> None:
    """Print a table of all sides: milliseconds, and the ratio to the peer, pair by pair and minimum to minimum."""
    print_row("side", "ms, median (quartiles)", "ratio, median of pairs", "ratio of minima", widths=(28, 30, 26, 16))
    for name, values in seconds.items():
        pairs = values / seconds[peer]
        print_row(
            name,
            spread(values, scale=1e3),
            spread(pairs, digits=3) if name != peer else "1",
            f"{values.min() / seconds[peer].min():.3f}",
            widths=(28, 30, 26, 16),
        )
    print(flush=True)


def print_row(*cells: str, widths: tuple[int, ...]) -> None:
    print("".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip(), flush=True)


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
