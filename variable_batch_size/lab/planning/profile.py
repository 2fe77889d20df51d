"""Profile: measured times of minibatches on several numbers of cores, and a throughput model fitted to them."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np

from variable_batch_size.checks import import_extra, is_integer, refuse
from variable_batch_size.files import numbered_lines, write_text
from variable_batch_size.policies.throughput import Throughput
from variable_batch_size.policies.timing import Times

_FARTHEST = 2  # the largest factor of extrapolation in cores and samples without `extrapolates`
_TINY = 1e-8
MEASURED, INTERPOLATED, EXTRAPOLATED = BASES = "measured", "interpolated", "extrapolated"  # in order of certainty
_LARGEST_GAMMA = 10.0


class Measured(NamedTuple):
    machines: int
    cores: int
    minibatch_size: int
    seconds_accumulating: float
    seconds_updating: float


COLUMNS = Measured._fields


@dataclass(frozen=True)
class Profile:
    """Measured times of a workload.

    >>> profile = Profile((Measured(1, 1, 32, 0.04, 0.05), Measured(1, 4, 32, 0.04, 0.11)))
    >>> profile.times(cores=2, minibatch_size=32)
    Times(accumulating=0.04, updating=0.07)
    """

    rows: Sequence[Measured]  # the measurements
    name: str = "profile"  # of their source, for messages
    extrapolates: bool = False  # allow times beyond twice the measured range
    guess: float = 1.0  # a factor of the times that were not measured

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, extrapolates: bool = False) -> "Profile":
        """Read a CSV file with the columns machines, cores, minibatch_size and the two times."""
        name = os.fspath(path)
        rows = tuple(_rows(numbered_lines(path), name))
        if not rows:
            refuse(name, "a profile must have a row", "none")
        return cls(rows, name, extrapolates)

    def write(self, path: str | os.PathLike[str], *, comment: str | None = None) -> None:
        """Write a file for :meth:`read`, with the lines of `comment` at the top, after ``#``."""
        top = [f"# {line}" for line in (comment or "").splitlines()]
        cells = ([str(cell) if is_integer(cell) else f"{cell:.6g}" for cell in row] for row in self.rows)
        write_text(Path(path), "\n".join([*top, ",".join(COLUMNS), *map(",".join, cells)]) + "\n")

    def times(self, *, cores: int, minibatch_size: int, machines: int = 1) -> Times:
        """The times of minibatches: measured, interpolated between measured ones, or from the fitted model.

        Interpolation is linear, over numbers of cores and then over minibatch sizes. Beyond twice the measured range or
        for an unmeasured network it raises, unless `extrapolates`.
        """
        basis, times = self._known(cores, minibatch_size, machines)
        if times is not None:
            return times if basis == MEASURED else Times(*(self.guess * seconds for seconds in times))
        self.refuse_other_network(machines, cores)
        for warning in [] if self.extrapolates else self.far(cores, minibatch_size, machines):
            raise ValueError(
                f"{warning}: more than a factor of {_FARTHEST} beyond that range needs --extrapolate, or `extrapolates`"
            )
        model = self.throughput
        guesses = model.accumulating(minibatch_size), model.updating(machines, cores, minibatch_size)
        return Times(*(self.guess * seconds for seconds in guesses))

    def basis(self, *, cores: int, minibatch_size: int, machines: int = 1) -> str:
        """What :meth:`times` are: "measured", "interpolated" between measured ones, or "extrapolated"."""
        return self._known(cores, minibatch_size, machines)[0]

    def _known(self, *numbers: int) -> tuple[str, Times | None]:
        """The basis of the times, and the times unless they are extrapolated."""
        if numbers not in self._lookups:
            self._lookups[numbers] = self._look_up(*numbers)
        return self._lookups[numbers]

    @cached_property
    def _lookups(self) -> dict[tuple[int, ...], tuple[str, Times | None]]:
        return {}

    def _look_up(self, cores: int, minibatch_size: int, machines: int) -> tuple[str, Times | None]:
        _check_placement(machines, cores)
        same = [row for row in self.rows if row.machines == machines]
        for rows in (same, self._alike(machines)):
            times = _between(rows, cores, minibatch_size)
            if times is not None:
                is_measured = any(row[:3] == (machines, cores, minibatch_size) for row in self.rows)
                return MEASURED if is_measured else INTERPOLATED, times
        return EXTRAPOLATED, None

    def _alike(self, machines: int) -> list[Measured]:
        """The rows with the same network: as in the model, all numbers of machines above one are alike."""
        return [row for row in self.rows if (row.machines > 1) == (machines > 1)]

    @property
    def has_several_machines(self) -> bool:
        """Whether the times of cores depend on how many machines they are on."""
        return any(row.machines > 1 for row in self.rows)

    @cached_property
    def throughput(self) -> Throughput:
        """The model fitted to the measurements."""
        return fit_throughput(self.rows)

    @cached_property
    def ends(self) -> "tuple[Profile, Profile] | None":
        """The ends of the 95 % interval of times that were not measured, from the errors of the model in the rows.

        Student's t times the standard deviation of the errors of both logarithms; None if the rows are too few to fit.
        """
        try:
            model, free = self.throughput, free_parameters(self.rows)
        except (ValueError, ImportError):
            return None
        errors = _log_errors(model, self.rows)
        freedom = len(errors) - len(free)
        deviation = math.sqrt(sum(error**2 for error in errors) / freedom)
        factor = math.exp(t_quantile(freedom) * deviation)
        low, high = (replace(self, guess=self.guess * end) for end in (1 / factor, factor))
        low.__dict__["throughput"] = high.__dict__["throughput"] = model  # the same rows need no other fit
        return low, high

    def refuse_other_network(self, machines: int, cores: int) -> None:
        """Reject cores without a measured all-reduce, which would take no time in the model."""
        _check_placement(machines, cores)
        is_known = any(row.cores > 1 for row in self._alike(machines))
        if cores > 1 and not is_known and not self.extrapolates:
            where = "several machines" if machines > 1 else "one machine"
            raise ValueError(f"{self.name} must have a row with several cores on {where}, to time their all-reduce")

    def far(self, cores: int, minibatch_size: int, machines: int = 1) -> list[str]:
        """In words, which of these numbers are more than a factor of 2 beyond the measured ones."""
        found, rows = [], self._alike(machines) or self.rows
        for what, number, field in (("cores", cores, 1), ("samples in a minibatch", minibatch_size, 2)):
            low, high = min(row[field] for row in rows), max(row[field] for row in rows)
            if not low / _FARTHEST <= number <= high * _FARTHEST:
                where = " on several machines" if machines > 1 else ""
                found.append(f"{self.name} was measured with {low} to {high} {what}{where}, got {number}")
        return found


