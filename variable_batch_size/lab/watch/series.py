"""Series: the records of a run in a bounded number of buckets, however many there are."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_BUCKETS = 1024
POSITIONS = ("step", "samples", "tokens", "progress", "seconds")  # a bucket has the last value of each
QUANTITIES = (  # and the mean of each of these
    "batch_size",
    "cores",
    "lr",
    "factor",
    "loss",
    "gain",
    "gain_low",
    "gain_high",
    "efficiency",
    "noise_scale",
    "noise_scale_low",
    "noise_scale_high",
    "samples_per_second",
    "seconds_per_step",
    "idle_share",
)
_ENDS = {"loss_low": ("loss", np.fmin), "loss_high": ("loss", np.fmax)}

Column = npt.NDArray[np.float64]
Columns = dict[str, Column]


def parsed(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """The JSON records in some lines; other lines are skipped, because the page must survive any file."""
    try:
        found = json.loads(b"[" + b",".join(lines) + b"]")  # all at once, which is faster
        is_right = len(found) == len(lines)  # two lines, joined, might parse as one record
    except (ValueError, RecursionError):
        is_right = False
    if not is_right:
        found = []
        for line in lines:
            with suppress(ValueError, RecursionError):
                found.append(json.loads(line))
    return [record for record in found if isinstance(record, dict)]


class Series:
    """Buckets of equally many consecutive records, a power of two that doubles when there are too many buckets."""

    def __init__(self) -> None:
        self.num_records = 0
        self.latest: dict[str, Any] = {}  # the last record of a step
        self._stride = 1
        self._full = _empty()
        self._rest = _empty()  # the records that do not fill a bucket yet
        self._step = self._samples = self._seconds = 0.0  # of the last record

    def add(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add those records of a log that describe steps."""
        of_steps = [record for record in records if "loss" in record and "step" in record]
        if not of_steps:
            return
        self.latest = dict(of_steps[-1])
        self.num_records += len(of_steps)
        new = {name: _column(of_steps, name) for name in (*POSITIONS, *QUANTITIES)}
        if "tokens" not in self.latest:
            new["tokens"] = _column(of_steps, "weight")
        self._add_times(new)
        self.append(new)

    def append(self, new: Columns) -> None:
        """Append rows; columns that are not given are unknown."""
        number = len(new["step"])
        known = {name: new.get(name, np.full(number, np.nan)) for name in (*POSITIONS, *QUANTITIES)}
        known |= {name: known[of] for name, (of, _) in _ENDS.items()}
        self._rest = {name: np.concatenate((self._rest[name], values)) for name, values in known.items()}
        number = len(self._rest["step"]) // self._stride * self._stride
        ready = _merged({name: values[:number] for name, values in self._rest.items()}, self._stride)
        self._rest = {name: values[number:] for name, values in self._rest.items()}
        self._full = {name: np.concatenate((self._full[name], ready[name])) for name in ready}
        while len(self._full["step"]) > MOST_BUCKETS:
            if len(self._full["step"]) % 2:  # the last bucket becomes records again, all equal to it
                again = {name: np.repeat(values[-1:], self._stride) for name, values in self._full.items()}
                self._rest = {name: np.concatenate((again[name], values)) for name, values in self._rest.items()}
                self._full = {name: values[:-1] for name, values in self._full.items()}
            self._full, self._stride = _merged(self._full, 2), 2 * self._stride

    def _add_times(self, new: Columns) -> None:
        """Add the seconds since the start, from the samples per second of each record."""
        samples = new["samples"]
        done = np.diff(samples, prepend=self._samples)
        with np.errstate(all="ignore"):
            took = np.nan_to_num(done / new["samples_per_second"], nan=0.0, posinf=0.0, neginf=0.0)
            steps = np.diff(new["step"], prepend=self._step)
            new["seconds_per_step"] = np.where(steps > 0, took / steps, np.nan)
        new["seconds"] = self._seconds + np.cumsum(np.maximum(took, 0.0))
        self._step, self._samples, self._seconds = (float(new[name][-1]) for name in ("step", "samples", "seconds"))

    def columns(self) -> Columns:
        """All buckets, with the smoothed loss. The last bucket may have fewer records."""
        last = _merged(self._rest, max(1, len(self._rest["step"])))
        found = {name: np.concatenate((self._full[name], last[name])) for name in last}
        found["loss_smooth"] = _smoothed(found["loss"])
        return found


def _empty() -> Columns:
    return {name: np.empty(0) for name in (*POSITIONS, *QUANTITIES, *_ENDS)}


def _column(records: Sequence[Mapping[str, Any]], name: str) -> Column:
    """The values with a name, NaN for those that are not numbers."""
    values = [record.get(name) for record in records]
    with suppress(ValueError, TypeError, OverflowError):  # a string, a list, a number with thousands of digits
        column = np.array(values, dtype=np.float64)
        if column.ndim == 1:
            return column
    numbers = [isinstance(value, int | float) and abs(value) < 1e300 for value in values]
    return np.array([value if is_one else math.nan for value, is_one in zip(values, numbers, strict=True)], float)


def _merged(columns: Columns, number: int) -> Columns:
    """Columns with so many consecutive rows merged into one."""
    found: Columns = {}
    for name, values in columns.items():
        rows = values.reshape(-1, number)
        if not rows.size:
            found[name] = np.empty(0)
        elif name in POSITIONS:
            found[name] = rows[:, -1]
        elif name in _ENDS:
            found[name] = _ENDS[name][1].reduce(rows, axis=1)
        else:
            known = np.isfinite(rows)
            with np.errstate(invalid="ignore", over="ignore"):
                found[name] = np.where(known, rows, 0.0).sum(axis=1) / known.sum(axis=1)
    return found


def _smoothed(values: Column) -> Column:
    """A trailing mean of the values, over 2 % of them."""
    if not len(values):
        return values
    window = max(1, len(values) // 50)
    # each window is summed by itself: with differences of cumulative sums, one huge loss would erase all later ones
    windows = np.lib.stride_tricks.sliding_window_view(np.append(np.full(window - 1, np.nan), values), window)
    known = np.isfinite(windows)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(np.where(known, windows, 0.0).sum(axis=1) / known.sum(axis=1))
