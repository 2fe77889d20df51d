"""What the runs of a rule on a trace recorded, step by step, as mean and deviation over the seeds."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from variable_batch_size.comparison.experiment import DIVERGED, DONE
from variable_batch_size.comparison.report.arm import Arm
from variable_batch_size.comparison.results import Results
from variable_batch_size.records import read_records

AXES = ("step", "samples", "progress")

TRAINING = ("batch_size", "lr", "loss", "gain", "noise_scale")
TESTS = ("test_loss", "metric")
"""What is recorded while training, and what when the model is tested."""

LOGARITHMIC = ("loss", "test_loss", "noise_scale")
"""What is drawn on a logarithmic axis."""

_MOST_POINTS = 500
_WINDOWS = 50
_TINY = 1e-30

Values = npt.NDArray[np.float64]
Curves = dict[str, Any]
"""The values of each axis by its name, and by that of each quantity its ``mean``, with ``low`` and ``high`` if seeds
differ. What is not finite is NaN."""


def curves(results: Results, arm: Arm) -> dict[str, Curves]:
    """The curves of an arm, from the ``steps.jsonl`` of its runs: those of the training and those of the tests.

    Records are put together by their number; where some seeds have ended or diverged, the others go on. An axis is
    the mean over the seeds, too: their progress may differ. The loss of each record becomes the mean over the latest
    2 % of the run, as that of a few small batches says little.
    """
    ended = [run for run, outcome in arm.outcomes if outcome.status in (DONE, DIVERGED)]
    seeds = [read_records(results.run_directory(run) / "steps.jsonl") for run in ended]
    return {
        "training": _together([_smooth([r for r in records if "loss" in r]) for records in seeds], TRAINING),
        "tests": _together([[r for r in records if "metric" in r] for records in seeds], TESTS),
    }


def _smooth(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records with the mean of the losses of the latest records instead of their own."""
    window = max(1, len(records) // _WINDOWS)
    losses = np.array([record["loss"] for record in records], dtype=np.float64)
    means = [losses[max(0, end - window) : end].mean() for end in range(1, len(losses) + 1)]
    return [{**record, "loss": mean} for record, mean in zip(records, means, strict=True)]


def _together(seeds: Sequence[Sequence[dict[str, Any]]], quantities: Iterable[str]) -> Curves:
    length = max(map(len, seeds), default=0)
    if not length:
        return {}
    every = -(-length // _MOST_POINTS)
    kept = sorted({*range(0, length, every), length - 1})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, where no seed, or one, has a number: that is NaN
        found: Curves = {axis: np.nanmean(_values(seeds, kept, axis), axis=0) for axis in AXES}
        for quantity in quantities:
            if any(records and quantity in records[0] for records in seeds):
                values = _values(seeds, kept, quantity)
                found[quantity] = {"mean": np.nanmean(values, axis=0)}
                if (np.nanmax(values, axis=0) > np.nanmin(values, axis=0)).any():
                    low, high = _band(values, is_logarithmic=quantity in LOGARITHMIC)
                    found[quantity] |= {"low": low, "high": high}
    return found


def _values(seeds: Sequence[Sequence[dict[str, Any]]], kept: Sequence[int], name: str) -> Values:
    """A row for each seed, NaN where it has no record."""
    rows = [[records[number][name] if number < len(records) else None for number in kept] for records in seeds]
    return np.array(rows, dtype=np.float64)


def _band(values: Values, *, is_logarithmic: bool) -> tuple[Values, Values]:
    """One deviation below and above the mean; by a factor where the axis is logarithmic, so that both are positive."""
    mean = np.nanmean(values, axis=0)
    if is_logarithmic:
        factor = np.exp(np.nanstd(np.log(np.maximum(values, _TINY)), axis=0, ddof=1))
        return mean / factor, mean * factor
    deviation = np.nanstd(values, axis=0, ddof=1)
    return mean - deviation, mean + deviation