def t_quantile(freedom: int, *, level: float = 0.95) -> float:
    """Half of the interval of Student's t with this level."""
    # scipy.stats.t.ppf calls its stdtrit, but scipy.stats takes a second to load
    special = import_extra("scipy.special", "an interval needs scipy", "compare")
    return float(special.stdtrit(freedom, (1 + level) / 2))


def half_interval(values: Sequence[float], *, level: float = 0.95) -> float:
    """Half of the interval of a mean, t · s / √n with Student's t; 0 for a single value."""
    number = len(values)
    return t_quantile(number - 1, level=level) * stdev(values) / math.sqrt(number) if number > 1 else 0.0


def _check_placement(machines: int, cores: int) -> None:
    if machines > cores:
        raise ValueError(f"`machines` must be at most the number of cores, which is {cores}, got {machines}")


def _between(rows: Sequence[Measured], cores: int, minibatch_size: int) -> Times | None:
    """Times on lines between the numbers of cores of each minibatch size, and between these sizes; None outside."""
    of_size: dict[int, list[float]] = {}
    for size in sorted({row.minibatch_size for row in rows}):
        here = [row for row in rows if row.minibatch_size == size]
        numbers = sorted({row.cores for row in here})
        if numbers[0] <= cores <= numbers[-1]:
            means = [[fmean(row[i] for row in here if row.cores == number) for number in numbers] for i in (3, 4)]
            of_size[size] = [float(np.interp(cores, numbers, mean)) for mean in means]
    sizes = list(of_size)
    if not sizes or not sizes[0] <= minibatch_size <= sizes[-1]:
        return None
    return Times(*(float(np.interp(minibatch_size, sizes, column)) for column in zip(*of_size.values(), strict=True)))


def _rows(numbered: Sequence[tuple[int, str]], name: str) -> Iterator[Measured]:
    if not numbered or tuple(cell.strip() for cell in numbered[0][1].split(",")) != COLUMNS:
        refuse(f"{name}:1", f"the columns of a profile must be {','.join(COLUMNS)}", numbered[0][1] if numbered else "")
    for number, line in numbered[1:]:
        cells, place = line.split(","), f"{name}:{number}"
        try:
            row = Measured(*map(int, cells[:3]), *map(float, cells[3:]))
        except (ValueError, TypeError):
            refuse(place, "a row of a profile must be three counts and two times in seconds", line.strip())
        if min(row[:3]) < 1 or not all(0 < seconds < math.inf for seconds in row[3:]):
            refuse(place, "counts and seconds must be positive", line.strip())
        if row.machines > row.cores:
            refuse(place, "a row must have at least as many cores as machines", line.strip())
        yield row


