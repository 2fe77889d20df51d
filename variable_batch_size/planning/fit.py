"""Fits the seven parameters of a throughput model to measured seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from variable_batch_size.checks import install
from variable_batch_size.policies.throughput import Throughput

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
