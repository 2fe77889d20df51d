"""What the runs of a rule on a trace recorded, step by step, as mean and deviation over the seeds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

AXES = ("step", "samples", "progress")

TRAINING = ("batch_size", "lr", "loss", "gain", "noise_scale")
TESTS = ("test_loss", "metric")
"""What is recorded while training, and what when the model is tested."""

_MOST_POINTS = 500
_DIGITS = 6

Curves = dict[str, Any]
"""By the name of an axis its values; by that of a quantity its means, and beside them their deviations, if any."""


def curves(paths: Sequence[Path]) -> dict[str, Curves]:
    """The curves of several seeds, from their ``steps.jsonl``: those of the training and those of the tests.

    Records are put together by their number, as far as all seeds have them. An axis, too, is the mean over the seeds:
    their progress may differ.
    """
    seeds = [_read(path) for path in paths if path.exists()]
    return {
        "training": _together([[r for r in records if "loss" in r] for records in seeds], TRAINING),
        "tests": _together([[r for r in records if "metric" in r] for records in seeds], TESTS),
    }


def _read(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _together(seeds: Sequence[Sequence[dict[str, Any]]], quantities: Iterable[str]) -> Curves:
    length = min(map(len, seeds), default=0)
    every = -(-length // _MOST_POINTS)
    kept = sorted({*range(0, length, max(1, every)), *([length - 1] if length else [])})
    found: Curves = {axis: _rounded(_values(seeds, kept, axis).mean(axis=0)) for axis in AXES if kept}
    for quantity in quantities:
        if kept and all(quantity in records[0] for records in seeds):
            values = _values(seeds, kept, quantity)
            found[quantity] = {"mean": _rounded(values.mean(axis=0))}
            if len(seeds) > 1 and values.std(axis=0).any():
                found[quantity]["deviation"] = _rounded(values.std(axis=0, ddof=1))
    return found


def _values(seeds: Sequence[Sequence[dict[str, Any]]], kept: Sequence[int], name: str) -> np.ndarray[Any, Any]:
    """A row for each seed; null, which stands for what is not finite, becomes NaN."""
    return np.array([[records[number][name] for number in kept] for records in seeds], dtype=np.float64)


def _rounded(values: np.ndarray[Any, Any]) -> list[float | None]:
    """With fewer digits, which a picture does not need; what is not finite becomes null, a gap in the curve."""
    return [float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else None for value in values.tolist()]