def fit_throughput(rows: Sequence[Measured]) -> Throughput:
    """Fit the model to both times, with the priors of Pollux (Qiao et al. 2021).

    Minimizes the sum of the root-mean-square errors of both logarithms, 0.001·(γ − 1)² and 0.01·((βn/αn)² + (βr/αr)²).
    Parameters that the rows don't determine are fixed: with one minibatch size, the constant part is half of its time;
    an unused network takes no time; with two cores at most, the all-reduce does not slow down with their number; and
    with no more measured all-reduces than parameters of the network, nothing overlaps. It raises for fewer different
    rows than other parameters.
    """
    names, number = free_parameters(rows), len({row[:3] for row in rows})
    if len(names) > number:
        rule = f"at least {len(names)} different combinations of cores and minibatch size"
        why = f"to fit {len(names)} parameters ({', '.join(names)})"
        raise ValueError(f"`rows` must have {rule} {why}, got {number}: measure more with vbs profile")
    optimize = import_extra("scipy.optimize", "fitting needs scipy", "compare")
    least_squares, minimize = optimize.least_squares, optimize.minimize
    start, is_free = _start(rows)
    free = [index for index, is_it in enumerate(is_free) if is_it]
    spans = [(math.log(_TINY / 100), math.log(1e6))] * 6 + [(0.0, math.log(_LARGEST_GAMMA))]
    bounds = [spans[index] for index in free]

    def unpacked(logarithms: Any) -> Throughput:
        values = dict(enumerate(start)) | {i: math.exp(x) for i, x in zip(free, logarithms, strict=True)}
        return Throughput(*values.values())

    def found(gamma: float) -> Throughput:
        first = [math.log(gamma if index == 6 else start[index]) for index in free]
        # start from least squares, because the error is not smooth at its minimum
        near = least_squares(lambda x: _log_errors(unpacked(x), rows), first, bounds=tuple(zip(*bounds, strict=True)))
        return unpacked(minimize(lambda x: _error(unpacked(x), rows), near.x, method="L-BFGS-B", bounds=bounds).x)

    # several local minima in γ
    return min(map(found, (1.1, 3.0, 8.0) if is_free[6] else (1.0,)), key=lambda model: _error(model, rows))


def free_parameters(rows: Sequence[Measured]) -> list[str]:
    """The parameters that are fitted to these rows; the others are fixed."""
    return [name for name, is_free in zip(Throughput._fields, _start(rows)[1], strict=True) if is_free]


def _start(rows: Sequence[Measured]) -> tuple[list[float], list[bool]]:
    """The initial parameters, and whether the rows determine each of them."""
    seconds = sorted(row.seconds_accumulating for row in rows)[len(rows) // 2]
    size = sorted(row.minibatch_size for row in rows)[len(rows) // 2]
    has_sizes = len({row.minibatch_size for row in rows}) > 1
    between, within = [row for row in rows if row.machines > 1], [r for r in rows if r.machines == 1 and r.cores > 1]
    networks: list[float] = []
    is_free = [has_sizes, True]
    for used in (between, within):
        is_slowed = any(row.cores > 2 for row in used)
        networks += [seconds / 4 if used else _TINY, seconds / 50 if is_slowed else _TINY]
        is_free += [bool(used), is_slowed]
    overlap_is_known = len({row[:3] for row in (*between, *within)}) > sum(is_free[2:])
    return [seconds / 2, seconds / 2 / size, *networks, 1.0], [*is_free, overlap_is_known]


def _log_errors(model: Throughput, rows: Sequence[Measured]) -> list[float]:
    """Errors of the accumulating minibatches, then of the updating ones."""
    accumulating = [math.log(model.accumulating(row.minibatch_size) / row.seconds_accumulating) for row in rows]
    return accumulating + [math.log(model.updating(*row[:3]) / row.seconds_updating) for row in rows]


def _error(model: Throughput, rows: Sequence[Measured]) -> float:
    squares = [error**2 for error in _log_errors(model, rows)]
    parts = (squares[: len(rows)], squares[len(rows) :])
    slowing = (model.beta_n / model.alpha_n) ** 2 + (model.beta_r / model.alpha_r) ** 2
    return sum(math.sqrt(sum(part) / len(rows)) for part in parts) + 1e-3 * (model.gamma - 1) ** 2 + 1e-2 * slowing
