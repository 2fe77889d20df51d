"""Profile: measured seconds of minibatches on several numbers of cores, and a throughput model fitted to them."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from variable_batch_size.checks import install, is_integer, refuse
from variable_batch_size.files import write_text
from variable_batch_size.policies.throughput import Throughput

COLUMNS = ("machines", "cores", "minibatch_size", "seconds_accumulating", "seconds_updating")

_FARTHEST = 2
"""By what factor measured numbers of cores and samples may be exceeded without being told to."""


class Measured(NamedTuple):
    """A row of a profile."""

    machines: int
    cores: int
    minibatch_size: int
    seconds_accumulating: float
    seconds_updating: float


class Times(NamedTuple):
    """Seconds of a minibatch that is only accumulated, and of the one that completes a step."""

    accumulating: float
    updating: float


@dataclass(frozen=True)
class Profile:
    """What was measured of a workload.

    Args:
        rows: the measurements.
        name: where they come from.
        extrapolates: whether times may be asked for beyond twice what was measured.

    >>> profile = Profile((Measured(1, 1, 32, 0.04, 0.05), Measured(1, 4, 32, 0.04, 0.11)))
    >>> profile.times(cores=2, minibatch_size=32)
    Times(accumulating=0.04, updating=0.07)
    """

    rows: Sequence[Measured]
    name: str = "profile"
    extrapolates: bool = False

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, extrapolates: bool = False) -> Profile:
        """Read a CSV file with the columns machines, cores, minibatch_size and the two times."""
        name = os.fspath(path)
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = tuple(_rows(file, name))
        if not rows:
            refuse(name, "a profile must have a row", "none")
        return cls(rows, name, extrapolates)

    def write(self, path: str | os.PathLike[str], *, comment: str | None = None) -> None:
        """Write such a file."""
        top = "".join(f"# {line}\n" for line in (comment or "").splitlines())
        lines = [",".join(COLUMNS), *(",".join(map(_cell, row)) for row in self.rows)]
        write_text(Path(path), top + "\n".join(lines) + "\n")

    def times(self, *, cores: int, minibatch_size: int, machines: int = 1) -> Times:
        """The seconds of minibatches: as measured, on a line between the nearest numbers of cores, or as fitted.

        Raises:
            ValueError: beyond twice what was measured, or over a network that was not, unless `extrapolates`.
        """
        found = self._measured(machines, minibatch_size)
        for number, times in found:
            if number == cores:
                return times
        for (low, at_low), (high, at_high) in pairwise(found):
            if low < cores < high:
                share = (cores - low) / (high - low)
                return Times(*(a + share * (b - a) for a, b in zip(at_low, at_high, strict=True)))
        self._refuse_far("cores", cores, [row.cores for row in self.rows])
        self._refuse_far("samples in a minibatch", minibatch_size, [row.minibatch_size for row in self.rows])
        self.refuse_other_network(machines, cores)
        return Times(
            self.throughput.accumulating(minibatch_size), self.throughput.updating(machines, cores, minibatch_size)
        )

    def _measured(self, machines: int, minibatch_size: int) -> list[tuple[int, Times]]:
        """The times on each number of cores, ascending; the mean where it was measured more than once."""
        of_cores: dict[int, list[tuple[float, ...]]] = {}
        for row in self.rows:
            if (row.machines, row.minibatch_size) == (machines, minibatch_size):
                of_cores.setdefault(row.cores, []).append(row[3:])
        return [(cores, Times(*map(fmean, zip(*times, strict=True)))) for cores, times in sorted(of_cores.items())]

    @cached_property
    def throughput(self) -> Throughput:
        """The model that fits the measurements best."""
        return fit_throughput(self.rows)

    def refuse_other_network(self, machines: int, cores: int) -> None:
        """Refuse cores between which no all-reduce was measured, for it takes no time in the model then."""
        is_known = any(row.cores > 1 and (row.machines > 1) == (machines > 1) for row in self.rows)
        if cores > 1 and not is_known and not self.extrapolates:
            where = "several machines" if machines > 1 else "one machine"
            raise ValueError(
                f"{self.name} must have a row of several cores on {where}, for the time of their all-reduce, got none"
            )

    def _refuse_far(self, what: str, number: int, measured: Sequence[int]) -> None:
        low, high = min(measured), max(measured)
        if not self.extrapolates and not low / _FARTHEST <= number <= high * _FARTHEST:
            raise ValueError(
                f"{self.name} was measured with {low} to {high} {what}, got {number}: times beyond twice that are "
                "guesses, which must be asked for (extrapolates)"
            )


def _cell(value: float) -> str:
    return str(value) if is_integer(value) else f"{value:.6g}"


def _rows(lines: Iterator[str], name: str) -> Iterator[Measured]:
    """The rows, each checked."""
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    if not numbered or tuple(cell.strip() for cell in numbered[0][1].split(",")) != COLUMNS:
        refuse(f"{name}:1", f"the columns of a profile must be {','.join(COLUMNS)}", numbered[0][1] if numbered else "")
    for (number, _), cells in zip(numbered[1:], csv.reader(line for _, line in numbered[1:]), strict=True):
        yield _row(cells, f"{name}:{number}")


def _row(cells: Sequence[str], place: str) -> Measured:
    try:
        row = Measured(*map(int, cells[:3]), *map(float, cells[3:]))
    except (ValueError, TypeError):
        refuse(place, "a row of a profile must be three counts and two numbers of seconds", ",".join(cells))
    if min(row[:3]) < 1 or not all(0 < seconds < math.inf for seconds in row[3:]):
        refuse(place, "counts and seconds must be positive", ",".join(cells))
    return row


_TINY = 1e-8
_LARGEST_GAMMA = 10.0


class Row(Protocol):
    """A measurement: a number of cores on machines, a minibatch size, and the seconds of its two kinds."""

    @property
    def machines(self) -> int: ...
    @property
    def cores(self) -> int: ...
    @property
    def minibatch_size(self) -> int: ...
    @property
    def seconds_accumulating(self) -> float: ...
    @property
    def seconds_updating(self) -> float: ...


def fit_throughput(rows: Sequence[Row]) -> Throughput:
    """The model with the smallest relative errors of both times, with the priors of Pollux (Qiao et al. 2021).

    It minimises the sum of the root-mean-square errors of both logarithms, 0.001·(γ − 1)² and 0.01·((βn/αn)² +
    (βr/αr)²).
    What no row tells of is held: one minibatch size says nothing of the constant part of its time, which is then half;
    a network that was not used takes no time; and two cores do not show how a third slows it down.
    """
    try:
        from scipy.optimize import least_squares, minimize
    except ImportError:
        raise ImportError(f"fitting needs scipy: {install('compare')}") from None

    start, is_free = _start(rows)
    free = [index for index, is_it in enumerate(is_free) if is_it]
    spans = [(math.log(_TINY / 100), math.log(1e6))] * 6 + [(0.0, math.log(_LARGEST_GAMMA))]

    def unpacked(logarithms: Any) -> Throughput:
        values = list(start)
        for index, value in zip(free, logarithms, strict=True):
            values[index] = math.exp(value)
        return Throughput(*values)

    def found(gamma: float) -> Throughput:
        first = [math.log(gamma if index == 6 else start[index]) for index in free]
        bounds = [spans[index] for index in free]
        # the error itself has an edge where it is small, which squares have not: they lead near it
        near = least_squares(lambda x: _log_errors(unpacked(x), rows), first, bounds=tuple(zip(*bounds, strict=True)))
        best = minimize(lambda x: _error(unpacked(x), rows), near.x, method="L-BFGS-B", bounds=bounds)
        return unpacked(best.x)

    # several valleys over γ
    return min(map(found, (1.1, 3.0, 8.0) if is_free[6] else (1.0,)), key=lambda model: _error(model, rows))


def _start(rows: Sequence[Row]) -> tuple[list[float], list[bool]]:
    """Where to begin, and which of the parameters the rows tell something of."""
    seconds = sorted(row.seconds_accumulating for row in rows)[len(rows) // 2]
    size = sorted(row.minibatch_size for row in rows)[len(rows) // 2]
    has_sizes = len({row.minibatch_size for row in rows}) > 1
    between = [row for row in rows if row.machines > 1]
    within = [row for row in rows if row.machines == 1 and row.cores > 1]
    networks: list[float] = []
    is_free = [has_sizes, True]
    for used in (between, within):
        is_slowed = any(row.cores > 2 for row in used)
        networks += [seconds / 4 if used else _TINY, seconds / 50 if is_slowed else _TINY]
        is_free += [bool(used), is_slowed]
    return [seconds / 2, seconds / 2 / size, *networks, 1.0], [*is_free, bool(between or within)]


def _log_errors(model: Throughput, rows: Sequence[Row]) -> list[float]:
    """Of all accumulating minibatches, then of all updating ones."""
    accumulating = [math.log(model.accumulating(row.minibatch_size) / row.seconds_accumulating) for row in rows]
    return accumulating + [
        math.log(model.updating(row.machines, row.cores, row.minibatch_size) / row.seconds_updating) for row in rows
    ]


def _error(model: Throughput, rows: Sequence[Row]) -> float:
    squares = [error**2 for error in _log_errors(model, rows)]
    parts = (squares[: len(rows)], squares[len(rows) :])
    slowing = (model.beta_n / model.alpha_n) ** 2 + (model.beta_r / model.alpha_r) ** 2
    return sum(math.sqrt(sum(part) / len(rows)) for part in parts) + 1e-3 * (model.gamma - 1) ** 2 + 1e-2 * slowing
